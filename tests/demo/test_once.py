"""What the demo must show: a POST happens once."""

from __future__ import annotations

import json
import signal
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx

from harness.demo import ALPHA, BETA, TEAPOT, Demo, get
from harness.patience import wait_until

_until = partial(wait_until, every=0.05)
CODE_OF_ANOTHER_BODY = "idempotency_key_reused_with_different_payload"
CUPS = {"customer_id": "cus_1", "items": [{"product_id": "sku_cup", "quantity": 6}]}


def _key() -> str:
    return str(uuid.uuid4())


def _state(demo: Demo, key: str) -> str | None:
    answer = get(f"{demo.url}/idempotency-keys/{key}", headers={"Authorization": f"Bearer {ALPHA}"})
    return answer.json()["state"] if answer.status_code == 200 else None


def _running(demo: Demo, key: str) -> bool:
    return _state(demo, key) == "in_progress"


def test_the_same_request_twice_is_one_order_and_the_same_bytes(demo: Demo) -> None:
    # R17, R87, R88
    key, before = _key(), len(demo.orders())
    first, second = demo.order(key), demo.order(key)
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.content == second.content
    assert first.headers["location"] == second.headers["location"] == f"/orders/{first.json()['id']}"
    assert first.headers["content-type"] == second.headers["content-type"]
    assert "idempotent-replayed" not in first.headers
    assert second.headers["idempotent-replayed"] == "true"
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"] == key
    assert len(demo.orders()) == before + 1


def test_another_body_under_the_same_key_is_refused_and_changes_nothing(demo: Demo) -> None:
    # R37, R233
    key = _key()
    first = demo.order(key)
    before = demo.orders()
    refused = demo.order(key, CUPS)
    assert refused.status_code == 422
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.json()["code"] == CODE_OF_ANOTHER_BODY
    assert demo.orders() == before
    assert demo.order(key).content == first.content


def test_reformatted_json_body_is_the_same_request(demo: Demo) -> None:
    # R34
    key = _key()
    first = demo.order(key, TEAPOT)
    with demo.client() as client:
        shuffled = json.dumps(dict(reversed(TEAPOT.items())), indent=4).encode()
        headers = {
            "Authorization": f"Bearer {ALPHA}",
            "Idempotency-Key": key,
            "Content-Type": "application/json; charset=utf-8",
        }
        second = client.post("/orders", content=shuffled, headers=headers)
    assert second.content == first.content
    assert second.headers["idempotent-replayed"] == "true"


def test_order_without_a_key_is_rejected(demo: Demo) -> None:
    # R11
    before = demo.orders()
    refused = demo.order(None)
    assert refused.status_code == 400
    assert refused.json()["code"] == "idempotency_key_missing"
    assert demo.orders() == before


def test_concurrent_request_receives_409_with_retry_after(demo: Demo) -> None:
    # R38, R79, R80
    key, before = _key(), len(demo.orders())
    with ThreadPoolExecutor(1) as thread:
        slow = thread.submit(demo.order, key, headers={"X-Demo-Delay": "1.5"})
        _until(lambda: _running(demo, key))
        met = demo.order(key, headers={"X-Demo-Delay": "1.5"})
        other = demo.order(key, CUPS)
        first = slow.result()
    assert met.status_code == 409
    assert met.json()["code"] == "idempotency_key_in_progress"
    assert 1 <= int(met.headers["retry-after"]) <= 30
    assert (other.status_code, other.json()["code"]) == (422, CODE_OF_ANOTHER_BODY)
    assert first.status_code == 201
    assert len(demo.orders()) == before + 1
    assert demo.order(key).content == first.content


def test_writers_wait_for_a_slow_handler_and_replays_do_not(demo: Demo) -> None:
    key, done = _key(), _key()
    demo.order(done)
    with ThreadPoolExecutor(6) as threads:
        slow = threads.submit(demo.order, key, headers={"X-Demo-Delay": "1"})
        _until(lambda: _running(demo, key))
        others = [threads.submit(demo.order, _key()) for _ in range(5)]
        assert demo.order(done).headers["idempotent-replayed"] == "true"
        assert demo.order(key).status_code == 409
        assert _running(demo, key)
        assert [other.result().status_code for other in (slow, *others)] == [201] * 6


def test_tenants_have_separate_keys_and_orders(demo: Demo) -> None:
    # R23, R29
    key = _key()
    alphas, betas = demo.order(key, token=ALPHA), demo.order(key, token=BETA)
    assert (alphas.status_code, betas.status_code) == (201, 201)
    assert "idempotent-replayed" not in betas.headers
    assert alphas.json()["id"] != betas.json()["id"]
    assert alphas.json()["id"] in {order["id"] for order in demo.orders(ALPHA)}
    assert [order["id"] for order in demo.orders(BETA)] == [betas.json()["id"]]


