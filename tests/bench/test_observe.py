"""The bench of observers runs, and compares with nobody."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.observe import WAYS, table

ROOT = Path(__file__).parents[2]


def test_short_observe_bench_run_lists_every_observer() -> None:
    words = ("--rounds", "1", "--requests", "2")
    done = subprocess.run(
        [sys.executable, "-m", "bench.observe", *words], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for way in WAYS:
        assert way in done.stdout


def test_observer_costs_are_compared_within_each_round() -> None:
    said = table({"nobody": [(100, 10), (400, 10)], "logs": [(110, 12), (410, 12)]}).splitlines()
    assert said[2].split() == ["logs", "260", "us", "+10", "us", "1.06", "12", "us", "+2", "us", "1.20"]
