"""gunicorn: workers that are forked, before and after the application was imported and had served."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from harness.patience import PATIENCE
from wsgi.shop import TABLE, Reply, execute, send
from wsgi.test_serving import TESTS, new_key

WORKERS = 2


@dataclass(frozen=True)
class Gunicorn:
    process: subprocess.Popen[str]
    port: int
    parents: dict[str, Any] | None
    """What the parent answered to its own request, if it served one before it forked."""


@contextmanager
def gunicorn(url: str, kind: str, *, preload: bool) -> Iterator[Gunicorn]:
    """Two workers on a socket of ours."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "SHOP": url, "SHOP_KIND": kind}
    if preload:
        environment["SHOP_SERVES_FIRST"] = "yes"
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        command = [sys.executable, "-m", "gunicorn", "--bind", f"fd://{listening.fileno()}", "--log-level", "error"]
        command += ["--workers", str(WORKERS), "--worker-class", "gthread", "--threads", "4", "--no-control-socket"]
        command += ["--preload"] * preload
        port = listening.getsockname()[1]
        with subprocess.Popen(
            [*command, "wsgi.prefork:app"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[listening.fileno()],
        ) as process:
            try:
                assert process.stdout is not None
                parents = json.loads(process.stdout.readline()) if preload else None
                yield Gunicorn(process, port, parents)
                process.send_signal(signal.SIGTERM)
                assert process.wait(PATIENCE) == 0
            finally:
                process.kill()


@pytest.mark.parametrize("preload", [False, True], ids=["import in each", "preload"])
def test_forked_workers_share_no_connections(url: str, kind: str, *, preload: bool) -> None:
    # Connections are made after the fork: neither the parent's nor a sibling's is ever used
    with gunicorn(url, kind, preload=preload) as served:
        seen: dict[int, set[int | None]] = {}
        while len(seen) < WORKERS:
            reply = send(served.port, "/where", {"item": "tea"}, key=new_key())
            assert reply.status == 201
            seen.setdefault(reply.json()["pid"], set()).add(reply.json()["backend"])
        key = new_key()

        def ask(_: int) -> Reply:
            return send(served.port, "/where", {"item": "once"}, key=key)

        with ThreadPoolExecutor(16) as clients:
            replies = list(clients.map(ask, range(48)))
        first = [reply for reply in replies if reply.status == 201 and not reply.replayed]
        assert len(first) == 1
        assert {reply.status for reply in replies} <= {201, 409}
        assert {reply.body for reply in replies if reply.replayed} <= {first[0].body}
        if served.parents is not None:
            seen[served.parents["pid"]] = {served.parents["backend"]}
            again = send(served.port, "/where", {"item": "first"}, key="the-key-of-the-parent")
            assert (again.replayed, again.json()) == (True, served.parents)
    assert [item for (item,) in execute(url, "SELECT item FROM sold") if item == "once"] == ["once"]
    if not url.startswith("sqlite"):
        backends = [backend for found in seen.values() for backend in found]
        assert len(backends) == len(set(backends))


def test_forking_while_the_parent_holds_a_connection_works(tables_dsn: str) -> None:
    # The only place in the pool is taken for ever, as far as a child could know that believed in its parent's pool
    url = tables_dsn.replace("postgresql://", "postgresql+psycopg://")
    execute(url, TABLE)
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "SHOP_KIND": "plain"}
    environment["SHOP"] = f"{url}{'&' if '?' in url else '?'}pool_size=1"
    command = [sys.executable, "-m", "wsgi.prefork"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True)
    childs, parents = said.stdout.splitlines()
    child, _, rest = parents.partition(" ")
    assert f'"pid": {child}' in childs
    assert (childs.endswith(f":{child}"), rest.endswith(f":{child}")) == (True, False)  # who owns their claims
    assert '"item": "parent"' in rest
    assert sorted(execute(url, "SELECT item FROM sold")) == [("child",), ("parent",)]
