"""The minimal store interface: `look`, `swap` and `page`.

A cell is one whole record, by the names of its columns. A service that can read a cell together with a clock, and
replace it if no other writer has, can store records: `oncekey.stores.cells.CellStore` builds the engine's store from
these three verbs, and `oncekey.databases.cells` runs it, in threads or under asyncio. The moves of
`oncekey.stores.moves` decide how a record changes; a store of cells decides nothing.

Three rules make such a store safe.
1. `swap` compares and writes in one atomic step, and the write is durable when it returns.
2. There is one clock for all processes: the server's, or that of the only machine. With a second clock that is
   ahead, a request would take over live leases.
3. If a reply is lost, `swap` raises `CommitAmbiguousError`; every other `StoreError` means that nothing was written.
   It must not retry a swap by itself: a second one that fails would hide that the first one was written.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from oncekey.core.model import Instant

T = TypeVar("T")

Cell: TypeAlias = Mapping[str, Any]
"""A record by the names of its columns (`oncekey.stores.rows.COLUMNS`): texts, integers, booleans, bytes and None."""
Place: TypeAlias = tuple[int, str, str]
"""The position where a page continues: after the cell with this timestamp, scope and key."""


class Index(StrEnum):
    """The lists that pages are read from, each ordered by a timestamp, scope and key. A cell is in one, or none."""

    UNFINISHED = "unfinished"
    """In progress, or started and failed: by `created_at`. The sweeper and the completer read it."""
    UNKNOWN = "unknown"
    """Unknown outcomes: by `created_at`."""
    EXPIRING = "expiring"
    """Finished, or failed and not started: by `expires_at`. The reaper reads it."""
    KEPT = "kept"
    """Marked as expired, and kept for a while: by `expires_at`."""
    ROLL = "roll"
    """The workers, which are not records: by `created_at`."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The values that a swap compares: a cell with another incarnation or version has changed since it was read."""

    incarnation: str
    version: int


@dataclass(frozen=True, slots=True)
class Look:
    """Read one cell, and the clock."""

    scope: str
    key: str


@dataclass(frozen=True, slots=True)
class Swap:
    """Replace one cell, if it is unchanged since it was read."""

    scope: str
    key: str
    seen: Seen | None
    cell: Cell | None
    keep_until: Instant | None


@dataclass(frozen=True, slots=True)
class Page:
    """Read some cells of an index."""

    index: Index
    after: Place
    limit: int


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """Query the store's health, if it can report it."""


@dataclass(frozen=True, slots=True)
class Make:
    """Create the tables, if the store has any, and return whether it did; existing tables are left unchanged."""


def indexed(cell: Cell) -> tuple[Index, Instant] | None:
    """The index of a cell, and its timestamp there; None if the cell is in no index."""
    match cell["state"]:
        case "in_progress":
            return Index.UNFINISHED, cell["created_at"]
        case "failed_retryable" if cell["memo"] is not None or cell["intent"] is not None:
            return Index.UNFINISHED, cell["created_at"]
        case "failed_retryable" | "completed":
            return Index.EXPIRING, cell["expires_at"]
        case "expired":
            return Index.KEPT, cell["expires_at"]
        case "unknown":
            return Index.UNKNOWN, cell["created_at"]
        case "roll":
            return Index.ROLL, cell["created_at"]
        case _:
            return None


def place_of(cell: Cell) -> Place:
    """The position of a cell in its index."""
    where = indexed(cell)
    assert where is not None
    return where[1], cell["scope"], cell["key"]


Verb: TypeAlias = Look | Swap | Page | Diagnostics | Make
Asking: TypeAlias = Generator[Verb, Any, T]
"""A statement of a store of cells: it yields verbs, and is sent their results."""


class Cells(Protocol):
    """A store of cells for blocking code."""

    def look(self, scope: str, key: str) -> tuple[Cell | None, Instant]:
        """The cell of this key, or None, and the store's clock in microseconds since the epoch."""

    def swap(self, scope: str, key: str, seen: Seen | None, cell: Cell | None, keep_until: Instant | None) -> bool:
        """Replace the cell that was `seen` with `cell`; False: it has changed, and nothing is written.

        `seen` is None if there must be no cell; `cell` is None to delete it. From `keep_until` on the store may delete
        the cell by itself; None: it must not.
        """

    def page(self, index: Index, after: Place, limit: int) -> tuple[Sequence[Cell], Instant]:
        """The cells of an index after a place, in the order that `indexed` defines, and the clock.

        The index may be stale: a caller that acts on a cell swaps it. Fewer cells than `limit` mean the end.
        """

    def close(self) -> None:
        """Close all connections."""


@runtime_checkable
class HasDiagnostics(Protocol):
    """Cells that report the health of their servers, for `oncekey doctor`; under asyncio the result is awaited."""

    def diagnostics(self) -> Any:  # noqa: ANN401  (rows of any kind, by server)
        """One row for each server."""


class AsyncCells(Protocol):
    """A store of cells for asyncio."""

    async def look(self, scope: str, key: str) -> tuple[Cell | None, Instant]:
        """The cell of this key, or None, and the store's clock in microseconds since the epoch."""

    async def swap(
        self, scope: str, key: str, seen: Seen | None, cell: Cell | None, keep_until: Instant | None
    ) -> bool:
        """Replace the cell that was `seen` with `cell`; False: it has changed. Like `Cells.swap`."""

    async def page(self, index: Index, after: Place, limit: int) -> tuple[Sequence[Cell], Instant]:
        """The cells of an index after a place, and the clock. Like `Cells.page`."""

    async def close(self) -> None:
        """Close all connections."""
