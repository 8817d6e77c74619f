"""kill -9 of PostgreSQL under a living server that takes payments: one charge for each key, whatever was going on."""

from __future__ import annotations

import threading
import time
import uuid
from pathlib import Path

from crash.victims import Town, Victim
from harness.postgres import PostgresServer

CLIENTS = 3
BEFORE, AFTER = 12, 6
"""Payments that must have been answered before the kill, and after it."""


class Payer(threading.Thread):
    """Makes one payment after the other, and remembers the keys."""

    def __init__(self, town: Town, server: Victim, answered: threading.Semaphore) -> None:
        super().__init__(daemon=True)
        self._town, self._server, self._answered = town, server, answered
        self.over = threading.Event()
        self.keys: list[str] = []

    def run(self) -> None:
        while not self.over.is_set():
            self.keys.append(str(uuid.uuid4()))
            answer = self._town.ask(self._server, "/payments", self.keys[-1])
            if answer is not None and answer.status_code == 201:
                self._answered.release()
            else:
                self.over.wait(0.02)


def test_a_killed_database_under_payments(  # R75, R110, R116, R117, F8, F24
    tmp_path: Path, crashable_postgres: PostgresServer
) -> None:
    dsn = crashable_postgres.create_database("shop").replace("postgresql", "postgresql+asyncpg", 1)
    with Town(tmp_path, dsn) as town:
        server = town.server()
        answered = threading.Semaphore(0)
        payers = [Payer(town, server, answered) for _ in range(CLIENTS)]
        for payer in payers:
            payer.start()
        for _ in range(BEFORE):
            assert answered.acquire(timeout=60)
        crashable_postgres.kill()
        while all(operation.status == 201 for operation in list(town.operations)):
            time.sleep(0.01)  # until somebody has noticed
        crashable_postgres.restart()
        for _ in range(AFTER):
            assert answered.acquire(timeout=60)
        for payer in payers:
            payer.over.set()
        for payer in payers:
            payer.join(60)
        keys = [key for payer in payers for key in payer.keys]
        final = {key: town.settled(server, "/payments", key) for key in keys}

        told = {operation.key for operation in town.operations if operation.status == 201 and not operation.replayed}
        assert told <= final.keys()
        charges = town.provider.charges()
        assert sorted(charge["customer_id"] for charge in charges) == sorted(keys)  # one each, and no other
        by_key = {charge["customer_id"]: charge["id"] for charge in charges}
        assert {key: answer.json()["charge_id"] for key, answer in final.items()} == by_key
        for key in keys:
            town.check(server, "/payments", key)
