"""Flask and Flask-SQLAlchemy behind real servers: races, small pools, outages, processes that fork or are killed."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from flask_apps.conftest import with_tables
from flask_apps.shop import Shop
from flask_apps.test_views import items
from harness.dsn import through
from harness.patience import PATIENCE
from harness.proxy import Proxy
from wsgi.shop import Reply, served
from wsgi.shop import send as plainly

TESTS = Path(__file__).parents[1]


def send(port: int, path: str, order: Any, *, key: str | None, **headers: str) -> Reply:
    return plainly(port, path, order, key=key, Authorization="Bearer alpha", **headers)


def new_key() -> str:
    return uuid.uuid4().hex


def rows(url: str, sql: str) -> list[Any]:
    engine = create_engine(url)
    with engine.connect() as connection:
        found = [tuple(row) for row in connection.execute(text(sql))]
    engine.dispose()
    return found


@pytest.fixture
def postgres_url(tables_dsn: str) -> str:
    return with_tables(tables_dsn.replace("postgresql:", "postgresql+psycopg:"))


# In this process, in as many threads as requests come


SMALL = {"pool_size": 2, "max_overflow": 0, "pool_timeout": PATIENCE}


@pytest.mark.parametrize("pool", [{}, SMALL], ids=["pool", "small pool"])
def test_twelve_flask_threads_with_one_key_run_once(
    open_shop: Callable[..., Shop], url: str, pool: dict[str, Any]
) -> None:
    # P1: one runs, and all others are told at once, also where handlers hold all connections that they may
    shop = open_shop(url, engine=pool)
    replies: list[Reply] = []
    key = new_key()

    def ask(port: int) -> None:
        replies.append(send(port, "/orders", {"item": "tea", "does": "wait"}, key=key))

    with served(shop.app) as port:
        threads = [threading.Thread(target=ask, args=(port,)) for _ in range(12)]
        threads[0].start()
        assert shop.entered.acquire(timeout=PATIENCE)
        for thread in threads[1:]:
            thread.start()
        for thread in threads[1:]:
            thread.join()
        # the handler has said db.session.commit(), and nobody else sees its row yet
        assert items(shop) == []
        shop.go_on.set()
        threads[0].join()
        again = send(port, "/orders", {"item": "tea", "does": "wait"}, key=key)
    assert sorted(reply.status for reply in replies) == [201, *[409] * 11]
    assert (again.replayed, items(shop), shop.runs) == (True, ["tea"], ["local"])


@pytest.mark.parametrize("path", ["/orders", "/payments", "/charges", "/parcels"])
def test_many_keys_on_a_small_pool_run_once_each(open_shop: Callable[..., Shop], url: str, path: str) -> None:
    # Every request reads its user before the claim: nobody who holds a connection waits for another one
    shop = open_shop(url, engine=SMALL)
    with served(shop.app) as port, ThreadPoolExecutor(12) as clients:
        keys = [new_key() for _ in range(24)]
        replies = list(clients.map(lambda key: send(port, path, {"item": key}, key=key), keys * 2))
        for key in keys:
            assert send(port, path, {"item": key}, key=key).status in {201, 202}
    firsts = [reply for reply in replies if reply.status in {201, 202} and not reply.replayed]
    assert {reply.status for reply in replies} <= {201, 202, 409}
    assert len(firsts) == 24 or path == "/parcels"  # a deferred answer is told twice as it is
    if path != "/charges":
        assert len(items(shop)) == 24
    else:
        assert len(shop.charges) == 24


def test_a_lost_flask_commit_is_verified(open_shop: Callable[..., Shop], postgres_url: str) -> None:
    # P7, F8
    with Proxy.before(postgres_url.replace("+psycopg", "")) as proxy:
        shop = open_shop(through(postgres_url, proxy.port))
        with served(shop.app) as port:
            assert send(port, "/orders", {"item": "first"}, key=new_key()).status == 201
            key = new_key()
            lost = proxy.lose_reply(b"COMMIT\0", b"COMMIT")
            reply = send(port, "/orders", {"item": "tea"}, key=key)
            assert lost.is_set()
            again = send(port, "/orders", {"item": "tea"}, key=key)
    assert (reply.status, again.status, again.body) == (201, 201, reply.body)
    assert rows(postgres_url, "SELECT item FROM orders ORDER BY id") == [("first",), ("tea",)]


def test_a_flask_store_outage_returns_503(open_shop: Callable[..., Shop], postgres_url: str) -> None:
    # R110: 503, and nothing is executed; when it is back it is used at once
    with Proxy.before(postgres_url.replace("+psycopg", "")) as proxy:
        shop = open_shop(through(postgres_url, proxy.port), engine={"pool_pre_ping": True})

        @shop.app.before_request
        def cuts() -> None:
            if "Cut" in flask_headers():
                proxy.shut()
                proxy.cut()

        with served(shop.app) as port:
            assert send(port, "/orders", {"item": "first"}, key=new_key()).status == 201
            key = new_key()
            down = send(port, "/orders", {"item": "tea"}, key=key, Cut="yes")
            proxy.reopen()
            up = send(port, "/orders", {"item": "tea"}, key=key)
    assert (down.status, down.json()["code"]) == (503, "idempotency_store_unavailable")
    assert (up.status, up.replayed, shop.runs) == (201, False, ["local", "local"])


def flask_headers() -> Any:
    import flask

    return flask.request.headers


# In processes of their own


@contextmanager
def gunicorn(url: str) -> Iterator[int]:
    """Two workers on a socket of ours, forked from a process that has served; its port."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    environment |= {"FLASK_SHOP": url, "FLASK_SHOP_SERVES_FIRST": "yes"}
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        command = [sys.executable, "-m", "gunicorn", "--bind", f"fd://{listening.fileno()}", "--log-level", "error"]
        command += ["--workers", "2", "--worker-class", "gthread", "--threads", "4", "--no-control-socket", "--preload"]
        with subprocess.Popen(
            [*command, "flask_apps.shop:served"], env=environment, pass_fds=[listening.fileno()]
        ) as process:
            try:
                yield listening.getsockname()[1]
                process.send_signal(signal.SIGTERM)
                assert process.wait(PATIENCE) == 0
            finally:
                process.kill()


