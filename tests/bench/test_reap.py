"""The bench of the reaper runs, and reaps everything beside a load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench.figures import BenchError
from bench.reap import told, waits

ROOT = Path(__file__).parents[2]


def test_short_reap_bench_run_reports_load_latency_and_wal_size(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    words = ("--rows", "30000", "--turn", "0.3", "--json", str(figures))
    done = subprocess.run(
        [sys.executable, "-m", "bench.reap", *words], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert found["moved"] == 30000
    assert found["load_alone_ms"]["count"] > 0
    assert found["load_beside_ms"]["count"] > 0
    batch, _, each, without = (cost["wal_bytes_per_row"] for cost in found["costs"].values())
    assert each > 1.2 * batch > without > 0
    assert done.stdout.strip() == told(found)


def test_percentiles_are_in_milliseconds() -> None:
    assert waits([0.001] * 98 + [0.002, 0.005]) == {"count": 100, "p50": 1.0, "p99": 5.0, "worst": 5.0}
    with pytest.raises(BenchError):
        waits([])
