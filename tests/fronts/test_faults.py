"""A Valkey in front of real databases, over real HTTP: flushed, stopped, killed, slow, full, cut off, or lying.

R176, R180, R181: the same answers, zero duplicates; only the speed changes.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import random
import signal
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import redis

from cli.operating import oncekey
from frameworks.realshop import PostgresDatabase, RealShop, SqliteFile
from frameworks.shop import new_key
from harness.brokers import Valkey
from harness.patience import PATIENCE, wait_until
from harness.proxy import Proxy
from harness.served import Served
from oncekey import wire
from oncekey.core.checks import Front
from oncekey.core.flow import drive
from oncekey.core.fronts import entry_of
from oncekey.core.model import LOCAL, RecordId
from oncekey.core.policy import Policy
from oncekey.core.scope import scope_of
from oncekey.engine.fronts import CacheCipher
from oncekey.engine.operation import Operation
from oncekey.observe.events import Asked, Consulted, Reserved
from wsgi import shop as wsgi

SECRET = b"a secret of the shop's"
KEYS, REPEATS, CLIENTS = 8, 4, 6


@pytest.fixture(params=["sqlite", "asyncpg"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "sqlite":
        return SqliteFile(tmp_path / "shop.db")
    return PostgresDatabase(request.getfixturevalue("tables_dsn"), request.param)


class Branch(RealShop):
    """One of several servers of the shop: what its front knew, and how often it asked the store."""

    def __init__(self, database: Any, place: str, *, timeout: float = 0.1, found: Counter[str] | None = None) -> None:
        front = Front(place, life=600, timeout=timeout)
        policy = Policy(secret=SECRET, replay_cache=front, lock_hint=Front(place, life=1, timeout=timeout))
        super().__init__(database, policy=policy)
        self.found: Counter[str] = Counter() if found is None else found
        self.asked = 0
        self.once.observe(self._see)

        @self.app.post("/orders", status_code=201)
        @self.once.protect(effects=LOCAL)
        async def create(op: Operation, item: str) -> dict[str, str]:
            await database.insert(op.connection, item)  # a second row of one item would be an error
            return {"item": item, "drawn": os.urandom(8).hex()}

    def _see(self, event: object) -> None:
        if isinstance(event, Consulted):
            self.found[event.found.value] += 1
        self.asked += isinstance(event, Asked | Reserved)


def send(port: int, key: str) -> tuple[int, bytes]:
    """One request, its status and its body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("POST", f"/orders?item={key}", headers={"Idempotency-Key": key})
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


class Load:
    """Clients that repeat every request at several servers until it is answered."""

    def __init__(self, ports: list[int]) -> None:
        self._ports = itertools.cycle(ports)
        self.bodies: defaultdict[str, set[bytes]] = defaultdict(set)
        self.statuses: Counter[int] = Counter()
        self.answers = 0

    def run(self, fault: AbstractContextManager[None], seen: Callable[[], object]) -> None:
        """All clients, a fault after the first answers, and repeats until somebody has seen it."""
        sent = [key for key in [new_key() for _ in range(KEYS)] for _ in range(REPEATS)]
        before = self.answers
        with ThreadPoolExecutor(CLIENTS) as clients, ExitStack() as meanwhile:
            under_way = [clients.submit(self._until_answered, key) for key in sent]
            wait_until(lambda: self.answers > before + CLIENTS)
            meanwhile.enter_context(fault)
            for one in under_way:
                one.result(PATIENCE)
            wait_until(lambda: seen() or list(clients.map(self._until_answered, sent[::REPEATS])) is None)

    def _until_answered(self, key: str) -> None:
        status = 409
        while status == 409:
            status, body = send(next(self._ports), key)
            self.statuses[status] += 1
        self.bodies[key].add(body)
        self.answers += 1


