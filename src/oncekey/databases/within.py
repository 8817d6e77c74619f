"""A driver that works inside the caller's own transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from oncekey.core.flow import Rows, Statement, Transaction, run_body

if TYPE_CHECKING:
    from collections.abc import Callable


T = TypeVar("T")


class Within:
    """A driver that runs everything on the caller's own connection, in its open transaction.

    It begins, commits and repeats nothing, and sets no savepoint: the transaction is the caller's, and the result of a
    flow is provisional until the caller commits. `execute` runs one statement.
    """

    def __init__(self, execute: Callable[[Statement], Rows]) -> None:
        self._execute = execute

    def run(self, transaction: Transaction[T]) -> T:
        """Run one transaction's statements in the caller's."""
        return run_body(transaction.body(), self._execute)
