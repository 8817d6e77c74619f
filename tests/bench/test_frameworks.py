"""The bench of frameworks runs each of them, and compares within a round."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.frameworks import PLACES, Figure, table

ROOT = Path(__file__).parents[2]


def test_short_frameworks_bench_run_lists_every_framework() -> None:
    words = ("--rounds", "1", "--seconds", "0.05", "--connections", "2")
    done = subprocess.run(
        [sys.executable, "-m", "bench.frameworks", *words], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    for name in PLACES:
        assert name in done.stdout


def test_framework_ratios_compare_figures_within_each_round() -> None:
    base = [Figure(1000.0, 100.0), Figure(100.0, 1000.0)]
    ours = [Figure(500.0, 400.0), Figure(50.0, 2000.0)]
    line = table({"Flask": {"unprotected": base, "new key": ours, "replay": base}}).splitlines()[1]
    assert line.split() == [
        "Flask",
        "550/s",
        "0.50",
        "(0.50-0.50)",
        "0.38",
        "(0.25-0.50)",
        *["1.00", "(1.00-1.00)"] * 2,
    ]
