"""What is lost, refused, throttled or late between a process and DynamoDB, and what the flows make of it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from socket import gaierror

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    ReadTimeoutError,
)

from dynamodb.unreliable import Unreliable
from harness import flows
from harness.dynamo import everything
from harness.patience import PATIENCE
from harness.ports import free_port
from harness.proxy import Proxy
from oncekey import wire
from oncekey.cells import Seen, Swap
from oncekey.core.errors import (
    CommitAmbiguousError,
    ConfigurationError,
    RecordUnreadableError,
    RolledBackError,
    SchemaError,
    StoreUnavailableError,
    TransactionControlError,
)
from oncekey.core.model import SECOND, Completed, Outcome, Proceed, Replay, State, StoredResponse
from oncekey.core.policy import Policy
from oncekey.databases.dynamodb.driver import PAUSES, AsyncDynamoCells, DynamoCells, DynamoDriver, Table
from oncekey.databases.dynamodb.talk import Dialogue, Failed, Refused, Request, understood
from oncekey.stores.cells import DynamoStore
from oncekey.testing.claims import a_claim, again, answered
from oncekey_contract import blocking
from oncekey_contract.cells import _cells

LONG = Completed(StoredResponse(200, (), b"z" * 900_000), Outcome.SUCCESS)


@pytest.fixture(params=["moto", "dynalite"])
def server(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def table(server, new_table):
    return new_table(server)


@pytest.fixture
def cells(server, table):
    cells = DynamoCells(Table(table, "us-east-1", server.endpoint))
    yield cells
    cells.close()


# What an error means


def refused(code, status=400):
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutItem")


def unreached(why):
    return EndpointConnectionError(endpoint_url="x", error=why)


@pytest.mark.parametrize(
    ("error", "to_a_write", "to_a_read"),
    [
        (refused("ProvisionedThroughputExceededException"), (StoreUnavailableError, True), None),
        (refused("ThrottlingException"), (StoreUnavailableError, True), None),
        (refused("RequestLimitExceeded"), (StoreUnavailableError, True), None),
        (refused("AccessDeniedException"), (StoreUnavailableError, False), None),
        (refused("ValidationException"), (StoreUnavailableError, False), None),
        (refused("ResourceNotFoundException"), (SchemaError, False), None),
        (refused("InternalServerError", 500), (CommitAmbiguousError, False), (StoreUnavailableError, True)),
        (refused("ServiceUnavailable", 503), (CommitAmbiguousError, False), (StoreUnavailableError, True)),
        (ReadTimeoutError(endpoint_url="x"), (CommitAmbiguousError, False), (StoreUnavailableError, True)),
        (ConnectionClosedError(endpoint_url="x"), (CommitAmbiguousError, False), (StoreUnavailableError, True)),
        (unreached(gaierror()), (StoreUnavailableError, False), (StoreUnavailableError, True)),
        (unreached(ConnectionResetError()), (CommitAmbiguousError, False), (StoreUnavailableError, True)),
        (unreached(None), (CommitAmbiguousError, False), (StoreUnavailableError, True)),
        (ConnectTimeoutError(endpoint_url="x"), (StoreUnavailableError, False), (StoreUnavailableError, True)),
        (NoCredentialsError(), (StoreUnavailableError, False), (StoreUnavailableError, True)),
    ],
    ids=lambda one: str(one)[:60],
)
def test_service_errors_map_to_store_errors(error, to_a_write, to_a_read):
    for writes, meant in ((True, to_a_write), (False, to_a_read or to_a_write)):
        told = understood(error, Request("put_item" if writes else "get_item", {"TableName": "t"}, writes=writes))
        assert isinstance(told, Failed)
        assert (type(told.error), told.again) == meant


@pytest.mark.parametrize("code", ["ConditionalCheckFailedException", "TransactionConflictException"])
def test_conditional_failures_are_refusals_and_not_errors(code):
    assert understood(refused(code), Request("put_item", {}, writes=True)) == Refused(code)


# Over the wire


def test_a_lost_reply_to_a_claim_is_found_by_its_owner(server, table):
    with Proxy("127.0.0.1", server.port) as proxy:
        engine = wire.connect(server.url(table, proxy.port))
        lost = proxy.lose_reply(b"DynamoDB_20120810.PutItem")
        claim = a_claim()
        verdict = flows.begin(engine, claim, Policy())
        assert lost.is_set()
        assert isinstance(verdict, Proceed)
        assert (verdict.record.owner, verdict.record.version) == (claim.owner, 1)
        lost = proxy.lose_reply(b"DynamoDB_20120810.PutItem")
        assert flows.settle(engine, verdict.lease, answered()).ours
        assert lost.is_set()
        assert isinstance(flows.begin(engine, again(claim), Policy()), Replay)
        engine.close()


async def test_lost_replies_under_asyncio(server, table):
    with Proxy("127.0.0.1", server.port) as proxy:
        engine = wire.aconnect(server.url(table, proxy.port))
        proxy.lose_reply(b"DynamoDB_20120810.PutItem")
        claim = a_claim()
        verdict = await flows.abegin(engine, claim, Policy())
        assert isinstance(verdict, Proceed)
        proxy.lose_reply(b"DynamoDB_20120810.PutItem")
        assert (await flows.asettle(engine, verdict.lease, answered())).ours
        proxy.lose_reply(b"DynamoDB_20120810.GetItem")
        assert isinstance(await flows.abegin(engine, again(claim), Policy()), Replay)
        await engine.close()


def test_swap_with_lost_reply_is_ambiguous_and_not_repeated(server, table):
    (cell,) = _cells()
    with Proxy("127.0.0.1", server.port) as proxy:
        cells = DynamoCells(Table(table, "us-east-1", f"http://127.0.0.1:{proxy.port}"))
        proxy.lose_reply(b"DynamoDB_20120810.PutItem")
        with pytest.raises(CommitAmbiguousError):
            cells.swap(cell["scope"], cell["key"], None, cell, None)
        assert cells.look(cell["scope"], cell["key"])[0] == cell
        proxy.shut()
        proxy.cut()
        with pytest.raises((StoreUnavailableError, CommitAmbiguousError)):
            cells.swap(cell["scope"], cell["key"], Seen(cell["incarnation"], cell["version"]), None, None)
        with pytest.raises(StoreUnavailableError):
            cells.look(cell["scope"], cell["key"])
        cells.close()


def test_connection_reset_after_a_write_is_ambiguous(server, table):
    (cell,) = _cells()
    with Unreliable(server.port) as between:
        cells = DynamoCells(Table(table, "us-east-1", f"http://127.0.0.1:{between.port}"))
        between.spoil("PutItem", "reset")
        with pytest.raises(CommitAmbiguousError):
            cells.swap(cell["scope"], cell["key"], None, cell, None)
        assert cells.look(cell["scope"], cell["key"])[0] == cell
        cells.close()


async def test_connection_reset_after_a_write_is_ambiguous_under_asyncio(server, table):
    """aiobotocore calls it an endpoint that cannot be reached, as it calls one that nobody listens on."""
    (cell,) = _cells()
    with Unreliable(server.port) as between:
        cells = AsyncDynamoCells(Table(table, "us-east-1", f"http://127.0.0.1:{between.port}"))
        between.spoil("PutItem", "reset")
        with pytest.raises(CommitAmbiguousError):
            await cells.swap(cell["scope"], cell["key"], None, cell, None)
        assert (await cells.look(cell["scope"], cell["key"]))[0] == cell
        await cells.close()
    nobody = AsyncDynamoCells(Table(table, "us-east-1", f"http://127.0.0.1:{free_port()}"))
    with pytest.raises(StoreUnavailableError):
        await nobody.swap(cell["scope"], cell["key"], None, cell, None)
    await nobody.close()


def test_throttled_requests_are_retried_up_to_a_limit(server, table):
    (cell,) = _cells()
    throttled = (400, "ProvisionedThroughputExceededException")
    with Unreliable(server.port) as between:
        cells = DynamoCells(Table(table, "us-east-1", f"http://127.0.0.1:{between.port}"))
        between.spoil("PutItem", *[throttled] * len(PAUSES))
        assert cells.swap(cell["scope"], cell["key"], None, cell, None)
        between.spoil("GetItem", *[throttled] * (len(PAUSES) + 1))
        with pytest.raises(StoreUnavailableError, match="ProvisionedThroughputExceeded"):
            cells.look(cell["scope"], cell["key"])
        assert Counter(between.seen) == {"PutItem": len(PAUSES) + 1, "GetItem": len(PAUSES) + 1}
        cells.close()


def test_a_record_that_a_transaction_holds_is_looked_at_again(server, table):
    with Unreliable(server.port) as between:
        engine = wire.connect(server.url(table, between.port))
        between.spoil("PutItem", (400, "TransactionConflictException"))
        assert isinstance(flows.begin(engine, a_claim(), Policy()), Proceed)
        assert between.seen == ["GetItem", "PutItem", "GetItem", "PutItem"]
        engine.close()


@pytest.mark.parametrize(
    ("reasons", "meant"),
    [
        (("ConditionalCheckFailed", "None"), False),
        (("ConditionalCheckFailed", "ConditionalCheckFailed"), False),  # the record's own word comes first
        (("TransactionConflict", "None"), False),
        (("None", "TransactionConflict"), False),
        (("None", "ConditionalCheckFailed"), RolledBackError),
        (("None", "ItemCollectionSizeLimitExceeded"), RolledBackError),
        (("None", "ThrottlingError"), StoreUnavailableError),
        (("ProvisionedThroughputExceeded", "None"), StoreUnavailableError),
    ],
)
def test_cancelled_transaction_reasons_map_to_errors(reasons, meant):
    talk = Dialogue("keys").transact([Swap("s", "k", Seen("i", 1), None, None)], [{"Put": {}}])
    next(talk)
    with pytest.raises(StopIteration if meant is False else meant) as told:
        talk.send(Refused("TransactionCanceledException", reasons))
    assert meant is not False or told.value.value is False
    assert meant is False or type(told.value) is meant


def test_internal_server_error_on_a_write_is_ambiguous(server, table):
    (cell,) = _cells()
    with Unreliable(server.port) as between:
        cells = DynamoCells(Table(table, "us-east-1", f"http://127.0.0.1:{between.port}"))
        between.spoil("PutItem", (500, "InternalServerError"))
        with pytest.raises(CommitAmbiguousError):
            cells.swap(cell["scope"], cell["key"], None, cell, None)
        assert between.seen == ["PutItem"]
        cells.close()


def test_response_without_date_raises_store_unavailable(server, table):
    with Unreliable(server.port) as between:
        cells = DynamoCells(Table(table, "us-east-1", f"http://127.0.0.1:{between.port}"))
        between.spoil("GetItem", "no date")
        with pytest.raises(StoreUnavailableError, match="Date"):
            cells.look("s", "k")
        cells.close()


def test_the_clock_is_the_services_and_never_ahead(cells):
    before = time.time_ns() // 1000
    _, now = cells.look("s", "k")
    after = time.time_ns() // 1000
    assert before - SECOND < now <= after  # the same machine's clock, in whole seconds
    assert now % SECOND == 0


def test_missing_table_raises_schema_error(server):
    engine = wire.connect(server.url("nothing-here"))
    with pytest.raises(SchemaError, match="oncekey migrate up"):
        engine.check()
    with pytest.raises(SchemaError, match="nothing-here"):
        flows.begin(engine, a_claim(), Policy())
    engine.close()


# Records longer than an item


def parts_in(clients, server, table):
    return [item for item in everything(clients[server.port], table) if "piece" in item]


def test_parts_are_deleted_with_their_record(server, table, clients):
    with blocking(DynamoStore, DynamoDriver(Table(table, "us-east-1", server.endpoint))) as world:
        claim = a_claim()
        assert world.settle(world.owned(claim), LONG).ours
        assert len(parts_in(clients, server, table)) == 3
        assert world.record(claim.id).response == LONG.response
        world.advance(claim.ttl)
        assert isinstance(world.begin(again(claim)), Proceed)  # another life
        assert parts_in(clients, server, table) == []


def test_a_part_that_cannot_be_deleted_does_not_hide_that_the_record_was_written(server, table, clients):
    (cell,) = _cells()
    long = {**cell, "response_body": b"z" * 500_000}
    short = {**cell, "version": cell["version"] + 1}
    with Unreliable(server.port) as between:
        cells = DynamoCells(Table(table, "us-east-1", f"http://127.0.0.1:{between.port}"))
        assert cells.swap(cell["scope"], cell["key"], None, long, None)
        assert cells.look(cell["scope"], cell["key"])[0] == long
        between.spoil("DeleteItem", (400, "AccessDeniedException"))
        assert cells.swap(cell["scope"], cell["key"], Seen(cell["incarnation"], cell["version"]), short, None)
        assert cells.look(cell["scope"], cell["key"])[0] == short
        cells.close()
    assert len(parts_in(clients, server, table)) == 2  # they cost their storage


def test_a_swap_that_fails_leaves_no_parts(server, table, clients, cells):
    (cell,) = _cells()
    long = {**cell, "response_body": b"z" * 500_000}
    assert not cells.swap(cell["scope"], cell["key"], Seen(cell["incarnation"], cell["version"]), long, None)
    assert parts_in(clients, server, table) == []


def test_a_record_whose_parts_are_lost_is_not_run_again(server, table, clients, cells):
    (cell,) = _cells()
    long = {**cell, "response_body": b"z" * 500_000}
    assert cells.swap(cell["scope"], cell["key"], None, long, None)
    clients[server.port].delete_item(TableName=table, Key={"pk": parts_in(clients, server, table)[0]["pk"]})
    with pytest.raises(RecordUnreadableError):
        cells.look(cell["scope"], cell["key"])


def test_expired_record_may_lose_its_parts_first(server, table, clients, cells):
    """The service deletes items in whatever order: an expired record without its parts still makes room."""
    (cell,) = _cells()
    long = {**cell, "response_body": b"z" * 500_000}
    assert cells.swap(cell["scope"], cell["key"], None, long, SECOND)
    for part in parts_in(clients, server, table):
        assert part["forget_at"] == {"N": "1"}
        clients[server.port].delete_item(TableName=table, Key={"pk": part["pk"]})
    assert cells.look(cell["scope"], cell["key"])[0] == {**long, "response_body": None}


# The handler's items


@pytest.fixture
def driver(moto, new_table):
    driver = DynamoDriver(Table(new_table(moto), "us-east-1", moto.endpoint))
    yield driver
    driver.close()


@pytest.fixture
def world(driver):
    with blocking(DynamoStore, driver) as world:
        yield world


def put(table, name):
    return {"TableName": table, "Item": {"pk": {"B": name.encode()}}}


@pytest.fixture
def theirs(moto, new_table):
    """A table of the application's."""
    return new_table(moto)


