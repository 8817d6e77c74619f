"""Reports the events of one operation to the observers. Without observers no operation has a `Notifier`."""

from __future__ import annotations

from contextvars import copy_context
from typing import TYPE_CHECKING, assert_never

from oncekey.core import model
from oncekey.core.errors import StoreBusyError, StoreError
from oncekey.core.rulings import FAILED_BY_LEASE
from oncekey.core.transitions import Actor, Mover, Trigger
from oncekey.observe import events

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from oncekey.core.operate import Moved


def how_of(met: model.Record | None, record: model.Record) -> events.How:
    """How a request came to own `record`, by the record that it found under its key."""
    if met is None or met.incarnation != record.incarnation:
        return events.How.NEW  # an expired record begins another incarnation
    return events.How.TAKEN_OVER if met.state is model.State.IN_PROGRESS else events.How.RETRIED


def state_after(settlement: model.Settlement) -> model.State | None:
    """The state in which a written settlement leaves its record."""
    match settlement:
        case model.Completed():
            return model.State.COMPLETED
        case model.Retryable() | model.HandedBack():
            return model.State.FAILED_RETRYABLE
        case model.Doubtful():
            return model.State.UNKNOWN
        case model.Deferred():
            return model.State.PENDING
        case model.Discarded():
            return None
        case _:
            assert_never(settlement)


def of_sweep(
    seen: model.Record, to: model.State, by: Actor, now: model.Instant | None, why: str
) -> Iterator[events.Event]:
    """The events of a stale record that the sweeper or a request moved."""
    about = events.About.of(seen)
    late = None if now is None or seen.lease_until is None else max(0, now - seen.lease_until)
    yield events.Swept(about, to, by, late)
    if to is model.State.UNKNOWN:
        yield events.Doubted(about, why, by)
        if why == FAILED_BY_LEASE:
            yield events.GivenUp(about, 0, why)


def of_move(moved: Moved, trigger: Trigger, mover: Mover) -> Iterator[events.Event]:
    """The events of a move that an operator, a resolver or a webhook made."""
    seen, to = moved.move.seen, moved.move.row.to
    about = events.About.of(seen)
    if mover.actor is Actor.OPERATOR:
        yield events.Operated(about, trigger, to, mover.who)
    if seen.state is model.State.IN_PROGRESS and to is not None:  # taken from an owner whose lease had expired
        yield from of_sweep(seen, to, mover.actor, moved.snapshot.now, moved.move.last_error or "")
    if seen.state is model.State.UNKNOWN and to is not model.State.UNKNOWN:
        yield events.Resolved(about, to, mover.actor, max(0, moved.snapshot.now - seen.last_run_at))


def notify_failure(notify: events.Notify | None, where: str, error: Exception) -> None:
    """Report a failure of the store. A busy store has not failed, and does not count for the breaker."""
    if notify is not None and not isinstance(error, StoreBusyError):
        notify(events.StoreFailed(where, type(error).__name__))


def notify_replay(notify: events.Notify, verdict: model.Replay, seconds: float) -> None:
    """Report a replay for which nothing was claimed."""
    notify(events.Replayed(events.About.of(verdict.record), seconds))


class Notifier:
    """Reports the events of one operation to the observers, with durations."""

    __slots__ = ("_about", "_began", "_clock", "_context", "_ended", "_entered", "_observed", "_resumed", "_written")

    def __init__(self, notify: events.Notify, claim: model.Claim, clock: Callable[[], float], *, resumed: bool) -> None:
        self._observed = notify
        # A handler may end in another task or thread; its events still belong to its request.
        self._context = copy_context()
        self._written = False
        self._about = events.About.of(claim)
        self._clock = clock
        self._resumed = resumed
        self._began = self._entered = self._ended = clock()

    def admitted(self, verdict: model.Verdict) -> None:
        """Report the verdict, except the refusal of a completer that came too late."""
        self._entered = self._clock()
        seconds = self._entered - self._began
        match verdict:
            case model.Proceed(record=record, now=now, met=met):
                how = events.How.NEW
                if record is not None:
                    self._about = events.About.of(record)  # the record may be older than this request
                    how = how_of(met, record)
                after = None if met is None or how is events.How.NEW else max(0, now - met.last_run_at)
                self._notify(events.Reserved(self._about, how, seconds, self._resumed, after))
            case _ if self._resumed:
                return
            case model.Replay(record=record):
                self._notify(events.Replayed(events.About.of(record), seconds))
            case model.Refuse(code=code, record=record, met=met):
                if met is not None and record is not None:
                    for event in of_sweep(met, record.state, Actor.REQUESTER, None, record.last_error or ""):
                        self._notify(event)
                self._notify(events.Refused(self._about, code, seconds))
            case model.Bypass():
                self._notify(events.Bypassed(self._about))
            case _:
                assert_never(verdict)

    def ended(self) -> None:
        """Note when the handler ended and its settlement began."""
        self._ended = self._clock()

    def settled(self, settlement: model.Settlement) -> None:
        """Report the committed settlement once; after an interruption it may have been written twice."""
        if self._written:
            return
        self._written = True
        now = self._clock()
        outcome = settlement.outcome if isinstance(settlement, model.Completed) else None
        to = state_after(settlement)
        ran = max(0.0, self._ended - self._entered)
        self._notify(events.Settled(self._about, to, outcome, ran, now - max(self._ended, self._entered)))
        if isinstance(settlement, model.Doubtful):
            self._notify(events.Doubted(self._about, settlement.last_error, Actor.OWNER))

    def over(self) -> None:
        """Report an operation without a settlement: its client gets the record's response, or an unknown outcome."""
        if not self._written:
            ran = max(0.0, self._ended - self._entered)
            self._notify(events.Unsettled(self._about, ran, self._clock() - max(self._ended, self._entered)))

    def stepped(
        self, name: str, kind: model.EntryKind, since: float, *, recalled: bool, error: BaseException | None
    ) -> None:
        """Report a finished or failed step."""
        if isinstance(error, StoreError):
            self.failed(kind.value, error)
        what = None if error is None else type(error).__name__
        self._notify(events.Stepped(self._about, name, kind, self._clock() - since, recalled, what))

    def now(self) -> float:
        """The clock that measures steps."""
        return self._clock()

    def failed(self, where: str, error: Exception) -> None:
        """Report that the store failed."""
        notify_failure(self._notify, where, error)

    def _notify(self, event: events.Event) -> None:
        try:
            self._context.run(self._observed, event)
        except RuntimeError:  # the thread of an abandoned handler is using the context
            self._observed(event)
