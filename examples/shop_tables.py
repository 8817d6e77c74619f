"""The tables of the shop that the examples serve, in the SQLite file that oncekey keeps its keys in, too."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

SHOP = Path("shop.db")
TOKENS = {"token-of-acme": "acme", "token-of-bolt": "bolt"}  # yours are in your database

ORDER = "INSERT INTO orders (tenant, product, quantity) VALUES (?, ?, ?) RETURNING id"
PAYMENT = "INSERT INTO payments (tenant, cents) VALUES (?, ?) RETURNING id"
PAID = "UPDATE payments SET charge = ? WHERE id = ?"


def make_tables() -> None:
    """Make what is missing."""
    with closing(sqlite3.connect(SHOP)) as shop, shop:
        shop.execute(
            "CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, tenant TEXT, product TEXT, quantity INT)"
        )
        shop.execute(
            "CREATE TABLE IF NOT EXISTS payments (id INTEGER PRIMARY KEY, tenant TEXT, cents INT, charge TEXT)"
        )


def orders_of(tenant: str) -> list[dict[str, Any]]:
    """Every order of a tenant."""
    with closing(sqlite3.connect(SHOP)) as shop:
        rows = shop.execute("SELECT id, product, quantity FROM orders WHERE tenant = ?", (tenant,)).fetchall()
    return [dict(zip(("id", "product", "quantity"), row, strict=True)) for row in rows]


def tenant_of(authorization: str | None) -> str | None:
    """Whose bearer token it is."""
    return TOKENS.get((authorization or "").removeprefix("Bearer "))
