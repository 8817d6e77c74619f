"""Blocking handlers in threads, and their business transactions, ended from the event loop in threads of their own."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from oncekey.runtimes.aio import shielded

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor, Future

    from oncekey.flow import Steps
    from oncekey.frameworks.asgi.installation import Installation
    from oncekey.ports import OpenTransaction

T = TypeVar("T")


async def in_thread(executor: Executor, run: Callable[[], T]) -> T:
    """Run a blocking handler, in our context. A thread cannot be cancelled, so a cancellation waits for its end (P5).

    Settled before that, its key would be free while it still runs, and its connection in two hands.
    """
    job = executor.submit(contextvars.copy_context().run, run)
    try:
        return await asyncio.wrap_future(job)
    except asyncio.CancelledError:
        if not job.cancel():
            await shielded(_ended(job))
        raise


async def _ended(job: Future[Any]) -> None:
    with suppress(BaseException):
        await asyncio.wrap_future(job)


async def opened_in_thread(installation: Installation) -> ThreadedTransaction:
    """A business transaction for a `def` handler. Who waits for its connection takes no handler's thread."""
    engine = installation.engines.blocking()
    opened: list[OpenTransaction] = []
    try:
        await in_thread(installation.openings, lambda: opened.append(engine.open()))
    except asyncio.CancelledError:
        for tx in opened:
            installation.settles.submit(tx.rollback)
        raise
    return ThreadedTransaction(opened[0], installation.settles, first=installation.openings)


class ThreadedTransaction:
    """The transaction of a `def` handler, as the exchange ends it.

    A call that is cancelled goes on in its thread, so the next one waits for it: a connection is in one hand only.
    The first steps begin it where a store has one writer, and wait for that in a thread of the openings.
    """

    def __init__(self, tx: OpenTransaction, executor: Executor, *, first: Executor | None = None) -> None:
        self._tx = tx
        self._executor = executor
        self._first = first
        self._turn = threading.Lock()

    @property
    def connection(self) -> Any:  # noqa: ANN401  (whatever the driver's users know)
        """What the handler got."""
        return self._tx.connection

    async def step(self, steps: Steps[T]) -> T:
        """Run statements inside it."""
        executor, self._first = self._first or self._executor, None
        return await self._do(lambda: self._tx.step(steps), executor)

    async def commit(self) -> None:
        """Commit."""
        await self._do(self._tx.commit)

    async def rollback(self) -> None:
        """Undo everything and give the connection back."""
        await self._do(self._tx.rollback)

    async def _do(self, job: Callable[[], T], executor: Executor | None = None) -> T:
        def in_turn() -> T:
            with self._turn:
                return job()

        return await asyncio.get_running_loop().run_in_executor(executor or self._executor, in_turn)
