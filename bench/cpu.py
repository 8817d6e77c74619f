"""`python -m bench.cpu`: the processor time of a protected request, next to the same route without protection.

Each source tree is one process that calls its applications without a socket, on databases of one private PostgreSQL.
Batches of all routes alternate and their order rotates, so a busy machine slows all of them alike. The figures are the
processor time of the process and of PostgreSQL per request, and the ratio to the unprotected route (`stock`) in the
same round. `stock-again` is the same route once more: its distance from 1 is the noise of the run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import clocks, prepared
from bench.figures import BenchError, at
from bench.places import AS_SHIPPED, ROOT
from bench.serving import POSTGRES_TABLES, SERVED

BASE = "stock"
UNPROTECTED = (BASE, "stock-again")
PROTECTED = ("local", "local-observed")
NOW, BEFORE = "now", "before"


@dataclass(frozen=True, slots=True)
class Spent:
    """Microseconds of processor time per request."""

    own: float
    server: float

    @property
    def total(self) -> float:
        return self.own + self.server


class Tree:
    """The process of one source tree."""

    def __init__(self, name: str, process: subprocess.Popen[str], databases: dict[str, str], postmaster: int) -> None:
        self.name = name
        self._process = process
        self._databases = databases
        self._postmaster = postmaster
        self._read()

    @property
    def routes(self) -> tuple[str, ...]:
        return tuple(self._databases)

    def measure(self, route: str, requests: int, together: int) -> Spent:
        database = self._databases[route]
        before = clocks.backends_of(self._postmaster, database)
        self._say(f"{route} {requests} {together}")
        own = float(self._read())
        server = clocks.added(before, clocks.backends_of(self._postmaster, database))
        return Spent(own / requests * 1e6, server / requests * 1e6)

    def stop(self) -> None:
        self._say("")
        self._process.wait(30)

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise BenchError(f"the process of {self.name} ended")
        return line


@contextmanager
def trees(sources: dict[str, Path], protected: Sequence[str]) -> Iterator[list[Tree]]:
    """One process for each source tree; the unprotected routes are served by the first."""
    sys.path.insert(0, str(ROOT / "tests"))
    import psycopg  # noqa: PLC0415

    from harness.postgres import PostgresServer  # noqa: PLC0415

    with ExitStack() as stack:
        server: Any = stack.enter_context(PostgresServer(settings=AS_SHIPPED))
        started = []
        for name, source in sources.items():
            routes = (*(() if started else UNPROTECTED), *protected)
            databases = {route: f"bench_{name}_{route}".replace("-", "_") for route in routes}
            dsns = {route: server.create_database(database) for route, database in databases.items()}
            for dsn in dsns.values():
                with psycopg.connect(dsn, autocommit=True) as connection:
                    connection.execute(POSTGRES_TABLES.encode())
            process = subprocess.Popen(
                [sys.executable, SERVED / "called.py", *(f"{route}={dsn}" for route, dsn in dsns.items())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{SERVED}", "BENCH_SOURCES": str(source)},
            )
            stack.callback(process.kill)
            started.append(Tree(name, process, databases, server.pid))
        yield started
        for tree in started:
            tree.stop()


def measured(started: Sequence[Tree], rounds: int, requests: int, together: int) -> dict[str, list[Spent]]:
    """All rounds of all routes, under `route` or, with several trees, `route (tree)`."""
    slices = [(tree, route) for tree in started for route in tree.routes]
    found: dict[str, list[Spent]] = {_title(tree, route, started): [] for tree, route in slices}
    for number in range(rounds):
        shift = number % len(slices)
        for tree, route in slices[shift:] + slices[:shift]:
            found[_title(tree, route, started)].append(tree.measure(route, requests, together))
    return found


def _title(tree: Tree, route: str, started: Sequence[Tree]) -> str:
    return route if len(started) == 1 or route in UNPROTECTED else f"{route} ({tree.name})"


def table(found: dict[str, list[Spent]]) -> str:
    """One line for each route: medians, the ratio to `stock` with its middle half, and the ratio in quiet moments.

    The last one compares lower quartiles. On a busy machine it varies less than the median of the ratios.
    """
    lines = [f"{'route':24}{'own':>8}{'PostgreSQL':>13}{'sum':>8}{'of stock':>12}   {'middle half':16}{'quiet':>8}"]
    quiet = at(sorted(one.total for one in found[BASE]), 0.25)
    for title, spent in found.items():
        ratios = sorted(base.total / one.total for one, base in zip(spent, found[BASE], strict=True))
        own, server, total = (
            statistics.median(getattr(one, name) for one in spent) for name in ("own", "server", "total")
        )
        middle = f"{at(ratios, 0.25):.2f} to {at(ratios, 0.75):.2f}"
        least = quiet / at(sorted(one.total for one in spent), 0.25)
        lines.append(
            f"{title:24}{own:5.0f} us{server:10.0f} us{total:5.0f} us{statistics.median(ratios):12.2f}   {middle:16}"
            f"{least:8.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="bench.cpu", description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--requests", type=int, default=100, help="in each batch")
    parser.add_argument("--together", type=int, default=8, help="requests at once")
    parser.add_argument("--routes", default=",".join(PROTECTED), help="protected routes (%(default)s)")
    parser.add_argument("--baseline", metavar="REF", help="measure a commit beside the present sources, as 'before'")
    given = parser.parse_args()
    with ExitStack() as stack:
        sources = {NOW: ROOT / "src"}
        if given.baseline is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="oncekey-bench-")))
            sources[BEFORE] = prepared.sources_of(prepared.commit_of(given.baseline), folder)
        started = stack.enter_context(trees(sources, given.routes.split(",")))
        print(table(measured(started, given.rounds, given.requests, given.together)))


if __name__ == "__main__":
    main()
