"""The same handlers with postponed annotations: there the framework sees text and not types."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

import oncekey.engine.operation as ops
from oncekey.core.model import INLINE, LOCAL
from oncekey.engine.operation import Operation, SyncOperation
from oncekey.engine.operation import Operation as Op

Typed = Operation[dict[str, int]]


class Thing(BaseModel):
    """A body."""

    n: int


def serve(app: FastAPI, once: Any) -> None:
    """Every way to ask for an operation."""

    @app.post("/typed")
    @once.protect(effects=LOCAL)
    async def typed(thing: Thing, op: Operation[Any]) -> list[Any]:
        return [op.key, thing.n]

    @app.post("/aliased")
    @once.protect(effects=INLINE)
    async def aliased(thing: Thing, op: Op) -> list[Any]:
        return [op.key, thing.n]

    @app.post("/named")
    @once.protect(effects=INLINE)
    async def named(thing: Thing, op: Typed) -> list[Any]:
        return [op.key, thing.n]

    @app.post("/dotted")
    @once.protect(effects=INLINE)
    async def dotted(thing: Thing, op: ops.Operation) -> list[Any]:
        return [op.key, thing.n]

    @app.post("/quoted")
    @once.protect(effects=INLINE)
    async def quoted(thing: Thing, op: "Operation") -> list[Any]:  # noqa: UP037  (text in text)
        return [op.key, thing.n]

    @app.post("/optional")
    @once.protect(effects=INLINE)
    async def optional(thing: Thing, op: Operation | None = None) -> list[Any]:
        return [op.key if op else None, thing.n]

    @app.post("/first")
    @once.protect(effects=INLINE)
    async def first(op: Operation, thing: Thing) -> list[Any]:
        return [op.key, thing.n]

    @app.post("/keyword")
    @once.protect(effects=INLINE)
    async def keyword(thing: Thing, *, op: Operation) -> list[Any]:
        return [op.key, thing.n]

    @app.post("/blocking")
    @once.protect(effects=LOCAL)
    def blocking(thing: Thing, op: SyncOperation) -> list[Any]:
        return [op.key, thing.n]
