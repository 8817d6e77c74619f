"""A store that is down, at the start or in flight: a clear answer, nothing executed, nothing lost."""

from __future__ import annotations

import sqlite3
import subprocess
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from harness.demo import ALPHA, COMMAND, Demo, get
from harness.ports import free_port
from harness.postgres import PostgresServer

DRIVERS = ("asyncpg", "psycopg")
MINE = {"Authorization": f"Bearer {ALPHA}"}


def _refused(demo: Demo) -> None:
    """Every route that needs the store says so, and the others go on."""
    with demo.client() as client:
        for path in ("/healthz", "/orders", f"/orders/{uuid.uuid4()}"):
            answer = client.get(path, headers=MINE)
            assert (answer.status_code, answer.json()["code"]) == (503, "store_unavailable")
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.headers["retry-after"] == "1"
        assert client.get("/").status_code == 200


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("place", ["nobody:s3cret@127.0.0.1:{port}/shop", "127.0.0.1:{port}/shop"])
def test_demo_without_a_database_server_prints_one_line(tmp_path: Path, driver: str, place: str) -> None:
    store = f"postgresql+{driver}://{place.format(port=free_port())}"
    command = [*COMMAND, "--port", str(free_port()), "--store", store]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("oncekey-demo: no connection to PostgreSQL")
    assert "s3cret" not in line


@pytest.mark.parametrize("driver", DRIVERS)
def test_database_crash_during_a_request_loses_and_repeats_nothing(tmp_path: Path, driver: str) -> None:
    # R110: nothing ran, so nothing is doubtful
    kept, refused, cut = (str(uuid.uuid4()) for _ in range(3))
    with PostgresServer() as server:
        store = server.create_database("shop").replace("postgresql:", f"postgresql+{driver}:", 1)
        with Demo(tmp_path, store=store) as demo:
            before = demo.order(kept)
            assert before.status_code == 201
            with ThreadPoolExecutor(1) as thread:
                slow = thread.submit(demo.order, cut, headers={"X-Demo-Delay": "1"})
                status = f"{demo.url}/idempotency-keys/{cut}"
                while get(status, headers=MINE).status_code != 200:
                    time.sleep(0.01)
                server.kill()
                assert slow.result().status_code == 503
            answer = demo.order(refused)
            assert (answer.status_code, answer.json()["code"]) == (503, "idempotency_store_unavailable")
            assert int(answer.headers["retry-after"]) >= 1
            _refused(demo)

            server.start()
            assert [order["id"] for order in demo.orders()] == [before.json()["id"]]
            assert demo.order(kept).content == before.content
            assert demo.order(refused).status_code == 201
            again = demo.order(cut)
            while again.status_code != 201:
                # The handler's end is written as soon as the store is back; until then the key is in progress.
                assert again.status_code in {409, 503}
                time.sleep(0.05)
                again = demo.order(cut)
            assert len(demo.orders()) == 3
            assert "Traceback" not in demo.output


def test_locked_sqlite_file_returns_503_and_executes_nothing(tmp_path: Path) -> None:
    key = str(uuid.uuid4())
    with Demo(tmp_path) as demo:
        sqlite = sqlite3
        with closing(sqlite.connect(tmp_path / "oncekey-demo.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            answer = demo.order(key)
            assert (answer.status_code, answer.json()["code"]) == (503, "idempotency_store_unavailable")
            assert demo.orders() == []
            other.execute("ROLLBACK")
        assert demo.order(key).status_code == 201
        assert len(demo.orders()) == 1
