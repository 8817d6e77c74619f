"""The program of the guide to WSGI and Flask does what its page says."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from harness.pages import ROOT, Page, load

KEY = {"Idempotency-Key": "4c1d9a3e-6d0b-4f53-8f0e-5f1f3f7f9999"}


def test_the_shop_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(sqlite3.connect("shop.db")) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, product TEXT)")
    module: Any = load(Page(ROOT / "docs/howto/wsgi.md").program("shop.py"), "shop.py", tmp_path, monkeypatch)
    client = module.app.test_client()
    for path, number in (("/orders", 1), ("/payments", 2)):
        sent = {"json": {"product": "tea"}, "headers": {"Idempotency-Key": f"a-key-of-the-page{path}"}}
        first, again = client.post(path, **sent), client.post(path, **sent)
        assert (first.status_code, again.status_code, again.data) == (201, 201, first.data)
        assert number in first.json.values()
        assert again.headers["Idempotent-Replayed"] == "true"
        assert client.post(path, json={"product": "tea"}).status_code == 400
    module.once.blocking().close()
