"""The bench of processor time runs, and compares each round with its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.cpu import PROTECTED, UNPROTECTED, Spent, table

ROOT = Path(__file__).parents[2]


def test_a_short_run() -> None:
    words = ("--rounds", "1", "--requests", "4", "--together", "2")
    done = subprocess.run(
        [sys.executable, "-m", "bench.cpu", *words], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    for route in (*UNPROTECTED, *PROTECTED):
        assert route in done.stdout


def test_each_round_is_compared_with_its_own() -> None:
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
