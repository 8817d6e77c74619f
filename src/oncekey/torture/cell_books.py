"""What a run reads of a store of cells when everything is over: its records, page by page, and nothing else.

Such a store shares no transaction, so there are no business rows, no messages and no log of writes: what happened once
is what the provider's own ledger says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from oncekey.cells import Index, Seen, Swap
from oncekey.flow import Mode, Statement, Transaction
from oncekey.stores.cells_upkeep import FIRST, gathered

if TYPE_CHECKING:
    from oncekey.cells import Asking, Line
    from oncekey.engine.shell import AsyncEngine
    from oncekey.flow import Rows, Steps, Value

_RECORDS: Final = (Index.UNFINISHED, Index.UNKNOWN, Index.EXPIRING, Index.KEPT)
_OPEN: Final = frozenset({"in_progress", "failed_retryable"})


class CellBooks:
    """The books of a run on a store of cells."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def open(self) -> None:
        """There is nothing to make."""

    async def close(self, scope: str) -> None:
        """Leave the store as it was: no record of ours."""
        await self._run("clear_records", _clearing, scope=scope)

    async def read(self, statement: str, **params: Value) -> Rows:
        """The rows that a statement of `sql/` would find; of what there is none, none."""
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
    """What the workers have to end without any client: phased requests that have begun."""
    return bool(line["effects"] == "phased" and line["state"] in _OPEN and line["recovery_point"] != "started")
