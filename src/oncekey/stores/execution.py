"""Running one transaction, once or until its reply arrives."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from oncekey.core.errors import CommitAmbiguousError, StoreError

if TYPE_CHECKING:
    from oncekey.flow import Flow, Transaction

T = TypeVar("T")

REPEATS = 3
"""How often a statement whose reply was lost is executed again before the outage is reported."""


def execute(transaction: Transaction[T]) -> Flow[T]:
    """Run one transaction."""
    result: T = yield transaction
    return result


def execute_until_acknowledged(transaction: Transaction[T]) -> Flow[T]:
    """Run a transaction again if its reply was lost; it must be one that may be executed twice (P7)."""
    lost: CommitAmbiguousError | None = None
    for _ in range(1 + REPEATS):
        try:
            return (yield from execute(transaction))
        except CommitAmbiguousError as error:
            lost = error
        except StoreError as error:
            if lost is None:
                raise
            raise lost from error  # this one was not executed, and the one before may have been
    assert lost is not None
    raise lost