@contextmanager
def waitress(url: str) -> Iterator[int]:
    """A process that an order may kill; its port."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "flask_apps.shop", url, "mortal"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


def test_forked_gunicorn_workers_open_their_own_pool(url: str) -> None:
    with gunicorn(url) as port, ThreadPoolExecutor(8) as clients:
        keys = [new_key() for _ in range(10)]
        replies = list(clients.map(lambda key: send(port, "/orders", {"item": key}, key=key), keys * 3))
        assert {reply.status for reply in replies} <= {201, 409}
        finals = {key: send(port, "/orders", {"item": key}, key=key) for key in keys}
        assert all(reply.status == 201 and reply.replayed for reply in finals.values())
        assert send(port, "/orders", {"item": "parent"}, key="the-key-of-the-parent").replayed
    firsts = [reply for reply in replies if reply.status == 201 and not reply.replayed]
    assert len(firsts) == 10
    assert len(rows(url, "SELECT item FROM orders WHERE item <> 'parent'")) == 10


def test_a_killed_flask_process_is_resumed_by_a_retry(file_url: str) -> None:
    # R116: kill -9 after the first phase, and another process goes on after it
    key, order = new_key(), {"item": "tea", "does": "die"}
    with waitress(file_url) as port, pytest.raises((http.client.HTTPException, OSError)):
        send(port, "/payments", order, key=key)
    assert rows(file_url, "SELECT item FROM orders") == [("tea",)]
    with waitress(file_url) as port:
        reply = send(port, "/payments", order, key=key)
        while reply.status == 409:  # until the lease of the dead is over
            threading.Event().wait(0.05)
            reply = send(port, "/payments", order, key=key)
        again = send(port, "/payments", order, key=key)
    assert (reply.status, reply.json()["attempt"], again.body) == (201, 2, reply.body)
    assert rows(file_url, "SELECT item FROM orders") == [("tea paid",)]


def test_a_worker_resumes_a_killed_flask_process(postgres_url: str) -> None:
    # H7, R120
    key, order = new_key(), {"item": "tea", "does": "die"}
    with waitress(postgres_url) as port, pytest.raises((http.client.HTTPException, OSError)):
        send(port, "/payments", order, key=key)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    environment["FLASK_SHOP"] = postgres_url
    command = [sys.executable, "-c", "from oncekey.cli import main; main()", "worker", "--app", "flask_apps.shop:once"]
    while rows(postgres_url, "SELECT item FROM orders") != [("tea paid",)]:  # until the lease of the dead is over
        subprocess.run([*command, "--once", "--only", "completer"], env=environment, capture_output=True, check=True)
    with waitress(postgres_url) as port:
        reply = send(port, "/payments", order, key=key)
    assert (reply.status, reply.replayed, reply.json()["attempt"]) == (201, True, 2)
