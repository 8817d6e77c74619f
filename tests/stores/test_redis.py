"""Redis as a store: its URLs, what the server forgets by itself, what a full, frozen or lagging one does."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from cli.operating import oncekey
from harness import flows
from harness.patience import wait_until
from harness.valkeys import StoringValkey, pair
from oncekey import INLINE, LOCAL, OUTBOX, PHASED, Once, wire
from oncekey.cells import Index
from oncekey.core.errors import CommitAmbiguousError, ConfigurationError, StoreUnavailableError
from oncekey.core.model import HOUR, Proceed, Replay
from oncekey.core.policy import Policy
from oncekey.databases.address import Address, Kind
from oncekey.databases.redis import driver
from oncekey.databases.redis.address import Mode, RedisAddress, parse
from oncekey.databases.redis.driver import AsyncRedisCells, RedisCells
from oncekey.databases.redis.talk import member_of, names_of
from oncekey.testing.claims import a_claim, again, answered
from oncekey_contract.walking import cell_of, records

START = (-1, "", "")


@pytest.fixture(scope="module")
def server():
    with StoringValkey() as server:
        yield server


@pytest.fixture
def url(server):
    server.say("FLUSHALL")
    return server.url


@pytest.fixture
def engine(url):
    engine = wire.connect(url)
    yield engine
    engine.close()


@pytest.fixture
def cells(url):
    cells = RedisCells(url)
    yield cells
    cells.close()


def settled(engine, body=b"done", **facts):
    claim = a_claim(**facts)
    verdict = flows.begin(engine, claim, Policy())
    assert isinstance(verdict, Proceed)
    assert flows.settle(engine, verdict.lease, answered(body)).ours
    return claim


# URLs


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://h", RedisAddress(Mode.SINGLE, (("h", 6379),))),
        ("redis://h:1/3", RedisAddress(Mode.SINGLE, (("h", 1),), database=3)),
        (
            "rediss://u:p%40@[::1]:2/0?ssl_ca_certs=ca.pem&pool_size=4",
            RedisAddress(
                Mode.SINGLE,
                (("::1", 2),),
                tls=True,
                username="u",
                password="p@",
                pool_size=4,
                files=(("ssl_ca_certs", "ca.pem"),),
            ),
        ),
        ("redis://:p@h", RedisAddress(Mode.SINGLE, (("h", 6379),), password="p")),
        (
            "redis+cluster://a:7000,b?wait=2&wait_ms=30",
            RedisAddress(Mode.CLUSTER, (("a", 7000), ("b", 6379)), wait=2, wait_ms=30),
        ),
        ("rediss+cluster://a:7000,b", RedisAddress(Mode.CLUSTER, (("a", 7000), ("b", 6379)), tls=True)),
        (
            "rediss+sentinel://a,b:5/shop/2",
            RedisAddress(Mode.SENTINEL, (("a", 26379), ("b", 5)), tls=True, service="shop", database=2),
        ),
    ],
)
def test_every_redis_url_form_is_parsed(url, address):
    assert parse(url) == address
    assert wire.understand(url) == Address(Kind.REDIS, url, pool_size=address.pool_size)


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("redis:h", "a Redis URL is redis://"),
        ("redis://", "a Redis URL is redis://"),
        ("redis://h:x", "port that is not a number"),
        ("redis://[::1", "closing bracket"),
        ("redis://a,b", "takes one server"),
        ("redis://h/x", "the database of a Redis store is a number"),
        ("redis://h?wait=-1", "wait of a Redis store is a number of at least 0"),
        ("redis://h?wait_ms=0", "wait_ms of a Redis store is a number of at least 1"),
        ("redis://h?retries=3", "no option retries"),
        ("redis://h?ssl_ca_certs=x", "use rediss"),
        ("redis+cluster://h/1", "has no numbered databases"),
        ("redis+sentinel://h", "the primary's name"),
        ("redis+ring://h", "no driver ring for redis"),
    ],
)
def test_invalid_redis_url_is_rejected_with_a_reason(url, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        Once(url)


@pytest.mark.parametrize(
    "url", ["redis://u:S3cret@h:x", "redis://u:S3cret?x@h", "redis://S3cret:x", "redis+x://S3cret@h"]
)
def test_redis_error_messages_hide_the_password(url):  # X8
    with pytest.raises(ConfigurationError) as raised:
        Once(url)
    assert "S3cret" not in str(raised.value)
    assert "S3cret" not in repr(parse("redis://u:S3cret@h"))


# What it is for


def test_redis_requires_low_stakes_on_every_operation():  # R184
    once = Once("redis://127.0.0.1:1")

    async def pay() -> None: ...

    with pytest.raises(ConfigurationError, match=r"pay: Redis can forget .* set low_stakes=True") as raised:
        once.protect(effects=INLINE, operation="pay")(pay)
    assert "\n" not in str(raised.value)
    with pytest.raises(ConfigurationError, match="low_stakes=True"):
        once.by_path(effects=INLINE, operation="pay")
    with pytest.raises(ConfigurationError, match="low_stakes=True"):
        once.function(effects=INLINE, key="key", operation="pay")(lambda op, key: None)
    once.protect(effects=INLINE, operation="pay", low_stakes=True)(pay)
    once.by_path(effects=INLINE, operation="other", low_stakes=True)
    Once("sqlite:///x.db").protect(effects=INLINE, operation="pay", low_stakes=True)(pay)


@pytest.mark.parametrize("effects", [LOCAL, OUTBOX])
async def test_transactional_effects_are_rejected_at_startup(url, effects):
    once = Once(url)

    @once.protect(effects=effects, operation="pay", low_stakes=True)
    async def pay() -> None: ...

    with pytest.raises(ConfigurationError, match=f"pay: effects={effects.name} needs a store that shares"):
        async with once.lifespan():
            pass


async def test_features_without_store_support_are_rejected_at_startup(url, caplog):
    for spoiling, sentence in (
        (lambda once: once.topic("mail")(print), "topics need a store with an outbox"),
        (lambda once: once.resolver("pay")(lambda question: None), "resolvers and webhooks"),
    ):
        once = Once(url)
        spoiling(once)
        with pytest.raises(ConfigurationError, match=sentence):
            async with once.lifespan():
                pass
    with pytest.raises(ConfigurationError, match="max_live_keys needs a store that counts"):
        async with Once(url, policy=Policy(max_live_keys=5)).lifespan():
            pass
    once = Once(url)

    @once.protect(effects=PHASED, operation="pay", low_stakes=True, complete=False)
    async def pay() -> None: ...

    async with once.lifespan():
        pass
    assert "pay: on this store a PHASED handler can use op.call and op.value but not op.phase" in caplog.text
    assert "this store has no audit trail" in caplog.text


# What the server forgets


def test_the_server_forgets_a_finished_key_an_hour_after_its_time(server, engine):
    claim = settled(engine)
    name = names_of(claim.id.scope, claim.id.key)[1][0]

    assert server.say("PEXPIRETIME", name) == (flows.find(engine, claim.id).record.expires_at + HOUR) // 1000

    open_claim = a_claim()
    flows.begin(engine, open_claim, Policy())
    assert server.say("PEXPIRETIME", names_of(open_claim.id.scope, open_claim.id.key)[1][0]) == -1


def test_expired_record_is_removed_from_its_index(server, engine, cells):
    claim = settled(engine)
    _, (name, pages) = names_of(claim.id.scope, claim.id.key)
    server.say("DEL", name)  # as its expiry does
    assert server.say("ZCARD", pages) == 1

    assert cells.page(Index.EXPIRING, START, 10)[0] == []

    assert server.say("ZCARD", pages) == 0
    assert isinstance(flows.begin(engine, again(claim), Policy()), Proceed)


def test_write_removes_outdated_index_members(server, cells):
    """Without a worker the pages would grow for ever."""
    cell = next(cell_of(one) for one in records(cells.look("", "")[1]) if one.state.value == "completed")
    pages = names_of(cell["scope"], cell["key"])[1][1]
    left = {**cell, "expires_at": 5, "key": "long ago"}
    server.say("ZADD", pages, 0, member_of(left))

    assert cells.swap(cell["scope"], cell["key"], None, cell, cell["expires_at"] + HOUR)

    assert server.say("ZRANGE", pages, 0, -1) == [member_of(cell)]


def test_scripts_that_the_server_has_lost_are_sent_again(server, engine):
    settled(engine)
    server.say("SCRIPT", "FLUSH")
    settled(engine)


def test_full_server_rejects_new_keys_but_settles_existing_ones(server, engine):
    claim = a_claim()
    verdict = flows.begin(engine, claim, Policy())
    server.say("CONFIG", "SET", "maxmemory", 1)
    try:
        with pytest.raises(StoreUnavailableError, match="maxmemory"):
            flows.begin(engine, a_claim(), Policy())
        assert flows.settle(engine, verdict.lease, answered()).ours
        assert isinstance(flows.begin(engine, again(claim), Policy()), Replay)
    finally:
        server.say("CONFIG", "SET", "maxmemory", 0)


# Replies that do not come


def test_a_swap_without_a_reply_is_ambiguous_and_a_look_is_not(server, url, engine, monkeypatch):
    settled(engine)  # a server that does not know the script yet would ask for it, and write nothing
    monkeypatch.setattr(driver, "PATIENCE", 0.2)
    cells = RedisCells(url)
    cell = cell_of(next(iter(records(cells.look("", "")[1]))))
    server.freeze()
    try:
        with pytest.raises(CommitAmbiguousError):
            cells.swap(cell["scope"], cell["key"], None, cell, None)
        with pytest.raises(StoreUnavailableError):
            cells.look(cell["scope"], cell["key"])
    finally:
        server.thaw()
    monkeypatch.setattr(driver, "PATIENCE", 30)
    other = RedisCells(url)
    wait_until(lambda: other.look(cell["scope"], cell["key"])[0] == cell)  # it was written after all
    cells.close()
    other.close()


async def test_a_cancelled_command_leaves_no_reply_to_the_next_one(server, url):
    cells = AsyncRedisCells(f"{url}?pool_size=1")
    first, second = [cell_of(one) for one, _ in zip(records(START_AT), range(2), strict=False)]
    await cells.look("", "")
    server.freeze()
    try:
        asked = asyncio.create_task(cells.look(first["scope"], first["key"]))
        for _ in range(50):  # turns of the loop, in which it is sent
            await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
    finally:
        server.thaw()
    assert await cells.swap(second["scope"], second["key"], None, second, None) is True
    assert (await cells.look(second["scope"], second["key"]))[0] == second
    await cells.close()


START_AT = 1_800_000_000_000_000


def test_refused_connection_is_unavailable_and_not_ambiguous(url):
    cells = RedisCells("redis://127.0.0.1:1")
    cell = cell_of(next(iter(records(START_AT))))
    with pytest.raises(StoreUnavailableError) as raised:
        cells.swap(cell["scope"], cell["key"], None, cell, None)
    assert not isinstance(raised.value, CommitAmbiguousError)


def test_threads_share_a_pool(engine):
    claims = [a_claim() for _ in range(60)]

    def run(mine):
        for claim in mine:
            verdict = flows.begin(engine, claim, Policy())
            flows.settle(engine, verdict.lease, answered(claim.id.key.encode()))

    threads = [threading.Thread(target=run, args=(claims[number::15],)) for number in range(15)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for claim in claims:
        assert flows.find(engine, claim.id).record.response.body == claim.id.key.encode()


# Replicas


@pytest.fixture(scope="module")
def watched():
    with pair() as both:
        yield both


def test_write_without_replica_confirmation_is_ambiguous(watched):
    engine = wire.connect(f"{watched.primary.url}?wait=1&wait_ms=100")
    before = settled(engine)
    begun = a_claim()
    lease = flows.begin(engine, begun, Policy()).lease
    watched.replica.freeze()
    try:
        with pytest.raises((CommitAmbiguousError, StoreUnavailableError)):
            flows.begin(engine, a_claim(), Policy())  # and so its handler is not entered
        with pytest.raises(CommitAmbiguousError):
            flows.settle(engine, lease, answered())
        # What is not known to last is not told to anybody, by whatever process.
        other = wire.connect(f"{watched.primary.url}?wait=1&wait_ms=100")
        for claim in (before, begun):
            with pytest.raises(StoreUnavailableError, match="too few replicas"):
                flows.begin(other, again(claim), Policy())
        other.close()
    finally:
        watched.replica.thaw()
    wait_until(lambda: isinstance(_asked(engine, begun), Replay))
    assert isinstance(flows.begin(engine, again(before), Policy()), Replay)
    engine.close()


def _asked(engine, claim):
    try:
        return flows.begin(engine, again(claim), Policy())
    except StoreUnavailableError:
        return None


# The doctor


def test_the_doctor_reads_eviction_persistence_and_replication(server, url):
    def findings(store=url):
        done = oncekey("doctor", "--store", store, "--workers", "0", "--json")
        return done.exit_code, {one["about"]: one for one in json.loads(done.stdout)["items"]}

    code, found = findings()
    assert (code, {name: found[name]["level"] for name in ("eviction", "persistence", "replication", "clock")}) == (
        0,
        {"eviction": "ok", "persistence": "ok", "replication": "ok", "clock": "ok"},
    )
    server.say("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    server.say("CONFIG", "SET", "appendfsync", "everysec")
    try:
        code, found = findings(f"{url}?wait=1")
    finally:
        server.say("CONFIG", "SET", "maxmemory-policy", "noeviction")
        server.say("CONFIG", "SET", "appendfsync", "always")
    assert (code, found["eviction"]["level"], found["persistence"]["level"]) == (2, "error", "warning")
    assert "allkeys-lru" in found["eviction"]["seen"]
    assert "everysec" in found["persistence"]["seen"]
    assert found["replication"]["level"] == "error"


def test_killed_server_keeps_acknowledged_writes():
    with StoringValkey() as own:
        engine = wire.connect(own.url)
        claims = [settled(engine) for _ in range(5)]
        own.kill()
        with pytest.raises(StoreUnavailableError):
            flows.begin(engine, again(claims[0]), Policy())
        own.start()
        assert all(isinstance(flows.begin(engine, again(claim), Policy()), Replay) for claim in claims)
        engine.close()
