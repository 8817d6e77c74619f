"""The bench of a large table names the plan of each statement, and how long PostgreSQL takes to plan and to run it."""

from __future__ import annotations

import re
from pathlib import Path

from bench.scale import plans, statements

from oncekey.wire import aconnect

ROOT = Path(__file__).parents[2]


async def test_the_reapers_plan_and_its_times_are_reported(postgres_dsn: str) -> None:
    # R170
    engine = aconnect(postgres_dsn)
    await engine.migrate()
    await engine.close()
    found = await plans(postgres_dsn)
    assert set(found) == set(statements()) >= {"claim", "stale", "expiring", "purge_expired"}
    for one in found.values():
        assert min(one["plan_ms"], one["run_ms"]) > 0
        assert one["indexes"] or one["read_whole"]


def test_a_guide_publishes_the_reapers_plan_and_the_command_that_measures_it() -> None:
    # R170
    guide = (ROOT / "docs/howto/sizing.md").read_text()
    assert "`python -m bench.scale --full`" in guide
    assert "10 million records" in guide
    assert re.search(r"^\| reaper, nothing due: planned, run \|(?: [\d.]+ ms, [\d.]+ ms \|){2}$", guide, re.MULTILINE)
