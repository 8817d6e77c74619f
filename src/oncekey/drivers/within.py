"""Flows inside the caller's own connection and open transaction.

Nothing here begins, commits, sets a savepoint or tries again: the transaction is the caller's. The result of a
flow is provisional until the caller commits (L7). The package of a database says how one statement is executed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, TypeVar

from oncekey.flow import astep, step

if TYPE_CHECKING:
    from oncekey.flow import Rows, Statement, Transaction

T = TypeVar("T")

NOT_BEGUN: Final = "begin a transaction on the connection first: what is written here must commit with your own rows"


class Within:
    """A driver that runs everything in the caller's transaction."""

    def __init__(self, execute: Callable[[Statement], Rows]) -> None:
        self._execute = execute

    def run(self, transaction: Transaction[T]) -> T:
        """Run one transaction's statements in the caller's."""
        return step(transaction.body(), self._execute)

    def close(self) -> None:
        """Nothing to close: the connection is the caller's."""


class AsyncWithin:
    """The same for asyncio."""

    def __init__(self, execute: Callable[[Statement], Awaitable[Rows]]) -> None:
        self._execute = execute

    async def run(self, transaction: Transaction[T]) -> T:
        """Run one transaction's statements in the caller's."""
        return await astep(transaction.body(), self._execute)

    async def close(self) -> None:
        """Nothing to close: the connection is the caller's."""
