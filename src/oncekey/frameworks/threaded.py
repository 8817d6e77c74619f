"""`def` handlers in threads: their call, and how an event loop opens their transaction."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from oncekey.core.errors import StoreError
from oncekey.databases.handler_sql import running
from oncekey.databases.threads import ThreadedTransaction
from oncekey.engine.deciding import HandlerEnded, rows_of
from oncekey.engine.operation import Operation, unkeyed_operation
from oncekey.engine.serve import NoConnectionError, Unkeyed, serve_unkeyed
from oncekey.engine.sync_operation import SyncOperation
from oncekey.runtimes.aio import shielded

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor, Future

    from oncekey.core.flow import Body
    from oncekey.engine.enrolment import Enrolment
    from oncekey.frameworks.asgi.installation import Installation
    from oncekey.ports.store import OpenTransaction
    from oncekey.runtimes.threads import ThreadRuntime

T = TypeVar("T")


def called(
    invoke: Callable[[object], Any], op: SyncOperation[Any] | Operation[Any], ended: HandlerEnded, enrolment: Enrolment
) -> Any:  # noqa: ANN401
    """Call an admitted handler, and record how it ended."""
    ended.entered, token = True, running.set(enrolment)
    try:
        return not_awaitable(invoke(op), enrolment)
    finally:
        running.reset(token)
        ended.kept, ended.rolled_back = op.kept, op.rolled_back


def not_awaitable(result: T, enrolment: Enrolment) -> T:
    """The result of a blocking handler; a coroutine would be discarded without having run."""
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError(
            f"{enrolment.operation} is a plain `def` and returned an awaitable: make it `async def`, and every "
            "decorator between it and @once.protect too"
        )
    return result


def run_blocking(invoke: Callable[[object], Any], enrolment: Enrolment, run: Unkeyed, runtime: ThreadRuntime) -> object:
    """Call a LOCAL `def` handler that has no record."""
    flow = serve_unkeyed(run)
    try:
        runtime.run(flow)
    except StoreError as error:
        raise NoConnectionError(error) from error
    op = unkeyed_operation(SyncOperation, run.claim, run)
    try:
        result = not_awaitable(invoke(op), enrolment)
        rows = rows_of(enrolment, op, result, raised=False)
    except BaseException as error:
        runtime.run(flow, rows_of(enrolment, op, error, raised=True))
        raise
    runtime.run(flow, rows)
    return result


async def in_thread(executor: Executor, run: Callable[[], T]) -> T:
    """Run a blocking handler in a thread, with the caller's context.

    A thread cannot be cancelled, so a cancellation waits for its end. If the request settled earlier, its key
    would be free while the handler still runs, and two threads would use one connection.
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


async def opened_in_thread(
    installation: Installation, first: Body[Any] | None = None
) -> tuple[ThreadedTransaction, Any]:
    """A business transaction for a `def` handler, and the results of its first steps.

    A request that waits for its connection occupies no handler's thread. The thread that got the connection runs the
    first steps itself: in the queue they would wait behind requests that wait for this very connection.
    """
    runtime = installation.threads()
    opened: list[tuple[OpenTransaction, Any]] = []
    try:
        await in_thread(installation.openings, lambda: opened.append(runtime.begin(first)))
    except asyncio.CancelledError:
        for tx, _ in opened:
            installation.settles.submit(tx.rollback)
        raise
    tx, found = opened[0]
    return ThreadedTransaction(tx, installation.settles), found
