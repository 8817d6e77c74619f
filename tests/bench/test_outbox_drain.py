"""The bench of the outbox runs, counts every message, and compares rounds with rounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench.outbox_drain import table

ROOT = Path(__file__).parents[2]


def test_a_short_run_without_peers(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    words = ("--without-peers", "--rounds", "2", "--messages", "150", "--json", str(figures))
    done = subprocess.run(
        [sys.executable, "-m", "bench.outbox_drain", *words], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "oncekey asyncpg" in done.stdout
    queues = json.loads(figures.read_text())["queues"]
    assert set(queues) == {"oncekey asyncpg", "oncekey psycopg"}
    assert all(len(found["rounds"]) == 2 and found["low"] > 0 for found in queues.values())


def test_ratios_are_of_the_same_round() -> None:
    said = table({"oncekey asyncpg": [100.0, 300.0], "pgqueuer": [50.0, 100.0]}).splitlines()
    assert said[0].split() == ["queue", "messages/s", "x", "pgqueuer"]
    assert said[1].split()[-2:] == ["2.50", "(2.00-3.00)"]
