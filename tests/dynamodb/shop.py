"""A shop whose orders lie in DynamoDB beside the keys. Run as a program it serves itself, to be killed."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import httpx
import uvicorn
from fastapi import FastAPI

from harness.patience import PATIENCE
from oncekey import INLINE, LOCAL, PHASED, Once, Operation, SyncOperation
from oncekey.databases.dynamodb.driver import Items

ORDERS = "orders"
ORDERS_TABLE = {
    "TableName": ORDERS,
    "BillingMode": "PAY_PER_REQUEST",
    "KeySchema": [{"AttributeName": "id", "KeyType": "HASH"}],
    "AttributeDefinitions": [{"AttributeName": "id", "AttributeType": "S"}],
}


class Shop:
    """The application. `runs` counts how often handlers ran, `paid` how often the provider was called."""

    def __init__(self, store: str, *, hold: bool = False) -> None:
        self.once = Once(store)
        self.app = FastAPI(lifespan=self.once.lifespan)
        self.runs: list[str] = []
        self.paid: list[str] = []
        self.held = threading.Event()
        self._hold = hold
        self.fails: list[Exception | None] = []
        """What goes wrong at the next places where something can."""
        once, app = self.once, self.app

        @app.post("/orders/{order}", status_code=201)
        @once.protect(effects=LOCAL)
        async def place_order(order: str, op: Operation[Items], items: int = 1, times: int = 1):
            self.runs.append(order)
            for number in range(items):
                stage(op.connection, order if items == 1 else f"{order}-{number}")
            if self._hold:
                self.held.set()
                await asyncio.sleep(PATIENCE)
            self._trouble()
            return {"order": order, "attempt": op.attempt, "receipt": "x" * times}

        @app.post("/threads/{order}", status_code=201)
        @once.protect(effects=LOCAL)
        def place_order_in_a_thread(order: str, op: SyncOperation[Items]):
            self.runs.append(order)
            stage(op.connection, order)
            return {"order": order, "attempt": op.attempt}

        @app.post("/counted/{order}", status_code=201)
        @once.protect(effects=LOCAL)
        async def count_order(order: str, op: Operation[Items]):
            op.connection.update(
                TableName=ORDERS,
                Key={"id": {"S": order}},
                UpdateExpression="ADD executions :one",
                ExpressionAttributeValues={":one": {"N": "1"}},
            )
            return {"attempt": op.attempt}

        @app.post("/receipts/{order}", status_code=201)
        @once.protect(effects=LOCAL)
        async def emit_a_receipt(order: str, op: Operation[Items]):
            stage(op.connection, order)
            op.emit("receipt", {})

        @app.post("/mails/{mail}", status_code=202)
        @once.protect(effects=INLINE)
        async def send_mail(mail: str, op: Operation):
            self.runs.append(mail)
            self._trouble()
            return {"mail": mail}

        @app.post("/payments/{order}", status_code=201)
        @once.protect(effects=PHASED)
        async def pay(order: str, op: Operation, body: dict[str, str]):
            self.runs.append(order)
            drawn = await op.value("drawn", time.time_ns)
            made = await op.phase("created", stage, order)
            charge = await op.call("charged", self._charge, repeatable=True)
            self._trouble()
            return {"order": made, "charge": charge, "drawn": drawn, "attempt": op.attempt}

        once.install(app, tenant=lambda _: "shop")

    def _charge(self, *, key: str) -> str:
        self.paid.append(key)
        self._trouble()
        return key

    def _trouble(self) -> None:
        trouble = self.fails.pop(0) if self.fails else None
        if trouble is not None:
            raise trouble


def stage(items: Items, order: str) -> str:
    items.put(TableName=ORDERS, Item={"id": {"S": order}}, ConditionExpression="attribute_not_exists(id)")
    return order


async def post(client: httpx.AsyncClient, path: str, key: str, **options) -> httpx.Response:
    return await client.post(path, headers={"Idempotency-Key": f'"{key}"'}, timeout=PATIENCE, **options)


if __name__ == "__main__":
    shop = Shop(os.environ["SHOP_STORE"], hold=True)
    uvicorn.run(shop.app, host="127.0.0.1", port=int(os.environ["SHOP_PORT"]), log_level="error")
