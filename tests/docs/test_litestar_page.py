"""The programs of the guide to Litestar do what the page says."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from harness.pages import ROOT, Page, load
from harness.served import Served
from wsgi.shop import send


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_litestar_guide_shop_works_as_described(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(sqlite3.connect("shop.db")) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, product TEXT)")
    module: Any = load(Page(ROOT / "docs/howto/litestar.md").program("shop.py"), "shop.py", folder, monkeypatch)
    with Served(module.app) as server:
        for path, number in (("/orders", 1), ("/payments", 2)):
            key = f"a-key-of-the-page{path}"
            first, again = [send(server.port, path, {"product": "tea"}, key=key) for _ in range(2)]
            assert (first.status, again.status, again.body, again.replayed) == (201, 201, first.body, True)
            assert number in first.json().values()
            assert send(server.port, path, {"product": "tea"}, key=None).status == 400


def test_litestar_guide_orders_program_works_as_described(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = load(Page(ROOT / "docs/howto/litestar.md").program("orders.py"), "orders.py", folder, monkeypatch)
    module.app.on_shutdown.append(module.alchemy.get_engine().dispose)  # the plugin does so once in a process
    with Served(module.app) as server:
        first, again = [send(server.port, "/orders", {"product": "tea"}, key="a-key-of-the-page") for _ in range(2)]
    assert (first.status, first.json(), again.body, again.replayed) == (201, {"id": 1}, first.body, True)
    with closing(sqlite3.connect("orders.db")) as connection:
        assert connection.execute("SELECT product FROM orders").fetchall() == [("tea",)]
