"""Runs a protected handler without a record: the client sent no key, or the route fails open while the store is down.

Nothing is stored, and a repeat runs again. The rows of a LOCAL handler are committed and rolled back as with a key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from oncekey.core.errors import StoreError
from oncekey.core.model import Effects
from oncekey.engine.operation import Operation, SyncOperation
from oncekey.engine.serve import Unkeyed, serve_unkeyed
from oncekey.frameworks.asgi.threads import in_thread
from oncekey.frameworks.asgi.transactions import transaction_of
from oncekey.frameworks.blocking import NoConnectionError, not_awaitable, rows_of, run_blocking, unkeyed_operation
from oncekey.runtimes.aio import Changed, shielded

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.core.model import Claim
    from oncekey.engine.enrolment import Enrolment
    from oncekey.frameworks.asgi.transactions import TransactionUser


async def run_unkeyed(
    invoke: Callable[[object], Any], enrolment: Enrolment, request: TransactionUser, claim: Claim | None
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
    transaction = request.transaction
    if transaction is not None:
        await transaction.rest()
    run = Unkeyed(site, claim, None if transaction is None else transaction.business_tx)
    flow = serve_unkeyed(run)
    try:
        await runtime.run(flow)
    except Changed as changed:
        raise changed.cancelled from None
    except StoreError as error:
        raise NoConnectionError(error) from error
    operation = unkeyed_operation(Operation, claim, run)
    try:
        transaction_of(request).joins(run.tx, enrolment)
        try:
            result = await invoke(operation)
        except installation.answers as answer:
            result = answer
        rows = rows_of(enrolment, operation, installation.seen(result), raised=False)
    except BaseException as error:
        # The roll-back is shielded: in a cancelled scope it would be cancelled, too.
        await shielded(runtime.finish(flow, rows_of(enrolment, operation, error, raised=True)))
        raise
    _, cancelled = await runtime.finish(flow, rows)
    if cancelled is not None:
        raise cancelled
    return cast("object", result)
