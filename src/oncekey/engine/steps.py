"""`op.phase`, `op.call` and `op.value` as flows, shared by asyncio, threads, unit tests and proofs.

The `PhasedRun` decides which step may come next and what is written. These flows decide when it is written, and what
happens if the store does not reply or the run is interrupted.

An interrupted step leaves nothing open. A transaction is rolled back. If its COMMIT was in progress, the flow reads the
record, as after a lost reply, so that the run matches it. An announcement is withdrawn if nothing was sent yet; after
that the call stays open, because its outcome is unknown. A result that was received is stored before the flow ends,
because the call cannot be repeated to get it again.
"""

from __future__ import annotations

import inspect
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from oncekey.core.errors import (
    CommitAmbiguousError,
    ConfigurationError,
    RejectedError,
    StoreError,
    StoreUnavailableError,
)
from oncekey.core.memo import decode
from oncekey.core.model import Announcement, EntryKind, MemoEntry, Snapshot
from oncekey.core.policy import micros
from oncekey.engine import reconcile
from oncekey.engine.actions import (
    RETURN_READERS,
    Begin,
    Call,
    Commit,
    Drop,
    Flush,
    Interrupted,
    Keep,
    Life,
    Rollback,
    Sleep,
    Tx,
)
from oncekey.engine.request import NO_OUTBOX

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from oncekey.core.flow import Body, Flow
    from oncekey.engine.phases import PhasedRun
    from oncekey.engine.run import Parcels
    from oncekey.ports.store import Store

T = TypeVar("T")

log = logging.getLogger("oncekey")

WRITES: Final = 8
"""How many attempts to write a call's result are made before the owner gives up."""
FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 2.0

UNFIT: Final = (
    "the call {name!r} was not made, because its function does not take these arguments: {why}; op.call(name, fn, ...) "
    "passes them by position, and the downstream key as `key`"
)
UNCERTAIN: Final = "oncekey: the call %r failed, and whether it was executed is not known: %r"
ROLLED_BACK: Final = "the phase was rolled back: its commit got no reply"


