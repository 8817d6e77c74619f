"""Real servers over real sockets: forks, loads, disconnects, and the tester of APIs under ASGI.

What is the same under every framework, kills among it, is proved by `tests/skins`.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest

from conformance.aiming import JSON, broken
from harness.databases import DatabaseServer
from harness.patience import PATIENCE, wait_until
from oncekey_check import Address, CheckProfile, Target, check

TESTS = Path(__file__).parents[1]


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def replayed(self) -> bool:
        return self.headers.get("idempotent-replayed") == "true"

    def json(self) -> Any:
        return json.loads(self.body)


def new_key() -> str:
    return os.urandom(16).hex()


def send(port: int, path: str, body: Any = None, *, key: str | None, by: str = "ann", **headers: str) -> Reply:
    sent = {"Content-Type": "application/json", "Authorization": f"Bearer {by}", **headers}
    if key is not None:
        sent["Idempotency-Key"] = key
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
        connection.request("POST", path, json.dumps(body or {"item": "tea"}), sent)
        response = connection.getresponse()
        names = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, names, response.read())


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def database(
    request: pytest.FixtureRequest, postgres_server: DatabaseServer, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """A database with the tables."""
    if request.param == "sqlite":
        place = str(tmp_path_factory.mktemp("served") / "shop.db")
    else:
        place = postgres_server.create_database(f"django_{uuid.uuid4().hex}")
    command = [sys.executable, "-m", "django", "migrate", "--run-syncdb", "--verbosity", "0"]
    subprocess.run(command, env=environment(place), check=True, timeout=PATIENCE)
    return place


def environment(database: str, **more: str) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SHOP_")}
    path = os.pathsep.join([str(TESTS), environ.get("PYTHONPATH", "")])
    return (
        environ
        | {
            "PYTHONPATH": path,
            "SHOP_DATABASE": database,
            "DJANGO_SETTINGS_MODULE": "django_shop.settings",
        }
        | more
    )


@contextmanager
def served(database: str, *command: str, **more: str) -> Iterator[int]:
    """A server on a socket of ours; its port."""
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listening:
        said = [one.format(fd=listening.fileno()) for one in command]
        with subprocess.Popen(
            [sys.executable, "-m", *said], env=environment(database, **more), pass_fds=[listening.fileno()]
        ) as process:
            try:
                yield listening.getsockname()[1]
                process.send_signal(signal.SIGTERM)
                assert process.wait(PATIENCE) in {0, -signal.SIGTERM}
            finally:
                process.kill()


GUNICORN = (
    *("gunicorn", "--bind", "fd://{fd}", "--log-level", "critical", "--no-control-socket"),
    *("--workers", "2", "--preload"),
)
UVICORN = ("uvicorn", "--fd", "{fd}", "--log-level", "critical", "django_shop.serving:asgi")


def gunicorn(database: str, *options: str, **more: str) -> Any:
    return served(database, *GUNICORN, *options, "django_shop.serving:application", **more)


@pytest.mark.parametrize("path", ["/orders", "/rest/bookings"])
def test_forty_keys_sent_three_times_run_once_each(database: str, path: str) -> None:
    keys = [new_key() for _ in range(40)]

    def ask(key: str) -> tuple[str, Reply]:
        return key, send(port, path, {"item": key, "does": "slow"} if path == "/orders" else {"item": key}, key=key)

    more = {} if database.endswith(".db") else {"SHOP_ATOMIC": "1"}
    with gunicorn(database, "--threads", "4", **more) as port:
        with ThreadPoolExecutor(16) as clients:
            replies = list(clients.map(ask, [*keys, *keys, *keys]))
        again = [
            send(port, path, {"item": key, "does": "slow"} if path == "/orders" else {"item": key}, key=key)
            for key in keys[:3]
        ]
    first = Counter(key for key, reply in replies if reply.status == 201 and not reply.replayed)
    assert first == Counter(keys)
    assert {reply.status for _, reply in replies} <= {201, 409}
    assert all(one.replayed for one in again)
    assert rows(database, keys) == 40


@pytest.mark.parametrize("server", [gunicorn, lambda database, **more: served(database, *UVICORN, **more)])
def test_a_request_to_another_view_starts_the_workers(database: str, server: Any) -> None:
    # the process that accepted the order has ended, and no client comes back
    with server(database) as port:
        assert send(port, "/shipments", key=new_key()).status == 202
    assert parcels(database) == 1
    with server(database, SHOP_WORKERS="1") as port:
        assert send(port, "/nothing-here", key=None).status == 404
        wait_until(lambda: parcels(database) == 0, every=0.05)


def parcels(database: str) -> int:
    if database.endswith(".db"):
        with closing(sqlite3.connect(database)) as connection:
            return int(connection.execute("SELECT count(*) FROM oncekey_outbox").fetchone()[0])
    with psycopg.connect(database) as connection:
        found = connection.execute("SELECT count(*) FROM oncekey.outbox").fetchone()
        assert found is not None
        return int(found[0])


def rows(database: str, keys: list[str]) -> int:
    marks = ", ".join(f"'{key}'" for key in keys)
    if database.endswith(".db"):
        with closing(sqlite3.connect(database)) as connection:
            return int(
                connection.execute(f"SELECT count(*) FROM django_shop_order WHERE item IN ({marks})").fetchone()[0]
            )
    with psycopg.connect(database) as connection:
        found = connection.execute(
            f"SELECT count(*) FROM django_shop_order WHERE item IN ({marks})".encode()
        ).fetchone()
        assert found is not None
        return int(found[0])


def test_workers_share_no_connection_with_their_parent(database: str) -> None:
    # Pitfall 14: the parent has asked its database before it forked, in the thread that serves in a sync worker.
    seen: dict[int, set[int | None]] = {}
    with gunicorn(database, SHOP_QUERIES_FIRST="1") as port:
        while len(seen) < 2:
            reply = send(port, "/where", {"item": "where"}, key=new_key())
            assert reply.status == 201
            seen.setdefault(reply.json()["pid"], set()).add(reply.json()["backend"])
        with ThreadPoolExecutor(16) as clients:
            keys = [new_key() for _ in range(60)]
            replies = list(clients.map(lambda key: send(port, "/orders", {"item": key}, key=key), keys))
    assert [reply.json()["item"] for reply in replies] == keys
    if not database.endswith(".db"):
        one, other = seen.values()
        assert not one & other


@pytest.mark.parametrize("path", ["/aorders", "/rest/bookings"])
def test_many_concurrent_keys_under_asgi_run_once_each(database: str, path: str) -> None:
    # Pitfall 11
    keys = [new_key() for _ in range(20)]
    with served(database, *UVICORN) as port, ThreadPoolExecutor(8) as clients:
        replies = list(clients.map(lambda key: send(port, path, {"item": key}, key=key), [*keys, *keys]))
    assert {reply.status for reply in replies} <= {201, 409}
    assert sum(reply.status == 201 and not reply.replayed for reply in replies) == 20
    assert rows(database, keys) == 20


JSON_BODY = ("application/json", b'{"item": "%s"}')
FORM_BODY = ("application/x-www-form-urlencoded", b"item=%s")
MULTIPART_BODY = (
    "multipart/form-data; boundary=b",
    b'--b\r\nContent-Disposition: form-data; name="item"\r\n\r\n%s\r\n--b--\r\n',
)


def send_chunks(port: int, path: str, kind: str, body: bytes, *, key: str) -> Reply:
    headers = {"Idempotency-Key": key, "Authorization": "Bearer ann", "Content-Type": kind}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
        connection.request("POST", path, iter([body[:9], body[9:]]), headers, encode_chunked=True)
        response = connection.getresponse()
        names = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, names, response.read())


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("reads", ["", "body", "POST", "FILES"])
def test_chunked_bodies_are_refused_under_wsgi_whatever_middleware_has_read(database: str, reads: str) -> None:
    # Django reads them as empty: two different requests with one key would count as the same
    with gunicorn(database, **({"SHOP_READS": reads} if reads else {})) as port:
        for path in ("/rest/bookings", "/orders"):
            for kind, body in (JSON_BODY, FORM_BODY, MULTIPART_BODY):
                key = new_key()
                refused = [send_chunks(port, path, kind, body % item.encode(), key=key) for item in (key, "milk")]
                assert [(reply.status, reply.json()["code"]) for reply in refused] == [
                    (411, "idempotency_body_length_missing")
                ] * 2
                assert send(port, path, {"item": key}, key=key).status == 201, "the key is unused"


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("reads", ["", "body", "POST"])
def test_chunked_bodies_are_fingerprinted_under_asgi(database: str, reads: str) -> None:
    with served(database, *UVICORN, **({"SHOP_READS": reads} if reads else {})) as port:
        for path, bodies in (
            ("/rest/bookings", (JSON_BODY, FORM_BODY, MULTIPART_BODY)),
            ("/orders", (JSON_BODY,)),
            ("/aorders", (JSON_BODY,)),
        ):
            for kind, body in bodies:
                if (kind, reads) == (MULTIPART_BODY[0], "POST"):
                    continue  # such a form cannot be read again
                key = new_key()
                first, again, other = (
                    send_chunks(port, path, kind, body % item.encode(), key=key) for item in (key, key, "milk")
                )
                assert (first.status, first.json()["item"], first.replayed) == (201, key, False)
                assert (again.status, again.body, again.replayed) == (201, first.body, True)
                assert other.status == 422


def test_a_client_that_disconnected_can_retry_for_its_response(database: str, tmp_path: Path) -> None:
    # Pitfall 10, over a real socket
    key, mark = new_key(), tmp_path / "entered"
    body = {"item": key, "does": "marked", "mark": str(mark)}
    with served(database, *UVICORN) as port:
        with closing(socket.create_connection(("127.0.0.1", port), PATIENCE)) as leaving:
            text = json.dumps(body).encode()
            head = f"POST /aorders HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ann\r\nIdempotency-Key: {key}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
            leaving.sendall(head.encode() + text)
            wait_until(mark.exists, "the view was not entered")
        assert send(port, "/spied", {}, key=None).status == 200  # by now the server has seen who left
        mark.unlink()
        reply = send(port, "/aorders", body, key=key)
        while reply.status == 409:
            threading.Event().wait(0.05)
            reply = send(port, "/aorders", body, key=key)
    assert (reply.status, reply.replayed, rows(database, [key])) == (201, True, 1)


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
def test_the_conformance_tester_reports_no_failures_under_asgi(database: str) -> None:
    with served(database, *UVICORN) as port:
        url = f"http://127.0.0.1:{port}/rest/conforming"
        report = check(
            Target(
                address=Address.parse(url),
                body=b'{"item": "teapot"}',
                headers=(JSON, ("Authorization", "Bearer alpha")),
                other_tenant=(("Authorization", "Bearer beta"),),
                slow=("X-Slow", "0.6"),
                fail=("X-Fail", "1"),
                count_address=Address.parse(url),
                count_pointer="/total",
                unothers=True,
            ),
            profile=CheckProfile.IETF,
        )
    assert broken(report, CheckProfile.IETF, CheckProfile.STRICT_MONEY) == set()
