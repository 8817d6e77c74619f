"""What Litestar does besides the suite of all skins: errors, no key, the status of a key, stops, workers."""

from __future__ import annotations

import threading
import uuid
from datetime import timedelta

from harness.patience import PATIENCE, wait_until
from harness.served import Served
from litestar_server.shop import Shop
from oncekey.core.policy import Policy
from wsgi.shop import Reply, send


def new_key() -> str:
    return str(uuid.uuid4())


def test_a_failed_local_request_rolls_back_and_can_be_retried(shop: Shop) -> None:
    # L6
    with Served(shop.application()) as server:
        key, order = new_key(), {"item": "tea", "does": "stumble"}
        assert send(server.port, "/local", order, key=key).status == 500
        assert shop.sold == []
        again = send(server.port, "/local", order, key=key)
        assert (again.status, again.replayed) == (201, False)
        assert send(server.port, "/local", order, key=key).replayed
    assert shop.sold == ["tea"]


def test_a_returned_409_is_stored_with_its_rows(shop: Shop) -> None:
    with Served(shop.application()) as server:
        key, order = new_key(), {"item": "tea", "status": 409}
        assert send(server.port, "/local", order, key=key).status == 409
        again = send(server.port, "/local", order, key=key)
    assert (again.status, again.replayed, shop.sold) == (409, True, ["tea"])


def test_a_failed_inline_request_is_not_repeated(shop: Shop) -> None:
    # F5
    with Served(shop.application()) as server:
        key, order = new_key(), {"item": "tea", "does": "stumble"}
        assert send(server.port, "/inline", order, key=key).status == 500
        unknown = send(server.port, "/inline", order, key=key)
    assert (unknown.status, unknown.json()["code"]) == (409, "idempotency_outcome_unknown")
    assert len(shop.charges) == 1


def test_a_retry_resumes_a_phased_litestar_handler(shop: Shop) -> None:
    # H1, R116
    with Served(shop.application()) as server:
        key, order = new_key(), {"item": "tea", "does": "stumble"}
        assert send(server.port, "/phased", order, key=key).status == 500
        assert (shop.sold, len(shop.charges)) == (["tea"], 1)
        again = send(server.port, "/phased", order, key=key)
        replayed = send(server.port, "/phased", order, key=key)
    assert (again.status, again.json()["attempt"], again.json()["charge"]) == (201, 2, shop.charges[0])
    assert (replayed.body, replayed.replayed) == (again.body, True)
    assert (shop.sold, len(shop.charges), len(shop.runs)) == (["tea", "tea paid"], 1, 2)


def test_in_process_workers_deliver_and_resume(url: str) -> None:
    # H7, OUTBOX: they start and stop with the server
    shop = Shop(url, workers=True, policy=Policy(complete_interval=timedelta(seconds=0.2)))
    with Served(shop.application()) as server:
        mailing, paying, order = new_key(), new_key(), {"item": "milk", "does": "stumble"}
        first = send(server.port, "/outbox", {"item": "tea"}, key=mailing)
        assert (first.status, send(server.port, "/phased", order, key=paying).status) == (202, 500)
        for state in (first.headers["location"], f"/idempotency-keys/{paying}"):
            wait_until(
                lambda state=state: send(server.port, state, key=None, method="GET").json()["state"] == "completed"
            )
        mailed, paid = (
            send(server.port, "/outbox", {"item": "tea"}, key=mailing),
            send(server.port, "/phased", order, key=paying),
        )
    assert (mailed.status, mailed.json(), mailed.replayed) == (201, {"mailed": "tea"}, True)
    assert (paid.status, paid.replayed, len(shop.charges)) == (201, True, 1)
    assert (shop.sold, shop.sent) == (["milk", "milk paid", "tea"], [{"item": "tea"}])


def test_optional_key_routes_accept_keyless_requests(shop: Shop) -> None:
    with Served(shop.application()) as server:
        assert [send(server.port, "/optional", {"item": "tea"}, key=None).status for _ in range(2)] == [201, 201]
        assert send(server.port, "/optional", {"item": "undone", "does": "stumble"}, key=None).status == 500
        assert send(server.port, "/optional", {"item": "failed", "status": 500}, key=None).status == 500
    assert shop.sold == ["tea", "tea"]


def test_the_status_resource_reports_completed_and_running_keys(shop: Shop) -> None:
    # R29, R84: who asks sees his own keys only
    with Served(shop.application()) as server:
        key = f"with/a slash//{new_key()}"
        assert send(server.port, "/local", {"item": "tea"}, key=f'"{key}"').status == 201
        path = "/idempotency-keys/" + key.replace("/", "%2F").replace(" ", "%20")
        mine = send(server.port, path, key=None, method="GET")
        strange = send(server.port, path, key=None, method="GET", Tenant="other")
        waiting = threading.Thread(
            target=send, args=(server.port, "/local", {"item": "milk", "does": "wait"}), kwargs={"key": "k" * 20}
        )
        waiting.start()
        assert shop.entered.acquire(timeout=PATIENCE)
        running = send(server.port, f"/idempotency-keys/{'k' * 20}", key=None, method="GET")
        shop.go_on.set()
        waiting.join()
    assert (mine.status, mine.json()["state"], mine.json()["key"]) == (200, "completed", key)
    assert (strange.status, running.json()["state"]) == (404, "in_progress")


def test_the_link_header_of_a_refusal_points_to_the_page(small_shop: Shop) -> None:
    # R11, R230
    with Served(small_shop.application()) as server:
        refused = send(server.port, "/local", {"item": "tea"}, key=None)
        path, _, slug = refused.headers["link"].partition(">")[0].lstrip("<").partition("#")
        page = send(server.port, path, key=None, method="GET")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert f'<h3 id="{slug}">' in page.body.decode()


def test_stopping_litestar_waits_for_running_requests(shop: Shop) -> None:
    # P5: what a server has begun is settled before its process ends
    key, order = new_key(), {"item": "tea", "does": "wait"}
    replies: list[Reply] = []
    with Served(shop.application()) as server:
        asking = threading.Thread(target=lambda: replies.append(send(server.port, "/local", order, key=key)))
        asking.start()
        assert shop.entered.acquire(timeout=PATIENCE)
        server.stop()
        shop.go_on.set()
    asking.join()
    assert [reply.status for reply in replies] == [201]
    again = Shop(shop.url)
    with Served(again.application()) as server:
        assert send(server.port, "/local", order, key=key).replayed
    assert shop.sold == ["tea"]
