"""What a driver or a transaction may be able to do besides the rest, found out by its methods when it is connected.

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
    """A blocking driver whose store shares the application's transactions: LOCAL is possible."""

    def begin(self) -> OpenTransaction:
        """Open a business transaction (where a store locks writers, its first statement begins it)."""


@runtime_checkable
class AsyncShares(Protocol):
    """An asyncio driver whose store shares the application's transactions: LOCAL is possible."""

    async def begin(self) -> AsyncOpenTransaction:
        """Open a business transaction (where a store locks writers, its first statement begins it)."""


@runtime_checkable
class Borrowed(Protocol):
    """A database that the application's framework connects to; the keys are kept there, on the framework's connections.

    `Once` takes one in the place of a URL. The framework opens, lends and closes the connections.
    """

    @property
    def dialect(self) -> str | None:
        """Which database it is: `postgresql`, `sqlite` or `mysql`. None: that is not known before there is an app."""

    @property
    def title(self) -> str:
        """Its name in sentences and logs, without a password."""

    def driver(self) -> Borrows:
        """A new driver on the connections of this process; making it does no I/O."""


@runtime_checkable
class AsyncFolds(Protocol):
    """An asyncio driver that sends the first statement of a business transaction in the message of its BEGIN."""

    async def begin_with(self, first: Body[T]) -> tuple[FoldingTransaction, T]:
        """Open a business transaction and run `first` in it; if that fails, nothing stays open."""


@runtime_checkable
class AsyncReads(Protocol):
    """An asyncio driver with transactions that only read, and that no writer has to wait for."""

    async def read(self) -> AsyncOpenTransaction:
        """Open one. It refuses writes, and is always rolled back."""


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
