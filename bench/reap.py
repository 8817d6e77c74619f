"""`python -m bench.reap`: the effect of reaping a full table on concurrent requests.

PostgreSQL only. A load of claims and settlements runs all the time. A reaper in a separate process, like that of
`oncekey worker`, removes all expired records and writes the audit. It works and pauses in turns, so that the load with
and without it is compared within seconds. WAL and processor time are measured again without a load: with an audit entry
per batch and tenant, for few tenants and for many, with an entry per record, and without an audit.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.figures import BenchError, Range, at
from bench.outbox_drain import spent
from bench.places import ROOT, places

if TYPE_CHECKING:
    from oncekey.core.flow import Transaction

DAY = 86_400_000_000
ROWS, FULL = 200_000, 1_000_000
WAL_ROWS = 20_000
TENANTS = 10
AUDITS: tuple[tuple[str, bool | str, int], ...] = (
    ("a line per batch and tenant", True, TENANTS),
    ("the same, 1,000 tenants", True, 1000),
    ("a line per record", "each", TENANTS),
    ("no audit", False, TENANTS),
)
"""The audits to measure: the title, the setting, and the number of tenants."""
CLIENTS = 4
TURN = 3.0
"""Seconds of each turn, in which the reaper works or pauses."""
SETTLING = 0.2
"""Seconds at the start of a turn whose requests are not counted."""
MANY = 100
"""The number of requests that a turn needs for a meaningful 99th percentile."""

Say = Callable[[str], None]


def waits(seconds: Sequence[float]) -> dict[str, float]:
    """Percentiles of durations, in milliseconds."""
    ordered = sorted(seconds)
    if not ordered:
        raise BenchError("nothing was measured")
    shares = {"p50": 0.50, "p99": 0.99, "worst": 1.0}
    return {"count": len(ordered), **{name: round(at(ordered, share) * 1000, 2) for name, share in shares.items()}}


class Load:
    """Claims and settlements of new keys; each client makes one at a time, with a short pause."""

    def __init__(self, engine: Any, clients: int) -> None:
        self._engine = engine
        self._took: list[tuple[float, float]] = []
        self._stopped = False
        self._tasks = [asyncio.ensure_future(self._client()) for _ in range(clients)]

    async def _client(self) -> None:
        from harness import flows  # noqa: PLC0415  (in tests/, importable once `places` was entered)
        from oncekey.core.model import Proceed  # noqa: PLC0415
        from oncekey.core.policy import Policy  # noqa: PLC0415
        from oncekey.testing.claims import a_claim, answered  # noqa: PLC0415

        policy = Policy()
        while not self._stopped:
            began = time.perf_counter()
            verdict = await flows.abegin(self._engine, a_claim(uuid.uuid4().hex), policy)
            assert isinstance(verdict, Proceed)
            settled = await flows.asettle(self._engine, verdict.lease, answered())
            assert settled.ours
            self._took.append((began, time.perf_counter() - began))
            await asyncio.sleep(0.01)

    def since(self, when: float) -> list[float]:
        """The seconds of each pair that began since then."""
        return [took for began, took in self._took if began >= when]

    async def stop(self) -> None:
        self._stopped = True
        await asyncio.gather(*self._tasks)


class Timed:
    """A driver's `run` that records how long each transaction took."""

    def __init__(self, run: Callable[[Transaction[Any]], Awaitable[Any]]) -> None:
        self._run = run
        self.took: dict[str, list[float]] = defaultdict(list)

    async def __call__(self, transaction: Transaction[Any]) -> Any:
        began = time.perf_counter()
        try:
            return await self._run(transaction)
        finally:
            self.took[transaction.name].append(time.perf_counter() - began)


