"""What the tests of LOCAL in one commit share: engines on a database of the test's own, and a look from outside."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg

from oncekey import wire
from oncekey.core.model import Claim
from oncekey.core.onecommit import Lock, LockNumbers
from oncekey.engine.enrolment import SCHEMA
from oncekey.engine.shell import AsyncEngine

PACKAGES = ("psycopg", "asyncpg")

LOCKS = (
    "SELECT count(DISTINCT (pid, classid, objid)) FROM pg_locks "
    "WHERE locktype = 'advisory' AND granted AND objsubid = {}"
)
EFFECTS = "CREATE TABLE IF NOT EXISTS effects (key text NOT NULL)"


def through(package: str, dsn: str) -> str:
    """The same database through another package."""
    return dsn.replace("postgresql:", f"postgresql+{package}:", 1)


@asynccontextmanager
async def connected(package: str, dsn: str, **options: Any) -> AsyncIterator[AsyncEngine]:
    """An engine, as long as it is needed."""
    engine = wire.aconnect(through(package, dsn), **options)
    try:
        yield engine
    finally:
        await engine.close()


def lock_for(claim: Claim) -> Lock:
    """What a claim locks, where there is no secret."""
    return LockNumbers(SCHEMA, None).of(claim.id, claim.fingerprint)


def rows(dsn: str, text: str) -> list[Any]:
    """What anybody else sees."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(text.encode())
        return cursor.fetchall() if cursor.description else []


def locks_held(dsn: str) -> int:
    """How many keys are locked in the whole server."""
    return int(rows(dsn, LOCKS.format(1))[0][0])


def marks_held(dsn: str) -> int:
    """How many requests have left their mark beside a lock, or beside one that they missed."""
    return int(rows(dsn, LOCKS.format(2))[0][0])


async def write(engine: AsyncEngine, connection: Any, key: str) -> None:
    """The business: one row."""
    sql = "INSERT INTO effects VALUES ($1)" if "asyncpg" in type(engine.driver).__module__ else None
    if sql:
        await connection.execute(sql, key)
    else:
        await connection.execute("INSERT INTO effects VALUES (%s)", (key,))
