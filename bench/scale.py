"""`python -m bench.scale`: which costs grow with the table, and what do a million keys cost?

PostgreSQL only. Two databases of one server: one always has ten thousand records, the other grows. At each size batches
of new keys and of replays alternate between the two, so a busy machine slows both alike; their ratio is that of
processor times, and at the first size, where both are equal, it is the noise of the run. Then the statements of claim,
sweep, reap, reconcile and console are explained, and the log that a new key writes is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from hashlib import md5
from pathlib import Path
from statistics import median
from typing import Any

import asyncpg
import psycopg

from bench import clocks, growth
from bench.figures import BenchError, Range
from bench.places import places
from bench.reap import plain, wal
from bench.serving import POSTGRES_TABLES, SERVED
from oncekey.core.model import RecordId, Replay
from oncekey.core.policy import Policy
from oncekey.databases.placeholders import numbered
from oncekey.databases.postgres.store import PostgresStore
from oncekey.stores.rows import claim_params
from oncekey.testing.claims import a_claim
from oncekey.wire import aconnect

SMALL = 10_000
SIZES, FULL = (SMALL, 100_000), (SMALL, 1_000_000, 10_000_000)
ROUNDS, BATCH, TOGETHER = 20, 100, 8
EXPLAINED = 9
LOGGED = 2000
"""The number of new keys whose WAL is measured."""
GRACE, DAY = 300_000_000, 86_400_000_000
AFTER = {"after_at": -1, "after_scope": "", "after_key": "", "limit": 1000}
ENDING = {
    **AFTER,
    "age": GRACE,
    "until": 2**62,
    "soft": False,
    "trusted_for": None,
    "noted": True,
    "each": False,
    **dict.fromkeys(("trigger", "actor", "who", "why"), ""),
}
Plan = dict[str, Any]


def statements() -> dict[str, tuple[str, Mapping[str, Any]]]:
    """The statements to explain, by title, with their parameters."""
    commands = PostgresStore()._statements._commands  # noqa: SLF001  (a measurement looks inside)
    asked: dict[str, tuple[str, Mapping[str, Any]]] = {
        "claim": ("claim", claim_params(a_claim(), None)),
        "find": ("find", {"scope": "shop|tenant-1", "key": "k"}),
        "stale": ("stale", AFTER),
        "resumable": ("resumable", {"after_created": 0, "after_scope": "", "after_key": "", "limit": 100}),
        "expiring": ("expiring", {**AFTER, "age": GRACE}),
        "kept_expired": ("kept_expired", {**AFTER, "age": GRACE}),
        "purge_expired": ("purge_expired", ENDING),
        "purge_expired, 200 due": ("purge_expired", {**ENDING, "age": -DAY, "limit": 200}),
        "live_keys": ("live_keys", {"scope": "shop|tenant-1", "limit": 1000}),
        "unknown_due": ("unknown_due", AFTER),
    }
    return {title: (str(commands[name]), params) for title, (name, params) in asked.items()}


def console_statements() -> dict[str, tuple[str, Mapping[str, Any]]]:
    """The statements of the console, by title, with their parameters."""
    from console.test_plans import WANTED  # noqa: PLC0415  (beside the tests, found once `places` was entered)

    commands = PostgresStore()._statements._commands  # noqa: SLF001
    return {f"console: {name}": (str(commands[name]), params) for name, (params, _) in WANTED.items()}


def nodes(plan: Plan) -> Iterator[Plan]:
    """All nodes of a plan."""
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


async def plans(dsn: str, asked: Mapping[str, tuple[str, Mapping[str, Any]]]) -> dict[str, Plan]:
    """Which indexes each statement uses, whether it reads a whole table, and how long PostgreSQL plans and runs it."""
    connection = await asyncpg.connect(dsn)
    shown = {}
    for title, (command, params) in asked.items():
        said = numbered(command)
        explained = []
        for _ in range(EXPLAINED):
            moves = connection.transaction()
            await moves.start()
            arguments = said.arguments({**params, "now": None})
            rows = await connection.fetch(f"EXPLAIN (ANALYZE, FORMAT JSON) {said.text}", *arguments)
            await moves.rollback()  # restores what was claimed or deleted
            explained.append(json.loads(rows[0][0])[0])
        found = list(nodes(explained[0]["Plan"]))
        shown[title] = {
            "indexes": sorted({node["Index Name"] for node in found if "Index Name" in node}),
            "read_whole": sorted({node.get("Relation Name", "?") for node in found if node["Node Type"] == "Seq Scan"}),
            "plan_ms": round(median(one["Planning Time"] for one in explained), 2),
            "run_ms": round(median(one["Execution Time"] for one in explained), 2),
        }
    await connection.close()
    return shown


class Database:
    """One database: an application in this process that takes new keys, and an engine that replays."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.dsn = plain(url)
        self.rows = 0

    async def open(self, stack: AsyncExitStack) -> None:
        """Start the application, which creates its tables."""
        import called  # noqa: PLC0415  (in `served`, found once the path has it)
        import ours  # noqa: PLC0415

        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(POSTGRES_TABLES.encode())
        self._called = called
        self._app = ours.asyncpg(self.dsn)
        await stack.enter_async_context(self._app.router.lifespan_context(self._app))
        self._engine = aconnect(self.url)
        stack.push_async_callback(self._engine.close)
        self._watch = stack.enter_context(psycopg.connect(self.dsn, autocommit=True))
        await self.new_keys(200)

    def fill(self, rows: int, *, others: int = 0) -> dict[str, float]:
        """Grow to a number of records; returns the bytes per record."""
        from harness.filling import fill_beside, fill_postgres  # noqa: PLC0415

        with psycopg.connect(self.dsn, autocommit=True) as connection:
            [self._scope] = connection.execute("SELECT max(scope) FROM oncekey.record").fetchone() or [""]
            # The application's own tenant, so that new keys go to pages all over the table and its indexes.
            fill_postgres(connection, self.rows + 1, rows, scope=self._scope)
            if others:
                fill_beside(connection, others, mixed=False)
            self.rows = rows
            connection.execute("VACUUM ANALYZE")
            connection.execute("CHECKPOINT")
            [[table, indexes, there]] = connection.execute(
                "SELECT pg_table_size('oncekey.record'), pg_indexes_size('oncekey.record'), count(*)"
                " FROM oncekey.record"
            ).fetchall()
        return {"table_bytes": round(table / there), "index_bytes": round(indexes / there)}

    async def new_keys(self, count: int) -> None:
        """LOCAL requests of one row, each with a new key."""
        await self._called.batch(self._app, "/orders", [uuid.uuid4().hex for _ in range(count)], TOGETHER)

    async def replays(self, count: int) -> None:
        """Replays of stored responses of other processes, anywhere in the table."""
        from harness import flows  # noqa: PLC0415

        left = count
        while left:
            number = random.randrange(1, self.rows + 1)
            if number % 1000 < 14:
                continue  # in progress, unknown or to be retried
            key = md5(str(number).encode(), usedforsecurity=False).hexdigest()
            verdict = await flows.abegin(self._engine, a_claim(id=RecordId(self._scope, key)), Policy())
            if not isinstance(verdict, Replay):
                raise BenchError(f"record {number} was not replayed")
            left -= 1

    async def cost(self, act: Callable[[int], Awaitable[None]]) -> float:
        """Microseconds of processor time per request of a batch, in this process and in PostgreSQL."""
        before = self._spent()
        await act(BATCH)
        return clocks.added(before, self._spent()) / BATCH * 1e6

    def _spent(self) -> dict[int, float]:
        said = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        pids = [os.getpid(), *(int(pid) for [pid] in self._watch.execute(said).fetchall())]
        found = {pid: seconds for pid in pids if (seconds := clocks.seconds_of(pid)) is not None}
        if not found:
            raise BenchError("this system does not report the processor time of other processes")
        return found

    async def log_bytes(self, *, compressed: bool) -> int:
        """Bytes of WAL per new key right after a checkpoint, when the first write to a page logs the whole page."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(f"ALTER SYSTEM SET wal_compression = {'lz4' if compressed else 'off'}")
            connection.execute("SELECT pg_reload_conf()")
            connection.execute("CHECKPOINT")
            await self.new_keys(TOGETHER)  # every session has read the setting
            before = wal(connection)
            await self.new_keys(LOGGED)
            return round((wal(connection) - before) / LOGGED)


async def compared(small: Database, large: Database, rounds: int) -> dict[str, Any]:
    """The cost of a new key and of a replay in the large table, and as multiples of the small one's in the round."""
    found: dict[str, Any] = {}
    for name in ("new_keys", "replays"):
        costs: dict[Database, list[float]] = {small: [], large: []}
        for database in (small, large):
            await database.cost(getattr(database, name))  # warms up connections and statements
        for number in range(rounds):
            for database in (small, large) if number % 2 else (large, small):
                costs[database].append(await database.cost(getattr(database, name)))
        ratios = [mine / base for mine, base in zip(costs[large], costs[small], strict=True)]
        found[name] = {
            "cpu_us": asdict(Range.of(costs[large])),
            "of_small": {**asdict(Range.of(ratios)), "rounds": ratios},
        }
    return found