class Turns:
    """The reaper's rests, which last until its turn: a byte on standard input ends or begins a turn."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._mine = asyncio.Event()
        self.paused = 0.0
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while word := os.read(0, 1):
            self._loop.call_soon_threadsafe(self._mine.set if word == b"+" else self._mine.clear)

    async def rest(self, seconds: float = 0.0) -> None:
        await asyncio.sleep(seconds)
        began = time.perf_counter()
        await self._mine.wait()
        self.paused += time.perf_counter() - began


def wal(connection: Any) -> int:
    """Bytes of WAL so far."""
    [[lsn]] = connection.execute("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint").fetchall()
    return int(lsn)


def fill(connection: Any, rows: int, tenants: int = TENANTS) -> None:
    """Write finished records that expired yesterday."""
    from harness.filling import fill_postgres  # noqa: PLC0415  (in tests/, importable once `places` was entered)

    connection.execute("TRUNCATE oncekey.record, oncekey.work, oncekey.audit")
    fill_postgres(connection, 1, rows, age=2 * DAY, finished=True, tenants=tenants)
    connection.execute("VACUUM ANALYZE oncekey.record")
    connection.execute("CHECKPOINT")


def a_reaper(engine: Any, run: Any, sleep: Any, *, audit: Any = True, pace: dict[str, float] | None = None) -> Any:
    """A reaper that processes everything, with the shipped pace unless another one is given."""
    from oncekey.core.policy import Policy  # noqa: PLC0415
    from oncekey.workers.upkeep import Reaper  # noqa: PLC0415

    policy = Policy(audit=audit, audit_ttl=timedelta(days=90))
    return Reaper(engine.store.upkeep, engine.store.audit, run, policy, sleep=sleep, **(pace or {}))


async def reap_all(url: str, pace: dict[str, Any]) -> dict[str, Any]:
    """The reaper's own process."""
    from oncekey.wire import aconnect  # noqa: PLC0415

    engine = aconnect(url)
    timed, turns = Timed(engine.driver.run), Turns()
    await turns.rest()
    began, turns.paused = time.perf_counter(), 0.0
    moved = await a_reaper(engine, timed, turns.rest, audit=pace.pop("audit", True), pace=pace).run_once()
    took = time.perf_counter() - began - turns.paused
    await engine.close()
    return {
        "moved": moved,
        "seconds": round(took, 2),
        "rows_per_s": round(moved / took),
        "batch_ms": waits(timed.took["purge_expired"]),
    }


async def beside_a_load(
    url: str, rows: int, clients: int, turn: float, say: Say, *, pace: dict[str, Any]
) -> dict[str, Any]:
    """The load with and without the reaper in turns, until everything is reaped."""
    from oncekey.wire import aconnect  # noqa: PLC0415

    command = [sys.executable, "-m", "bench.reap", "--reaper", url, "--pace", json.dumps(pace)]
    engine, pipe = aconnect(url), asyncio.subprocess.PIPE
    alone: list[list[float]] = []
    beside: list[list[float]] = []
    # It exits when its standard input ends, which is when this process ends.
    reaper = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stdout=pipe)
    assert reaper.stdin is not None
    assert reaper.stdout is not None
    try:
        load = Load(engine, clients)
        over = asyncio.ensure_future(reaper.stdout.read())
        await asyncio.sleep(turn)  # warm-up
        while not over.done():
            for word, turns in ((b"-", alone), (b"+", beside)):
                reaper.stdin.write(word)
                await asyncio.sleep(SETTLING)
                began = time.perf_counter()
                await asyncio.wait({over}, timeout=turn)
                turns.append(load.since(began))
            say(f"{len(beside) * turn:.0f} seconds of reaping")
        told = await over
        await load.stop()
    finally:
        if reaper.returncode is None:
            reaper.kill()
        await reaper.wait()
        await engine.close()
    if reaper.returncode:
        raise BenchError(f"the reaper ended with {reaper.returncode}")
    reaped = json.loads(told)
    if reaped["moved"] != rows:
        raise BenchError(f"{rows} rows had expired, and {reaped['moved']} were reaped")
    pairs = [(one, two) for one, two in zip(alone, beside, strict=True) if min(len(one), len(two)) >= MANY]
    ratios = [waits(two)["p99"] / waits(one)["p99"] for one, two in pairs]
    whole = [waits([took for turn_ in turns for took in turn_]) for turns in (alone, beside)]
    return {
        "rows": rows,
        **reaped,
        "million_s": round(reaped["seconds"] * 1_000_000 / rows, 1),
        "load_alone_ms": whole[0],
        "load_beside_ms": whole[1],
        "p99_ratio": round(whole[1]["p99"] / whole[0]["p99"], 3),
        "p99_ratios": {**asdict(Range.of(ratios)), "rounds": ratios} if ratios else None,
        # The same between turns without a reaper: how much the machine alone changes this figure.
        "p99_noise": _noise([waits(one)["p99"] for one in alone if len(one) >= MANY]),
    }


def _noise(found: Sequence[float]) -> dict[str, float] | None:
    """Each turn of the load without the reaper, compared with the one before it."""
    ratios = [later / earlier for earlier, later in itertools.pairwise(found)]
    return asdict(Range.of(ratios)) if ratios else None


async def cost_per_row(url: str, connection: Any, rows: int, audit: bool | str, tenants: int) -> dict[str, Any]:
    """WAL and processor time per deleted record, without other load and without rests."""
    from oncekey.wire import aconnect  # noqa: PLC0415

    engine = aconnect(url)
    fill(connection, rows, tenants)
    began, before, busy = time.perf_counter(), wal(connection), spent(plain(url))
    moved = await a_reaper(engine, engine.driver.run, lambda _: asyncio.sleep(0), audit=audit).run_once()
    took, worked = time.perf_counter() - began, spent(plain(url))
    await engine.close()
    if moved != rows:
        raise BenchError(f"{rows} rows had expired, and {moved} were reaped")
    return {
        "audit": audit,
        "rows": rows,
        "tenants": tenants,
        "wal_bytes_per_row": round((wal(connection) - before) / rows),
        "cpu_us_per_row": None if busy is None or worked is None else round((worked - busy) / rows * 1e6, 2),
        "rows_per_s": round(rows / took),
    }


