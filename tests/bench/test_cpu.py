"""The bench of processor time runs, and compares each round with its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.cpu import PROTECTED, UNPROTECTED, Spent, table

ROOT = Path(__file__).parents[2]


def test_short_cpu_bench_run_lists_every_route() -> None:
    words = ("--rounds", "1", "--requests", "4", "--together", "2")
    done = subprocess.run(
        [sys.executable, "-m", "bench.cpu", *words], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    for route in (*UNPROTECTED, *PROTECTED):
        assert route in done.stdout


def test_cpu_ratios_compare_routes_within_each_round() -> None:
    said = table({"stock": [Spent(50, 50), Spent(250, 250)], "local": [Spent(100, 100), Spent(500, 500)]}).splitlines()
    assert said[2].split() == [
        "local",
        "300",
        "us",
        "300",
        "us",
        "600",
        "us",
        "0.50",
        "0.50",
        "to",
        "0.50",
        "0.50",
        "1.00",
        "stock",
    ]


def test_a_replay_is_compared_with_the_route_without_a_database() -> None:
    found = {"stock": [Spent(500, 500)], "bare": [Spent(100, 0)], "cold-replay (now)": [Spent(100, 100)]}
    assert table(found).splitlines()[3].split()[8:] == ["0.50", "0.50", "to", "0.50", "0.50", "1.00", "bare"]
