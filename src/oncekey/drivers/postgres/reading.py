"""Transactions of PostgreSQL that only read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from oncekey.flow import Statement

if TYPE_CHECKING:
    from oncekey.flow import Steps


class Begun(Protocol):
    """A transaction that was begun."""

    async def step(self, steps: Steps[Any]) -> Any:  # noqa: ANN401  (what the statements come to)
        """Run statements inside it."""

    async def rollback(self) -> None:
        """Roll back."""


Tx = TypeVar("Tx", bound=Begun)


async def only_reading(tx: Tx) -> Tx:
    """The transaction; from now on the server refuses writes in it."""
    try:
        await tx.step(_read_only())
    except BaseException:
        await tx.rollback()
        raise
    return tx


def _read_only() -> Steps[None]:
    yield Statement("read_only", "SET LOCAL transaction_read_only = on")
