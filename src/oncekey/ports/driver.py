"""Optional capabilities of a driver or a transaction, recognised by its methods when the store is connected.

`ports` has the other protocols, which only type checkers read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from oncekey.core.flow import Body
    from oncekey.ports.store import (
        AsyncOpenTransaction,
        Borrows,
        FoldingTransaction,
        OpenTransaction,
        RequestSession,
        SteppingSession,
    )

T = TypeVar("T")


@runtime_checkable
class Shares(Protocol):
    """A blocking driver whose store shares the application's transactions, which LOCAL requires."""

    def begin(self) -> OpenTransaction:
        """Open a business transaction (where a store locks writers, its first statement begins it)."""


@runtime_checkable
class AsyncShares(Protocol):
    """An asyncio driver whose store shares the application's transactions, which LOCAL requires."""

    async def begin(self) -> AsyncOpenTransaction:
        """Open a business transaction (where a store locks writers, its first statement begins it)."""


@runtime_checkable
class Borrowed(Protocol):
    """A database on the connections of the application's framework; the keys are stored there.

    `Once` accepts one instead of a URL. The framework opens, lends and closes the connections.
    """

    @property
    def dialect(self) -> str | None:
        """The database: `postgresql`, `sqlite` or `mysql`. None: unknown until there is an app."""

    @property
    def title(self) -> str:
        """Its name in messages and logs, without a password."""

    def driver(self) -> Borrows:
        """A new driver on the connections of this process; creating it does no I/O."""


@runtime_checkable
class AsyncFolds(Protocol):
    """An asyncio driver that sends the first statement of a business transaction in the message of its BEGIN."""

    async def begin_with(self, first: Body[T]) -> tuple[FoldingTransaction, T]:
        """Open a business transaction and run `first` in it; if that fails, nothing stays open."""


@runtime_checkable
class AsyncReads(Protocol):
    """An asyncio driver with read-only transactions, which never block a writer."""

    async def read(self) -> AsyncOpenTransaction:
        """Open a transaction that refuses writes and is always rolled back."""


@runtime_checkable
class AsyncWaits(Protocol):
    """An asyncio driver that can wait for a free connection."""

    async def wait_for_slot(self, seconds: float) -> bool:
        """Wait for a free connection without taking it; False if there was none within `seconds`."""


@runtime_checkable
class AsyncSessions(Protocol):
    """An asyncio driver whose transactions are `SessionTransaction`s."""

    def session(self) -> RequestSession:
        """An ordinary session, which the application commits and the caller closes."""

    def stepping_session(self) -> SteppingSession:
        """A session that only reads until it joins a transaction."""