def measured(
    rows: int, clients: int, turn: float, say: Say, pace: dict[str, Any] | None = None, *, tenants: int = TENANTS
) -> dict[str, Any]:
    """All measurements, on a separate server."""
    import psycopg  # noqa: PLC0415

    with places(("asyncpg",)) as stores:
        url = stores["asyncpg"]()
        asyncio.run(_migrated(url))
        with psycopg.connect(plain(url), autocommit=True) as connection:
            say(f"writing {rows} expired rows")
            fill(connection, rows, tenants)
            found = asyncio.run(beside_a_load(url, rows, clients, turn, say, pace=pace or {}))
            say("measuring WAL and processor time")
            few = min(rows, WAL_ROWS)
            found["costs"] = {
                name: asyncio.run(cost_per_row(url, connection, few, audit, tenants)) for name, audit, tenants in AUDITS
            }
    return found


def plain(url: str) -> str:
    """The URL in psycopg's form."""
    return url.replace("postgresql+asyncpg:", "postgresql:", 1)


async def _migrated(url: str) -> None:
    from oncekey.wire import aconnect  # noqa: PLC0415

    engine = aconnect(url)
    await engine.migrate()
    await engine.close()


def told(found: dict[str, Any]) -> str:
    """The results as text for the terminal."""
    alone, beside = found["load_alone_ms"], found["load_beside_ms"]
    ratios, noise = found["p99_ratios"], found["p99_noise"]
    rows, each, batch = found["rows"], found["rows_per_s"], found["batch_ms"]
    times = f"{found['p99_ratio']:.2f} times (p50: {alone['p50']:.1f} and {beside['p50']:.1f} ms)"
    lines = [
        f"{rows} rows in {found['seconds']:.1f} s during a load ({each}/s): a million in {found['million_s']:.0f} s",
        f"a batch took {batch['p50']:.0f} ms, at most {batch['worst']:.0f} ms",
        f"the load's p99: {alone['p99']:.1f} ms alone, {beside['p99']:.1f} ms with the reaper: {times}",
    ]
    if ratios is not None and noise is not None:
        turns = f"{ratios['median']:.2f} times ({ratios['low']:.2f}-{ratios['high']:.2f})"
        lines.append(f"turn by turn {turns}; two turns without a reaper: {noise['low']:.2f}-{noise['high']:.2f} times")
    lines += [
        f"{name}: {cost['wal_bytes_per_row']} bytes of WAL and {cost['cpu_us_per_row'] or '?'} us of CPU per record"
        for name, cost in found["costs"].items()
    ]
    return "\n".join(lines)


def main(words: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.reap", description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS, help=f"number of expired rows ({ROWS})")
    parser.add_argument("--full", action="store_true", help="a million rows")
    parser.add_argument("--clients", type=int, default=CLIENTS, help=f"concurrent requests of the load ({CLIENTS})")
    parser.add_argument("--turn", type=float, default=TURN, help=f"seconds of each turn ({TURN:g})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results")
    parser.add_argument("--moment", type=float, metavar="MS", help="how long a batch should take (default: as shipped)")
    parser.add_argument("--least", type=int, metavar="N", help="the minimum size of a batch (default: as shipped)")
    parser.add_argument(
        "--rate", type=float, metavar="N", help="the target rate in records per second (default: as shipped)"
    )
    parser.add_argument("--each", action="store_true", help="an audit entry for every record")
    parser.add_argument("--tenants", type=int, default=TENANTS, help=f"number of tenants ({TENANTS})")
    parser.add_argument("--reaper", help=argparse.SUPPRESS)
    parser.add_argument("--pace", type=json.loads, default={}, help=argparse.SUPPRESS)
    said = parser.parse_args(words)
    if said.reaper:
        print(json.dumps(asyncio.run(reap_all(said.reaper, said.pace))))
        return 0
    pace: dict[str, Any] = {} if said.least is None else {"least": said.least}
    if said.each:
        pace["audit"] = "each"
    if said.rate is not None:
        pace["rate"] = said.rate
    if said.moment is not None:
        pace["moment"] = int(said.moment * 1000)
    try:
        found = measured(FULL if said.full else said.rows, said.clients, said.turn, _say, pace, tenants=said.tenants)
    except BenchError as error:
        _say(str(error))
        return 1
    print(told(found))
    if said.json:
        said.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def _say(words: str) -> None:
    print(f"bench: {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
