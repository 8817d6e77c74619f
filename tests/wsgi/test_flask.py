"""What Flask has of its own: views in classes, decorators, error handlers, streams, its test client."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from oncekey.frameworks.blocking import current
from wsgi.shop import Shop


def headers(key: str | None = None) -> dict[str, str]:
    return {"Idempotency-Key": key or uuid.uuid4().hex}


def test_a_class_based_flask_view_is_replayed(small_shop: Shop) -> None:
    client, sent = small_shop.flask().test_client(), headers()
    first = client.post("/orders/tea", headers=sent)
    again = client.post("/orders/tea", headers=sent)
    assert (first.status_code, first.data, again.data) == (201, b"one two", b"one two")
    assert again.headers["Idempotent-Replayed"] == "true"
    assert (client.get("/orders/tea", headers=sent).data, small_shop.sold) == (b"looked at tea", ["tea"])


def test_decorators_and_hooks_run_on_every_replay(small_shop: Shop) -> None:
    app = small_shop.flask()
    client, sent = app.test_client(), headers()
    for _ in range(2):
        assert client.post("/local", json={"item": "tea"}, headers=sent).status_code == 201
    assert app.config["SEEN"] == [{"item": "tea"}, "logged in"] * 2
    assert small_shop.sold == ["tea"]
    assert current.get() is None


def test_an_aborted_flask_view_is_stored_without_rows(small_shop: Shop) -> None:
    # L6: a final no that was raised is stored without its rows
    app = small_shop.flask()
    app.register_error_handler(409, lambda error: ({"error": "sold out"}, 409))
    client, sent = app.test_client(), headers()
    first = client.post("/orders/refused", headers=sent)
    again = client.post("/orders/refused", headers=sent)
    assert (first.status_code, first.json) == (409, {"error": "sold out"})
    assert (again.status_code, again.json, again.headers["Idempotent-Replayed"]) == (409, first.json, "true")
    assert small_shop.sold == []


def test_an_error_raised_in_testing_mode_rolls_back(small_shop: Shop) -> None:
    app = small_shop.flask()
    app.testing = True  # then nobody makes a page of it
    client, sent = app.test_client(), headers()
    order = {"item": "tea", "does": "stumble"}
    with pytest.raises(ValueError, match="stumbled"):
        client.post("/local", json=order, headers=sent)
    assert (small_shop.sold, client.post("/local", json=order, headers=sent).status_code) == ([], 201)


def test_large_responses_and_event_streams_are_not_stored(small_shop: Shop) -> None:
    # A4: a large answer is sent once, and then it is said that it was; a stream of events is refused
    client, sent = small_shop.flask().test_client(), headers()
    assert len(client.post("/orders/large", headers=sent).data) == 3_000_000
    tombstone: Any = client.post("/orders/large", headers=sent)
    assert tombstone.json["code"] == "idempotency_response_not_stored"
    events = client.post("/orders/events", headers=headers())
    assert (events.status_code, small_shop.sold) == (500, ["large"])