def names(clients, moto, table):
    return sorted(bytes(item["pk"]["B"]).decode() for item in everything(clients[moto.port], table))


def test_heartbeat_before_commit_does_not_lose_the_response(world, driver, theirs, clients, moto):
    claim = a_claim()
    lease = world.owned(claim)
    tx = driver.begin()
    tx.connection.put(**put(theirs, "row"))
    assert tx.run(world.store.settling(lease, answered())).ours
    assert world.renew(lease, claim.lease) is not None
    tx.commit()
    assert (world.record(claim.id).state, names(clients, moto, theirs)) == (State.COMPLETED, ["row"])


def test_commit_after_a_takeover_is_rejected(world, driver, theirs, clients, moto):
    claim = a_claim()
    lease = world.owned(claim)
    tx = driver.begin()
    tx.connection.put(**put(theirs, "row"))
    assert tx.run(world.store.settling(lease, answered())).ours
    world.advance(claim.lease)
    assert isinstance(world.begin(again(claim)), Proceed)
    with pytest.raises(StoreUnavailableError):
        tx.commit()
    assert (world.record(claim.id).fence, names(clients, moto, theirs)) == (2, [])


def test_open_transaction_sees_its_own_writes(world, driver):
    claim = a_claim()
    lease = world.owned(claim)
    tx = driver.begin()
    assert tx.run(world.store.settling(lease, answered())).ours
    assert tx.run(world.store.settling(lease, answered())).ours  # said again, it finds its own word
    assert world.record(claim.id).state is State.IN_PROGRESS
    tx.rollback()
    assert world.record(claim.id).state is State.IN_PROGRESS


