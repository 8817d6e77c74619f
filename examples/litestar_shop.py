"""A payments service on Litestar: orders that commit with their key, and payments that survive a crash.

    python examples/litestar_shop.py

serves it on port 8000 until Ctrl-C, with its database in the working folder. It needs
`pip install 'oncekey[litestar]' uvicorn`. Send the same request twice:

    curl -i localhost:8000/orders -H 'Idempotency-Key: my-first-order-0001' -d '{"product": "tea", "cents": 450}'
    curl -i localhost:8000/payments -H 'Idempotency-Key: my-first-payment-01' -d '{"order": 1}'

and look at /idempotency-keys/my-first-payment-01, and at /schema, which describes the API.
"""

import os
import sqlite3
from contextlib import closing
from typing import Any

import uvicorn
from litestar import Litestar, Request, post
from litestar.exceptions import NotFoundException

from oncekey import LOCAL, PHASED, SINGLE_TENANT, Once, Operation
from oncekey.litestar import OncePlugin

DATABASE = os.environ.get("SHOP_DATABASE", "litestar_shop.db")
PORT = int(os.environ.get("SHOP_PORT", "8000"))
ORDERS = "CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, product TEXT, cents INTEGER, charge TEXT)"
INSERT = "INSERT INTO orders (product, cents) VALUES (?, ?) RETURNING id"

# Workers in the process that serves: they go on with payments that a crash left behind.
once = Once(f"sqlite:///{DATABASE}", migrate=True, workers=True)


@post("/orders")
@once.protect(effects=LOCAL)
async def create_order(request: Request[Any, Any, Any], op: Operation) -> dict[str, int]:
    """Take an order; its row and the stored answer are one commit."""
    order = await request.json()
    cursor = await op.connection.execute(INSERT, (order["product"], order["cents"]))
    row = await cursor.fetchone()
    return {"id": row["id"]}


@post("/payments")
@once.protect(effects=PHASED)
async def pay(request: Request[Any, Any, Any], op: Operation) -> dict[str, str]:
    """Charge the card of an order, in steps: whoever goes on after a crash begins after the last one."""
    number = (await request.json())["order"]

    async def priced(connection: Any) -> int | None:  # noqa: ANN401  (a connection of the store's driver)
        cursor = await connection.execute("SELECT cents FROM orders WHERE id = ?", (number,))
        row = await cursor.fetchone()
        return None if row is None else int(row["cents"])

    async def noted(connection: Any) -> None:  # noqa: ANN401
        await connection.execute("UPDATE orders SET charge = ? WHERE id = ?", (charge, number))

    cents = await op.phase("priced", priced)
    if cents is None:
        raise NotFoundException("there is no such order")
    charge = await op.call("charged", lambda key: charge_card(key, cents), repeatable=True)
    await op.phase("noted", noted)
    return {"charge": charge}


async def charge_card(key: str, cents: int) -> str:
    """Where a provider of payments would be called, with `key` as its own Idempotency-Key."""
    return f"ch_{key[:8]}_{cents}"


app = Litestar([create_order, pay], plugins=[OncePlugin(once, tenant=SINGLE_TENANT)])


def main() -> None:
    """Make the shop's own table, and serve."""
    with closing(sqlite3.connect(DATABASE)) as connection:
        connection.execute(ORDERS)
    uvicorn.run(app, port=PORT)


if __name__ == "__main__":
    main()
