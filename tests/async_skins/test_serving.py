"""What Litestar and aiohttp do besides the suite of all skins: errors, no key, the status of a key, stops, workers."""

from __future__ import annotations

import threading
import uuid
from contextlib import closing
from datetime import timedelta

import pytest

from async_skins.shop import Shop, served, server_of
from harness.patience import PATIENCE, wait_until
from harness.served import Wire
from oncekey.core.policy import Policy
from wsgi.shop import Reply, send


def new_key() -> str:
    return str(uuid.uuid4())


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


def test_what_may_have_been_sent_is_not_sent_again(shop: Shop, kind: str) -> None:
    # F5
    with served(shop.application(kind)) as port:
        key, order = new_key(), {"item": "tea", "does": "stumble"}
        assert send(port, "/inline", order, key=key).status == 500
        unknown = send(port, "/inline", order, key=key)
    assert (unknown.status, unknown.json()["code"]) == (409, "idempotency_outcome_unknown")
    assert len(shop.charges) == 1


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


def test_workers_of_the_same_process_deliver_and_go_on(url: str, kind: str) -> None:
    # H7, OUTBOX: they start and stop with the server
    shop = Shop(url, workers=True, policy=Policy(complete_interval=timedelta(seconds=0.2)))
    with served(shop.application(kind)) as port:
        mailing, paying, order = new_key(), new_key(), {"item": "milk", "does": "stumble"}
        first = send(port, "/outbox", {"item": "tea"}, key=mailing)
        assert (first.status, send(port, "/phased", order, key=paying).status) == (202, 500)
        for state in (first.headers["location"], f"/idempotency-keys/{paying}"):
            wait_until(lambda state=state: send(port, state, key=None, method="GET").json()["state"] == "completed")
        mailed, paid = send(port, "/outbox", {"item": "tea"}, key=mailing), send(port, "/phased", order, key=paying)
    assert (mailed.status, mailed.json(), mailed.replayed) == (201, {"mailed": "tea"}, True)
    assert (paid.status, paid.replayed, len(shop.charges)) == (201, True, 1)
    assert (shop.sold, shop.sent) == (["milk", "milk paid", "tea"], [{"item": "tea"}])


def test_without_a_key_where_that_is_allowed(shop: Shop, kind: str) -> None:
    with served(shop.application(kind)) as port:
        assert [send(port, "/optional", {"item": "tea"}, key=None).status for _ in range(2)] == [201, 201]
        assert send(port, "/optional", {"item": "undone", "does": "stumble"}, key=None).status == 500
        assert send(port, "/optional", {"item": "failed", "status": 500}, key=None).status == 500
    assert shop.sold == ["tea", "tea"]


def test_the_status_of_a_key(shop: Shop, kind: str) -> None:
    # R29, R84: who asks sees his own keys only
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


@pytest.mark.parametrize("path", ["/local", "/inline", "/phased"])
def test_a_server_that_cancels_for_a_client_that_leaves_does_not_end_it(shop: Shop, path: str) -> None:
    # P5, R77: aiohttp's does, if it is told to; the operation goes on, and the next try gets its answer
    with served(shop.aiohttp(), handler_cancellation=True) as port:
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
