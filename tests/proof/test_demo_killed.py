"""kill -9 of the server in the middle of requests, and of PostgreSQL under a server that lives.

Whatever was acknowledged replays byte for byte; whatever was not is sent again until it is, and happened once.
"""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from harness.demo import ALPHA, Demo
from harness.patience import PATIENCE, wait_until
from harness.postgres import PostgresServer

CLIENTS = 3
ROUNDS = 2
ANSWERS = 6
"""So many are given before something is killed."""
LEASE = 1


class Shopper(threading.Thread):
    """Sends one order after the other until told to stop; remembers what it asked for and what it was told."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__()
        self._url = url
        self._rng = random.Random(seed)
        self.stopped = threading.Event()
        self.asked: dict[str, dict[str, object]] = {}
        self.told: dict[str, bytes] = {}

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=PATIENCE, verify=False) as client:
            while not self.stopped.is_set():
                key = str(uuid.UUID(int=self._rng.getrandbits(128)))
                quantity = self._rng.randint(1, 1000)
                self.asked[key] = {"customer_id": "c-1", "items": [{"product_id": "p-1", "quantity": quantity}]}
                delay = self._rng.choice(("0", "0", "0.05", "0.2"))
                try:
                    answer = send(client, key, self.asked[key], {"X-Demo-Delay": delay})
                except httpx.TransportError:
                    self.stopped.wait(0.25)
                    continue
                if answer.status_code == 201:
                    assert "idempotent-replayed" not in answer.headers
                    self.told[key] = answer.content
                else:
                    self.stopped.wait(0.05)


def send(client: httpx.Client, key: str, body: object, headers: dict[str, str] | None = None) -> httpx.Response:
    sent = {"Authorization": f"Bearer {ALPHA}", "Idempotency-Key": key, **(headers or {})}
    return client.post("/orders", json=body, headers=sent)


def under_fire(demo: Demo, crash: Callable[[], None]) -> None:
    """Load, crashes, and then the two promises."""
    asked: dict[str, dict[str, object]] = {}
    told: dict[str, bytes] = {}
    for number in range(ROUNDS):
        shoppers = [Shopper(demo.url, number * CLIENTS + client) for client in range(CLIENTS)]
        for shopper in shoppers:
            shopper.start()
        wait_until(lambda shoppers=shoppers: sum(len(shopper.told) for shopper in shoppers) >= ANSWERS)
        crash()
        for shopper in shoppers:
            shopper.stopped.set()
        for shopper in shoppers:
            shopper.join()
            asked |= shopper.asked
            told |= shopper.told
    assert told
    assert len(told) < len(asked), "no request was cut off: the crash proved nothing"
    with demo.client() as client:
        final = {key: settled(client, key, body) for key, body in asked.items()}
    for key, body in told.items():
        assert final[key].content == body
        assert final[key].headers["idempotent-replayed"] == "true"
    orders = [order["id"] for order in demo.orders()]
    assert len(orders) == len(set(orders)) == len(asked)
    assert {answer.json()["id"] for answer in final.values()} == set(orders)


def settled(client: httpx.Client, key: str, body: object) -> httpx.Response:
    """Send until there is an answer, as a patient client does; a dead owner's lease has to run out first."""
    answers: list[httpx.Response] = []

    def has_ended() -> bool:
        answers.append(send(client, key, body))
        if answers[-1].status_code == 201:
            return True
        assert answers[-1].status_code in (409, 503), answers[-1].text
        assert int(answers[-1].headers["retry-after"]) >= 1  # R80
        return False

    wait_until(has_ended, lambda: answers[-1].text, every=0.1)
    return answers[-1]


def restart(demo: Demo) -> None:
    demo.kill()
    demo.start()


def test_killed_server_on_sqlite_keeps_acknowledged_responses(tmp_path: Path) -> None:  # R71, R75, R86, R246
    with Demo(tmp_path, "--lease", str(LEASE)) as demo:
        under_fire(demo, lambda: restart(demo))


@pytest.mark.parametrize("scheme", ["postgresql+asyncpg", "postgresql+psycopg"])
def test_killed_server_on_postgresql_keeps_acknowledged_responses(
    tmp_path: Path, postgres_dsn: str, scheme: str
) -> None:  # R71, R75
    store = postgres_dsn.replace("postgresql", scheme, 1)
    with Demo(tmp_path, "--lease", str(LEASE), store=store) as demo:
        under_fire(demo, lambda: restart(demo))


@pytest.mark.parametrize("scheme", ["postgresql+asyncpg", "postgresql+psycopg"])
def test_running_server_survives_a_killed_database(  # R75, R110, F8
    tmp_path: Path, crashable_postgres: PostgresServer, scheme: str
) -> None:
    store = crashable_postgres.create_database("shop").replace("postgresql", scheme, 1)

    def crash() -> None:
        crashable_postgres.kill()
        crashable_postgres.restart()

    with Demo(tmp_path, "--lease", str(LEASE), store=store) as demo:
        under_fire(demo, crash)
