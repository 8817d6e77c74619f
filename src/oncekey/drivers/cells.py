"""Drivers of stores that are made of cells: they perform the verbs that the statements yield."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, assert_never, cast

from oncekey.cells import Look, Make, Page, Swap, TellsVitals, Vitals
from oncekey.core.errors import StoreUnavailableError
from oncekey.flow import astep, step

if TYPE_CHECKING:
    from oncekey.cells import Asking, AsyncCells, Cells, Verb
    from oncekey.flow import Rows, Statement, Steps, Transaction

T = TypeVar("T")

NO_TABLES = "this store of cells has no tables of its own"


class CellDriver:
    """Blocking. Each statement is a swap of its own, so several of them are not one transaction."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells

    def run(self, transaction: Transaction[T]) -> T:
        """Run one transaction, statement by statement."""
        return step(transaction.body(), self._execute)

    def close(self) -> None:
        """Close all connections."""
        self._cells.close()

    def _execute(self, statement: Statement) -> Rows:
        return step(asking(statement), cast("Any", self.answer))

    def answer(self, verb: Verb) -> object:
        """Perform a verb."""
        match verb:
            case Look(scope, key):
                return self._cells.look(scope, key)
            case Swap(scope, key, seen, line, keep_until):
                return self._cells.swap(scope, key, seen, line, keep_until)
            case Page(index, after, limit):
                return self._cells.page(index, after, limit)
            case Vitals():
                return self._cells.vitals() if isinstance(self._cells, TellsVitals) else ()
            case Make():
                raise StoreUnavailableError(NO_TABLES)
            case _:
                assert_never(verb)


class AsyncCellDriver:
    """The same for asyncio."""

    def __init__(self, cells: AsyncCells) -> None:
        self._cells = cells

    async def run(self, transaction: Transaction[T]) -> T:
        """Run one transaction, statement by statement."""
        return await astep(transaction.body(), self._execute)

    async def close(self) -> None:
        """Close all connections."""
        await self._cells.close()

    async def _execute(self, statement: Statement) -> Rows:
        return await astep(asking(statement), cast("Any", self.answer))

    async def answer(self, verb: Verb) -> object:
        """Perform a verb."""
        match verb:
            case Look(scope, key):
                return await self._cells.look(scope, key)
            case Swap(scope, key, seen, line, keep_until):
                return await self._cells.swap(scope, key, seen, line, keep_until)
            case Page(index, after, limit):
                return await self._cells.page(index, after, limit)
            case Vitals():
                return await self._cells.vitals() if isinstance(self._cells, TellsVitals) else ()
            case Make():
                raise StoreUnavailableError(NO_TABLES)
            case _:
                assert_never(verb)


def asking(statement: Statement) -> Steps[Rows]:
    """A statement of a store of cells is a function that makes a generator of verbs."""
    assert callable(statement.command)
    asking = cast("Asking[Rows]", statement.command(**statement.params))
    return cast("Steps[Rows]", asking)
