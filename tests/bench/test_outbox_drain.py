"""The bench of the outbox runs, counts every message, and compares rounds with rounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench.outbox_drain import Drained, table

ROOT = Path(__file__).parents[2]


def test_short_outbox_bench_run_without_peers_writes_rates(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    words = ("--without-peers", "--rounds", "2", "--messages", "150", "--json", str(figures))
    done = subprocess.run(
        [sys.executable, "-m", "bench.outbox_drain", *words], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "oncekey asyncpg" in done.stdout
    queues = json.loads(figures.read_text())["queues"]
    assert set(queues) == {"oncekey asyncpg", "oncekey psycopg"}
    assert all(len(found["rate"]["rounds"]) == 2 and found["rate"]["low"] > 0 for found in queues.values())
    if sys.platform == "linux":
        assert all(found["cpu_us"]["low"] > 0 for found in queues.values())


def test_outbox_ratios_compare_queues_within_each_round() -> None:
    ours, theirs = [Drained(100.0, 40.0), Drained(300.0, 50.0)], [Drained(50.0, None), Drained(100.0, None)]
    said = table({"oncekey asyncpg": ours, "pgqueuer": theirs}).splitlines()
    assert said[0].split() == ["queue", "messages/s", "CPU", "us", "x", "pgqueuer"]
    assert "45.0" in said[1]
    assert said[1].split()[-2:] == ["2.50", "(2.00-3.00)"]
