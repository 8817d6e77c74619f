"""Every fault of the provider, on every route that calls it: how often it was charged, and what the client hears."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from harness.demo import ALPHA, BETA, MONEY, Demo
from harness.patience import PATIENCE, wait_until
from harness.provider import Provider

_until = partial(wait_until, every=0.05)
IN_DOUBT = (409, "idempotency_outcome_unknown")
UNCERTAIN = ("error-before", "error-after", "drop-before", "drop-after", "hang-after")
LATER = {"idempotency_key_in_progress", "idempotency_execution_failed", "provider_unavailable"}
CALLING = ("/payments", "/transfers", "/notifications")
# Nobody settles what is unknown while these tests look at it.
QUICK = ("--lease", "2", "--call-timeout", "1.5", "--interval", "3600")


def _key() -> str:
    return str(uuid.uuid4())


def _code(answer: httpx.Response) -> tuple[int, str | None]:
    return answer.status_code, answer.json().get("code")


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Provider]:
    with Provider(tmp_path_factory.mktemp("provider")) as running:
        yield running


@pytest.fixture(scope="module")
def demo(provider: Provider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    with Demo(tmp_path_factory.mktemp("demo"), "--provider", provider.url, *QUICK) as running:
        yield running


@pytest.fixture
def customer() -> dict[str, object]:
    """A body of the test's own, so that its charges are found in the ledger."""
    return {**MONEY, "customer_id": f"cus_{uuid.uuid4().hex}"}


def _charges(provider: Provider, body: dict[str, object]) -> list[str]:
    return [charge["id"] for charge in provider.charges() if charge["customer_id"] == body["customer_id"]]


def _end(demo: Demo, route: str, key: str, body: dict[str, object]) -> httpx.Response:
    """Retry as a patient client does, until the answer is not `later`."""
    deadline = time.monotonic() + PATIENCE
    while True:
        answer = demo.post(route, key, body)
        if answer.status_code != 202 and _code(answer)[1] not in LATER:
            return answer
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.05)


@pytest.mark.parametrize("route", CALLING)
def test_without_a_fault_it_is_charged_once(
    demo: Demo, provider: Provider, customer: dict[str, object], route: str
) -> None:
    key = _key()
    first = demo.post(route, key, customer)
    last = _end(demo, route, key, customer)
    assert first.status_code == (202 if route == "/transfers" else 201)
    assert (last.status_code, last.headers["idempotent-replayed"]) == (201, "true")
    assert [last.json()["charge_id"]] == _charges(provider, customer)
    if route != "/transfers":
        assert first.content == last.content


def test_a_transfer_is_accepted_and_its_status_is_followed_to_the_end(
    demo: Demo, provider: Provider, customer: dict[str, object]
) -> None:
    # R83, R124
    key = _key()
    accepted = demo.post("/transfers", key, customer)
    assert accepted.status_code == 202
    assert int(accepted.headers["retry-after"]) >= 1
    place = accepted.headers["location"]
    assert place == f"/idempotency-keys/{key}"
    _until(lambda: demo.read(place).json()["state"] == "completed")
    assert demo.read(place).json()["response"]["status"] == 201
    assert len(_charges(provider, customer)) == 1


@pytest.mark.parametrize("fault", UNCERTAIN)
@pytest.mark.parametrize("route", CALLING)
def test_a_call_that_may_not_be_repeated_is_never_made_twice(
    demo: Demo, provider: Provider, customer: dict[str, object], route: str, fault: str
) -> None:
    # R85, R103 in part, R117, R125, F6, F31; INLINE is like this whatever it is told. Without deduplication a second
    # call would show.
    key = _key()
    first = demo.post(route, key, customer, fault=fault, repeatable=False, dedup=False)
    assert (
        _code(first)
        == {
            "/payments": IN_DOUBT,
            "/transfers": (202, None),
            "/notifications": (502, "provider_failed"),
        }[route]
    )
    _until(lambda: demo.record(key)["state"] == "unknown")
    charged = _charges(provider, customer)
    assert len(charged) == (1 if fault.endswith("-after") else 0)
    assert [_code(demo.post(route, key, customer)) for _ in range(3)] == [IN_DOUBT] * 3
    assert demo.record(key)["state"] == "unknown"
    assert _charges(provider, customer) == charged


@pytest.mark.parametrize("fault", [*UNCERTAIN, "delay:0.05", "delay:2"])
@pytest.mark.parametrize("route", ["/payments", "/transfers"])
def test_a_call_that_may_be_repeated_ends_with_one_charge(
    demo: Demo, provider: Provider, customer: dict[str, object], route: str, fault: str
) -> None:
    # R117, R127, R264
    key = _key()
    demo.post(route, key, customer, fault=fault)
    last = _end(demo, route, key, customer)
    assert last.status_code == 201
    assert [last.json()["charge_id"]] == _charges(provider, customer)
    assert demo.post(route, key, customer).content == last.content
    assert demo.record(key)["state"] == "completed"


@pytest.mark.parametrize("repeatable", [True, False], ids=["repeatable", "unrepeatable"])
@pytest.mark.parametrize("route", CALLING)
def test_a_decline_is_final(
    demo: Demo, provider: Provider, customer: dict[str, object], route: str, repeatable: bool
) -> None:
    key = _key()
    demo.post(route, key, customer, fault="decline", repeatable=repeatable)
    last = _end(demo, route, key, customer)
    assert _code(last) == (402, "card_declined")
    assert last.headers["idempotent-replayed"] == "true"
    assert last.headers["content-type"] == "application/problem+json"
    assert (demo.record(key)["state"], demo.record(key)["outcome"]) == ("completed", "failure")
    assert _charges(provider, customer) == []


