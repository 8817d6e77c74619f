"""Saying one transaction, once or until its reply is heard."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from oncekey.core.errors import CommitAmbiguousError

if TYPE_CHECKING:
    from oncekey.flow import Flow, Transaction

T = TypeVar("T")

REPEATS = 3
"""How often a statement whose reply was lost is said again before the outage is reported."""


def said(transaction: Transaction[T]) -> Flow[T]:
    """Run one transaction."""
    result: T = yield transaction
    return result


def repeated(transaction: Transaction[T]) -> Flow[T]:
    """Say it again when the reply was lost: what may be said twice is its own way of reading again (P7)."""
    for _ in range(REPEATS):
        try:
            return (yield from said(transaction))
        except CommitAmbiguousError:
            continue
    return (yield from said(transaction))
