"""`python -m bench.cpu`: the processor time of a protected request, next to the same route without protection.

Each source tree is one process that calls its applications without a socket, on databases of one private PostgreSQL.
Batches of all routes alternate and their order rotates, so a busy machine slows all of them alike. The figures are the
processor time of the process and of PostgreSQL per request, and the ratio to a base in the same round: the unprotected
route (`stock`), for SQLite the same route without a key, and for a replay of a key that another process answered the
route without a database (`bare`). `stock-again` is the same route once more: its distance from 1 is the noise of the
run.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import clocks, prepared
from bench.figures import BenchError, at
from bench.places import AS_SHIPPED, ROOT
from bench.serving import POSTGRES_TABLES, SERVED, SQLITE_TABLES

BASE = "stock"
UNPROTECTED = (BASE, "stock-again", "bare", "sqlite-unkeyed")
PROTECTED = ("local", "local-observed", "cold-replay", "phased", "sqlite")
BASES = {"bare": "bare", "cold-replay": "bare", "sqlite-unkeyed": "sqlite-unkeyed", "sqlite": "sqlite-unkeyed"}
"""The base of a route, if it is not `stock`."""
REPLAYS = ("cold-replay",)
NOW, BEFORE = "now", "before"


@dataclass(frozen=True, slots=True)
class Spent:
    """Microseconds of processor time per request."""

    own: float
    server: float
    passed: float = 0.0
    """Microseconds that passed, divided by the number of requests."""

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
        if route.startswith("sqlite"):
            requests = max(1, requests // 5)  # each one waits for the disk
        if route in REPLAYS:
            self._say(f"prepare {route} {requests} {together}")
            self._read()
        before = clocks.backends_of(self._postmaster, database)
        self._say(f"{route} {requests} {together}")
        own, passed = map(float, self._read().split())
        server = clocks.added(before, clocks.backends_of(self._postmaster, database))
        return Spent(own / requests * 1e6, server / requests * 1e6, passed / requests * 1e6)

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
def trees(sources: dict[str, Path], unprotected: Sequence[str], protected: Sequence[str]) -> Iterator[list[Tree]]:
    """One process for each source tree; the unprotected routes are served by the first."""
    sys.path.insert(0, str(ROOT / "tests"))
    import psycopg  # noqa: PLC0415

    from harness.postgres import PostgresServer  # noqa: PLC0415

    with ExitStack() as stack:
        server: Any = stack.enter_context(PostgresServer(settings=AS_SHIPPED))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="oncekey-bench-")))
        started = []
        for name, source in sources.items():
            routes = (*(() if started else unprotected), *protected)
            databases = {route: f"bench_{name}_{route}".replace("-", "_") for route in routes}
            addresses = {}
            for route, database in databases.items():
                if route.startswith("sqlite"):
                    file = folder / f"{database}.db"
                    with closing(sqlite3.connect(file)) as fresh:
                        fresh.executescript(SQLITE_TABLES)
                    addresses[route] = f"sqlite:///{file}"
                    continue
                addresses[route] = server.create_database(database)
                with psycopg.connect(addresses[route], autocommit=True) as connection:
                    connection.execute(POSTGRES_TABLES.encode())
            process = subprocess.Popen(
                [sys.executable, SERVED / "called.py", *(f"{route}={address}" for route, address in addresses.items())],
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
    """One line for each route: medians, the ratio to its base with its middle half, and the ratio in quiet moments.

    The last one compares lower quartiles. On a busy machine it varies less than the median of the ratios. `passed` is
    the ratio of the times that passed, in which a batch also waits for the disk.
    """
    heads = f"{'own':>8}{'PostgreSQL':>13}{'sum':>8}{'ratio':>8}   {'middle half':16}{'quiet':>8}{'passed':>9}  of"
    lines = [f"{'route':24}{heads}"]
    for title, spent in found.items():
        base = BASES.get(title.partition(" ")[0], BASE)
        if base not in found:
            base = BASE
        pairs = list(zip(found[base], spent, strict=True))
        ratios = sorted(unprotected.total / one.total for unprotected, one in pairs)
        own, server, total = (
            statistics.median(getattr(one, name) for one in spent) for name in ("own", "server", "total")
        )
        middle = f"{at(ratios, 0.25):.2f} to {at(ratios, 0.75):.2f}"
        quiet, passed = (_quiet(found[base], name) / _quiet(spent, name) for name in ("total", "passed"))
        lines.append(
            f"{title:24}{own:5.0f} us{server:10.0f} us{total:5.0f} us{statistics.median(ratios):8.2f}   {middle:16}"
            f"{quiet:8.2f}{passed:9.2f}  {base}"
        )
    return "\n".join(lines)


def _quiet(spent: Sequence[Spent], name: str) -> float:
    return at(sorted(getattr(one, name) for one in spent), 0.25) or 1.0


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="bench.cpu", description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--requests", type=int, default=100, help="in each batch")
    parser.add_argument("--together", type=int, default=8, help="requests at once")
    parser.add_argument("--routes", default=",".join(PROTECTED), help="protected routes (%(default)s)")
    parser.add_argument("--baseline", metavar="REF", help="also measure the sources of a commit, as 'before'")
    given = parser.parse_args()
    with ExitStack() as stack:
        sources = {NOW: ROOT / "src"}
        if given.baseline is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="oncekey-bench-")))
            sources[BEFORE] = prepared.sources_of(prepared.commit_of(given.baseline), folder)
        protected = given.routes.split(",")
        bases = {BASE, "stock-again", *(BASES.get(route, BASE) for route in protected)}
        started = stack.enter_context(trees(sources, [route for route in UNPROTECTED if route in bases], protected))
        print(table(measured(started, given.rounds, given.requests, given.together)))


if __name__ == "__main__":
    main()
