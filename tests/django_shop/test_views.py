"""Function views: one execution for each key, on PostgreSQL and SQLite."""

from __future__ import annotations

from django_shop.asking import new_key, post, replayed, sold, stored


def test_a_first_request_and_its_repetitions(alias: str) -> None:
    key = new_key()
    first = post("/orders", key=key)
    again = post("/orders", key=f'"{key}"')
    other = post("/orders", {"item": "milk"}, key=key)
    stranger = post("/orders", key=key, by="bob")
    assert (first.status_code, first.json(), replayed(first)) == (201, {"item": "tea", "attempt": 1}, False)
    assert (again.status_code, again.content, replayed(again)) == (201, first.content, True)
    assert first.headers["Idempotency-Key"] == key
    assert first.headers["Idempotency-Key-Expires"] == again.headers["Idempotency-Key-Expires"]
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused_with_different_payload")
    assert (stranger.status_code, replayed(stranger)) == (201, False)
    assert sold() == ["tea", "tea"]
    assert stored(alias) == 2
