"""The provider's books, handed to the console by whoever can read them."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from oncekey.flow import adrive
from oncekey.reconcile.books import Books, Pointers, read
from oncekey.reconcile.ledger import LedgerEntry, Report, compare

if TYPE_CHECKING:
    from oncekey.core.model import Instant
    from oncekey.engine.shell import AsyncEngine

Entries = Callable[["Instant"], "Iterable[LedgerEntry] | Awaitable[Iterable[LedgerEntry]]"]


@dataclass(frozen=True, slots=True)
class Ledger:
    """How to read the provider's books, and ours beside them.

    `entries` is handed an instant in microseconds and gives what was booked since. `pointers` says where our results
    have amounts; `inline` names the calls of INLINE operations, which announce none.
    """

    entries: Entries
    pointers: Pointers = field(default_factory=Pointers)
    inline: Mapping[str, str] = field(default_factory=dict)

    async def compared(self, engine: AsyncEngine, since: Instant) -> Report:
        """Where the books differ."""
        found = self.entries(since)
        theirs = await found if inspect.isawaitable(found) else found
        ours = await adrive(read(engine.store, Books(since, self.pointers, self.inline)), engine.driver.run)
        return compare(theirs, ours)
