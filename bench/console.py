"""`python -m bench.console`: how long the console's pages take on a large table.

PostgreSQL only. The database fills the tables. Then the plan of every statement must use its index, otherwise there are
no figures. Then the application in this process renders every page a few times, with the store but without sockets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from http import HTTPStatus

import httpx
import psycopg

from bench.figures import BenchError, Range
from bench.places import places
from oncekey.console import Console
from oncekey.wire import connect

TOKEN = "bench-token-0123456789"
PAGES = {
    "overview": "",
    "its numbers": "live",
    "its charts": "series.json?window=24+h",
    "unfinished": "records",
    "unknown": "records?state=unknown",
    "completed": "records?state=completed",
    "completed, one tenant": "records?state=completed&tenant=1%3A-8%3Atenant-7",
    "retryable, an error that there is not": "records?state=failed_retryable&error=none",
    "queue of unknown": "unknown",
    "dead letters": "letters",
    "audit": "audit?who=all",
}


async def measured(url, rounds):
    """The pages of a newly started console, each rendered a few times."""
    console = Console(url, tokens=f"bench:operate:{TOKEN}")
    transport = httpx.ASGITransport(console, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1/") as visitor:
        await visitor.post("login", data={"token": TOKEN})
        listed = (await visitor.get("records?state=unknown")).text
        pages = {**PAGES, "one record": f"record/{re.search(r'/record/([A-Za-z0-9_-]+)', listed)[1]}"}
        proof = re.search(r'name="proof" value="([0-9a-f]+)"', listed)[1]
        took = {name: await _timed(rounds, lambda path=path: visitor.get(path)) for name, path in pages.items()}
        for name, key in (("a whole key", "e4da3b7fbbce2345d7772b0674a318d5"), ("the beginning of one", "abcd")):
            form = {"proof": proof, "key": key}
            took[name] = await _timed(rounds, lambda form=form: visitor.post("find", data=form))
    await console.close()
    return took


async def _timed(rounds, ask):
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        answer = await ask()
        took.append((time.perf_counter() - began) * 1000)
        if answer.status_code >= HTTPStatus.BAD_REQUEST:
            raise BenchError(answer.text)
    found = Range.of(took)
    return {"median": round(found.median, 1), "worst": round(found.high, 1)}


def main():
    """Fill the tables, then measure."""
    parser = argparse.ArgumentParser(prog="python -m bench.console", description=__doc__)
    parser.add_argument("--records", type=int, default=200_000, help="number of records (200000)")
    parser.add_argument("--full", action="store_true", help="five million records: takes minutes and gigabytes")
    parser.add_argument("--rounds", type=int, default=20, help="how often each page is rendered (20)")
    said = parser.parse_args()
    records = 5_000_000 if said.full else said.records
    with places(("asyncpg",)) as made:
        url = made["asyncpg"]()
        engine = connect(url.replace("+asyncpg", "+psycopg"))
        engine.migrate()
        engine.close()
        # In the tests' folder, which is importable once `places` was entered.
        from harness.filling import fill_beside, fill_postgres  # noqa: PLC0415

        began = time.perf_counter()
        with psycopg.connect(url.replace("+asyncpg", ""), autocommit=True) as connection:
            fill_postgres(connection, 1, records)
            fill_beside(connection, records // 10, mixed=False)
            connection.execute("VACUUM ANALYZE")
            (size,) = connection.execute("SELECT pg_database_size(current_database())").fetchone()
            print(f"filled in {time.perf_counter() - began:.0f} s, {size / 1e9:.1f} GB", file=sys.stderr)
            plans = planned(connection)
        found = asyncio.run(measured(url, said.rounds))
    shown = {"records": records, "gigabytes": round(size / 1e9, 1), "statement_ms": plans, "page_ms": found}
    print(json.dumps(shown, indent=2))


def planned(connection):
    """The duration of each statement; raises if one scans a whole table."""
    from console.test_plans import NARROW, WANTED  # noqa: PLC0415
    from harness.plans import check_plan, explained  # noqa: PLC0415

    took = {}
    for name, (params, indexes) in WANTED.items():
        for way, given in (("any", params), ("narrow", {word: NARROW.get(word, params[word]) for word in params})):
            plan = explained(connection, name, given, analyze=True)
            check_plan(plan, indexes)
            took[f"{name}, {way}"] = round(plan[0]["Actual Total Time"], 2)
    return took


if __name__ == "__main__":
    main()