class Faults:
    """What happens to a Valkey, and to the way to it."""

    def __init__(self, valkey: Valkey, proxy: Proxy) -> None:
        self._valkey = valkey
        self._proxy = proxy
        self._client = redis.Redis.from_url(valkey.url)

    @contextmanager
    def flushed(self) -> Iterator[None]:
        self._client.flushall()
        yield
        self._client.flushall()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self._valkey.signal(signal.SIGSTOP)
        yield
        self._valkey.signal(signal.SIGCONT)

    @contextmanager
    def killed(self) -> Iterator[None]:
        self._valkey.signal(signal.SIGKILL)
        yield
        self._valkey.__enter__()

    @contextmanager
    def evicting(self) -> Iterator[None]:
        with self._limited("allkeys-random"):
            yield

    @contextmanager
    def full(self) -> Iterator[None]:
        with self._limited("noeviction"):
            yield

    @contextmanager
    def partitioned(self) -> Iterator[None]:
        self._proxy.hold()
        yield
        self._proxy.release()

    @contextmanager
    def reset(self) -> Iterator[None]:
        self._proxy.cut()
        yield
        self._proxy.cut()

    @contextmanager
    def slow(self) -> Iterator[None]:
        with self._meanwhile(self._dawdle):
            yield

    @contextmanager
    def lying(self) -> Iterator[None]:
        with self._meanwhile(self._lie):
            yield

    @contextmanager
    def _meanwhile(self, doing: Callable[[threading.Event], None]) -> Iterator[None]:
        over = threading.Event()
        thread = threading.Thread(target=doing, args=(over,))
        thread.start()
        yield
        over.set()
        thread.join(PATIENCE)

    @contextmanager
    def _limited(self, policy: str) -> Iterator[None]:
        self._client.config_set("maxmemory-policy", policy)
        self._client.config_set("maxmemory", "1")
        yield
        self._client.config_set("maxmemory", "0")

    def _dawdle(self, over: threading.Event) -> None:
        while not over.wait(0.01):  # each reply is late, later than some are waited for, and comes
            self._client.execute_command("CLIENT", "PAUSE", 150, "ALL")

    def _lie(self, over: threading.Event) -> None:
        rng, heard = random.Random(7), [b"garbage", b"", os.urandom(300)]
        while not over.is_set():
            for name in list(self._client.scan_iter()):
                value = self._client.get(name)
                if isinstance(value, bytes) and value not in heard:
                    heard += [value, value[: len(value) // 2], value + b"x"]
                # Somebody else's, a piece, rubbish; never its own again, because what is still true is no lie.
                lie = rng.choice([one for one in heard if one != value])
                self._client.set(name, lie, keepttl=True)
            over.wait(0.002)

    def close(self) -> None:
        self._client.close()


FAULTS = {
    "flushed": "miss",
    "stopped": "unavailable",
    "killed": "unavailable",
    "slow": "unavailable",
    "evicting": "miss",
    "full": "miss",
    "partitioned": "unavailable",
    "reset": "miss",
    "lying": "refused",
}
"""Each with what is seen of it."""


def test_cache_faults_never_change_responses(database: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncekey.engine.run.PAUSE", 0.02)  # what is there again is soon asked again
    found: Counter[str] = Counter()
    with ExitStack() as stack:
        valkey = stack.enter_context(Valkey())
        proxy = stack.enter_context(Proxy("127.0.0.1", valkey.port))
        shops = [Branch(database, f"redis://127.0.0.1:{proxy.port}/0", found=found) for _ in range(2)]
        load = Load([stack.enter_context(Served(shop.app)).port for shop in shops])
        faults = Faults(valkey, proxy)
        stack.callback(faults.close)
        for name, shown in FAULTS.items():
            load.run(nullcontext(), more_than(found, "hit"))  # it is there, and of use
            load.run(getattr(faults, name)(), more_than(found, shown))
    keys = 2 * KEYS * len(FAULTS)
    assert {status for status in load.statuses if status != 409} == {201}
    assert len(load.bodies) == keys
    assert [bodies for bodies in load.bodies.values() if len(bodies) != 1] == []
    assert shops[0].rows == sorted(load.bodies)


def more_than(found: Counter[str], what: str) -> Callable[[], bool]:
    """Whether there was more of it since now."""
    before = found[what]
    return lambda: found[what] > before


# R177: hit: 0 statements, also where another process has answered; R89: as the store would have said it
def test_two_servers_share_cached_responses(database: Any, valkey: Valkey) -> None:
    with ExitStack() as stack:
        first, second = (Branch(database, valkey.url, timeout=30) for _ in range(2))
        here, there = (stack.enter_context(Served(shop.app)).port for shop in (first, second))
        key = new_key()
        bodies = {send(here, key)}
        record_id = RecordId(scope_of("-", "acme"), key)
        with closing(wire.connect(database.url.replace("asyncpg", "psycopg"))) as engine:
            engine.check()
            glimpse = drive(engine.store.recall(record_id), engine.driver.run)
            assert engine.identity is not None
            vault = CacheCipher(SECRET, engine.identity)
        with redis.Redis.from_url(valkey.url) as client:
            name = vault.name("a", record_id)
            wait_until(lambda: client.exists(name))  # nobody waits for that
            plain = vault.unseal(name, client.get(name))  # type: ignore[arg-type]
        assert glimpse is not None
        assert plain is not None
        entry = entry_of(plain, record_id)
        assert entry is not None
        assert entry.finished == glimpse.finished
        assert entry.read_at <= glimpse.now < entry.until <= glimpse.finished.expires_at
        send(there, new_key())  # a process learns the store's clock by its first question
        asked = second.asked
        bodies |= {send(there, key) for _ in range(3)}
        assert len(bodies) == 1
        assert (second.asked, second.found["hit"]) == (asked, 3)


# R106: an operator's word reaches what is shared, from another process
def test_bust_command_removes_the_cached_response(
    database: Any, valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Branch(database, valkey.url, timeout=30)
    key = new_key()
    bust = ("keys", "bust", key, "--tenant", "acme", "--store", database.url, "--reason", "wrong", "--runs-again")
    with Served(shop.app) as server:
        (status, body), *_ = [send(server.port, key) for _ in range(2)]
        assert (status, shop.found["hit"]) == (201, 1)
        assert "need secret" in oncekey(*bust, "--replay-cache", valkey.url).stderr
        monkeypatch.setenv("ONCEKEY_SECRET", SECRET.decode())
        database.execute("DELETE FROM orders")
        said = oncekey(*bust, "--replay-cache", valkey.url)
        assert (said.exit_code, said.stderr) == (0, "")
        again = send(server.port, key)
        assert (again[0], again[1] != body) == (201, True)
        database.execute("DELETE FROM orders")
        nobody = oncekey(*bust, "--replay-cache", "redis://127.0.0.1:1/0")
        assert nobody.exit_code == 0
        assert "did not respond" in nobody.stderr


def test_doctor_checks_the_shared_cache(tmp_path: Path, valkey: Valkey) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    with closing(wire.connect(url)) as engine:
        engine.migrate()

    def seen(place: str) -> tuple[str, str]:
        said = json.loads(oncekey("doctor", "--store", url, "--json", "--replay-cache", place).stdout)
        ((level, text),) = [(one["level"], one["seen"]) for one in said["items"] if one["about"] == "replay_cache"]
        return level, text

    with redis.Redis.from_url(valkey.url) as client:
        assert seen(valkey.url)[0] == "note"
        client.config_set("maxmemory", "64mb")
        assert seen(valkey.url)[0] == "note"
        client.config_set("maxmemory-policy", "allkeys-lru")
        level, text = seen(valkey.url)
        client.config_set("maxmemory", "0")
        client.config_set("maxmemory-policy", "noeviction")
    assert level == "ok"
    assert "65536 KiB, allkeys-lru" in text
    assert "is not a Redis URL" in oncekey("doctor", "--store", url, "--replay-cache", "memory").stderr
    assert seen("redis://user:word@127.0.0.1:1/0") == ("warning", "redis://127.0.0.1:1/0 does not respond")


# The same in threads
@pytest.mark.parametrize("kind", ["plain", "flask"])
def test_shared_cache_works_behind_wsgi(kind: str, tmp_path: Path, valkey: Valkey) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    wsgi.execute(url, wsgi.TABLE)
    front = Front(valkey.url, life=600, timeout=30)
    policy = Policy(secret=SECRET, replay_cache=front, lock_hint=Front(valkey.url, timeout=30))
    shop = wsgi.Shop(url, policy=policy)
    found: Counter[tuple[str, str]] = Counter()

    def see(event: object) -> None:
        if isinstance(event, Consulted):
            found[event.front, event.found.value] += 1

    shop.once.observe(see)
    app = shop.application(kind)
    with wsgi.served(app) as port:
        key, order = new_key(), {"item": "tea"}
        first = wsgi.send(port, "/local", order, key=key)
        wsgi.execute(url, "DELETE FROM oncekey_record")
        kept = wsgi.send(port, "/local", order, key=key)
        running = threading.Thread(
            target=wsgi.send, args=(port, "/inline", {"item": "milk", "does": "wait"}), kwargs={"key": key + "-2"}
        )
        running.start()
        assert shop.entered.acquire(timeout=PATIENCE)
        told = wsgi.send(port, "/inline", {"item": "milk", "does": "wait"}, key=key + "-2")
        shop.go_on.set()
        running.join()
        late = wsgi.send(port, "/inline", {"item": "milk", "does": "wait"}, key=key + "-2")
    for threads in shop.once._threaded.values():
        assert threads.stop(PATIENCE)
    shop.once.blocking().close()
    assert (first.replayed, kept.replayed, kept.body) == (False, True, first.body)
    assert (told.status, late.status, late.replayed) == (409, 201, True)
    assert (found["replay_cache", "hit"], found["lock_hint", "hit"]) == (2, 1)
