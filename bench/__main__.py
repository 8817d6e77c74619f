"""`python -m bench`: requests per second of the demo's `POST /orders` with and without oncekey, as ratios."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.figures import BASE, KINDS, Result, Slice, document, table
from bench.load import HOST, Load, fire
from bench.places import ROOT, STORES, NewStore, places

BODY = (
    b'{"customer_id":"cus_1001","items":['
    b'{"product_id":"sku_teapot","quantity":2},{"product_id":"sku_cup","quantity":6}]}'
)
HEAD = (
    b"POST /orders HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer demo-alpha\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\nidempotency-key: " % len(BODY)
)
REPLAYED = b"\r\nidempotent-replayed: true"
REPLAY_KEYS = 16


class BenchError(Exception):
    """The figures would be wrong."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how hard."""

    rounds: int
    seconds: float
    connections: int
    at_most: int
    pin: bool


@dataclass(frozen=True, slots=True)
class Server:
    """A server under load."""

    port: int
    pid: int

    def cpu_seconds(self) -> float | None:
        """Its processor time so far, where the system says it."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def orders(self) -> int:
        with urllib.request.urlopen(f"http://{HOST}:{self.port}/bench/count", timeout=30) as answer:
            return int(answer.read())


@contextmanager
def serving(stores: dict[str, str], plan: Plan) -> Iterator[list[Server]]:
    """A server process for each variant and its store, started together, as long as they are needed."""
    with ExitStack() as stack:
        processes = []
        for variant, store in stores.items():
            command = [sys.executable, "-m", "bench.service", variant, store, *(["0"] if plan.pin else [])]
            process = stack.enter_context(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
            processes.append(process)
        try:
            yield [Server(_port(process), process.pid) for process in processes]
        finally:
            for process in processes:
                process.terminate()


def _port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.strip():
        raise BenchError("a server did not start; its own words are above")
    return int(line)


def request_with(key: bytes) -> bytes:
    return b'%b"%b"\r\n\r\n%b' % (HEAD, key, BODY)


def new_key() -> bytes:
    return request_with(uuid.uuid4().hex.encode())


def known_keys() -> Callable[[], bytes]:
    requests = itertools.cycle([new_key() for _ in range(REPLAY_KEYS)])
    return lambda: next(requests)


async def measure(store: str, new_store: NewStore, plan: Plan) -> Result:
    """All rounds on one store. Both servers are up all the time, and the kinds of requests take turns."""
    result = Result(store)
    done = dict.fromkeys(KINDS, 0)
    with serving({"unprotected": new_store(), "protected": new_store()}, plan) as (plain, once):
        replays = known_keys()
        servers = {BASE: plain, "new key": once, "replay": once}
        loads = {
            BASE: _load(plan, new_key),
            "new key": _load(plan, new_key, unmarked=REPLAYED),
            "replay": _load(plan, replays, marker=REPLAYED),
        }

        async def volley(kind: str, load: Load) -> Slice:
            server = servers[kind]
            before = server.cpu_seconds()
            fired = await fire(server.port, load)
            after = server.cpu_seconds()
            if fired.wrong or not fired.count:
                raise BenchError(f"{store}, {kind}: {fired.wrong[0] if fired.wrong else 'no answer'}")
            done[kind] += fired.count
            return Slice.of(fired, None if before is None or after is None else after - before)

        first = Load(replays, b"201", connections=1, seconds=30, at_most=REPLAY_KEYS)
        primed = (await fire(once.port, first)).count
        for kind, load in loads.items():
            await volley(kind, Load(load.request, load.status, connections=plan.connections, seconds=plan.seconds / 4))
        for turn in range(plan.rounds):
            # Each kind comes first, second and last equally often: caches and foreign load favour nobody.
            order = [KINDS[(turn + offset) % len(KINDS)] for offset in range(len(KINDS))]
            for kind in order:
                result.rounds[kind].append(await volley(kind, loads[kind]))
            print(f"  {store}: round {turn + 1} of {plan.rounds}", file=sys.stderr, flush=True)
        _check(store, "without oncekey", plain.orders(), done[BASE])
        _check(store, "with oncekey", once.orders(), done["new key"] + primed)
    return result


def _load(plan: Plan, request: Callable[[], bytes], marker: bytes | None = None, unmarked: bytes | None = None) -> Load:
    return Load(request, b"201", marker, unmarked, plan.connections, plan.seconds, plan.at_most)


def _check(store: str, where: str, rows: int, answers: int) -> None:
    if rows != answers:
        raise BenchError(f"{store} {where}: {answers} answers, but {rows} orders")


def main(words: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--store", action="append", choices=STORES, help="only this one; may be repeated")
    parser.add_argument("--rounds", type=int, help="rounds per store (5)")
    parser.add_argument("--seconds", type=float, help="seconds per slice (1.2)")
    parser.add_argument("--connections", type=int, default=16, help="requests at the same time (16)")
    parser.add_argument("--requests", type=int, default=20_000, help="at most so many per slice (20000)")
    parser.add_argument("--quick", action="store_true", help="two short rounds: does it run, and roughly how fast")
    parser.add_argument("--pin", action="store_true", help="servers on the first core, the load on the others (Linux)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    said = parser.parse_args(words)
    plan = Plan(
        rounds=said.rounds or (2 if said.quick else 5),
        seconds=said.seconds or (0.3 if said.quick else 1.2),
        connections=said.connections,
        at_most=said.requests,
        pin=said.pin and hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) > 1,
    )
    stores = tuple(dict.fromkeys(said.store or STORES))
    results = []
    try:
        with places(stores) as found:
            if plan.pin:
                os.sched_setaffinity(0, os.sched_getaffinity(0) - {0})
            results = [asyncio.run(measure(store, new_store, plan)) for store, new_store in found.items()]
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    print(table(results))
    settings: dict[str, object] = {
        "rounds": plan.rounds,
        "seconds": plan.seconds,
        "connections": plan.connections,
        "pinned": plan.pin,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    print(f"\n{plan.rounds} rounds of {plan.seconds:g} s with {plan.connections} connections; median (lowest-highest).")
    print("Compare the ratios: the rates are this machine's, at this moment.")
    if said.json:
        said.json.write_text(json.dumps(document(results, settings), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
