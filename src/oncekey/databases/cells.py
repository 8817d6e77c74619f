"""Drivers of stores that are made of cells: they perform the verbs that the statements yield.

A blocking client and one for asyncio send the same requests and read the same replies. So a store may implement its
verbs once, as talks: generators that yield requests and are sent the replies. `TalkingCells` and `AsyncTalkingCells`
turn them into cells; a store adds how it sends one request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar, assert_never, cast

from oncekey.cells import Diagnostics, HasDiagnostics, Look, Make, Page, Swap
from oncekey.core.errors import StoreUnavailableError
from oncekey.core.flow import Body, Rows, Statement, Transaction, adrive, arun_body, drive, run_body

if TYPE_CHECKING:
    from oncekey.cells import Asking, AsyncCells, Cell, Cells, Index, Place, Seen, Verb
    from oncekey.core.model import Instant

T = TypeVar("T")
Q = TypeVar("Q")
Q_co = TypeVar("Q_co", covariant=True)

Talk: TypeAlias = Generator[Q, Any, T]
"""The requests of one verb: the talk is sent each reply, or the `StoreError` for which there is none."""
VitalRows: TypeAlias = "tuple[Mapping[str, Any], ...]"

NO_TABLES = "this store of cells has no tables"


class Talks(Protocol[Q_co]):
    """The verbs of a store as talks, with its own type of requests; `oncekey.cells.Cells` documents each verb."""

    def look(self, scope: str, key: str) -> Talk[Q_co, tuple[Cell | None, Instant]]:
        """Read one cell, and the clock."""

    def swap(
        self, scope: str, key: str, seen: Seen | None, cell: Cell | None, keep_until: Instant | None
    ) -> Talk[Q_co, bool]:
        """Replace one cell, if it is unchanged since it was read."""

    def page(self, index: Index, after: Place, limit: int) -> Talk[Q_co, tuple[Sequence[Cell], Instant]]:
        """Read some cells of an index, and the clock."""

    def diagnostics(self) -> Talk[Q_co, VitalRows]:
        """Query the health of every server."""


class TalkingCells(ABC, Generic[Q]):
    """Cells whose verbs are talks, for blocking code."""

    def __init__(self, talks: Talks[Q]) -> None:
        self._talks = talks

    @abstractmethod
    def send(self, request: Q) -> Any:  # noqa: ANN401  (a reply, as the talks read it)
        """Send one request, and return the reply; the type of a `StoreError` shows if a write may have happened."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections."""

    def look(self, scope: str, key: str) -> tuple[Cell | None, Instant]:
        return drive(self._talks.look(scope, key), self.send)

    def swap(self, scope: str, key: str, seen: Seen | None, cell: Cell | None, keep_until: Instant | None) -> bool:
        return drive(self._talks.swap(scope, key, seen, cell, keep_until), self.send)

    def page(self, index: Index, after: Place, limit: int) -> tuple[Sequence[Cell], Instant]:
        return drive(self._talks.page(index, after, limit), self.send)

    def diagnostics(self) -> VitalRows:
        return drive(self._talks.diagnostics(), self.send)


class AsyncTalkingCells(ABC, Generic[Q]):
    """Cells whose verbs are talks, for asyncio."""

    def __init__(self, talks: Talks[Q]) -> None:
        self._talks = talks

    @abstractmethod
    async def send(self, request: Q) -> Any:  # noqa: ANN401
        """Send one request, and return the reply, like `TalkingCells.send`."""

    @abstractmethod
    async def close(self) -> None:
        """Close all connections."""

    async def look(self, scope: str, key: str) -> tuple[Cell | None, Instant]:
        return await adrive(self._talks.look(scope, key), self.send)

    async def swap(
        self, scope: str, key: str, seen: Seen | None, cell: Cell | None, keep_until: Instant | None
    ) -> bool:
        return await adrive(self._talks.swap(scope, key, seen, cell, keep_until), self.send)

    async def page(self, index: Index, after: Place, limit: int) -> tuple[Sequence[Cell], Instant]:
        return await adrive(self._talks.page(index, after, limit), self.send)

    async def diagnostics(self) -> VitalRows:
        return await adrive(self._talks.diagnostics(), self.send)


class CellDriver:
    """The blocking driver of cells. Each statement is a separate swap, so several are not one transaction."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells

    def run(self, transaction: Transaction[T]) -> T:
        return run_body(transaction.body(), self._execute)

    def close(self) -> None:
        self._cells.close()

    def _execute(self, statement: Statement) -> Rows:
        return run_body(asking(statement), cast("Any", self.answer))

    def answer(self, verb: Verb) -> object:
        """Perform a verb."""
        match verb:
            case Look(scope, key):
                return self._cells.look(scope, key)
            case Swap(scope, key, seen, cell, keep_until):
                return self._cells.swap(scope, key, seen, cell, keep_until)
            case Page(index, after, limit):
                return self._cells.page(index, after, limit)
            case Diagnostics():
                return self._cells.diagnostics() if isinstance(self._cells, HasDiagnostics) else ()
            case Make():
                raise StoreUnavailableError(NO_TABLES)
            case _:
                assert_never(verb)


class AsyncCellDriver:
    """The asyncio driver of cells."""

    def __init__(self, cells: AsyncCells) -> None:
        self._cells = cells

    async def run(self, transaction: Transaction[T]) -> T:
        return await arun_body(transaction.body(), self._execute)

    async def close(self) -> None:
        await self._cells.close()

    async def _execute(self, statement: Statement) -> Rows:
        return await arun_body(asking(statement), cast("Any", self.answer))

    async def answer(self, verb: Verb) -> object:
        """Perform a verb."""
        match verb:
            case Look(scope, key):
                return await self._cells.look(scope, key)
            case Swap(scope, key, seen, cell, keep_until):
                return await self._cells.swap(scope, key, seen, cell, keep_until)
            case Page(index, after, limit):
                return await self._cells.page(index, after, limit)
            case Diagnostics():
                return await self._cells.diagnostics() if isinstance(self._cells, HasDiagnostics) else ()
            case Make():
                raise StoreUnavailableError(NO_TABLES)
            case _:
                assert_never(verb)


def asking(statement: Statement) -> Body[Rows]:
    """The verbs of a statement, whose command in a store of cells is a function that returns their generator."""
    assert callable(statement.command)
    asking = cast("Asking[Rows]", statement.command(**statement.params))
    return cast("Body[Rows]", asking)
