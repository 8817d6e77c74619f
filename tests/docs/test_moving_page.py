"""The function of the page on moving from other packages: a second call with the same key does not run it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

import oncekey
from harness.pages import ROOT, Page, load

PAGE = Page(ROOT / "docs" / "howto" / "moving.md")


def test_a_function_moved_from_powertools_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with sqlite3.connect("billing.db") as file:
        file.execute("CREATE TABLE bills (id INTEGER PRIMARY KEY, amount INTEGER)")
    bill = load(PAGE.program("billing.py"), "billing.py", tmp_path, monkeypatch).bill
    assert [bill({"id": "order-1", "amount": 5}) for _ in range(2)] == [{"bill": 1}] * 2
    with pytest.raises(oncekey.KeyReusedError):
        bill({"id": "order-1", "amount": 6})
    with sqlite3.connect("billing.db") as file:
        assert file.execute("SELECT amount FROM bills").fetchall() == [(5,)]
