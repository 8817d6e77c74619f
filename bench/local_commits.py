"""`python -m bench.local_commits`: what a protected LOCAL write costs PostgreSQL, beside the unprotected one.

First the server's own counters, for one write after the other: transactions that wrote, commits, flushes of the
write-ahead log and dead rows. Then requests per second, the two kinds in turn, as ratios of the same round.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from dataclasses import dataclass

import psycopg

from bench.__main__ import BenchError, Plan, Server, new_key, serving
from bench.load import Load, fire
from bench.places import places

DRIVERS = ("asyncpg", "psycopg")
KINDS = ("unprotected", "protected")
WARM_UP = 50
SETTLED = 0.5
PATIENCE = 20.0

COUNTERS = """
    SELECT (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint),
           (SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()),
           (SELECT wal_sync FROM pg_stat_wal),
           (SELECT COALESCE(sum(n_tup_upd + n_tup_del), 0)::bigint FROM pg_stat_user_tables),
           (SELECT COALESCE(sum(n_tup_ins), 0)::bigint FROM pg_stat_user_tables)
"""


@dataclass(frozen=True, slots=True)
class Counters:
    """What the server has counted so far. Whatever is updated or deleted is a dead row."""

    writers: int
    commits: int
    flushes: int
    dead: int
    inserted: int

    def per(self, before: Counters, writes: int) -> tuple[float, ...]:
        """What each of so many writes added."""
        pairs = zip(_values(self), _values(before), strict=True)
        return tuple((now - then) / writes for now, then in pairs)


def _values(counters: Counters) -> tuple[int, ...]:
    return counters.writers, counters.commits, counters.flushes, counters.dead, counters.inserted


async def counted(dsn: str, rows: int | None = None) -> Counters:
    """The counters, once sessions have handed theirs in: they do so a moment after they fall silent."""
    ends = time.monotonic() + PATIENCE
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        seen: Counters | None = None
        while time.monotonic() < ends:
            found = await (await connection.execute(COUNTERS.encode())).fetchone()
            assert found is not None
            counters = Counters(*map(int, found))
            if seen is not None and counters.inserted == seen.inserted and (rows is None or counters.inserted >= rows):
                return counters
            seen = counters
            await asyncio.sleep(SETTLED)
    raise BenchError("the server's counters never came to rest")


async def cost(dsn: str, server: Server, writes: int, each: int) -> tuple[float, ...]:
    """What one write costs: one after the other, so that no two commits share a flush."""
    cold = await counted(dsn)
    warmed = (await fire(server.port, Load(new_key, b"201", connections=1, seconds=30, at_most=WARM_UP))).count
    before = await counted(dsn, cold.inserted + each * warmed)
    fired = await fire(server.port, Load(new_key, b"201", connections=1, seconds=120, at_most=writes))
    if fired.wrong or fired.count != writes:
        raise BenchError(fired.wrong[0] if fired.wrong else "too few answers")
    return (await counted(dsn, before.inserted + each * writes)).per(before, writes)


async def throughput(servers: list[Server], plan: Plan) -> tuple[list[float], list[float]]:
    """Requests per second of both kinds, round by round."""
    rates: tuple[list[float], list[float]] = ([], [])
    for turn in range(plan.rounds + 1):
        for kind in (0, 1) if turn % 2 else (1, 0):
            load = Load(new_key, b"201", connections=plan.connections, seconds=plan.seconds, at_most=plan.at_most)
            fired = await fire(servers[kind].port, load)
            if fired.wrong:
                raise BenchError(fired.wrong[0])
            if turn:  # the first round only warms up
                rates[kind].append(fired.rate)
    return rates


async def measure(driver: str, urls: list[str], plan: Plan, writes: int) -> None:
    """Both kinds on one driver."""
    with serving(dict(zip(KINDS, urls, strict=True)), plan) as servers:
        for kind, url, server in zip(KINDS, urls, servers, strict=True):
            dsn = url.replace(f"postgresql+{driver}:", "postgresql:", 1)
            found = await cost(dsn, server, writes, each=1 if kind == "unprotected" else 2)
            shown = " ".join(f"{value:>9.3f}" for value in found)
            print(f"{driver:<10} {kind:<12} {shown}", flush=True)
        plain, once = await throughput(servers, plan)
        ratios = [b / a for a, b in zip(plain, once, strict=True)]
        print(
            f"{driver:<10} {'throughput':<12} {statistics.median(plain):.0f}/s unprotected, "
            f"{statistics.median(once):.0f}/s protected, ratio {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f}-{max(ratios):.2f}) in {plan.rounds} rounds",
            flush=True,
        )


def main(words: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.local_commits", description=__doc__)
    parser.add_argument("--driver", action="append", choices=DRIVERS, help="only this one; may be repeated")
    parser.add_argument("--writes", type=int, default=300, help="writes to count (300)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of throughput (9)")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds per slice (1)")
    parser.add_argument("--connections", type=int, default=16, help="requests at the same time (16)")
    said = parser.parse_args(words)
    plan = Plan(said.rounds, said.seconds, said.connections, 50_000, pin=False)
    drivers = tuple(dict.fromkeys(said.driver or DRIVERS))
    print(f"{'per write':<23} {'wrote':>9} {'commits':>9} {'flushes':>9} {'dead':>9} {'inserted':>9}")
    try:
        with places(drivers) as found:
            for driver, new_store in found.items():
                asyncio.run(measure(driver, [new_store(), new_store()], plan, said.writes))
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