@pytest.mark.parametrize(
    ("staged", "why"),
    [
        ({"ConditionExpression": "attribute_exists(pk)"}, "item 1 ConditionalCheckFailed"),
        ({"Item": {"pk": {"B": b"other"}}}, "ValidationException"),  # which is staged below, too
        ({"Item": {"pk": {"S": "no bytes"}}}, "refused"),
        ({"Item": "no item"}, "TransactWriteItems does not accept"),
        ({"TableName": "nothing-here"}, "ResourceNotFoundException"),
    ],
)
def test_items_that_are_refused_are_rolled_back(world, driver, theirs, clients, moto, staged, why):  # noqa: PLR0917
    claim = a_claim()
    lease = world.owned(claim)
    tx = driver.begin()
    tx.connection.put(**{**put(theirs, "row"), **staged})
    tx.connection.put(**put(theirs, "other"))
    tx.run(world.store.settling(lease, answered()))
    with pytest.raises(RolledBackError, match=why):
        tx.commit()
    assert (world.record(claim.id).state, names(clients, moto, theirs)) == (State.IN_PROGRESS, [])


def test_put_delete_update_and_check_commit_together(world, driver, theirs, clients, moto):
    for name in ("there", "old"):
        clients[moto.port].put_item(**put(theirs, name))
    lease = world.owned(a_claim())
    tx = driver.begin()
    tx.connection.put(**put(theirs, "new"))
    tx.connection.delete(TableName=theirs, Key={"pk": {"B": b"old"}})
    tx.connection.update(
        TableName=theirs,
        Key={"pk": {"B": b"updated"}},
        UpdateExpression="SET a = :a",
        ExpressionAttributeValues={":a": {"N": "1"}},
    )
    tx.connection.check(TableName=theirs, Key={"pk": {"B": b"there"}}, ConditionExpression="attribute_exists(pk)")
    tx.run(world.store.settling(lease, answered()))
    tx.commit()
    assert names(clients, moto, theirs) == ["new", "there", "updated"]
    with pytest.raises(TransactionControlError):
        tx.connection.put(**put(theirs, "late"))


