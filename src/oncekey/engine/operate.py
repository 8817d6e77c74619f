"""An operator's commands as flows: read, decide by the table of moves, write the move together with its audit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final
from uuid import UUID

from oncekey.core.errors import ConfigurationError
from oncekey.core.flow import Flow, Mode, Transaction
from oncekey.core.keys import key_digest
from oncekey.core.model import Code, Completed, Effects, Outcome, ParcelKind, RecordId, State, StoredResponse, moment
from oncekey.core.operate import Forbidden, Move, Moved, OperatorCommand, Order, audited_as, decide
from oncekey.core.policy import Policy
from oncekey.core.problems import render
from oncekey.core.resolution import Executed, Rejected
from oncekey.core.resolvers import from_text
from oncekey.core.transitions import Mover, Note, Trigger
from oncekey.engine.notifying import of_move
from oncekey.engine.request import KeyView, look
from oncekey.observe.events import About, Notify, Operated
from oncekey.ops.explain_retry import downstream_keys

if TYPE_CHECKING:
    from oncekey.core.model import DeadLetter, Record, Snapshot
    from oncekey.core.resolution import Evidence
    from oncekey.core.transitions import AuditEntry
    from oncekey.ops.stats import Roll, Tally
    from oncekey.ports.store import Audit, Operate, Outbox, Store, Survey

NOT_HERE = "this store does not support operator commands: `oncekey stores` lists the stores that do"
NO_LETTER = "there is no dead letter with this id"
DIED_AGAIN = "it has changed since you looked: it was retried, and failed again"
OPEN_AGAIN = "it has changed since you looked: the outcome of its request is unknown, and would be settled, too"
ORPHAN = "its request was deleted, or settled without it, so nothing needs the call: run `oncekey dlq discard`"

GIVEN_UP = (
    "An operator gave up this operation: it will not be retried, and this response is final. "
    "To execute it after all, send the request with a new key."
)

BATCHES: Final = 10
"""How many deletions in its scope are shown for a key without a record."""
REPORTED: Final = (
    "{source} reported at {at} that the provider {said}, and this report has not been applied yet: a worker or "
    "`oncekey reconcile` applies it"
)
AGREEING: Final[dict[Order, tuple[type, ...]]] = {
    Order.EXECUTED: (Executed,),
    Order.DECLINED: (Rejected,),
    Order.DISCARD: (Rejected,),
    Order.NOT_EXECUTED: (),
    Order.RELEASE: (),
    Order.RETRY: (),
}
"""The orders that state an outcome or repeat a call, with the reports that they agree with."""
SETTLED = (State.COMPLETED, State.EXPIRED, State.FAILED_RETRYABLE)


@dataclass(frozen=True, slots=True)
class LetterMoved:
    """A dead letter that moves no record was put back into the outbox, or discarded."""

    letter: DeadLetter
    trigger: Trigger


def inspect(store: Store, record_id: RecordId, lock: int | None) -> Flow[KeyView]:
    """`look`, with the record's parcels and the evidence about its open call."""
    sight = yield from look(store, record_id, lock)
    record = sight.snapshot.record
    if record is None:
        return sight
    parcels = yield from operations_of(store).parcels(record.incarnation)
    evidence: tuple[Evidence, ...] = ()
    if store.reconcile is not None and record.intent is not None:
        evidence = yield from store.reconcile.about(record, record.intent.downstream_key)
    return KeyView(sight.snapshot, sight.busy, parcels, evidence)


def act(
    store: Store, record_id: RecordId, command: OperatorCommand, mover: Mover, *, notify: Notify | None = None
) -> Flow[Moved | Forbidden]:
    """Carry out the operator's command, if the table of moves allows it."""
    objection = yield from _contradicted(store, record_id, command)
    if objection is not None:
        return objection
    noting = partial(_note, command, mover)
    done = yield from operations_of(store).move(record_id, partial(decide, command), noting)
    if notify is not None and isinstance(done, Moved):
        for event in of_move(done, audited_as(command.order, done.move.seen), mover):
            notify(event)
    return done


def _contradicted(store: Store, record_id: RecordId, command: OperatorCommand) -> Flow[Forbidden | None]:
    """The objection to an outcome other than the one that a stored report states: the operator may not have seen it.

    A webhook that arrives before its record is unknown, or without a running worker, is stored and applied later. "Not
    executed" would send the call again.
    """
    if command.order not in AGREEING or store.reconcile is None:
        return None
    record = (yield from store.find(record_id)).record
    if record is None or record.state is not State.UNKNOWN:
        return None
    calls: tuple[str, ...] = ()
    if record.effects is Effects.INLINE and store.upkeep is not None:
        calls = (yield from store.upkeep.workers()).inline_calls(record.operation)
    for key in downstream_keys(record, calls).values():
        for one in (yield from store.reconcile.about(record, key)):
            reported = from_text(one.report.resolution)
            if isinstance(reported, (Executed, Rejected)) and not isinstance(reported, AGREEING[command.order]):
                said = "executed the call" if isinstance(reported, Executed) else "refused the call"
                return Forbidden(REPORTED.format(source=one.report.source, at=moment(one.at), said=said))
    return None


