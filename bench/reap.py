"""`python -m bench.reap`: what reaping a full table does to the requests that are served meanwhile (R169).

PostgreSQL only. A load of claims and settlements runs alone, then beside a reaper (in a process of its own, as
`oncekey worker` is) that removes all expired records, then alone again. WAL is measured once more without a load, with
the audit and without it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import uuid
from collections import defaultdict
from datetime import timedelta

import psycopg

from bench.places import places
from oncekey.core.model import Proceed
from oncekey.core.policy import Policy
from oncekey.testing.claims import a_claim, answered
from oncekey.wire import aconnect
from oncekey.workers.reaper import Reaper

DAY = 86_400_000_000
POLICY = Policy()


def percentile(values, rank):
    """A percentile in milliseconds."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * rank / 100))] * 1000, 2)


def figures(values):
    """How long things took, in milliseconds."""
    return {
        "count": len(values),
        "p50": percentile(values, 50),
        "p99": percentile(values, 99),
        "worst": round(max(values) * 1000, 2),
    }


async def load(engine, clients, until):
    """Claims and settlements of new keys, each client one at a time with a breath in between; seconds of each pair."""
    took = []

    async def client():
        while not until():
            began = time.perf_counter()
            verdict = await engine.begin(a_claim(uuid.uuid4().hex), POLICY)
            assert isinstance(verdict, Proceed)
            settled = await engine.settle(verdict.lease, answered())
            assert settled.ours
            took.append(time.perf_counter() - began)
            await asyncio.sleep(0.01)

    await asyncio.gather(*(client() for _ in range(clients)))
    return took


class Timed:
    """A driver's `run` that remembers how long each transaction took."""

    def __init__(self, run):
        self._run = run
        self.took = defaultdict(list)

    async def __call__(self, transaction):
        began = time.perf_counter()
        try:
            return await self._run(transaction)
        finally:
            self.took[transaction.name].append(time.perf_counter() - began)


def wal(connection):
    """Bytes of WAL so far."""
    [[lsn]] = connection.execute("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint").fetchall()
    return lsn


def fill(connection, rows):
    """Finished records that expired yesterday."""
    from harness.filling import fill_postgres  # noqa: PLC0415  (beside the tests, found once `places` was entered)

    connection.execute("TRUNCATE oncekey.record, oncekey.work, oncekey.audit")
    fill_postgres(connection, 1, rows, age=2 * DAY, finished=True)
    connection.execute("VACUUM ANALYZE oncekey.record")
    connection.execute("CHECKPOINT")


def a_reaper(engine, run, *, audit=True, batch=POLICY.reap_batch, rests=True):
    """A reaper that works through everything."""
    policy = Policy(audit=audit, reap_batch=batch, audit_ttl=timedelta(days=90))
    sleep = asyncio.sleep if rests else (lambda _: asyncio.sleep(0))
    return Reaper(engine.store.upkeep, engine.store.audit, run, policy, sleep=sleep)


async def beside_a_load(url, connection, rows, clients, seconds):
    """The load alone, beside the reaper, and alone again."""
    engine = aconnect(url)
    fill(connection, rows)
    ends = time.perf_counter() + seconds
    before = await load(engine, clients, lambda: time.perf_counter() >= ends)
    command = [sys.executable, "-m", "bench.reap", "--reaper", url]
    reaper = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    during = await load(engine, clients, lambda: reaper.returncode is not None)
    reaped = json.loads(await reaper.stdout.read())
    assert reaped["moved"] == rows, (reaped, rows)
    ends = time.perf_counter() + seconds
    after = await load(engine, clients, lambda: time.perf_counter() >= ends)
    await engine.close()
    return {
        "rows": rows,
        **reaped,
        "load_alone_ms": figures(before),
        "load_beside_ms": figures(during),
        "load_afterwards_ms": figures(after),
    }


async def reap_all(url):
    """The reaper's own process."""
    engine = aconnect(url)
    timed, began = Timed(engine.driver.run), time.perf_counter()
    moved = await a_reaper(engine, timed).run_once()
    took = time.perf_counter() - began
    await engine.close()
    return {
        "moved": moved,
        "reaped_in_s": round(took, 1),
        "rows_per_s": round(moved / took),
        "page_ms": figures(timed.took["expiring"]),
        "batch_ms": figures(timed.took["purge_expired"]),
    }


async def wal_per_row(url, connection, rows, *, audit):
    """Bytes of WAL for each record that goes, without anybody else."""
    engine = aconnect(url)
    fill(connection, rows)
    began, before = time.perf_counter(), wal(connection)
    moved = await a_reaper(engine, engine.driver.run, audit=audit, rests=False).run_once()
    took = time.perf_counter() - began
    assert moved == rows
    await engine.close()
    return {
        "audit": audit,
        "rows": rows,
        "wal_bytes_per_row": round((wal(connection) - before) / rows),
        "rows_per_s": round(rows / took),
    }


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.reap", description=__doc__)
    parser.add_argument("--full", action="store_true", help="a million rows instead of fifty thousand")
    parser.add_argument("--rows", type=int, help="so many rows")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0, help="of the load alone, before and after")
    parser.add_argument("--reaper", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.reaper:
        print(json.dumps(asyncio.run(reap_all(given.reaper))))
        return
    rows = given.rows or (1_000_000 if given.full else 50_000)
    with places(("asyncpg",)) as stores:
        url = stores["asyncpg"]()
        dsn = url.replace("postgresql+asyncpg:", "postgresql:", 1)
        asyncio.run(_migrated(url))
        with psycopg.connect(dsn, autocommit=True) as connection:
            shown = {
                "beside_a_load": asyncio.run(beside_a_load(url, connection, rows, given.clients, given.seconds)),
                "wal": [
                    asyncio.run(wal_per_row(url, connection, max(1000, rows // 10), audit=audit))
                    for audit in (True, False)
                ],
            }
        # Both, because a machine that others use may have been busier before, or after.
        before, beside, after = (
            shown["beside_a_load"][f"load_{when}_ms"]["p99"] for when in ("alone", "beside", "afterwards")
        )
        shown["p99_beside_to_before"] = round(beside / before, 2)
        shown["p99_beside_to_after"] = round(beside / after, 2)
    print(json.dumps(shown, indent=2))


async def _migrated(url):
    engine = aconnect(url)
    await engine.migrate()
    await engine.close()


if __name__ == "__main__":
    main()
