"""A protected handler that runs without a record: no key was sent, or its route fails open while the store is down.

Nothing is stored and a repeat runs again, but the rows of a LOCAL handler are kept and undone as with a key.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, TypeVar, cast

from oncekey.core.errors import StoreError
from oncekey.core.model import Effects
from oncekey.core.settle import Business, Ending, decide
from oncekey.engine.serve import Unkeyed, serve_unkeyed
from oncekey.frameworks.asgi.lending import lend
from oncekey.frameworks.asgi.operation import Operation, SyncOperation
from oncekey.frameworks.asgi.threads import in_thread, not_awaitable
from oncekey.runtimes.aio import Changed, shielded

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.core.model import Claim
    from oncekey.engine.enrolment import Enrolment
    from oncekey.frameworks.asgi.lending import Borrower
    from oncekey.runtimes.threads import ThreadRuntime

Op = TypeVar("Op", Operation[Any], SyncOperation[Any])


class NoConnectionError(Exception):
    """The handler was not called, because its transaction could not be opened."""


async def run_unkeyed(
    invoke: Callable[[object], Any], enrolment: Enrolment, request: Borrower, claim: Claim | None
) -> object:
    """Call the handler, in a transaction of its own if it is LOCAL."""
    installation = request.installation
    if enrolment.effects is not Effects.LOCAL:
        if enrolment.blocking:
            op = unkeyed_operation(SyncOperation, claim, None)
            return await in_thread(installation.handlers, lambda: not_awaitable(invoke(op), enrolment))
        return await invoke(unkeyed_operation(Operation, claim, None))
    await request.read_ahead(enrolment.policy)
    runtime, site = installation.life()
    if enrolment.blocking:
        run, threads = Unkeyed(site, claim), installation.threads()
        return await in_thread(installation.handlers, lambda: run_blocking(invoke, enrolment, run, threads))
    lent = request.lent
    if lent is not None:
        await lent.rest()
    run = Unkeyed(site, claim, None if lent is None else lent.business_tx)
    flow = serve_unkeyed(run)
    try:
        await runtime.run(flow)
    except Changed as changed:
        raise changed.cancelled from None
    except StoreError as error:
        raise NoConnectionError from error
    operation = unkeyed_operation(Operation, claim, run)
    try:
        lend(request).joins(run.tx, enrolment)
        result = await invoke(operation)
        rows = _rows(enrolment, operation, result, raised=False)
    except BaseException as error:
        # In a scope that was cancelled even a roll-back would be cancelled.
        await shielded(runtime.finish(flow, _rows(enrolment, operation, error, raised=True)))
        raise
    _, cancelled = await runtime.finish(flow, rows)
    if cancelled is not None:
        raise cancelled
    return cast("object", result)


def run_blocking(invoke: Callable[[object], Any], enrolment: Enrolment, run: Unkeyed, runtime: ThreadRuntime) -> object:
    """Call a LOCAL `def` handler, in its thread."""
    flow = serve_unkeyed(run)
    try:
        runtime.run(flow)
    except StoreError as error:
        raise NoConnectionError from error
    op = unkeyed_operation(SyncOperation, run.claim, run)
    try:
        result = not_awaitable(invoke(op), enrolment)
        rows = _rows(enrolment, op, result, raised=False)
    except BaseException as error:
        runtime.run(flow, _rows(enrolment, op, error, raised=True))
        raise
    runtime.run(flow, rows)
    return result


def unkeyed_operation(kind: type[Op], claim: Claim | None, run: Unkeyed | None) -> Op:
    """What a handler is handed whose request has no record."""
    held: dict[str, Any] = {}
    if run is not None:
        held = {"connection": run.tx.connection, "parcels": run.parcels}
    if claim is not None:
        # The provider's own idempotency is all that is left: a repeat must send it the same key.
        return kind(key=claim.id.key, scope=claim.id.scope, seed=claim.seed, **held)
    # Each request is an operation of its own, so no two of them may share a downstream key.
    return kind(key=None, scope="", seed=secrets.token_bytes(32), **held)


def _rows(enrolment: Enrolment, op: Operation[Any] | SyncOperation[Any], ended: object, *, raised: bool) -> Business:
    """What becomes of the rows, as far as it can be seen here: responses and HTTP exceptions name their status."""
    if raised and not isinstance(ended, Exception):
        return Business.ROLLBACK
    status = getattr(ended, "status_code", None if raised else 200)
    if isinstance(ended, tuple) and len(ended) > 1:  # Flask's body and status
        status = ended[1]
    ending = Ending(
        status=status if isinstance(status, int) else None,
        headers=(),
        body=b"",
        entered=True,
        raised=raised,
        not_executed=False,
        kept=op.kept,
        rolled_back=op.rolled_back,
    )
    return decide(enrolment.effects, enrolment.policy, ending).business
