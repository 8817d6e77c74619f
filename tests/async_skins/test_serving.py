"""Litestar and aiohttp over real sockets: claims, replays, refusals, races, clients that leave, a process that dies."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from async_skins.shop import Shop, served, server_of
from conformance.aiming import broken
from harness.patience import PATIENCE, wait_until
from harness.served import Wire
from oncekey.conformance import Address, Profile, Target, check
from oncekey.core.policy import Policy
from oncekey.once import Once
from oncekey.surveying import survey
from oncekey.workers.completer import Completer
from wsgi.shop import TABLE, Reply, execute, send

TESTS = Path(__file__).parents[1]


def new_key() -> str:
    return str(uuid.uuid4())


def test_a_repeat_gets_the_same_bytes_and_another_request_is_refused(shop: Shop, kind: str) -> None:
    # R5, R9: byte for byte, however the key is written; 422 for another body; a stranger has keys of its own
    with served(shop.application(kind)) as port:
        key, order = new_key(), {"item": "tea"}
        first = send(port, "/local", order, key=key)
        again = send(port, "/local", order, key=f'"{key}"')
        other = send(port, "/local", {"item": "milk"}, key=key)
        stranger = send(port, "/local", order, key=key, Tenant="other")
    assert (first.status, first.json(), first.replayed) == (201, {"item": "tea", "attempt": 1}, False)
    assert (again.status, again.body, again.replayed) == (201, first.body, True)
    assert first.headers["content-type"] == again.headers["content-type"]
    assert first.headers["idempotency-key"] == key
    assert again.headers["idempotency-key"] == f'"{key}"'
    assert first.headers["idempotency-key-expires"] == again.headers["idempotency-key-expires"]
    assert (other.status, other.json()["code"]) == (422, "idempotency_key_reused_with_different_payload")
    assert (stranger.status, stranger.replayed) == (201, False)
    assert (shop.sold, shop.runs) == (["tea", "tea"], ["local", "local"])


def test_what_is_no_key_is_refused(small_shop: Shop, kind: str) -> None:
    with served(small_shop.application(kind)) as port:
        missing = send(port, "/local", {"item": "tea"}, key=None)
        short = send(port, "/local", {"item": "tea"}, key="short")
        with closing(Wire(port)) as wire:
            lines = (f"Idempotency-Key: {new_key()}", f"Idempotency-Key: {new_key()}")
            wire.say("POST /local HTTP/1.1", "Host: shop", "Content-Length: 2", *lines, body=b"{}")
            two = wire.hear()[0]
    assert (missing.status, missing.json()["code"]) == (400, "idempotency_key_missing")
    assert (short.status, two, small_shop.runs) == (400, 400, [])


def test_eight_at_once_on_one_key(shop: Shop, kind: str) -> None:
    # P1: one runs, and all others are told at once
    replies: list[Reply] = []
    key = new_key()

    def ask(port: int) -> None:
        replies.append(send(port, "/local", {"item": "tea", "does": "wait"}, key=key))

    with served(shop.application(kind)) as port:
        threads = [threading.Thread(target=ask, args=(port,)) for _ in range(8)]
        threads[0].start()
        assert shop.entered.acquire(timeout=PATIENCE)
        for thread in threads[1:]:
            thread.start()
        for thread in threads[1:]:
            thread.join()
        shop.go_on.set()
        threads[0].join()
        after = send(port, "/local", {"item": "tea", "does": "wait"}, key=key)
    assert sorted(reply.status for reply in replies) == [201, *[409] * 7]
    assert {reply.json()["code"] for reply in replies if reply.status == 409} == {"idempotency_key_in_progress"}
    assert (after.status, after.replayed) == (201, True)
    assert (shop.sold, shop.runs) == (["tea"], ["local"])


def test_whoever_waits_gets_the_answer(shop: Shop, kind: str) -> None:
    # R82
    replies: list[Reply] = []
    key = new_key()

    def ask(port: int) -> None:
        replies.append(send(port, "/waiting", {"item": "tea", "does": "wait"}, key=key))

    with served(shop.application(kind)) as port:
        threads = [threading.Thread(target=ask, args=(port,)) for _ in range(3)]
        threads[0].start()
        assert shop.entered.acquire(timeout=PATIENCE)
        for thread in threads[1:]:
            thread.start()
        shop.go_on.set()
        for thread in threads:
            thread.join()
    assert [reply.status for reply in replies] == [201, 201, 201]
    assert sorted(reply.replayed for reply in replies) == [False, True, True]
    assert (shop.sold, shop.runs) == (["tea"], ["local"])


def test_what_fails_is_undone_and_runs_again(shop: Shop, kind: str) -> None:
    # L6
    with served(shop.application(kind)) as port:
        key, order = new_key(), {"item": "tea", "does": "stumble"}
        assert send(port, "/local", order, key=key).status == 500
        assert shop.sold == []
        again = send(port, "/local", order, key=key)
        assert (again.status, again.replayed) == (201, False)
        assert send(port, "/local", order, key=key).replayed
    assert shop.sold == ["tea"]


def test_a_final_no_is_kept_with_its_rows(shop: Shop, kind: str) -> None:
    with served(shop.application(kind)) as port:
        key, order = new_key(), {"item": "tea", "status": 409}
        assert send(port, "/local", order, key=key).status == 409
        again = send(port, "/local", order, key=key)
    assert (again.status, again.replayed, shop.sold) == (409, True, ["tea"])


def test_an_outside_call_is_made_once(shop: Shop, kind: str) -> None:
    # F5: what may have been sent is not sent again
    with served(shop.application(kind)) as port:
        key = new_key()
        first = send(port, "/inline", {"item": "a"}, key=key)
        assert (first.status, send(port, "/inline", {"item": "a"}, key=key).body) == (201, first.body)
        key, order = new_key(), {"item": "b", "does": "stumble"}
        assert send(port, "/inline", order, key=key).status == 500
        unknown = send(port, "/inline", order, key=key)
    assert (unknown.status, unknown.json()["code"]) == (409, "idempotency_outcome_unknown")
    assert len(shop.charges) == 2


def test_a_phased_handler_is_gone_on_with(shop: Shop, kind: str) -> None:
    # H1, R116
    with served(shop.application(kind)) as port:
        key, order = new_key(), {"item": "tea", "does": "stumble"}
        assert send(port, "/phased", order, key=key).status == 500
        assert (shop.sold, len(shop.charges)) == (["tea"], 1)
        again = send(port, "/phased", order, key=key)
        replayed = send(port, "/phased", order, key=key)
    assert (again.status, again.json()["attempt"], again.json()["charge"]) == (201, 2, shop.charges[0])
    assert (replayed.body, replayed.replayed) == (again.body, True)
    assert (shop.sold, len(shop.charges), len(shop.runs)) == (["tea", "tea paid"], 1, 2)


def test_a_worker_of_the_same_process_does_the_rest(url: str, kind: str) -> None:
    # OUTBOX: 202 first, and the worker's answer for the same key afterwards; workers stop with the server
    shop = Shop(url, workers=True)
    with served(shop.application(kind)) as port:
        key = new_key()
        first = send(port, "/outbox", {"item": "tea"}, key=key)
        assert (first.status, "location" in first.headers) == (202, True)
        state = first.headers["location"]
        wait_until(lambda: send(port, state, key=None, method="GET").json()["state"] == "completed")
        again = send(port, "/outbox", {"item": "tea"}, key=key)
    assert (again.status, again.json(), again.replayed) == (201, {"mailed": "tea"}, True)
    assert (shop.sold, shop.runs, shop.sent) == (["tea"], ["outbox"], [{"item": "tea"}])


def test_without_a_key_where_that_is_allowed(shop: Shop, kind: str) -> None:
    with served(shop.application(kind)) as port:
        assert [send(port, "/optional", {"item": "tea"}, key=None).status for _ in range(2)] == [201, 201]
        assert send(port, "/optional", {"item": "undone", "does": "stumble"}, key=None).status == 500
        assert send(port, "/optional", {"item": "failed", "status": 500}, key=None).status == 500
    assert shop.sold == ["tea", "tea"]


def test_the_status_of_a_key(shop: Shop, kind: str) -> None:
    # R190, R228: who asks sees his own keys only
    with served(shop.application(kind)) as port:
        key = f"with/a slash//{new_key()}"
        assert send(port, "/local", {"item": "tea"}, key=f'"{key}"').status == 201
        path = "/idempotency-keys/" + key.replace("/", "%2F").replace(" ", "%20")
        mine = send(port, path, key=None, method="GET")
        strange = send(port, path, key=None, method="GET", Tenant="other")
        waiting = threading.Thread(
            target=send, args=(port, "/local", {"item": "milk", "does": "wait"}), kwargs={"key": "k" * 20}
        )
        waiting.start()
        assert shop.entered.acquire(timeout=PATIENCE)
        running = send(port, f"/idempotency-keys/{'k' * 20}", key=None, method="GET")
        shop.go_on.set()
        waiting.join()
    assert (mine.status, mine.json()["state"], mine.json()["key"]) == (200, "completed", key)
    assert (strange.status, running.json()["state"]) == (404, "in_progress")


def test_the_link_of_a_refusal_leads_to_a_page(small_shop: Shop, kind: str) -> None:
    # R11, R230
    with served(small_shop.application(kind)) as port:
        refused = send(port, "/local", {"item": "tea"}, key=None)
        path, _, slug = refused.headers["link"].partition(">")[0].lstrip("<").partition("#")
        page = send(port, path, key=None, method="GET")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert f'<h3 id="{slug}">' in page.body.decode()


def test_a_store_that_is_down(tmp_path: Path, kind: str) -> None:
    # R35: 503 and nothing runs; it is asked again by the next request
    url = f"sqlite:///{tmp_path}/folder/shop.db"
    (tmp_path / "folder").mkdir()
    execute(url, TABLE)
    shop = Shop(url)
    with served(shop.application(kind)) as port:
        assert send(port, "/local", {"item": "tea"}, key=new_key()).status == 201
        (tmp_path / "folder").rename(tmp_path / "elsewhere")
        key = new_key()
        down = [send(port, path, {"item": "milk"}, key=key) for path in ("/phased", "/inline")]
        (tmp_path / "elsewhere").rename(tmp_path / "folder")
    assert {(reply.status, reply.json()["code"]) for reply in down} <= {(503, "idempotency_store_unavailable")}
    assert shop.runs == ["local"]


def test_a_server_of_the_store_that_is_gone(crashable_postgres: Any, kind: str) -> None:
    # R35
    url = crashable_postgres.create_database("shop").replace("postgresql://", "postgresql+psycopg://")
    execute(url, TABLE)
    shop = Shop(url)
    with served(shop.application(kind)) as port:
        key = new_key()
        assert send(port, "/local", {"item": "tea"}, key=key).status == 201
        crashable_postgres.kill()
        down = send(port, "/local", {"item": "milk"}, key=new_key())
        crashable_postgres.start()
        wait_until(lambda: send(port, "/local", {"item": "tea"}, key=key).replayed)
    assert (down.status, down.json()["code"]) == (503, "idempotency_store_unavailable")
    assert (shop.sold, shop.runs) == (["tea"], ["local"])


@pytest.mark.parametrize("path", ["/local", "/inline", "/phased"])
def test_a_client_that_leaves_does_not_end_it(shop: Shop, kind: str, path: str) -> None:
    # P5, R77: the operation goes on, and the next try gets its answer; aiohttp's server would cancel it
    options = {"handler_cancellation": True} if kind == "aiohttp" else {}
    with served(shop.application(kind), **options) as port:
        key, order = new_key(), {"item": "tea", "does": "wait"}
        with closing(Wire(port)) as wire:
            body = b'{"item": "tea", "does": "wait"}'
            lines = (f"Idempotency-Key: {key}", "Content-Type: application/json", f"Content-Length: {len(body)}")
            wire.say(f"POST {path} HTTP/1.1", "Host: shop", *lines, body=body)
            assert shop.entered.acquire(timeout=PATIENCE)
        assert send(port, path, order, key=key).status == 409
        shop.go_on.set()
        replies: list[Reply] = []

        def asked() -> bool:
            replies.append(send(port, path, order, key=key))
            return replies[-1].status == 201

        wait_until(asked)
    assert replies[-1].replayed
    assert len(shop.runs) == 1


def test_a_stop_waits_for_what_runs(shop: Shop, kind: str) -> None:
    # P5: what a server has begun is settled before its process ends
    key, order = new_key(), {"item": "tea", "does": "wait"}
    replies: list[Reply] = []
    with server_of(shop.application(kind)) as server:
        asking = threading.Thread(target=lambda: replies.append(send(server.port, "/local", order, key=key)))
        asking.start()
        assert shop.entered.acquire(timeout=PATIENCE)
        server.stop()
        shop.go_on.set()
    asking.join()
    assert [reply.status for reply in replies] == [201]
    again = Shop(shop.url)
    with served(again.application(kind)) as port:
        assert send(port, "/local", order, key=key).replayed
    assert shop.sold == ["tea"]


# A process of its own


@contextmanager
def process(url: str, kind: str, *, mortal: bool, lease: float = 60.0) -> Iterator[int]:
    """A server, and its port; one that is mortal dies by an order, at the latest when the block ends."""
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent / 'src'}"}
    command = [sys.executable, "-m", "async_skins.shop", url, kind, "mortal" if mortal else "immortal", str(lease)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield int(server.stdout.readline())
            if mortal:
                assert server.wait(PATIENCE) == -signal.SIGKILL
        finally:
            server.kill()


def dies(port: int, path: str, order: Any, key: str) -> None:
    with pytest.raises((http.client.HTTPException, OSError)):
        send(port, path, order, key=key)


def test_killed_in_its_handler_and_sent_again(url: str, kind: str) -> None:
    # P1, L1: kill -9 leaves neither rows nor a key that nobody can use
    key, order = new_key(), {"item": "tea", "does": "die"}
    with process(url, kind, mortal=True) as port:
        dies(port, "/local", order, key)
    assert execute(url, "SELECT item FROM sold") == []
    shop = Shop(url)
    with served(shop.application(kind)) as port:
        first = send(port, "/local", order, key=key)
        again = send(port, "/local", order, key=key)
    assert (first.status, first.replayed, again.body, again.replayed) == (201, False, first.body, True)
    assert shop.sold == ["tea"]


def test_killed_between_two_steps_and_gone_on_with(url: str, kind: str) -> None:
    # R116, R117: what was done is not done again, by whoever goes on when the lease is over
    key, order = new_key(), {"item": "tea", "does": "die"}
    with process(url, kind, mortal=True, lease=1.0) as port:
        dies(port, "/phased", order, key)
    assert execute(url, "SELECT item FROM sold") == [("tea",)]
    shop = Shop(url)
    replies: list[Reply] = []
    with served(shop.application(kind)) as port:

        def went_on() -> bool:
            replies.append(send(port, "/phased", order, key=key))
            return replies[-1].status != 409

        wait_until(went_on)
    assert (replies[-1].status, replies[-1].json()["attempt"]) == (201, 2)
    assert shop.sold == ["tea", "tea paid"]


# Without the client


def due(url: str) -> None:
    """What was handed back may be gone on with now."""
    table = "oncekey_record" if url.startswith("sqlite") else "oncekey.work"
    execute(url, f"UPDATE {table} SET reconcile_after = 1 WHERE reconcile_after IS NOT NULL")


async def complete(once: Once) -> int:
    """One look of a completer, as `oncekey worker` takes it."""
    await once.start()
    try:
        return await Completer(once).run_once()
    finally:
        await once.stop()


def test_a_completer_goes_on_in_the_clients_stead(shop: Shop, kind: str) -> None:
    # H7, R120: in another process, which has the application and no server
    key, order = new_key(), {"item": "t\u00e4a", "does": "stumble"}
    with served(shop.application(kind)) as port:
        assert send(port, "/phased?a=%20b", order, key=key).status == 500
    due(shop.url)
    other = Shop(shop.url, stumbled={"t\u00e4a"})
    other.application(kind)
    assert asyncio.run(complete(other.once)) == 1
    assert (shop.sold, shop.charges, other.charges) == (["t\u00e4a", "t\u00e4a paid"], shop.charges[:1], [])
    with served(Shop(shop.url).application(kind)) as port:
        replayed = send(port, "/phased?a=%20b", order, key=key)
    assert (replayed.status, replayed.replayed, replayed.json()["attempt"]) == (201, True, 2)


def test_workers_of_the_same_process_go_on(url: str, kind: str) -> None:
    # H7
    shop = Shop(url, workers=True, policy=Policy(complete_interval=timedelta(seconds=0.2)))
    with served(shop.application(kind)) as port:
        key, order = new_key(), {"item": "tea", "does": "stumble"}
        assert send(port, "/phased", order, key=key).status == 500
        wait_until(
            lambda: send(port, f"/idempotency-keys/{key}", key=None, method="GET").json()["state"] == "completed"
        )
        reply = send(port, "/phased", order, key=key)
    assert (reply.status, reply.replayed, len(shop.charges)) == (201, True, 1)
    assert shop.sold == ["tea", "tea paid"]


# Seen from outside, and listed


def test_it_keeps_every_promise_of_the_draft(small_shop: Shop, kind: str) -> None:
    # C7: the tester that `oncekey check` is
    with served(small_shop.application(kind)) as port:
        url = f"http://127.0.0.1:{port}"
        report = check(
            Target(
                address=Address.parse(f"{url}/local"),
                body=b'{"item": "tea", "number": 1}',
                headers=(("Content-Type", "application/json"), ("Tenant", "acme")),
                other_tenant=(("Tenant", "other"),),
                other_address=Address.parse(f"{url}/inline"),
                unsafe_methods=True,
            ),
            profile=Profile.IETF,
        )
    assert broken(report, Profile.IETF, Profile.STRICT_MONEY) == set()
    assert report.matches == [Profile.IETF, Profile.STRICT_MONEY]


def test_its_routes_are_listed(small_shop: Shop, kind: str) -> None:
    # R186
    small_shop.application(kind)
    lines = [one.line for one in survey([small_shop.once], small_shop.once.served)]
    found = {line.path: (line.method, line.effects, line.key) for line in lines}
    assert found == {
        "/local": ("POST", "local", "required"),
        "/waiting": ("POST", "local", "required"),
        "/optional": ("POST", "local", "optional"),
        "/inline": ("POST", "inline", "required"),
        "/phased": ("POST", "phased", "required"),
        "/outbox": ("POST", "outbox", "required"),
    }