def retry(
    store: Store, letter_id: UUID, command: OperatorCommand, mover: Mover, *, notify: Notify | None = None
) -> Flow[Moved | LetterMoved | Forbidden]:
    """Retry a dead letter: a message alone, a deferred call together with its record."""
    letter = yield from _dead_letter(store, letter_id, command)
    if isinstance(letter, Forbidden):
        return letter
    if letter.parcel.kind is ParcelKind.EMIT:
        note = _letter_note(letter, Trigger.DLQ_RETRY, mover, _why(command))
        done = yield from operations_of(store).revive(letter, note)
        return _letter_moved(letter, Trigger.DLQ_RETRY, mover, notify) if done else Forbidden(NO_LETTER)
    if (yield from _moves_nothing(store, letter)):
        return Forbidden(ORPHAN)
    return (yield from act(store, letter.parcel.record_id, command, mover, notify=notify))


def discard(
    store: Store, letter_id: UUID, command: OperatorCommand, mover: Mover, *, notify: Notify | None = None
) -> Flow[Moved | LetterMoved | Forbidden]:
    """Discard a dead letter. A deferred call ends with a response for its client."""
    letter = yield from _dead_letter(store, letter_id, command)
    if isinstance(letter, Forbidden):
        return letter
    if letter.parcel.kind is ParcelKind.DEFER and not (yield from _moves_nothing(store, letter)):
        if command.died_at is not None and command.version is None:
            return Forbidden(OPEN_AGAIN)
        return (yield from act(store, letter.parcel.record_id, command, mover, notify=notify))
    note = _letter_note(letter, Trigger.DISCARD, mover, _why(command))
    done = yield from operations_of(store).discard(letter, note)
    return _letter_moved(letter, Trigger.DISCARD, mover, notify) if done else Forbidden(NO_LETTER)


def foresee(store: Store, letter: DeadLetter, command: OperatorCommand) -> Flow[Move | Forbidden | None]:
    """The move of the letter's record that `retry` or `discard` would make now; None: only the letter moves."""
    if letter.parcel.kind is ParcelKind.EMIT:
        return None
    seen = yield from store.find(letter.parcel.record_id)
    if is_settled(seen.record, letter):
        return Forbidden(ORPHAN) if command.order is Order.RETRY else None
    parcels = yield from operations_of(store).parcels(letter.parcel.incarnation)
    return decide(command, seen, parcels)


def _dead_letter(store: Store, letter_id: UUID, command: OperatorCommand) -> Flow[DeadLetter | Forbidden]:
    letter = yield from box_of(store).find_dead_letter(letter_id)
    if letter is None:
        return Forbidden(NO_LETTER)
    if command.died_at not in {None, letter.died_at}:
        return Forbidden(DIED_AGAIN)
    return letter


def _letter_moved(letter: DeadLetter, trigger: Trigger, mover: Mover, notify: Notify | None) -> LetterMoved:
    if notify is not None:
        notify(Operated(About.of_parcel(letter.parcel), trigger, None, mover.who))
    return LetterMoved(letter, trigger)


def given_up() -> Completed:
    """The response of an operation that was given up, unless the operator provides another one."""
    page = render(Code.EXECUTION_FAILED, 500, Policy(), detail=GIVEN_UP, final=True)
    return Completed(StoredResponse(500, ((b"content-type", page.media_type),), page.body), Outcome.FAILURE)


def disclose(store: Store, record_id: RecordId, mover: Mover, why: str) -> Flow[Snapshot]:
    """The record with all its content, for an operator; the read is audited before the content is shown."""
    audit, seen = _audit_of(store), (yield from store.find(record_id))
    if seen.record is not None:
        note = Note.of(seen.record, seen.record.state, Trigger.DISCLOSE, mover, why)
        yield Transaction("disclose", Mode.ATOMIC, partial(audit.noting, (note,)))
    return seen


def disclose_letter(store: Store, letter: DeadLetter, mover: Mover, why: str) -> Flow[None]:
    """Audit that an operator reads the payload of a dead letter, before it is shown."""
    note = _letter_note(letter, Trigger.DISCLOSE, mover, why)
    yield Transaction("disclose", Mode.ATOMIC, partial(_audit_of(store).noting, (note,)))


_CONSOLE: Final = "console"
"""The scope of the console's own lines in the audit; no caller has such a scope."""


