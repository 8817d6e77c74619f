"""Looking into a real database past everything of ours, for what a customer sent; and giving it another key."""

from __future__ import annotations

import re
import sqlite3
from base64 import b64encode
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pymysql

from oncekey.core.flow import adrive
from oncekey.databases.mariadb.address import MariadbAddress
from oncekey.sealing import AesGcm
from oncekey.stores.rekey import WALKS, Walked, seals
from oncekey.wire import aconnect
from sealing.shop import MARK, NEW, OLD, Shop

K1 = AesGcm({"k1": OLD}, current="k1")
ONLY_NEW = AesGcm({"k2": NEW}, current="k2")
BOTH = AesGcm({"k2": NEW, "k1": OLD}, current="k2")
VARIABLE = {"k1": f"k1:{b64encode(OLD).decode()}", "k2": f"k2:{b64encode(NEW).decode()}"}
"""The keys as ONCEKEY_SEAL_KEYS has them."""
PATHS = ("local", "inline", "outbox", "phased")


def execute(url: str, sql: str, *given: Any) -> list[tuple[Any, ...]]:
    """Rows of the database itself, past everything of ours."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as connection:
            return connection.execute(sql.replace("oncekey.", "oncekey_").replace("%s", "?"), given).fetchall()
    if url.startswith(("mariadb", "mysql")):
        address = MariadbAddress.parse(url)
        with (
            pymysql.connect(**address.options(), database=address.database, autocommit=True) as connection,
            connection.cursor() as asked,
        ):
            asked.execute(re.sub(r"\bkey\b", "`key`", sql.replace("oncekey.", "oncekey_")), given)
            return list(asked.fetchall())
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(sql, given)
        return cursor.fetchall() if cursor.description else []


def tables(url: str) -> list[str]:
    """All of the database's own."""
    if url.startswith("sqlite"):
        return [name for (name,) in execute(url, "SELECT name FROM sqlite_master WHERE type = 'table'")]
    if url.startswith(("mariadb", "mysql")):
        return [name for (name,) in execute(url, "SHOW TABLES")]
    where = "table_schema NOT IN ('pg_catalog', 'information_schema') AND table_type = 'BASE TABLE'"
    return [
        f"{schema}.{name}"
        for schema, name in execute(
            url, f"SELECT table_schema, table_name FROM information_schema.tables WHERE {where}"
        )
    ]


def shown(url: str) -> list[str]:
    """Every table in which any column of any row shows the mark; for SQLite the files, too."""
    found = []
    for table in tables(url):
        for row in execute(url, f"SELECT * FROM {table}"):
            cells = [bytes(cell) if isinstance(cell, bytes | memoryview) else str(cell).encode() for cell in row]
            found += [table for cell in cells if MARK.encode() in cell]
    if url.startswith("sqlite"):
        file = Path(url.removeprefix("sqlite:///"))
        found += [one.name for one in file.parent.iterdir() if MARK.encode() in one.read_bytes()]
    return found


async def everything(shop: Shop, start: str) -> dict[str, Any]:
    """All that a store keeps content of: answers, results, a kept request, parcels, evidence; by what they answered."""
    replies = {path: await shop.post(f"/{path}", f"{start}-{path}-0000000000") for path in PATHS}
    assert [reply.status for reply in replies.values()] == [200, 200, 202, 200]
    assert (await shop.hear(f"{start}-event")).status == 200
    shop.provider_down = True
    assert (await shop.post("/phased", f"{start}-begun-0000000000")).status == 500
    shop.provider_down = False
    return replies


async def rekeyed(url: str, seal: AesGcm, limit: int = 3) -> Walked:
    """All walks to their ends, in short pages."""
    engine, done = aconnect(url), Walked()
    try:
        for walk in WALKS:
            stop = await adrive(walk(engine.store, seal, None, limit), engine.driver.run)
            done += stop.walked
            while stop.after is not None:
                stop = await adrive(walk(engine.store, seal, stop.after, limit), engine.driver.run)
                done += stop.walked
    finally:
        await engine.close()
    return done


async def used(url: str) -> dict[str, set[str | None]]:
    """Which keys are in use, by what they seal."""
    engine = aconnect(url)
    try:
        kept = await adrive(seals(engine.store, 10_000), engine.driver.run)
    finally:
        await engine.close()
    found: dict[str, set[str | None]] = {}
    for one in kept:
        found.setdefault(one.part, set()).add(one.key_id)
    return found
