"""Redis by TLS: one server, a cluster, and sentinels. Each of them wants a certificate."""

from __future__ import annotations

from urllib.parse import urlencode

import pytest

from harness import flows
from harness.certificates import certificate
from harness.valkeys import SLOTS, Cluster, TlsRedis, pair
from oncekey import wire
from oncekey.cells import Index
from oncekey.core.errors import CommitAmbiguousError, StoreUnavailableError
from oncekey.core.fronts import GET, REPLACE, Command
from oncekey.core.model import Replay
from oncekey.core.policy import Policy
from oncekey.databases.redis.driver import AsyncRedisCells, RedisCells
from oncekey.databases.redis.line import RedisLine
from oncekey.databases.redis.nodes import _SLOTS
from oncekey.databases.redis.talk import names_of
from oncekey.engine.run import Breaker
from oncekey.testing.claims import a_claim, again, answered

START = (-1, "", "")


@pytest.fixture(scope="module")
def server():
    with TlsRedis() as server:
        yield server


def settled(engine):
    claim = a_claim()
    assert flows.settle(engine, flows.begin(engine, claim, Policy()).lease, answered()).ours
    return claim


def slot_of(claim):
    return _SLOTS[names_of(claim.id.scope, claim.id.key)[0]]


def is_replayed(engine, claim):
    return isinstance(flows.begin(engine, again(claim), Policy()), Replay)


async def test_one_server_serves_threads_and_asyncio(server):
    engine = wire.connect(server.url)
    claim = settled(engine)
    assert is_replayed(engine, claim)
    engine.close()

    cells = AsyncRedisCells(server.url)
    line, _ = await cells.look(claim.id.scope, claim.id.key)
    assert line["state"] == "completed"
    assert (await cells.page(Index.EXPIRING, START, 10))[0] == [line]
    await cells.close()


@pytest.mark.parametrize("missing", ["the server's", "the client's", "all"])
def test_invalid_certificate_is_unavailable_and_writes_nothing(server, missing, tmp_path):
    """And it is known that nothing was written."""
    other, key = (str(path) for path in certificate(tmp_path))
    files = {
        "the server's": server.files | {"ssl_ca_certs": other},
        "the client's": server.files | {"ssl_certfile": other, "ssl_keyfile": key},
        "all": {},
    }[missing]
    cells = RedisCells(f"rediss://127.0.0.1:{server.port}/0?{urlencode(files)}")
    with pytest.raises(StoreUnavailableError) as raised:
        cells.swap("scope", "key", None, {"state": "expired", "expires_at": 1, "scope": "scope", "key": "key"}, None)
    assert not isinstance(raised.value, CommitAmbiguousError)
    cells.close()


def test_tls_cluster_redirects_are_followed():
    with Cluster(TlsRedis, replicas=0) as cluster:
        # One node is named: where the others are, it says itself, with the ports that speak TLS.
        first, options = cluster.nodes[0], cluster.url.partition("?")[2]
        engine = wire.connect(f"rediss+cluster://127.0.0.1:{first.port}?{options}")
        claims = [settled(engine) for _ in range(30)]
        assert {slot_of(claim) * 3 // SLOTS for claim in claims} == {0, 1, 2}
        assert all(is_replayed(engine, claim) for claim in claims)
        cells = RedisCells(cluster.url)
        assert {line["key"] for line in cells.page(Index.EXPIRING, START, 100)[0]} == {one.id.key for one in claims}
        cells.close()

        # A slot moves: the node that had it names the one that has it.
        used = {slot_of(claim) for claim in claims}
        moved = next(
            claim
            for claim in (a_claim() for _ in range(1000))
            if slot_of(claim) < SLOTS // 3 - 1 and slot_of(claim) not in used
        )
        name = cluster.nodes[1].say("CLUSTER", "MYID").decode()
        for node in (cluster.nodes[1], first):
            node.say("CLUSTER", "SETSLOT", slot_of(moved), "NODE", name)
        assert flows.settle(engine, flows.begin(engine, moved, Policy()).lease, answered()).ours
        assert cluster.nodes[1].say("EXISTS", names_of(moved.id.scope, moved.id.key)[1][0]) == 1
        engine.close()


def test_sentinels_name_the_primary():
    with pair(sentinels=1, kind=TlsRedis) as watched:
        engine = wire.connect(watched.url)
        assert is_replayed(engine, settled(engine))
        engine.close()
        assert watched.primary.say("DBSIZE") == 2  # the record, and the page that it is on


async def test_shared_cache_connects_over_tls(server):
    line = RedisLine(server.url, 5.0, Breaker())
    kept = Command(REPLACE, b"front", b"value", 60_000_000)
    assert await line.ask((kept, Command(GET, b"front"))) == [b"OK", b"value"]
    assert line.ask_blocking((Command(GET, b"front"),)) == [b"value"]
    await line.close()
    line.close_blocking()
