"""The bench of a large table names the plan of each statement, and how long PostgreSQL takes to plan and to run it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from bench.scale import plans, statements

from bench import growth
from oncekey.wire import aconnect

ROOT = Path(__file__).parents[2]


async def test_the_reapers_plan_and_its_times_are_reported(postgres_dsn: str) -> None:
    # R170
    engine = aconnect(postgres_dsn)
    await engine.migrate()
    await engine.close()
    found = await plans(postgres_dsn, statements())
    assert set(found) == set(statements()) >= {"claim", "stale", "expiring", "purge_expired"}
    for one in found.values():
        assert min(one["plan_ms"], one["run_ms"]) > 0
        assert one["indexes"] or one["read_whole"]


def test_a_guide_publishes_the_reapers_plan_and_the_command_that_measures_it() -> None:
    # R170
    guide = (ROOT / "docs/howto/sizing.md").read_text()
    assert "`python -m bench.scale --full --keep`" in guide
    assert "| 1 million | 10 million |" in guide
    assert re.search(r"^\| reaper, nothing due: planned, run \|(?: [\d.]+ ms, [\d.]+ ms \|){3}$", guide, re.MULTILINE)
    assert growth.stale() == []


def test_a_short_run_compares_both_tables_and_draws_them(tmp_path: Path) -> None:
    figures, drawing = tmp_path / "figures.json", tmp_path / "growth.svg"
    words = ("--rows", "10000", "12000", "--rounds", "1", "--json", str(figures), "--plot", str(drawing))
    done = subprocess.run(
        [sys.executable, "-m", "bench.scale", *words], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert [point["rows"] for point in found["points"]] == [10_000, 12_000]
    for point in found["points"]:
        assert growth.read_whole(point) == []
        assert point["new_keys"]["of_small"]["median"] > 0
        assert min(point["wal_bytes"], point["wal_bytes_lz4"], point["table_bytes"], point["index_bytes"]) > 100
    assert done.stdout.strip() == growth.table(found).strip()
    assert drawing.read_text() == growth.plot(found)
    assert drawing.read_text().count("<polyline") == len(growth.series(found)) == 5


def test_scale_plot_shows_multiples_and_page_shows_absolute_figures() -> None:
    plan = {"indexes": [], "read_whole": [], "plan_ms": 1.0, "run_ms": 1.0}
    names = ("claim", "stale", "purge_expired", "purge_expired, 200 due", "console: tally")
    point = {
        "rows": 10_000,
        "table_bytes": 700,
        "index_bytes": 200,
        "wal_bytes": 1000,
        "wal_bytes_lz4": 900,
        "new_keys": {"cpu_us": {"median": 600.0}, "of_small": {"median": 1.0, "low": 0.9, "high": 1.1}},
        "replays": {"cpu_us": {"median": 60.0}, "of_small": {"median": 1.0, "low": 0.9, "high": 1.1}},
        "plans": dict.fromkeys(names, plan),
    }
    slow = {**point, "rows": 10_000_000, "plans": {name: {**plan, "run_ms": 4.0} for name in names}}
    found = {"rounds": 3, "points": [point, slow]}
    assert growth.series(found)["sweeper's page"] == [1.0, 2.5]
    assert "| processor time of the requests | 600 s | 600 s |" in growth.published(found)
    assert "| new `LOCAL` key, as a multiple of that with 10,000 records | 1.00 (0.90-1.10) | 1.00" in (
        growth.published(found)
    )
