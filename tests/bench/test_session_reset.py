"""The bench of session resets runs, and compares with doing nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.session_reset import WAYS, Figures, table

ROOT = Path(__file__).parents[2]


def test_short_session_reset_bench_run_lists_every_method() -> None:
    words = ("--driver", "asyncpg", "--rounds", "1", "--writes", "8")
    done = subprocess.run(
        [sys.executable, "-m", "bench.session_reset", *words], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for way in WAYS:
        assert way in done.stdout


def test_waits_are_compared_round_by_round() -> None:
    found = {"none": [Figures(100, 10, 20), Figures(400, 10, 20)], "sent": [Figures(200, 15, 20), Figures(800, 15, 40)]}
    said = table("asyncpg", found).splitlines()
    assert "x 2.00" in said[1]
    assert "client    15 us (x 1.50)" in said[1]
    assert "server    30 us (x 1.50)" in said[1]
