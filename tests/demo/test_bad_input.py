"""Bad input gets a clear answer, executes nothing, and leaves the key free for the request as it was meant."""

from __future__ import annotations

import json
import socket
import uuid
from dataclasses import dataclass, field

import pytest

from harness.demo import ALPHA, TEAPOT, Demo

GOOD = json.dumps(TEAPOT)
MEGABYTE = 1024 * 1024
TOO_LARGE = json.dumps({**TEAPOT, "customer_id": "x" * 10 * MEGABYTE})


@dataclass(frozen=True)
class Bad:
    """A request, and how it must be answered."""

    name: str
    status: int
    code: str
    body: bytes | str = GOOD
    headers: dict[str, str] = field(default_factory=dict)


def _with(**members: object) -> str:
    return json.dumps({**TEAPOT, **members})


BAD = [
    Bad("no JSON", 400, "malformed_json", '{"customer_id": '),
    Bad("not UTF-8", 400, "malformed_json", b'{"customer_id": "\xff"}'),
    Bad("nested too deeply", 400, "malformed_json", "[" * 100_000),
    Bad("a name twice", 400, "idempotency_body_invalid", GOOD.replace("{", '{"customer_id": "cus_2", ', 1)),
    Bad("nothing", 422, "invalid_request", ""),
    Bad("a list", 422, "invalid_request", "[]"),
    Bad("null", 422, "invalid_request", "null"),
    Bad("a number for a name", 422, "invalid_request", _with(customer_id=7)),
    Bad("an empty name", 422, "invalid_request", _with(customer_id="")),
    Bad("a long name", 422, "invalid_request", _with(customer_id="x" * 101)),
    Bad("NUL in a name", 422, "invalid_request", _with(customer_id="a\0b")),
    Bad("half a character", 422, "invalid_request", _with(customer_id="\ud800")),
    Bad("half a character as a member", 422, "invalid_request", '{"\\ud800": 1}'),
    Bad("no items", 422, "invalid_request", _with(items=[])),
    Bad("items as text", 422, "invalid_request", _with(items="teapot")),
    Bad("too many items", 422, "invalid_request", _with(items=TEAPOT["items"] * 101)),
    Bad("a number as text", 422, "invalid_request", _with(items=[{"product_id": "p", "quantity": "2"}])),
    Bad("true for a number", 422, "invalid_request", _with(items=[{"product_id": "p", "quantity": True}])),
    Bad("a fraction", 422, "invalid_request", _with(items=[{"product_id": "p", "quantity": 1.5}])),
    Bad("none of it", 422, "invalid_request", _with(items=[{"product_id": "p", "quantity": 0}])),
    Bad("more than there is", 422, "invalid_request", _with(items=[{"product_id": "p", "quantity": 10**30}])),
    Bad("NaN", 422, "invalid_request", GOOD.replace(": 2", ": NaN")),
    Bad("a member too many", 422, "invalid_request", _with(price=1)),
    Bad("no JSON by its own word", 422, "invalid_request", headers={"Content-Type": "text/plain"}),
    Bad("too large", 413, "body_too_large", TOO_LARGE),
    Bad("unknown token", 401, "unauthorized", headers={"Authorization": "Bearer demo-gamma"}),
    Bad("no bearer token", 401, "unauthorized", headers={"Authorization": "Basic ZGVtbzphbHBoYQ=="}),
    Bad("no delay", 400, "invalid_delay", headers={"X-Demo-Delay": "soon"}),
    Bad("a delay before now", 400, "invalid_delay", headers={"X-Demo-Delay": "-1"}),
    Bad("NaN seconds", 400, "invalid_delay", headers={"X-Demo-Delay": "nan"}),
    Bad("a delay for ever", 400, "invalid_delay", headers={"X-Demo-Delay": "inf"}),
    Bad("a long delay", 400, "invalid_delay", headers={"X-Demo-Delay": "60.1"}),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_bad_request_returns_a_problem_and_leaves_the_key_free(demo: Demo, bad: Bad) -> None:
    key, before = str(uuid.uuid4()), demo.orders()
    headers = {"Authorization": f"Bearer {ALPHA}", "Content-Type": "application/json", "Idempotency-Key": key}
    with demo.client() as client:
        answer = client.post("/orders", content=bad.body, headers={**headers, **bad.headers})
        assert (answer.status_code, answer.json()["code"]) == (bad.status, bad.code)
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["status"] == bad.status
        assert ("www-authenticate" in answer.headers) is (bad.status == 401)
        assert demo.orders() == before
        # The connection still works, and the same key now takes the request as it was meant.
        meant = client.post("/orders", content=GOOD, headers=headers)
    assert meant.status_code == 201
    assert "idempotent-replayed" not in meant.headers


@pytest.mark.parametrize(
    "key", ["short", "", "x" * 256, '"unterminated', "two, keys, in, one, line", "ümlaut-ümlaut-ümlaut"]
)
def test_a_bad_key_is_refused(demo: Demo, key: str) -> None:
    # R7, R8, R9, R10
    before = demo.orders()
    with demo.client() as client:
        headers = [
            (b"authorization", b"Bearer demo-alpha"),
            (b"content-type", b"application/json"),
            (b"idempotency-key", key.encode("latin-1")),
        ]
        answer = client.post("/orders", content=GOOD, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["code"] in {"idempotency_key_malformed", "idempotency_key_missing"}
    assert demo.orders() == before


def test_demo_without_a_token_returns_www_authenticate(demo: Demo) -> None:
    with demo.client() as client:
        answer = client.post("/orders", json=TEAPOT, headers={"Idempotency-Key": str(uuid.uuid4())})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == 'Bearer realm="oncekey demo"'


def test_a_large_body_in_chunks_is_refused_as_well(demo: Demo) -> None:
    before = demo.orders()
    with demo.client() as client:
        headers = {"Authorization": f"Bearer {ALPHA}", "Idempotency-Key": str(uuid.uuid4())}
        answer = client.post("/orders", content=(b"x" * MEGABYTE for _ in range(10)), headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")
    assert demo.orders() == before


def test_a_small_body_in_chunks_is_an_order(demo: Demo) -> None:
    with demo.client() as client:
        headers = {
            "Authorization": f"Bearer {ALPHA}",
            "Idempotency-Key": str(uuid.uuid4()),
            "Content-Type": "application/json",
        }
        answer = client.post("/orders", content=(bytes([byte]) for byte in GOOD.encode()), headers=headers)
    assert answer.status_code == 201


def test_demo_creates_no_order_from_an_interrupted_upload(demo: Demo) -> None:
    before = demo.orders()
    head = (
        b"POST /orders HTTP/1.1\r\nHost: demo\r\nAuthorization: Bearer demo-alpha\r\n"
        b"Content-Type: application/json\r\nContent-Length: 1000\r\nIdempotency-Key: %b\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", demo.port)) as connection:
        connection.sendall(head % str(uuid.uuid4()).encode() + GOOD.encode())
    assert demo.orders() == before
    assert demo.order(str(uuid.uuid4())).status_code == 201


def test_an_unknown_path_and_a_wrong_method_are_problems_too(demo: Demo) -> None:
    with demo.client() as client:
        nowhere, wrong = client.get("/nowhere"), client.delete("/orders")
    assert (nowhere.status_code, nowhere.json()["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"]