def test_items_without_a_key_are_written_too(driver, theirs, clients, moto):
    tx = driver.begin()
    tx.connection.put(**put(theirs, "row"))
    tx.commit()
    assert names(clients, moto, theirs) == ["row"]


def test_oncekey_table_cannot_be_written_in_a_transaction(driver):
    tx = driver.begin()
    for name in (driver.table, f"arn:aws:dynamodb:eu-central-1:123456789012:table/{driver.table}"):
        with pytest.raises(ConfigurationError, match="own table"):
            tx.connection.put(**put(name, "row"))


# Many processes

RACER = """
import sys
from oncekey import wire
from oncekey.core.model import Proceed
from oncekey.core.policy import Policy
from oncekey.engine import request
from oncekey.core.flow import drive
from oncekey.testing.claims import a_claim
engines = [wire.connect(url) for url in sys.argv[2:]]
for engine in engines:
    engine.check()
print("ready", flush=True)
sys.stdin.readline()
for number in range(int(sys.argv[1])):
    for which, engine in enumerate(engines):
        verdict = drive(request.begin(engine.store, a_claim(f"raced-{number}"), Policy()), engine.driver.run)
        print(f"{which}/{number}" if isinstance(verdict, Proceed) else "-", flush=True)
"""


def test_concurrent_processes_claim_one_dynamodb_key_once(moto, dynalite, new_table):
    """Each round has one winner on each emulator (R50)."""
    rounds, urls = 30, [server.url(new_table(server)) for server in (moto, dynalite)]
    command = [sys.executable, "-c", RACER, str(rounds), *urls]
    racers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    try:
        for racer in racers:
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            racer.stdin.write("go\n")
            racer.stdin.flush()
        said = [racer.communicate(timeout=PATIENCE)[0].split() for racer in racers]
    finally:
        for racer in racers:
            racer.kill()
            racer.wait()
    won = Counter(word for words in said for word in words if word != "-")
    assert won == {f"{which}/{number}": 1 for which in range(2) for number in range(rounds)}
