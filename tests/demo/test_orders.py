"""Orders can be read by whoever placed them."""

from __future__ import annotations

import uuid
from datetime import datetime

import pytest

from harness.demo import ALPHA, BETA, TEAPOT, Demo
from oncekey_demo.data import OrderIn, datetime_of, moment, place

WANTED = OrderIn.model_validate(TEAPOT)


def _get(demo: Demo, path: str, token: str = ALPHA):
    with demo.client() as client:
        return client.get(path, headers={"Authorization": f"Bearer {token}"})


def test_location_header_leads_to_the_order(demo: Demo) -> None:
    placed = demo.order(str(uuid.uuid4()))
    read = _get(demo, placed.headers["location"])
    assert read.status_code == 200
    assert read.json() == placed.json()
    assert read.json()["status"] == "placed"
    assert {**TEAPOT, **read.json()} == read.json()
    assert datetime.fromisoformat(read.json()["created_at"]).tzinfo is not None


@pytest.mark.parametrize("stranger", ["/orders/{id}", "/orders/nonsense", f"/orders/{uuid.UUID(int=0)}"])
def test_order_of_another_tenant_returns_404(demo: Demo, stranger: str) -> None:
    placed = demo.order(str(uuid.uuid4())).json()
    answer = _get(demo, stranger.format(**placed), BETA)
    assert (answer.status_code, answer.json()["code"]) == (404, "order_not_found")


def test_the_newest_come_first_and_no_more_than_asked_for(demo: Demo) -> None:
    ids = [demo.order(str(uuid.uuid4())).json()["id"] for _ in range(5)]
    assert [order["id"] for order in demo.orders(limit=5)] == ids[::-1]
    assert [order["id"] for order in demo.orders(limit=2)] == ids[:2:-1]
    assert len(_get(demo, "/orders").json()) >= 5


@pytest.mark.parametrize("limit", ["0", "-1", "10001", "many", "1.5"])
def test_a_limit_is_a_number_within_reason(demo: Demo, limit: str) -> None:
    answer = _get(demo, f"/orders?limit={limit}")
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")


@pytest.mark.parametrize("path", ["/orders", f"/orders/{uuid.UUID(int=1)}"])
def test_reading_orders_without_a_token_returns_401(demo: Demo, path: str) -> None:
    with demo.client() as client:
        assert client.get(path).status_code == 401


def test_openapi_documents_the_key_header(demo: Demo) -> None:
    with demo.client() as client:
        post = client.get("/openapi.json").json()["paths"]["/orders"]["post"]
    key = next(parameter for parameter in post["parameters"] if parameter["name"] == "Idempotency-Key")
    assert key["required"] is True
    assert {"201", "400", "409", "413", "422", "503"} <= set(post["responses"])


def test_ids_are_uuids_that_grow_with_time() -> None:
    ids = [place(WANTED).id for _ in range(2)]
    assert [found.version for found in ids] == [7, 7]
    assert [found.variant for found in ids] == [uuid.RFC_4122] * 2
    early, late = place(WANTED), place(WANTED)
    while late.created_at == early.created_at:
        late = place(WANTED)
    assert str(early.id) < str(late.id)


def test_order_times_round_trip_through_the_database() -> None:
    created_at = place(WANTED).created_at
    assert datetime_of(moment(created_at)) == created_at
