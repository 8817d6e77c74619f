"""kill -9 of PostgreSQL under a living server that takes payments: one charge for each key, whatever was going on."""

from __future__ import annotations

import threading
import time
import uuid
from pathlib import Path

from harness.postgres import PostgresServer
from proof.crash.victims import Cluster, Victim

CLIENTS = 3
BEFORE, AFTER = 12, 6
"""Payments that must have been answered before the kill, and after it."""


class Payer(threading.Thread):
    """Makes one payment after the other, and remembers the keys."""

    def __init__(self, cluster: Cluster, server: Victim, answered: threading.Semaphore) -> None:
        super().__init__(daemon=True)
        self._town, self._server, self._answered = cluster, server, answered
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


def test_database_killed_during_payments_charges_once_per_key(  # R75, R110, R116, R117, F8, F24
    tmp_path: Path, crashable_postgres: PostgresServer
) -> None:
    dsn = crashable_postgres.create_database("shop").replace("postgresql", "postgresql+asyncpg", 1)
    with Cluster(tmp_path, dsn) as cluster:
        server = cluster.server()
        answered = threading.Semaphore(0)
        payers = [Payer(cluster, server, answered) for _ in range(CLIENTS)]
        for payer in payers:
            payer.start()
        for _ in range(BEFORE):
            assert answered.acquire(timeout=60)
        crashable_postgres.kill()
        while all(operation.status == 201 for operation in list(cluster.operations)):
            time.sleep(0.01)  # until somebody has noticed
        crashable_postgres.restart()
        for _ in range(AFTER):
            assert answered.acquire(timeout=60)
        for payer in payers:
            payer.over.set()
        for payer in payers:
            payer.join(60)
        keys = [key for payer in payers for key in payer.keys]
        final = {key: cluster.settled(server, "/payments", key) for key in keys}

        told = {operation.key for operation in cluster.operations if operation.status == 201 and not operation.replayed}
        assert told <= final.keys()
        charges = cluster.provider.charges()
        assert sorted(charge["customer_id"] for charge in charges) == sorted(keys)  # one each, and no other
        by_key = {charge["customer_id"]: charge["id"] for charge in charges}
        assert {key: answer.json()["charge_id"] for key, answer in final.items()} == by_key
        for key in keys:
            cluster.check(server, "/payments", key)
