"""Processes of their own for races and crashes: a shop whose handler says "already done" when it sees its row."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from typing import Any

import psycopg
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from harness.asgi import Caller
from local.databases import lock_for
from oncekey import wire
from oncekey.core.model import LOCAL
from oncekey.core.policy import Policy
from oncekey.engine.operation import Operation, SyncOperation
from oncekey.once import Once
from oncekey.testing.claims import a_claim

TAKEN = (409, 503, 404)
"""What the handler answers to a row that is there: stored, never stored, stored and raised elsewhere."""

TABLE = "CREATE TABLE effects (key text NOT NULL, pid bigint NOT NULL)"
PATIENCE = 120.0


def shop(url: str, *, blocking: bool, policy: Policy | None = None) -> tuple[Once, FastAPI]:
    """One process's application."""
    once = Once(url, policy=policy)
    app = FastAPI(lifespan=once.lifespan)
    once.install(app, tenant=lambda _: "acme")

    async def create(op: Operation) -> Any:
        seen = await _fetch(op.connection, "SELECT pid FROM effects WHERE key = '{}'", op.key)
        if not seen:
            await op.connection.execute(f"INSERT INTO effects VALUES ('{op.key}', {os.getpid()})")
        return answered(op.key, seen)

    def create_blocking(op: SyncOperation) -> Any:
        seen = op.connection.execute(f"SELECT pid FROM effects WHERE key = '{op.key}'").fetchall()
        if not seen:
            op.connection.execute(f"INSERT INTO effects VALUES ('{op.key}', {os.getpid()})")
        return answered(op.key, seen)

    app.post("/orders", status_code=201)(once.protect(effects=LOCAL)(create_blocking if blocking else create))
    return once, app


async def _fetch(connection: Any, text: str, key: str | None) -> Any:
    text = text.format(key)
    if hasattr(connection, "fetch"):
        return await connection.fetch(text)
    return await (await connection.execute(text)).fetchall()


def answered(key: str | None, seen: Any) -> JSONResponse:
    """201 for the first, and for everybody else what must never be sent."""
    if seen:
        return JSONResponse({"error": "already done"}, status_code=TAKEN[len(key or "") % len(TAKEN)])
    return JSONResponse({"by": os.getpid()}, status_code=201)


async def _race(url: str, keys: list[str], blocking: bool) -> tuple[Counter[str], dict[str, bytes], list[Any]]:
    once, app = shop(url, blocking=blocking)
    seen: Counter[str] = Counter()
    heard: dict[str, bytes] = {}
    wrong: list[Any] = []
    async with once.lifespan(app):

        async def send(key: str) -> None:
            reply = await Caller(app, "POST", "/orders", headers=[("Idempotency-Key", key)]).run()
            match reply.status, reply.code:
                case 201, _:
                    seen["replayed" if reply.replayed else "won"] += 1
                    heard.setdefault(key, reply.body)
                    if heard[key] != reply.body:
                        wrong.append((key, heard[key], reply.body))
                case 409, "idempotency_key_in_progress":
                    seen["in progress"] += 1
                case _:
                    wrong.append((key, reply.status, reply.body))

        for start in range(0, len(keys), 2):
            # Two at a time, each twice: everybody meets himself and all others.
            await asyncio.gather(*(send(key) for key in keys[start : start + 2] * 2))
        for key in keys:
            await send(key)
    return seen, heard, wrong


def race(url: str, keys: list[str], blocking: bool, line: Any, reports: Any) -> None:
    """One racer: sends every key, again and again."""
    line.wait(PATIENCE)
    reports.put(asyncio.run(_race(url, keys, blocking)))


def stall(url: str, key: str, lease_ms: int) -> None:
    """Enter a key and say so on the first line; then stand still until somebody stops or kills this process."""

    async def enter() -> None:
        engine = wire.aconnect(url)
        claim = a_claim(key, lease=lease_ms * 1000)
        tx = await engine.open()
        assert engine.store.locks is not None
        look = await tx.run(engine.store.locks.locking(lock_for(claim), claim))
        await tx.connection.execute(f"INSERT INTO effects VALUES ('{key}', {os.getpid()})")
        print("in" if look.got else "out", flush=True)
        await asyncio.sleep(PATIENCE)

    asyncio.run(enter())


def prepared(dsn: str) -> None:
    """The table of the business."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(TABLE)


if __name__ == "__main__":
    stall(sys.argv[1], sys.argv[2], int(sys.argv[3]))