def end_session(store: Store, nonce: str, mover: Mover) -> Flow[None]:
    """Record in the audit that an operator logged out, for every process that serves the console."""
    note = Note(
        scope=_CONSOLE,
        key_digest=key_digest(nonce),
        incarnation=UUID(int=0),
        operation=_CONSOLE,
        fence=0,
        source=None,
        to=None,
        trigger=Trigger.LOG_OUT,
        actor=mover.actor,
        who=mover.who,
        why="logged out",
    )
    yield Transaction("end_session", Mode.ATOMIC, partial(_audit_of(store).noting, (note,)))


def has_ended(store: Store, nonce: str) -> Flow[bool]:
    """Whether the operator of this session has logged out, in any process."""
    return bool((yield from _audit_of(store).history(RecordId(_CONSOLE, nonce), 1)))


def history_of(store: Store, record_id: RecordId) -> Flow[tuple[AuditEntry, ...]]:
    """The audit of a key, oldest first. Without a record, also the latest deletions in its scope."""
    audit = _audit_of(store)
    own = yield from audit.history(record_id)
    if (yield from store.find(record_id)).record is not None:
        return own
    batches = yield from audit.deletions(record_id.scope, BATCHES)
    return tuple(sorted((*own, *batches), key=lambda entry: entry.at))


def deletion_of(store: Store, record_id: RecordId) -> Flow[str | None]:
    """How a key without a record was deleted, according to the audit; None if it shows no deletion."""
    if store.audit is None:
        return None
    lines = yield from history_of(store, record_id)
    deleted = [entry for entry in lines if entry.note.trigger is Trigger.PURGE]
    if not deleted:
        return None
    named = [entry for entry in deleted if entry.note.key_digest]
    last = (named or deleted)[-1]
    at, note = moment(last.at), last.note
    if named:
        return f"its record expired, and {note.who} deleted it at {at}"
    return f"it may have expired: {note.who} last deleted keys of this tenant at {at} ({note.why})"


def operations_of(store: Store) -> Operate:
    """The store's interface for operators; raises `ConfigurationError` if it has none."""
    if store.operate is None:
        raise ConfigurationError(NOT_HERE)
    return store.operate


def _audit_of(store: Store) -> Audit:
    if store.audit is None:
        raise ConfigurationError(NOT_HERE)
    return store.audit


def box_of(store: Store) -> Outbox:
    """The store's outbox; raises `ConfigurationError` if it has none."""
    if store.outbox is None:
        raise ConfigurationError(NOT_HERE)
    return store.outbox


def survey_of(store: Store) -> Survey:
    """The store's interface for listings; raises `ConfigurationError` if it has none."""
    if store.survey is None:
        raise ConfigurationError(NOT_HERE)
    return store.survey


def roll_of(store: Store) -> Flow[Roll]:
    """The registered workers."""
    if store.upkeep is None:
        raise ConfigurationError(NOT_HERE)
    return (yield from store.upkeep.workers())


def pulse(store: Store) -> Flow[tuple[Tally, Roll]]:
    """The tally of the store, and the workers: everything that a dashboard polls."""
    tally = yield from survey_of(store).tally()
    return tally, (yield from roll_of(store))


def _moves_nothing(store: Store, letter: DeadLetter) -> Flow[bool]:
    """Whether the letter's record is gone, belongs to another request, or is settled: then only the letter moves."""
    return is_settled((yield from store.find(letter.parcel.record_id)).record, letter)


def is_settled(record: Record | None, letter: DeadLetter) -> bool:
    """Whether the record of a letter is gone, belongs to another request, or needs the letter's call no more."""
    return record is None or record.incarnation != letter.parcel.incarnation or record.state in SETTLED


def _note(command: OperatorCommand, mover: Mover, move: Move) -> Note:
    return Note.of(move.seen, move.row.to, audited_as(command.order, move.seen), mover, _why(command))


def _letter_note(letter: DeadLetter, trigger: Trigger, mover: Mover, why: str) -> Note:
    """The audit line of a parcel that moves no record, with its topic in place of the operation."""
    parcel = letter.parcel
    return Note(
        scope=parcel.record_id.scope,
        key_digest=key_digest(parcel.record_id.key),
        incarnation=parcel.incarnation,
        operation=parcel.topic,
        fence=0,
        source=None,
        to=None,
        trigger=trigger,
        actor=mover.actor,
        who=mover.who,
        why=why,
    )


def _why(command: OperatorCommand) -> str:
    """The operator's reason, with a note if the reference was closed at the provider."""
    closed = command.closed and command.order is Order.NOT_EXECUTED
    return f"{command.reason.strip()}{' (the reference was closed at the provider)' if closed else ''}"
