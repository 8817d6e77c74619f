"""The bench of partitions runs, reaps everything in both layouts, and says what it found."""

from __future__ import annotations

from typing import Any

import pytest

from bench import partitions


@pytest.mark.parametrize("rows", ["1", "3000"])  # one row is gone before a request beside it has ended
def test_short_partitions_bench_run_reports_both_layouts(
    rows: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], postgres_server: Any
) -> None:
    monkeypatch.setenv("ONCEKEY_TEST_POSTGRES_DSN", postgres_server.dsn())
    monkeypatch.setattr(partitions, "ROUNDS", 1)
    monkeypatch.setattr(partitions, "OPS", 5)
    monkeypatch.setattr(partitions, "ALONE", 5)
    assert partitions.main(["--rows", rows]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["answers", "whole:", "split:"] * 2
    assert all("left_mb" in line for line in lines if line.startswith("  "))
