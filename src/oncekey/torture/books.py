"""The tables that a run keeps in the store's own database, and reads when it is over.

Of a store of cells a run reads only the records, page by page. Such a store shares no transaction, so there are no
business rows, no messages and no log of writes: the provider's own ledger says what happened.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from oncekey.cells import Index, Seen, Swap
from oncekey.demo.tables import Tables
from oncekey.flow import Mode, Statement, Transaction
from oncekey.stores.cells_upkeep import FIRST, gathered

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.cells import Asking, Line
    from oncekey.engine.shell import AsyncEngine
    from oncekey.flow import Rows, Steps, Value


_NEEDS: Final = "torture needs SQLite, PostgreSQL or MariaDB: what is only in memory cannot survive"
_CLEARED: Final = ("clear_parcels", "clear_dead_letters", "clear_records")


def now() -> int:
    """Microseconds of this machine's clock, by which all events of a run are ordered."""
    return time.time_ns() // 1000


class Books:
    """Writes rows through the connection of a handler, and reads them in transactions of its own."""

    def __init__(self, engine: Callable[[], AsyncEngine]) -> None:
        self._tables = Tables(engine, __package__, _NEEDS)

    async def open(self) -> None:
        """Create the tables and the log again; drop what an earlier run has left."""
        names = [*self._tables.named("drop_"), *self._tables.named("create_")]
        await self._tables.run(Mode.ATOMIC, *((name, {}) for name in names))

    async def close(self, scope: str) -> None:
        """Leave the store as it was: no table, no trigger and no record of ours."""
        params: dict[str, Value] = {"scope": scope}
        cleared = [(name, params) for name in _CLEARED]
        await self._tables.run(Mode.ATOMIC, *((name, {}) for name in self._tables.named("drop_")), *cleared)

    async def add_row(self, connection: Any, route: str, key: str, wanted: str) -> str:  # noqa: ANN401
        """Write a business row as part of the transaction that `connection` has open."""
        made = uuid4().hex
        params: dict[str, Value] = {"id": made, "route": route, "key": key, "wanted": wanted, "at": now()}
        await self._tables.say(connection, "add_row", params)
        return made

    async def add_delivery(self, key: str, downstream_key: str) -> None:
        """Write down that a message arrived."""
        await self._tables.write("add_delivery", {"key": key, "downstream_key": downstream_key})

    async def read(self, statement: str, **params: Value) -> Rows:
        """The rows that a statement finds."""
        return await self._tables.read(statement, params)


_RECORDS: Final = (Index.UNFINISHED, Index.UNKNOWN, Index.EXPIRING, Index.KEPT)
_OPEN: Final = frozenset({"in_progress", "failed_retryable"})


class CellBooks:
    """The books of a run on a store of cells."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def open(self) -> None:
        """A store of cells needs no tables."""

    async def close(self, scope: str) -> None:
        """Leave the store as it was: no record of ours."""
        await self._run("clear_records", _clearing, scope=scope)

    async def read(self, statement: str, **params: Value) -> Rows:
        """The rows that a statement of `sql/` would find; none for tables that a store of cells lacks."""
        match statement:
            case "foreign":
                return [{"records": len(await self._run("foreign", _reading)), "parcels": 0}]
            case "records":
                return await self._run("records", _reading, **params)
            case "unfinished":
                lines = await self._run("records", _reading, **params)
                return [{"key": one["key"], "what": f"phased {one['state']}"} for one in lines if _is_left(one)]
            case _:
                return ()

    async def _run(self, name: str, command: Any, **params: Value) -> Rows:  # noqa: ANN401  (a statement of cells)
        statement = Statement(f"torture.{name}", command, dict(params))

        def body() -> Steps[Rows]:
            return (yield statement)

        return await self._engine.driver.run(Transaction(f"torture.{name}", Mode.READ, body))


def _reading(scope: str | None = None) -> Asking[Rows]:
    lines: list[Line] = []
    for index in _RECORDS:
        some, _ = yield from gathered(index, FIRST, 1 << 62, None, lambda line, _: scope in {None, line["scope"]})
        lines += some
    return sorted(lines, key=lambda line: str(line["key"]))


def _clearing(scope: str) -> Asking[Rows]:
    lines = yield from _reading(scope)
    for line in lines:
        yield Swap(line["scope"], line["key"], Seen(line["incarnation"], line["version"]), None, None)
    return lines


def _is_left(line: Line) -> bool:
    """Whether the workers have to finish this record without its client: a PHASED request that has begun."""
    return bool(line["effects"] == "phased" and line["state"] in _OPEN and line["recovery_point"] != "started")