class Stepping:
    """The steps of one run of a phased handler. `drive` performs a flow; under asyncio its result is awaited."""

    __slots__ = ("_drive", "_parcels", "_phased_run", "_store")

    def __init__(
        self, drive: Callable[[Life[Any]], Any], store: Store, phased_run: PhasedRun, parcels: Parcels
    ) -> None:
        self._drive = drive
        self._store = store
        self._phased_run = phased_run
        self._parcels = parcels

    def phase(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401  (what the phase returns)
        """One local transaction: `fn` gets its connection, and then its own arguments."""

        def within(connection: Any) -> Any:  # noqa: ANN401
            return fn(connection, *args, **kwargs)

        return self._drive(phase(self._store, self._phased_run, self._parcels, name, within))

    def call(
        self,
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        repeatable: bool | timedelta,
        parameters: object,
        result: object = None,
    ) -> Any:  # noqa: ANN401  (what the call returns)
        """One outside call: `fn` gets its own arguments, and the downstream key as `key`."""
        _check_arguments(name, fn, args)

        def made(key: str) -> Any:  # noqa: ANN401
            return fn(*args, key=key)

        flow = call(
            self._store, self._phased_run, name, made, repeatable=repeatable, parameters=parameters, result=result
        )
        return self._drive(flow)

    def value(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401  (what it returns)
        """A value that may differ from run to run."""
        return self._drive(value(self._phased_run, name, partial(fn, *args, **kwargs)))


def _check_arguments(name: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Refuse arguments that do not fit before the call is announced: later, a `TypeError` would leave it uncertain."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # a C function may have no signature
    try:
        signature.bind(*args, key="")
    except TypeError as error:
        raise ConfigurationError(UNFIT.format(name=name, why=error)) from None


def phase(store: Store, phased_run: PhasedRun, parcels: Parcels, name: str, fn: Callable[[Any], Any]) -> Life[Any]:
    """One local transaction: the rows, the parcels and the recovery point commit together."""
    with phased_run.open_step(name, EntryKind.PHASE) as stored:
        if stored is not None:
            return decode(stored.result)
        parcels.take()  # drop the parcels of a failed phase
        yield RETURN_READERS  # reading sessions return their connections before the flow waits for another one
        tx, _ = yield Begin()
        try:
            returned: object = yield Call(fn, (tx.connection,), within=tx)
            yield Flush(tx)
            entry = phased_run.entry(name, EntryKind.PHASE, returned)
            yield from _committed(store, phased_run, parcels, tx, entry)
        except (Exception, Interrupted):  # not GeneratorExit: a dropped flow has no runtime to perform an action
            yield from _rolled_back(tx)
            raise
    return decode(entry.result)


def call(
    store: Store,
    phased_run: PhasedRun,
    name: str,
    fn: Callable[[str], Any],
    *,
    repeatable: bool | timedelta,
    parameters: object,
    result: object = None,
) -> Life[Any]:
    """One outside call: announced, made, and its result stored; never inside a transaction."""
    with phased_run.open_step(name, EntryKind.CALL) as stored:
        if stored is not None:
            return phased_run.recalled(stored, result)
        announcement = phased_run.announcement(name, repeatable=repeatable, parameters=parameters)
        yield RETURN_READERS
        since = phased_run.clock()
        yield from _announced(store, phased_run, announcement)
        try:
            phased_run.in_time(since)
            limit = phased_run.policy.call_timeout.total_seconds()
            returned: object = yield Call(fn, (announcement.downstream_key,), limit=limit)
            entry = phased_run.result(name, returned, final_no=False, declared=result)
        except RejectedError as no:
            entry = phased_run.result(name, no.value, final_no=True)
        except Exception as error:  # an interruption is not caught here: it proves nothing about the call
            if phased_run.unsent(error):
                yield from _to_its_end(lambda: _withdrawn(store, phased_run))
                if (not_made := phased_run.not_made(name, error)) is not None:
                    raise not_made from error
            elif phased_run.parked is None:  # oncekey replaces a response of the application that would name the error
                log.warning(UNCERTAIN, name, error)
            raise
        yield from _to_its_end(lambda: _kept(store, phased_run, entry))
    return phased_run.recalled(entry, result)


def value(phased_run: PhasedRun, name: str, fn: Callable[[], Any]) -> Life[Any]:
    """A value that may differ from run to run, computed once: the time, a random number, an id."""
    with phased_run.open_step(name, EntryKind.VALUE) as stored:
        if stored is not None:
            return decode(stored.result)
        drawn: object = yield Call(fn)
        entry = phased_run.entry(name, EntryKind.VALUE, drawn)
        phased_run.remember(entry)
    return decode(entry.result)


# The end of a phase


def _committed(store: Store, phased_run: PhasedRun, parcels: Parcels, tx: Tx, entry: MemoEntry) -> Life[None]:
    memo = phased_run.with_entry(entry)
    fold = None
    if not parcels.emitted:
        fold = store.phases.keeping(phased_run.lease, phased_run.stored, memo, micros(phased_run.policy.lease))
    try:
        ended: Keep | Drop = yield Commit(tx, _last(store, phased_run, parcels, memo), fold)
    except (CommitAmbiguousError, Interrupted) as lost:
        done = yield from _to_its_end(lambda: _found_out(store, phased_run, tx, memo))
        if isinstance(lost, Interrupted):
            raise
        if done is None:
            raise phased_run.mark_lost() from None
        if not done:
            raise StoreUnavailableError(ROLLED_BACK) from lost
    else:
        if isinstance(ended, Drop):
            raise phased_run.mark_lost()
        phased_run.written(memo, ended.value)


def _last(store: Store, phased_run: PhasedRun, parcels: Parcels, memo: tuple[MemoEntry, ...]) -> Body[Keep | Drop]:
    snapshot = yield from checkpointing(store, phased_run, parcels, memo)
    return Drop() if snapshot is None else Keep(snapshot)


def _found_out(store: Store, phased_run: PhasedRun, tx: Tx, memo: tuple[MemoEntry, ...]) -> Life[bool | None]:
    """Whether a phase whose COMMIT got no reply was stored, read when its row is free. None: the lease is lost."""
    yield Rollback(tx)  # the connection is released before another one is requested
    done = yield from store.phases.after_lost_commit(phased_run.lease, memo, micros(phased_run.policy.lease))
    if done:
        phased_run.written(memo, None)
    return done


def _rolled_back(tx: Tx) -> Life[None]:
    try:
        yield Rollback(tx)
    except Interrupted:
        yield Rollback(tx)  # no-op if it has ended
        raise


# Writes before and after a call


def _announced(store: Store, phased_run: PhasedRun, announcement: Announcement) -> Life[None]:
    """Announce the call. If it is unknown whether that was stored, withdraw it: nothing was sent yet."""
    try:
        snapshot = yield from store.phases.announce(
            phased_run.lease, phased_run.stored, phased_run.script.memo, announcement
        )
    except (CommitAmbiguousError, Interrupted):
        if announcement.sends == 1:
            yield from _to_its_end(lambda: _withdrawn(store, phased_run))
        raise
    phased_run.announced(snapshot)


def _withdrawn(store: Store, phased_run: PhasedRun) -> Life[None]:
    phased_run.withdrawn((yield from _insisting(lambda: store.phases.withdraw(phased_run.lease))))


def _kept(store: Store, phased_run: PhasedRun, entry: MemoEntry) -> Life[None]:
    memo, span = phased_run.with_entry(entry), micros(phased_run.policy.lease)
    snapshot = yield from _insisting(lambda: store.phases.result(phased_run.lease, phased_run.stored, memo, span))
    if snapshot is None:
        yield from reconcile.keep_refused_result(store, phased_run.lease, phased_run.seed, entry, phased_run.policy)
        raise phased_run.mark_lost()
    phased_run.written(memo, snapshot)


def _insisting(flow: Callable[[], Flow[T]]) -> Life[T]:
    """Retry a flow for some seconds while the store does not reply: what it writes cannot be obtained again."""
    pause = FIRST_PAUSE
    for _ in range(WRITES - 1):
        try:
            return (yield from flow())
        except StoreError:
            yield Sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)
    return (yield from flow())


def _to_its_end(flow: Callable[[], Life[T]]) -> Life[T]:
    """Run a flow to its end even if it is interrupted; its writes must be safe to repeat."""
    try:
        return (yield from flow())
    except Interrupted:
        yield from flow()
        raise


def checkpointing(
    store: Store, phased_run: PhasedRun, parcels: Parcels, memo: tuple[MemoEntry, ...]
) -> Body[Snapshot | None]:
    """Write a finished phase and its parcels, as the last statements of its transaction. None: the lease is lost."""
    snapshot = yield from store.phases.checkpointing(
        phased_run.lease, phased_run.stored, memo, micros(phased_run.policy.lease)
    )
    taken = parcels.take()
    if snapshot is not None and taken:
        if store.parcels is None:
            raise ConfigurationError(NO_OUTBOX)
        yield from store.parcels.putting(taken)
    return snapshot
