"""A blocking business transaction, ended from the event loop in threads of its own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from oncekey.flow import Steps
    from oncekey.ports import OpenTransaction

T = TypeVar("T")


class ThreadedTransaction:
    """The transaction of a `def` handler, as the exchange ends it."""

    def __init__(self, tx: OpenTransaction, executor: Executor) -> None:
        self._tx = tx
        self._executor = executor

    @property
    def connection(self) -> Any:  # noqa: ANN401  (whatever the driver's users know)
        """What the handler got."""
        return self._tx.connection

    async def step(self, steps: Steps[T]) -> T:
        """Run statements inside it."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._tx.step, steps)

    async def commit(self) -> None:
        """Commit."""
        await asyncio.get_running_loop().run_in_executor(self._executor, self._tx.commit)

    async def rollback(self) -> None:
        """Undo everything and give the connection back."""
        await asyncio.get_running_loop().run_in_executor(self._executor, self._tx.rollback)