def test_a_key_is_the_same_with_and_without_quotes(demo: Demo) -> None:
    # R5, C1
    key = _key()
    first, second = demo.order(f'"{key}"'), demo.order(key)
    assert first.status_code == 201
    assert second.content == first.content
    assert second.headers["idempotent-replayed"] == "true"


def test_two_key_lines_are_refused(demo: Demo) -> None:
    # R7: which of the two would it be?
    before = demo.orders()
    body = json.dumps(TEAPOT).encode()
    lines = [
        b"POST /orders HTTP/1.1",
        b"Host: demo",
        b"Authorization: Bearer demo-alpha",
        b"Content-Type: application/json",
        b"Content-Length: %d" % len(body),
        b"Idempotency-Key: %b" % _key().encode(),
        b"Idempotency-Key: %b" % _key().encode(),
        b"Connection: close",
    ]
    answer = demo.say(b"\r\n".join(lines) + b"\r\n\r\n" + body)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"code":"idempotency_key_malformed"' in answer
    assert demo.orders() == before


def test_concurrent_requests_create_one_order(demo: Demo) -> None:
    key, before = _key(), len(demo.orders())
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: demo.order(key), range(16)))
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert len({answer.content for answer in answers if answer.status_code == 201}) == 1
    assert len(demo.orders()) == before + 1


def test_status_resource_is_visible_only_to_its_tenant(demo: Demo) -> None:
    # R84
    key = _key()
    order = demo.order(key)
    mine = get(f"{demo.url}/idempotency-keys/{key}", headers={"Authorization": f"Bearer {ALPHA}"})
    assert (mine.status_code, mine.json()["state"]) == (200, "completed")
    assert mine.json()["response"]["body"] == order.text
    theirs = get(f"{demo.url}/idempotency-keys/{key}", headers={"Authorization": f"Bearer {BETA}"})
    assert (theirs.status_code, theirs.json()["code"]) == (404, "idempotency_key_not_found")
    assert get(f"{demo.url}/idempotency-keys/{key}").status_code == 401


def test_response_is_replayed_after_kill_9(tmp_path: Path) -> None:
    key = _key()
    with Demo(tmp_path) as demo:
        first = demo.order(key)
        orders = demo.orders()
        demo.kill()
        demo.start()
        again = demo.order(key)
        assert again.content == first.content
        assert again.headers["idempotent-replayed"] == "true"
        assert again.headers["location"] == first.headers["location"]
        assert demo.orders() == orders


def test_request_interrupted_by_kill_9_executes_once_after_restart(tmp_path: Path) -> None:
    key = _key()
    with Demo(tmp_path, "--lease", "1") as demo:
        with ThreadPoolExecutor(1) as thread:
            cut = thread.submit(demo.order, key, headers={"X-Demo-Delay": "30"})
            _until(lambda: _running(demo, key))
            demo.kill()
            assert isinstance(cut.exception(), httpx.TransportError)
        demo.start()
        assert demo.orders() == []
        answers: list[httpx.Response] = []

        def answered() -> bool:
            answers.append(demo.order(key))
            return answers[-1].status_code == 201

        _until(answered)
        assert {answer.status_code for answer in answers[:-1]} <= {409}
        assert all("retry-after" in answer.headers for answer in answers[:-1])
        assert [order["id"] for order in demo.orders()] == [answers[-1].json()["id"]]
        assert demo.order(key).content == answers[-1].content


def test_sigterm_waits_for_the_running_request(tmp_path: Path) -> None:
    key = _key()
    with Demo(tmp_path) as demo:
        with ThreadPoolExecutor(1) as thread:
            slow = thread.submit(demo.order, key, headers={"X-Demo-Delay": "1"})
            _until(lambda: _running(demo, key))
            demo.stop(signal.SIGTERM)
            first = slow.result()
        assert first.status_code == 201
        demo.start()
        assert demo.order(key).content == first.content


def test_disconnected_client_receives_the_replay_on_retry(demo: Demo) -> None:
    key, before = _key(), len(demo.orders())
    with demo.client() as client:
        client.timeout = httpx.Timeout(0.3)
        headers = {"Authorization": f"Bearer {ALPHA}", "Idempotency-Key": key, "X-Demo-Delay": "0.8"}
        try:
            client.post("/orders", json=TEAPOT, headers=headers)
        except httpx.ReadTimeout:
            pass
        else:
            raise AssertionError("the answer came too early to be missed")
    _until(lambda: _state(demo, key) == "completed")
    again = demo.order(key)
    assert (again.status_code, again.headers["idempotent-replayed"]) == (201, "true")
    assert len(demo.orders()) == before + 1
