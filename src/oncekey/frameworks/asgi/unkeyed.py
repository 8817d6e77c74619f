"""A protected handler that runs without a record: no key was sent, or its route fails open while the store is down.

Nothing is stored and a repeat runs again, but the rows of a LOCAL handler are kept and undone as with a key (L6).
"""

from __future__ import annotations

import functools
import secrets
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from oncekey.core.errors import ConfigurationError, StoreError
from oncekey.core.model import Effects, Lease, RecordId
from oncekey.core.settle import Business, Ending, decide
from oncekey.engine.parcels import Parcels
from oncekey.engine.request import NO_OUTBOX
from oncekey.frameworks.asgi.lending import business
from oncekey.frameworks.asgi.operation import Operation, SyncOperation
from oncekey.frameworks.asgi.threads import in_thread, not_awaitable
from oncekey.runtimes.aio import flush, shielded

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.core.model import Claim
    from oncekey.engine.enrolment import Enrolment
    from oncekey.engine.shell import Engine
    from oncekey.flow import Steps
    from oncekey.frameworks.asgi.lending import Borrower
    from oncekey.ports import AsyncOpenTransaction, Store

Op = TypeVar("Op", Operation[Any], SyncOperation[Any])


class NoConnectionError(Exception):
    """The handler was not called, because its transaction could not be opened."""


async def run_unkeyed(
    invoke: Callable[[object], Any], enrolment: Enrolment, request: Borrower, claim: Claim | None
) -> object:
    """Call the handler, in a transaction of its own if it is LOCAL."""
    if enrolment.blocking:
        installation = request.installation
        if enrolment.effects is Effects.LOCAL:
            await request.read_ahead(enrolment.policy)
        blocking, wake = installation.engines.blocking, installation.wake
        return await in_thread(installation.handlers, lambda: run_blocking(invoke, enrolment, blocking, wake, claim))
    if enrolment.effects is not Effects.LOCAL:
        return await invoke(_operation(Operation, claim, None))
    try:
        tx = await business(request, enrolment)
    except StoreError as error:
        raise NoConnectionError from error
    parcels = _parcels(claim)
    op = _operation(Operation, claim, tx.connection, parcels)
    putting = functools.partial(_putting, request.installation.engines.asynchronous().store, parcels)
    try:
        result = await invoke(op)
        await _end(tx, _rows(enrolment, op, result, raised=False), putting)
    except BaseException as error:
        if isinstance(error, Exception) and _rows(enrolment, op, error, raised=True) is Business.COMMIT:
            await _end(tx, Business.COMMIT, putting)
        # What was committed is over; in a scope that was cancelled even a roll-back would be cancelled.
        await shielded(tx.rollback())
        raise
    if parcels.used:
        request.installation.wake()
    return result


async def _end(tx: AsyncOpenTransaction, rows: Business, putting: Callable[[], Steps[None]]) -> None:
    if rows is Business.COMMIT:
        await flush(tx)
        await tx.step(putting())
        await tx.commit()
    else:
        await tx.rollback()


def run_blocking(
    invoke: Callable[[object], Any],
    enrolment: Enrolment,
    blocking: Callable[[], Engine],
    wake: Callable[[], None],
    claim: Claim | None,
) -> object:
    """The same for a `def` handler, in its thread."""
    if enrolment.effects is not Effects.LOCAL:
        return not_awaitable(invoke(_operation(SyncOperation, claim, None)), enrolment)
    engine = blocking()
    try:
        tx = engine.open()
    except StoreError as error:
        raise NoConnectionError from error
    parcels = _parcels(claim)
    op = _operation(SyncOperation, claim, tx.connection, parcels)
    try:
        try:
            result = not_awaitable(invoke(op), enrolment)
        except Exception as error:
            if _rows(enrolment, op, error, raised=True) is Business.COMMIT:
                tx.step(_putting(engine.store, parcels))
                tx.commit()
            raise
        if _rows(enrolment, op, result, raised=False) is Business.COMMIT:
            tx.step(_putting(engine.store, parcels))
            tx.commit()
    finally:
        tx.rollback()
    if parcels.used:
        wake()
    return result


def _parcels(claim: Claim | None) -> Parcels:
    """What is emitted without a record belongs to a life of its own."""
    record_id, seed = (RecordId("", ""), secrets.token_bytes(32)) if claim is None else (claim.id, claim.seed)
    return Parcels(Lease(record_id, uuid4(), 1, 1, Effects.LOCAL, 0, 0, 0), seed)


def _putting(store: Store, parcels: Parcels) -> Steps[None]:
    if parcels.emitted:
        if store.outbox is None:
            raise ConfigurationError(NO_OUTBOX)
        yield from store.outbox.putting(parcels.emitted)


def _operation(kind: type[Op], claim: Claim | None, connection: object, parcels: Parcels | None = None) -> Op:
    if claim is not None:
        # The provider's own idempotency is all that is left: a repeat must send it the same key (D1).
        seed, key, scope = claim.seed, claim.id.key, claim.id.scope
        return kind(key=key, scope=scope, seed=seed, connection=connection, parcels=parcels)
    # Each request is an operation of its own, so no two of them may share a downstream key.
    return kind(key=None, scope="", seed=secrets.token_bytes(32), connection=connection, parcels=parcels)


def _rows(enrolment: Enrolment, op: Operation[Any] | SyncOperation[Any], ended: object, *, raised: bool) -> Business:
    """What becomes of the rows, as far as it can be seen here: responses and HTTP exceptions name their status."""
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
