"""The example shop's tables, in the same SQLite file as oncekey's own tables."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

SHOP = Path("shop.db")
TOKENS = {"token-of-acme": "acme", "token-of-bolt": "bolt"}  # a real shop keeps these in its database

ORDER = "INSERT INTO orders (tenant, product, quantity) VALUES (?, ?, ?) RETURNING id"
PAYMENT = "INSERT INTO payments (tenant, cents) VALUES (?, ?) RETURNING id"
PAID = "UPDATE payments SET charge = ? WHERE id = ?"


def create_tables() -> None:
    """Create the tables that do not exist yet."""
    with closing(sqlite3.connect(SHOP)) as shop, shop:
        shop.execute(
            "CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, tenant TEXT, product TEXT, quantity INT)"
        )
        shop.execute(
            "CREATE TABLE IF NOT EXISTS payments (id INTEGER PRIMARY KEY, tenant TEXT, cents INT, charge TEXT)"
        )


def orders_of(tenant: str) -> list[dict[str, Any]]:
    """All orders of a tenant."""
    with closing(sqlite3.connect(SHOP)) as shop:
        rows = shop.execute("SELECT id, product, quantity FROM orders WHERE tenant = ?", (tenant,)).fetchall()
    return [dict(zip(("id", "product", "quantity"), row, strict=True)) for row in rows]


def tenant_of(authorization: str | None) -> str | None:
    """The tenant that a bearer token belongs to; None if the token is unknown."""
    return TOKENS.get((authorization or "").removeprefix("Bearer "))
