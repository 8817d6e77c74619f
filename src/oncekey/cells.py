"""The smallest store of requests: `look`, `swap` and `page`.

A cell is one record, kept as a whole. Whoever can read a cell with a clock, and replace it if nobody else has, can keep
the records of requests: `oncekey.stores.cells.CellStore` makes the store that the engine talks to of these three verbs,
and `oncekey.drivers.cells` runs it, blocking or under asyncio. What becomes of a record is decided by the moves of
`oncekey.stores.moves`; a store of cells decides nothing.

Three rules make such a store safe.
1. `swap` compares and writes in one step that nobody can come between, and what it wrote is durable when it returns.
2. The clock is one for all processes: the server's, or that of the one machine there is. A second clock that is ahead
   takes over leases that are alive.
3. When a reply is lost, `swap` raises `CommitAmbiguousError`; every other `StoreError` says that nothing was written.
   It must not repeat a swap by itself: a second one that fails hides that the first one was written.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from oncekey.core.model import Instant

T = TypeVar("T")

Line: TypeAlias = Mapping[str, Any]
"""A record by the names of its columns (`oncekey.stores.rows.COLUMNS`): texts, integers, booleans, bytes and None."""
Place: TypeAlias = tuple[int, str, str]
"""Where a page goes on: behind the record with this `created_at`, scope and key."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a swap compares: a line with another life or another version is not the one that was looked at."""

    incarnation: str
    version: int


@dataclass(frozen=True, slots=True)
class Look:
    """Read one cell, and the clock."""

    scope: str
    key: str


@dataclass(frozen=True, slots=True)
class Swap:
    """Replace one cell, if it is as it was seen."""

    scope: str
    key: str
    seen: Seen | None
    line: Line | None
    keep_until: Instant | None


@dataclass(frozen=True, slots=True)
class Page:
    """Read some unfinished cells."""

    after: Place
    limit: int


Verb: TypeAlias = Look | Swap | Page
Asking: TypeAlias = Generator[Verb, Any, T]
"""A statement of a store of cells: it yields verbs, and is sent what they answered."""


class Cells(Protocol):
    """Where records lie, for blocking code."""

    def look(self, scope: str, key: str) -> tuple[Line | None, Instant]:
        """The line of this key, or None, and the store's clock in microseconds since the epoch."""

    def swap(self, scope: str, key: str, seen: Seen | None, line: Line | None, keep_until: Instant | None) -> bool:
        """Write `line` in the place of the line that was `seen`; False: there is another one, and nothing is written.

        `seen` is None where there must be no line; `line` is None to remove it. From `keep_until` on the store may
        forget the line by itself; None: it must not.
        """

    def page(self, after: Place, limit: int) -> tuple[Sequence[Line], Instant]:
        """Phased records in progress or failed, by `created_at`, scope and key, from behind a place on; and the clock.

        It may be late or incomplete: whoever acts on a line swaps it.
        """

    def close(self) -> None:
        """Give everything back."""


class AsyncCells(Protocol):
    """The same for asyncio."""

    async def look(self, scope: str, key: str) -> tuple[Line | None, Instant]:
        """The line of this key, or None, and the store's clock in microseconds since the epoch."""

    async def swap(
        self, scope: str, key: str, seen: Seen | None, line: Line | None, keep_until: Instant | None
    ) -> bool:
        """Write `line` in the place of the line that was `seen`; False: there is another one. As `Cells.swap`."""

    async def page(self, after: Place, limit: int) -> tuple[Sequence[Line], Instant]:
        """Phased records in progress or failed, from behind a place on, and the clock. As `Cells.page`."""

    async def close(self) -> None:
        """Give everything back."""
