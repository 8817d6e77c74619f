"""Real requests: the handler's items and the key in one transaction, replays, steps that are resumed, kill -9.

On moto, because dynalite has no transactions."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import uuid
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest

from dynamodb.shop import ORDERS, ORDERS_TABLE, Shop, post
from harness.asgi import until
from harness.dynamo import CREDENTIALS, everything
from harness.patience import PATIENCE, wait_until
from harness.ports import free_port
from harness.proxy import Proxy
from harness.served import Served
from oncekey.workers.completer import Completer


class World:
    """A table, the orders beside it, and what lies there."""

    def __init__(self, server, client, table):
        self.server, self.client, self.table = server, client, table
        self.order, self.key = f"order-{uuid.uuid4().hex}", uuid.uuid4().hex

    def url(self, port=None):
        return self.server.url(self.table, port)

    @asynccontextmanager
    async def shop(self, port=None):
        shop = Shop(self.url(port))
        with Served(shop.app) as served:
            # Uvicorn closes a connection whose handler raised, and may do so while the next request is on its way.
            fresh = httpx.Limits(max_keepalive_connections=0)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.port}", limits=fresh) as client:
                yield shop, client

    def placed(self, order=None):
        """How many orders there are of this name, or whose names begin so."""
        return sum(row["id"]["S"].startswith(order or self.order) for row in everything(self.client, ORDERS))

    @property
    def records(self):
        """Items with a state are records; parts have none."""
        return [item for item in everything(self.client, self.table) if "state" in item]

    @property
    def state(self):
        (record,) = self.records
        return record["state"]["S"]

    def lease_over(self):
        """As the clock would do it."""
        (record,) = self.records
        self.client.update_item(
            TableName=self.table,
            Key={"pk": record["pk"]},
            UpdateExpression="SET lease_until = :past",
            ExpressionAttributeValues={":past": {"N": "1"}},
        )


@pytest.fixture
def world(moto, clients, new_table):
    table = new_table(moto)
    client = clients[moto.port]
    with suppress(client.exceptions.ResourceInUseException):  # a list of tables ends after a hundred
        client.create_table(**ORDERS_TABLE)
    return World(moto, client, table)


@pytest.mark.parametrize("path", ["orders", "threads"])
async def test_items_and_key_are_one_write(world, path):
    # R74
    async with world.shop() as (shop, client):
        first = await post(client, f"/{path}/{world.order}", world.key)
        again = await post(client, f"/{path}/{world.order}", world.key)
        assert (first.status_code, again.status_code) == (201, 201)
        assert again.content == first.content
        assert again.headers["Idempotent-Replayed"] == "true"
        assert shop.runs == [world.order]
    assert (world.placed(), world.state) == (1, "completed")


async def test_a_handler_that_fails_leaves_no_item(world):
    async with world.shop() as (shop, client):
        shop.fails.append(RuntimeError())
        assert (await post(client, f"/orders/{world.order}", world.key)).status_code == 500
        assert (world.placed(), world.state) == (0, "failed_retryable")
        again = await post(client, f"/orders/{world.order}", world.key)
        assert (again.status_code, again.json()["attempt"]) == (201, 2)
    assert world.placed() == 1


async def test_item_rejected_by_dynamodb_fails_the_request(world):
    async with world.shop() as (_, client):
        assert (await post(client, f"/orders/{world.order}", world.key)).status_code == 201
        taken = await post(client, f"/orders/{world.order}", uuid.uuid4().hex)
        assert (taken.status_code, taken.json()["code"]) == (500, "idempotency_execution_failed")
    states = sorted(record["state"]["S"] for record in world.records)
    assert (world.placed(), states) == (1, ["completed", "failed_retryable"])


async def test_transaction_item_limit_is_enforced(world):
    async with world.shop() as (_, client):
        assert (await post(client, f"/orders/{world.order}?items=99", world.key)).status_code == 201
        assert world.placed() == 99
        other = f"order-{uuid.uuid4().hex}"
        many = await post(client, f"/orders/{other}?items=100", uuid.uuid4().hex)
        assert (many.status_code, world.placed(other)) == (500, 0)


async def test_response_larger_than_an_item_is_replayed(world):
    async with world.shop() as (_, client):
        first = await post(client, f"/orders/{world.order}?times=900000", world.key)
        again = await post(client, f"/orders/{world.order}?times=900000", world.key)
        assert (first.status_code, again.headers["Idempotent-Replayed"]) == (201, "true")
        assert again.content == first.content
    assert world.placed() == 1


async def test_emit_fails_without_an_outbox(world):
    async with world.shop() as (_, client):
        assert (await post(client, f"/receipts/{world.order}", world.key)).status_code == 500
    assert (world.placed(), world.state) == (0, "failed_retryable")


async def test_inline_runs_once(world):
    async with world.shop() as (shop, client):
        answers = [await post(client, "/mails/hello", world.key) for _ in range(2)]
        assert [one.status_code for one in answers] == [202, 202]
        assert shop.runs == ["hello"]


async def test_phased_handler_resumes_after_its_last_step(world):
    """Phase, call and value are not done again; the request itself is longer than an item."""
    body = {"note": "y" * 600_000}
    async with world.shop() as (shop, client):
        shop.fails += [ConnectionResetError(), None, RuntimeError()]
        assert (await post(client, f"/payments/{world.order}", world.key, json=body)).status_code == 500
        assert (world.placed(), world.state) == (1, "failed_retryable")
        assert (await post(client, f"/payments/{world.order}", world.key, json=body)).status_code == 500
        done = await post(client, f"/payments/{world.order}", world.key, json=body)
        assert (done.status_code, done.json()["attempt"]) == (201, 3)
        assert len(shop.paid) == 2  # the first one's reply was lost, and it is repeatable
        assert len(set(shop.paid)) == 1
    assert (world.placed(), world.state) == (1, "completed")


async def test_completer_resumes_a_request_without_its_client(world):
    async with world.shop() as (shop, client):
        shop.fails += [ConnectionResetError()]
        await post(client, f"/payments/{world.order}", world.key, json={})
        assert world.state == "failed_retryable"
        (record,) = world.records
        world.client.update_item(
            TableName=world.table,
            Key={"pk": record["pk"]},
            UpdateExpression="SET reconcile_after = :now",
            ExpressionAttributeValues={":now": {"N": "1"}},
        )
    other = Shop(world.url())
    async with other.once.lifespan(other.app):
        assert await Completer(other.once).run_once() == 1
    assert (world.placed(), world.state, other.runs) == (1, "completed", [world.order])


async def test_transaction_with_lost_reply_returns_the_stored_response(world):
    """It was written: the client hears the answer that is stored (P7)."""
    with Proxy("127.0.0.1", world.server.port) as proxy:
        async with world.shop(proxy.port) as (shop, client):
            lost = proxy.lose_reply(b"TransactWriteItems")
            answer = await post(client, f"/orders/{world.order}", world.key)
            assert lost.is_set()
            assert (answer.status_code, answer.json()["order"], shop.runs) == (201, world.order, [world.order])
    assert (world.placed(), world.state) == (1, "completed")


async def test_a_transaction_that_never_arrived_may_be_tried_again(world):
    with Proxy("127.0.0.1", world.server.port) as proxy:
        async with world.shop(proxy.port) as (shop, client):
            lost = proxy.lose_request(b"TransactWriteItems")
            assert (await post(client, f"/orders/{world.order}", world.key)).status_code == 503
            assert lost.is_set()
            assert (world.placed(), world.state) == (0, "failed_retryable")
            assert (await post(client, f"/orders/{world.order}", world.key)).status_code == 201
            assert len(shop.runs) == 2
    assert world.placed() == 1


async def test_a_transaction_that_arrives_late_is_refused(world):
    """The record has moved on, so neither the answer nor the items are written a second time."""
    with Proxy("127.0.0.1", world.server.port) as proxy:
        async with world.shop(proxy.port) as (_, client):
            late = proxy.postpone(b"TransactWriteItems")
            assert (await post(client, f"/orders/{world.order}", world.key)).status_code == 503
            late.deliver()
            assert (world.placed(), world.state) == (0, "failed_retryable")
            answer = await post(client, f"/orders/{world.order}", world.key)
            assert (answer.status_code, answer.json()["attempt"]) == (201, 2)
    assert world.placed() == 1


async def test_a_storm_of_lost_requests_and_replies_executes_each_once(world):
    """Two servers, three clients for each key, and a network that loses the first of everything (R50, R62)."""
    keys = [f"{world.order}-{number}" for number in range(6)]
    answers = {key: set() for key in keys}

    async def insist(client, key):
        while True:
            answer = await post(client, f"/counted/{key}", f"{world.key}-{key}")
            if answer.status_code == 201:
                answers[key].add(answer.content)
                return
            assert answer.status_code in {409, 503}, answer.content
            await asyncio.sleep(0.02)

    with Proxy("127.0.0.1", world.server.port) as proxy:
        async with world.shop(proxy.port) as (_, one), world.shop(proxy.port) as (_, other):
            lost = []
            for _ in range(4):
                for operation in (b"TransactWriteItems", b"PutItem", b"GetItem"):
                    lost += [proxy.lose_reply(operation), proxy.lose_request(operation)]
            await asyncio.gather(*(insist(client, key) for key in keys for client in (one, other, one)))
            assert sum(one.is_set() for one in lost) > len(keys)
    counted = {item["id"]["S"]: item.get("executions") for item in everything(world.client, ORDERS)}
    assert {key: counted[key] for key in keys} == {key: {"N": "1"} for key in keys}
    assert all(len(heard) == 1 for heard in answers.values()), answers


async def test_a_server_killed_in_its_handler_has_written_nothing(world):
    port = free_port()
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-m", "dynamodb.shop"]
    environment = os.environ | CREDENTIALS | {"SHOP_STORE": world.url(), "SHOP_PORT": str(port)}
    victim = subprocess.Popen(command, cwd=tests, env=environment)  # noqa: ASYNC220  (nothing else runs here)
    try:
        wait_until(lambda: _serves(port), "the server did not start")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            sent = asyncio.create_task(post(client, f"/orders/{world.order}", world.key))
            await until(lambda: world.records)
            victim.kill()
            with pytest.raises(httpx.HTTPError):
                await sent
    finally:
        victim.kill()
        victim.wait(PATIENCE)
    assert (world.placed(), world.state) == (0, "in_progress")
    async with world.shop() as (shop, client):
        assert (await post(client, f"/orders/{world.order}", world.key)).status_code == 409
        world.lease_over()
        answer = await post(client, f"/orders/{world.order}", world.key)
        assert (answer.status_code, answer.json()["attempt"], len(shop.runs)) == (201, 2, 1)
    assert (world.placed(), world.state) == (1, "completed")


def _serves(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/openapi.json").status_code == 200
    except httpx.HTTPError:
        return False