def test_shop_payments_match_the_provider_ledger(demo: Demo, provider: Provider, customer: dict[str, object]) -> None:
    keys = {"settled": None, "declined": "decline"}
    for status, fault in keys.items():
        demo.post("/payments", _key(), customer, fault=fault)
        (payment, *_) = demo.read("/payments?limit=1").json()
        assert payment["status"] == status
        assert demo.read(f"/payments/{payment['id']}").json() == payment
    assert demo.read(f"/payments/{payment['id']}", BETA).status_code == 404
    assert demo.read("/payments/nonsense").status_code == 404
    settled = demo.read("/payments?limit=2").json()[1]
    assert [settled["charge_id"]] == _charges(provider, customer)
    assert demo.ledger() == provider.charges()


def test_a_settled_payment_gets_its_receipt(demo: Demo, customer: dict[str, object]) -> None:
    # R123: emitted in the phase that settles, delivered after its commit; a declined payment has none.
    declined = demo.post("/payments", _key(), customer, fault="decline")
    assert declined.status_code == 402
    payment = demo.post("/payments", _key(), customer).json()["id"]
    _until(lambda: payment in {receipt["payment_id"] for receipt in demo.read("/receipts").json()})
    settled = {one["id"] for one in demo.read("/payments?limit=1000").json() if one["status"] == "settled"}
    assert {receipt["payment_id"] for receipt in demo.read("/receipts?limit=1000").json()} <= settled


def test_transfer_is_listed_as_requested(demo: Demo, customer: dict[str, object]) -> None:
    demo.post("/transfers", _key(), customer)
    (transfer, *_) = demo.read("/transfers?limit=1").json()
    assert (transfer["customer_id"], transfer["status"]) == (customer["customer_id"], "requested")


@pytest.mark.parametrize(
    ("header", "value", "code"),
    [
        ("X-Demo-Fault", "nonsense", "unknown_fault"),
        ("X-Demo-Fault", "delay:", "unknown_fault"),
        ("X-Demo-Dedup", "maybe", "invalid_switch"),
        ("X-Demo-Repeatable", "", "invalid_switch"),
    ],
)
def test_demo_rejects_an_unknown_fault_or_option_header(
    demo: Demo, provider: Provider, header: str, value: str, code: str
) -> None:
    body = {**MONEY, "customer_id": f"cus_{_key()}"}
    with demo.client() as client:
        for route in CALLING:
            sent = {"Authorization": f"Bearer {ALPHA}", "Idempotency-Key": _key(), header: value}
            assert _code(client.post(route, json=body, headers=sent)) == (400, code)
    assert _charges(provider, body) == []


@pytest.mark.parametrize(
    "wrong",
    [{"amount_cents": 0}, {"amount_cents": "5"}, {"currency": "euro"}, {"customer_id": ""}, {"tip": 1}],
    ids=str,
)
@pytest.mark.parametrize("route", CALLING)
def test_a_bad_request_for_money_charges_nothing(
    demo: Demo, provider: Provider, customer: dict[str, object], route: str, wrong: dict[str, object]
) -> None:
    key = _key()
    assert _code(demo.post(route, key, {**customer, **wrong})) == (422, "invalid_request")
    assert demo.post(route, key, customer).status_code in {201, 202}


@pytest.mark.parametrize("repeatable", [True, False], ids=["repeatable", "unrepeatable"])
def test_unreachable_provider_causes_no_unknown_outcome(tmp_path: Path, repeatable: bool) -> None:
    # R100, R102: a connection that was refused proves it, so the same key runs again when the provider is back.
    with Provider(tmp_path) as provider, Demo(tmp_path, "--provider", provider.url, *QUICK) as demo:
        provider.kill()
        keys = {route: _key() for route in CALLING}
        for route, key in keys.items():
            first = demo.post(route, key, repeatable=repeatable)
            assert first.status_code == (202 if route == "/transfers" else 503), first.text
            states = {"pending", "in_progress"} if route == "/transfers" else {"failed_retryable"}
            assert demo.record(key)["state"] in states  # a worker may be asking in vain this very moment
        assert _code(demo.read("/demo/ledger")) == (503, "provider_unavailable")
        assert "Traceback" not in demo.output
        provider.start()
        ids = [_end(demo, route, key, MONEY).json()["charge_id"] for route, key in keys.items()]
        assert sorted(ids) == sorted(charge["id"] for charge in provider.charges())


def test_charges_endpoint_lists_only_the_charges_of_its_request(demo: Demo) -> None:
    for route in ("/payments", "/transfers", "/notifications"):
        mine, other = str(uuid.uuid4()), str(uuid.uuid4())
        demo.post(route, other)
        demo.post(route, mine)
        _until(lambda key=mine: demo.record(key)["state"] == "completed")
        (charge,) = demo.read(f"/demo/charges/{mine}").json()["charges"]
        assert json.loads(demo.record(mine)["response"]["body"])["charge_id"] == charge["id"]
    ordered = str(uuid.uuid4())
    demo.order(ordered)
    assert demo.read(f"/demo/charges/{ordered}").json() == {"charges": []}


def test_charges_endpoint_hides_requests_of_other_tenants(demo: Demo) -> None:
    key = str(uuid.uuid4())
    demo.post("/payments", key, token=BETA)
    assert _code(demo.read(f"/demo/charges/{key}")) == (404, "request_not_found")
    assert len(demo.read(f"/demo/charges/{key}", BETA).json()["charges"]) == 1
    assert demo.read(f"/demo/charges/{key}", "nobody").status_code == 401
    assert demo.read("/demo/charges/%00").status_code == 422