async def measured(urls: Sequence[str], sizes: Sequence[int], rounds: int, say: Callable[[str], None]) -> Plan:
    """All measurements at each size."""
    async with AsyncExitStack() as stack:
        small, large = (Database(url) for url in urls)
        for database in (small, large):
            await database.open(stack)
        small.fill(SMALL, others=SMALL)
        points = []
        for size in sizes:
            began = time.perf_counter()
            taken = large.fill(size, others=0 if points else SMALL)
            say(f"{size} records, written in {time.perf_counter() - began:.0f} s")
            points.append(
                {
                    "rows": size,
                    **taken,
                    **await compared(small, large, rounds),
                    "wal_bytes": await large.log_bytes(compressed=False),
                    "wal_bytes_lz4": await large.log_bytes(compressed=True),
                    "plans": await plans(large.dsn, {**statements(), **console_statements()}),
                }
            )
            await large.log_bytes(compressed=False)
    return {"rounds": rounds, "points": points}


def main(words: list[str] | None = None) -> int:
    """Measure at each size, print, and write the plot."""
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    parser.add_argument("--full", action="store_true", help="10 thousand, 1 and 10 million records: 10 GB of disk")
    parser.add_argument("--rows", type=int, nargs="+", help="these sizes, in ascending order", metavar="N")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"batches of each at each size ({ROUNDS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the plot, an SVG")
    parser.add_argument("--keep", action="store_true", help="write the figures and the plot into the sizing page")
    given = parser.parse_args(words)
    sizes = given.rows or (FULL if given.full else SIZES)
    try:
        with places(("asyncpg",)) as stores:
            sys.path.insert(0, str(SERVED))
            found = asyncio.run(measured([stores["asyncpg"]() for _ in range(2)], sizes, given.rounds, _say))
    except BenchError as error:
        _say(str(error))
        return 1
    print(growth.table(found))
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")
    if given.plot:
        given.plot.write_text(growth.plot(found))
    if given.keep:
        growth.keep(found)
    return 0


def _say(words: str) -> None:
    print(f"bench: {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
