"""The smallest store of requests: `look`, `swap` and `page`.

A cell is one record, kept as a whole. A service that can read a cell together with a clock, and replace it if no other
writer has, can keep the records of requests: `oncekey.stores.cells.CellStore` makes the store that the engine uses out
of these three verbs, and `oncekey.drivers.cells` runs it, blocking or under asyncio. The moves of
`oncekey.stores.moves` decide what a record becomes; a store of cells decides nothing.

Three rules make such a store safe.
1. `swap` compares and writes in one atomic step, and what it wrote is durable when it returns.
2. There is one clock for all processes: the server's, or that of the one machine there is. With a second clock that is
   ahead, a request would take over leases that are alive.
3. If a reply is lost, `swap` raises `CommitAmbiguousError`; every other `StoreError` means that nothing was written.
   It must not repeat a swap by itself: a second one that fails would hide that the first one was written.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from oncekey.core.model import Instant

T = TypeVar("T")

Line: TypeAlias = Mapping[str, Any]
"""A record by the names of its columns (`oncekey.stores.rows.COLUMNS`): texts, integers, booleans, bytes and None."""
Place: TypeAlias = tuple[int, str, str]
"""Where a page goes on: after the line with this instant, scope and key."""


class Index(StrEnum):
    """The lists that pages are read from, each in the order of an instant, scope and key. A line is in one, or none."""

    UNFINISHED = "unfinished"
    """In progress, or begun and failed: by `created_at`. The sweeper and the completer read it."""
    UNKNOWN = "unknown"
    """Unknown outcomes: by `created_at`."""
    EXPIRING = "expiring"
    """Finished, or failed and not begun: by `expires_at`. The reaper reads it."""
    KEPT = "kept"
    """Marked as expired, and kept for a while: by `expires_at`."""
    ROLL = "roll"
    """The workers, which are no records: by `created_at`."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a swap compares: a line with another incarnation or version is not the one that was read."""

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
    line: Line | None
    keep_until: Instant | None


@dataclass(frozen=True, slots=True)
class Page:
    """Read some cells of an index."""

    index: Index
    after: Place
    limit: int


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """Ask the store for its health, if it can report it."""


@dataclass(frozen=True, slots=True)
class Make:
    """Create the tables, if the store has any, and return whether it did; existing tables stay as they are."""


def indexed(line: Line) -> tuple[Index, Instant] | None:
    """The index that a line is in, and its instant there; None: the line is in no index."""
    match line["state"]:
        case "in_progress":
            return Index.UNFINISHED, line["created_at"]
        case "failed_retryable" if line["memo"] is not None or line["intent"] is not None:
            return Index.UNFINISHED, line["created_at"]
        case "failed_retryable" | "completed":
            return Index.EXPIRING, line["expires_at"]
        case "expired":
            return Index.KEPT, line["expires_at"]
        case "unknown":
            return Index.UNKNOWN, line["created_at"]
        case "roll":
            return Index.ROLL, line["created_at"]
        case _:
            return None


def place_of(line: Line) -> Place:
    """The position of a line in its index."""
    where = indexed(line)
    assert where is not None
    return where[1], line["scope"], line["key"]


Verb: TypeAlias = Look | Swap | Page | Diagnostics | Make
Asking: TypeAlias = Generator[Verb, Any, T]
"""A statement of a store of cells: it yields verbs, and is sent their results."""


class Cells(Protocol):
    """A store of cells for blocking code."""

    def look(self, scope: str, key: str) -> tuple[Line | None, Instant]:
        """The line of this key, or None, and the store's clock in microseconds since the epoch."""

    def swap(self, scope: str, key: str, seen: Seen | None, line: Line | None, keep_until: Instant | None) -> bool:
        """Replace the line that was `seen` by `line`; False: there is another one, and nothing is written.

        `seen` is None if there must be no line; `line` is None to remove it. From `keep_until` on the store may remove
        the line by itself; None: it must not.
        """

    def page(self, index: Index, after: Place, limit: int) -> tuple[Sequence[Line], Instant]:
        """The lines of an index after a place, in the order that `indexed` defines, and the clock.

        The index may be out of date: a caller that acts on a line swaps it. Fewer lines than `limit` mean the end.
        """

    def close(self) -> None:
        """Close all connections."""


@runtime_checkable
class HasDiagnostics(Protocol):
    """Cells that report the health of their servers, for `oncekey doctor`; under asyncio the result is awaited."""

    def diagnostics(self) -> Any:  # noqa: ANN401  (rows of any kind, by server)
        """One row for each server."""


class AsyncCells(Protocol):
    """The same for asyncio."""

    async def look(self, scope: str, key: str) -> tuple[Line | None, Instant]:
        """The line of this key, or None, and the store's clock in microseconds since the epoch."""

    async def swap(
        self, scope: str, key: str, seen: Seen | None, line: Line | None, keep_until: Instant | None
    ) -> bool:
        """Replace the line that was `seen` by `line`; False: there is another one. As `Cells.swap`."""

    async def page(self, index: Index, after: Place, limit: int) -> tuple[Sequence[Line], Instant]:
        """The lines of an index after a place, and the clock. As `Cells.page`."""

    async def close(self) -> None:
        """Close all connections."""
