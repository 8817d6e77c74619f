"""The programs of the guides to Litestar and aiohttp do what their pages say, and so does the example."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from async_skins.shop import served
from harness.pages import ROOT, Page, load
from harness.patience import PATIENCE, wait_until
from harness.ports import free_port
from wsgi.shop import send


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", ["litestar", "aiohttp"])
def test_the_shop_of_the_page(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(sqlite3.connect("shop.db")) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, product TEXT)")
    module: Any = load(Page(ROOT / f"docs/howto/{page}.md").program("shop.py"), "shop.py", folder, monkeypatch)
    with served(module.app) as port:
        for path, number in (("/orders", 1), ("/payments", 2)):
            key = f"a-key-of-the-page{path}"
            first, again = [send(port, path, {"product": "tea"}, key=key) for _ in range(2)]
            assert (first.status, again.status, again.body, again.replayed) == (201, 201, first.body, True)
            assert number in first.json().values()
            assert send(port, path, {"product": "tea"}, key=None).status == 400


def test_the_orders_of_the_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = load(Page(ROOT / "docs/howto/litestar.md").program("orders.py"), "orders.py", folder, monkeypatch)
    module.app.on_shutdown.append(module.alchemy.get_engine().dispose)  # the plugin does so once in a process
    with served(module.app) as port:
        first, again = [send(port, "/orders", {"product": "tea"}, key="a-key-of-the-page") for _ in range(2)]
    assert (first.status, first.json(), again.body, again.replayed) == (201, {"id": 1}, first.body, True)
    with closing(sqlite3.connect("orders.db")) as connection:
        assert connection.execute("SELECT product FROM orders").fetchall() == [("tea",)]


def test_the_example_is_started_by_the_command_that_it_names() -> None:
    program = ROOT / "examples/litestar_shop.py"
    command = "python examples/litestar_shop.py"
    assert command in program.read_text()
    assert command in (ROOT / "examples/README.md").read_text()
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "SHOP_PORT": str(port)}
    with subprocess.Popen([sys.executable, str(program)], env=environment, stderr=subprocess.DEVNULL) as shop:
        try:
            wait_until(lambda: _answers(port) or shop.poll() is not None)
            order = {"product": "tea", "cents": 450}
            assert send(port, "/orders", order, key="my-first-order-0001").json() == {"id": 1}
            assert send(port, "/orders", order, key="my-first-order-0001").replayed
            first, again = [send(port, "/payments", {"order": 1}, key="my-first-payment-01") for _ in range(2)]
            assert (first.status, first.json()["charge"][-4:], again.body, again.replayed) == (
                201,
                "_450",
                first.body,
                True,
            )
            missing = send(port, "/payments", {"order": 2}, key="my-first-payment-02")
            assert missing.status == 404
            status = send(port, "/idempotency-keys/my-first-payment-01", key=None, method="GET").json()
            assert status["state"] == "completed"
            assert send(port, "/schema/openapi.json", key=None, method="GET").status == 200
        finally:
            shop.terminate()
            assert shop.wait(PATIENCE) is not None


def _answers(port: int) -> bool:
    try:
        return send(port, "/schema", key=None, method="GET").status > 0
    except OSError:
        return False
