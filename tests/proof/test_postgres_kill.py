"""kill -9 PostgreSQL again and again under load; afterwards nothing that was acknowledged is lost or done twice."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import closing
from typing import TypeVar

import psycopg

from harness import flows
from harness.patience import PATIENCE
from harness.postgres import PostgresServer
from harness.tables import make_tables
from oncekey import wire
from oncekey.core.errors import CommitAmbiguousError, StoreError
from oncekey.core.model import Code, Effects, Lease, Proceed, Recovery, Refuse, Replay, State
from oncekey.core.policy import Policy
from oncekey.engine.shell import Engine
from oncekey.testing.claims import LEASE, a_claim, answered

T = TypeVar("T")

KILLS = 3
PAIRS = 3
PER_KILL = 250
"""Answers that must have been given before the server is killed once more."""


class Load:
    """Pairs of clients who send the same keys, and what they were told."""

    def __init__(self, dsn: str) -> None:
        self.engine = wire.connect(dsn)
        self.over = threading.Event()
        self.keys: dict[str, Effects] = {}
        self.answers: dict[str, set[bytes]] = defaultdict(set)
        self.provider: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.broken: list[BaseException] = []
        self._lock = threading.Lock()
        self.clients = [
            threading.Thread(target=self._client, args=(pair, seed))
            for pair in range(PAIRS)
            for seed in (2 * pair, 2 * pair + 1)
        ]

    def _client(self, pair: int, seed: int) -> None:
        rng, number = random.Random(seed), 0
        try:
            while not self.over.is_set():
                effects = Effects.INLINE if number % 3 == 0 else Effects.LOCAL
                key = f"{effects}-{pair}-{number}"
                with self._lock:
                    self.keys[key] = effects
                self._send(key, effects, rng.randbytes(rng.randrange(200)))
                number += 1
        except BaseException as error:
            self.broken.append(error)

    def _send(self, key: str, effects: Effects, body: bytes) -> None:
        recovery = Recovery.UNKNOWN if effects is Effects.INLINE else Recovery.RETRY
        claim = a_claim(key, effects=effects, recovery=recovery)
        # The owner is the same each time, so a claim whose reply was lost is found again.
        verdict = self._insist(lambda: flows.begin(self.engine, claim, Policy()))
        match verdict:
            case Proceed(lease) if effects is Effects.LOCAL:
                self._run_local(key, lease, body)
            case Proceed(lease):
                with self._lock:
                    self.provider[key] += 1
                # It happened outside: the answer is kept trying until the store has it.
                assert self._insist(lambda: flows.settle(self.engine, lease, answered(body))).ours
                self._report(key, body)
            case Replay(record):
                self._report(key, record.response.body)
            case Refuse(code):
                assert code is Code.IN_PROGRESS, code
                self.seen["in progress"] += 1

    def _run_local(self, key: str, lease: Lease, body: bytes) -> None:
        transaction = None
        try:
            transaction = self.engine.open()
            transaction.connection.execute("INSERT INTO effects (key) VALUES (%s)", [key])
            if flows.settle_within(self.engine, transaction, lease, answered(body)).ours:
                transaction.commit()
                self._report(key, body)
        except CommitAmbiguousError:
            settled = self._insist(lambda: flows.settle_lost_commit(self.engine, lease))
            if settled.ours or settled.snapshot.record.state is State.FAILED_RETRYABLE:
                self.seen["lost commits that did not happen"] += 1
            else:
                self.seen["lost commits that happened"] += 1
                assert settled.snapshot.record.response.body == body
                self._report(key, body)
        except (StoreError, psycopg.Error):
            # Nothing of it happened; the claim is left behind, as by a process that dies.
            self.seen["left behind"] += 1
        finally:
            if transaction is not None:
                transaction.rollback()

    def _report(self, key: str, body: bytes) -> None:
        with self._lock:
            self.answers[key].add(body)
            self.seen["answered"] += 1

    def _insist(self, ask: Callable[[], T]) -> T:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return ask()
            except StoreError as error:
                self.seen[type(error).__name__] += 1
                if time.monotonic() > deadline:
                    raise
                self.over.wait(0.005)


def test_acknowledged_responses_survive_repeated_postgres_kills(crashable_postgres: PostgresServer):
    server = crashable_postgres
    dsn = make_tables(server.create_database("crashed"))
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE effects (key text NOT NULL)")
        # A careless default must not matter: what oncekey answers for waits for the disk.
        connection.execute("ALTER DATABASE crashed SET synchronous_commit = off")
    load = Load(dsn)
    for client in load.clients:
        client.start()
    try:
        for kill in range(1, KILLS + 1):
            wait_for(lambda kill=kill: load.seen["answered"] >= kill * PER_KILL or load.broken)
            server.kill()
            server.start()
        wait_for(lambda: load.seen["answered"] >= (KILLS + 1) * PER_KILL or load.broken)
    finally:
        load.over.set()
        for client in load.clients:
            client.join(PATIENCE)
    assert load.broken == []
    assert load.seen["StoreUnavailableError"] + load.seen["CommitAmbiguousError"] > 0, "nobody noticed"
    check(load, dsn)
    load.engine.close()


def check(load: Load, dsn: str) -> None:
    """One answer and one effect for each key, before and after everybody has sent it once more."""
    with psycopg.connect(dsn, autocommit=True) as raw:

        def effects() -> Counter[str]:
            return Counter(row[0] for row in raw.execute("SELECT key FROM effects").fetchall())

        states = dict(raw.execute("SELECT key, state FROM oncekey.record").fetchall())
        assert max(effects().values()) == 1
        done = {key for key, state in states.items() if state == "completed"}
        # A LOCAL effect is there exactly if its answer is.
        assert effects().keys() == {key for key in done if load.keys[key] is Effects.LOCAL}
        assert max(load.provider.values()) == 1
        assert {key for key in done if load.keys[key] is Effects.INLINE} == load.provider.keys()

        # Everybody comes back after the leases are over.
        later = time.time_ns() // 1000 + 2 * LEASE
        with closing(wire.connect(dsn, clock=lambda: later)) as engine:
            for key, kind in load.keys.items():
                repeated(engine, load, key, kind)
        assert effects() == Counter(key for key, kind in load.keys.items() if kind is Effects.LOCAL)


def repeated(engine: Engine, load: Load, key: str, kind: Effects) -> None:
    recovery = Recovery.UNKNOWN if kind is Effects.INLINE else Recovery.RETRY
    verdict = flows.begin(engine, a_claim(key, effects=kind, recovery=recovery), Policy())
    heard = load.answers.get(key, set())
    assert len(heard) <= 1, f"{key} was answered in two ways"
    match verdict:
        case Replay(record):
            # Byte for byte what was acknowledged, if anything was.
            assert heard <= {record.response.body}
        case Proceed(lease):
            assert kind is Effects.LOCAL
            assert not heard
            transaction = engine.open()
            transaction.connection.execute("INSERT INTO effects (key) VALUES (%s)", [key])
            assert flows.settle_within(engine, transaction, lease, answered()).ours
            transaction.commit()
        case Refuse(code):
            # A claim that nobody came back for: nothing was sent, but nobody can prove it.
            assert kind is Effects.INLINE
            assert code is Code.OUTCOME_UNKNOWN
            assert not heard


def wait_for(reached: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < deadline, "the load does not get on"
        time.sleep(0.005)
