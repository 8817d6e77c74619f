"""`python -m bench.scale`: does anything grow with the table? Plans and latencies at several sizes.

PostgreSQL only. The table is filled by the database itself. At each size the statements of claim, sweep, reap and
reconcile are explained, with the times that PostgreSQL takes to plan and to run them, and claims, pages and replays are
timed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import uuid
from statistics import median

import asyncpg
import psycopg

from bench.places import places
from bench.reap import waits
from oncekey.core.flow import adrive
from oncekey.core.model import Proceed
from oncekey.core.policy import Policy
from oncekey.databases.placeholders import numbered
from oncekey.databases.postgres.store import PostgresStore
from oncekey.stores.rows import claim_params
from oncekey.testing.claims import a_claim, answered
from oncekey.wire import aconnect

POLICY = Policy()
CLAIMS = 2000
LOOKS = 50
EXPLAINED = 9
GRACE = 300_000_000
AFTER = {"after_at": -1, "after_scope": "", "after_key": "", "limit": 1000}
ENDING = {
    **AFTER,
    "age": GRACE,
    "until": 2**62,
    "soft": False,
    "trusted_for": None,
    "noted": True,
    **dict.fromkeys(("trigger", "actor", "who", "why"), ""),
}


def statements():
    """What is explained, by name, with its parameters; those that this version does not have are left out."""
    commands = PostgresStore()._statements._commands  # noqa: SLF001  (a measurement looks inside)
    asked = {
        "claim": claim_params(a_claim(), None),
        "find": {"scope": "shop|tenant-1", "key": "k"},
        "stale": AFTER,
        "resumable": {"after_created": 0, "after_scope": "", "after_key": "", "limit": 100},
        "expiring": {**AFTER, "age": GRACE},
        "kept_expired": {**AFTER, "age": GRACE},
        "purge_expired": ENDING,
        "live_keys": {"scope": "shop|tenant-1", "limit": 1000},
        "unknown_due": AFTER,
    }
    return {name: (commands[name], params) for name, params in asked.items() if name in commands}


def nodes(plan):
    """All nodes of a plan."""
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


async def plans(dsn):
    """Which indexes each statement uses, whether it reads a whole table, and how long PostgreSQL plans and runs it."""
    connection = await asyncpg.connect(dsn)
    shown = {}
    for name, (command, params) in statements().items():
        said = numbered(command)
        explained = []
        for _ in range(EXPLAINED):
            moves = connection.transaction()
            await moves.start()
            arguments = said.arguments({**params, "now": None})
            rows = await connection.fetch(f"EXPLAIN (ANALYZE, FORMAT JSON) {said.text}", *arguments)
            await moves.rollback()  # what was claimed or deleted is there again
            explained.append(json.loads(rows[0][0])[0])
        found = list(nodes(explained[0]["Plan"]))
        indexes = sorted({node["Index Name"] for node in found if "Index Name" in node})
        scanned = sorted({node.get("Relation Name", "?") for node in found if node["Node Type"] == "Seq Scan"})
        shown[name] = {
            "indexes": indexes,
            "read_whole": scanned,
            "plan_ms": round(median(one["Planning Time"] for one in explained), 2),
            "run_ms": round(median(one["Execution Time"] for one in explained), 2),
        }
    await connection.close()
    return shown


async def timed(count, action):
    """Seconds of each of so many."""
    took = []
    for _ in range(count):
        began = time.perf_counter()
        await action()
        took.append(time.perf_counter() - began)
    return waits(took)


async def latencies(url):
    """Claims of new keys, replays, and empty looks of sweeper and reaper, one after the other."""
    from harness import flows  # noqa: PLC0415  (beside the tests, found once `places` was entered)

    engine = aconnect(url)
    claims = []

    async def claim():
        claims.append(a_claim(uuid.uuid4().hex))
        assert isinstance(await flows.abegin(engine, claims[-1], POLICY), Proceed)

    async def replay():
        await flows.abegin(engine, claims[0], POLICY)

    await timed(100, claim)
    verdict = await flows.abegin(engine, claims[0], POLICY)
    await flows.asettle(engine, verdict.lease, answered())
    upkeep, run = engine.store.upkeep, engine.driver.run
    shown = {
        "claim_ms": await timed(CLAIMS, claim),
        "replay_ms": await timed(CLAIMS, replay),
        "sweep_page_ms": await timed(LOOKS, lambda: adrive(upkeep.stale(100), run)),
        "reap_page_ms": await timed(LOOKS, lambda: adrive(upkeep.expiring(1000, GRACE), run)),
    }
    await engine.close()
    return shown


def main():
    """Measure at each size and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    parser.add_argument("--full", action="store_true", help="0, 1 and 10 million rows, not 0, 10 and 100 thousand")
    parser.add_argument("--rows", type=int, nargs="+", help="these sizes, in rising order", metavar="N")
    given = parser.parse_args()
    sizes = given.rows or ((0, 1_000_000, 10_000_000) if given.full else (0, 10_000, 100_000))
    with places(("asyncpg",)) as stores:
        from harness.filling import fill_postgres  # noqa: PLC0415  (beside the tests, found now)

        url = stores["asyncpg"]()
        dsn = url.replace("postgresql+asyncpg:", "postgresql:", 1)
        asyncio.run(_migrated(url))
        with psycopg.connect(dsn, autocommit=True) as connection:
            there = 0
            for size in sizes:
                fill_postgres(connection, there + 1, size)
                there = size
                connection.execute("VACUUM ANALYZE oncekey.record, oncekey.work")
                connection.execute("CHECKPOINT")
                [[table, indexes]] = connection.execute(
                    "SELECT pg_table_size('oncekey.record') >> 20, pg_indexes_size('oncekey.record') >> 20"
                ).fetchall()
                shown = {"rows": size, "table_mib": table, "indexes_mib": indexes}
                shown.update(asyncio.run(latencies(url)))
                shown["plans"] = asyncio.run(plans(dsn))
                print(json.dumps(shown, indent=2), flush=True)


async def _migrated(url):
    engine = aconnect(url)
    await engine.migrate()
    await engine.close()


if __name__ == "__main__":
    main()
