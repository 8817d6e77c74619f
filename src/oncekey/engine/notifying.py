"""Reports the events of one operation to the observers. Without observers no operation has a `Notifier`."""

from __future__ import annotations

from contextvars import copy_context
from typing import TYPE_CHECKING, assert_never

from oncekey.core.errors import StoreBusyError, StoreError
from oncekey.core.model import (
    Bypass,
    Completed,
    Deferred,
    Discarded,
    Doubtful,
    HandedBack,
    Proceed,
    Refuse,
    Replay,
    Retryable,
    State,
)
from oncekey.core.transitions import Actor
from oncekey.observe.events import (
    About,
    Bypassed,
    Doubted,
    How,
    Operated,
    Refused,
    Replayed,
    Reserved,
    Resolved,
    Settled,
    Stepped,
    StoreFailed,
    Swept,
    Unsettled,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from oncekey.core.audit import Mover
    from oncekey.core.model import Claim, EntryKind, Instant, Record, Settlement, Verdict
    from oncekey.core.operate import Moved
    from oncekey.core.transitions import Trigger
    from oncekey.observe.events import Event, Notify


def how_of(met: Record | None, record: Record) -> How:
    """How a request came to own `record`, by the record that it found under its key."""
    if met is None or met.incarnation != record.incarnation:
        return How.NEW  # an expired record begins another incarnation
    return How.TAKEN_OVER if met.state is State.IN_PROGRESS else How.RETRIED


def state_after(settlement: Settlement) -> State | None:
    """The state in which a written settlement leaves its record."""
    match settlement:
        case Completed():
            return State.COMPLETED
        case Retryable() | HandedBack():
            return State.FAILED_RETRYABLE
        case Doubtful():
            return State.UNKNOWN
        case Deferred():
            return State.PENDING
        case Discarded():
            return None
        case _:
            assert_never(settlement)


def of_sweep(seen: Record, to: State, by: Actor, now: Instant | None, why: str) -> Iterator[Event]:
    """The events of a stale record that the sweeper or a request moved."""
    about = About.of(seen)
    late = None if now is None or seen.lease_until is None else max(0, now - seen.lease_until)
    yield Swept(about, to, by, late)
    if to is State.UNKNOWN:
        yield Doubted(about, why, by)


def of_move(moved: Moved, trigger: Trigger, mover: Mover) -> Iterator[Event]:
    """The events of a move that an operator, a resolver or a webhook made."""
    seen, to = moved.move.seen, moved.move.row.to
    about = About.of(seen)
    if mover.actor is Actor.OPERATOR:
        yield Operated(about, trigger, to, mover.who)
    if seen.state is State.IN_PROGRESS and to is not None:  # taken from an owner that let its lease run out
        yield from of_sweep(seen, to, mover.actor, moved.snapshot.now, moved.move.last_error or "")
    if seen.state is State.UNKNOWN and to is not State.UNKNOWN:
        yield Resolved(about, to, mover.actor, max(0, moved.snapshot.now - seen.last_run_at))


def notify_failure(notify: Notify | None, where: str, error: Exception) -> None:
    """Report that the store failed. A store that is only busy did not fail, and does not count for the breaker."""
    if notify is not None and not isinstance(error, StoreBusyError):
        notify(StoreFailed(where, type(error).__name__))


def notify_replay(notify: Notify, verdict: Replay, seconds: float) -> None:
    """Report a replay that was given before anything was claimed."""
    notify(Replayed(About.of(verdict.record), seconds))


class Notifier:
    """Reports one operation to the observers, and how long its parts took."""

    __slots__ = ("_about", "_began", "_clock", "_context", "_ended", "_entered", "_observed", "_resumed", "_written")

    def __init__(self, notify: Notify, claim: Claim, clock: Callable[[], float], *, resumed: bool) -> None:
        self._observed = notify
        # A handler may end in another task or thread; its events still belong to its request.
        self._context = copy_context()
        self._written = False
        self._about = About.of(claim)
        self._clock = clock
        self._resumed = resumed
        self._began = self._entered = self._ended = clock()

    def admitted(self, verdict: Verdict) -> None:
        """Report the verdict. That a completer was refused because it came too late is not reported."""
        self._entered = self._clock()
        seconds = self._entered - self._began
        match verdict:
            case Proceed(record=record, now=now, met=met):
                how = How.NEW
                if record is not None:
                    self._about = About.of(record)  # the record may be older than this request
                    how = how_of(met, record)
                after = None if met is None or how is How.NEW else max(0, now - met.last_run_at)
                self._notify(Reserved(self._about, how, seconds, self._resumed, after))
            case _ if self._resumed:
                return
            case Replay(record=record):
                self._notify(Replayed(About.of(record), seconds))
            case Refuse(code=code, record=record, met=met):
                if met is not None and record is not None:
                    for event in of_sweep(met, record.state, Actor.REQUESTER, None, record.last_error or ""):
                        self._notify(event)
                self._notify(Refused(self._about, code, seconds))
            case Bypass():
                self._notify(Bypassed(self._about))
            case _:
                assert_never(verdict)

    def ended(self) -> None:
        """Note that the handler has ended: from now on it is settled."""
        self._ended = self._clock()

    def settled(self, settlement: Settlement) -> None:
        """Report the committed settlement; after an interruption it may have been written twice."""
        if self._written:
            return
        self._written = True
        now = self._clock()
        outcome = settlement.outcome if isinstance(settlement, Completed) else None
        to = state_after(settlement)
        ran = max(0.0, self._ended - self._entered)
        self._notify(Settled(self._about, to, outcome, ran, now - max(self._ended, self._entered)))
        if isinstance(settlement, Doubtful):
            self._notify(Doubted(self._about, settlement.last_error, Actor.OWNER))

    def over(self) -> None:
        """Report the answer. Without a settlement of ours it is the record's answer, or that the outcome is unknown."""
        if not self._written:
            ran = max(0.0, self._ended - self._entered)
            self._notify(Unsettled(self._about, ran, self._clock() - max(self._ended, self._entered)))

    def stepped(self, name: str, kind: EntryKind, since: float, *, recalled: bool, error: BaseException | None) -> None:
        """Report a step that was taken, or failed."""
        if isinstance(error, StoreError):
            self.failed(kind.value, error)
        what = None if error is None else type(error).__name__
        self._notify(Stepped(self._about, name, kind, self._clock() - since, recalled, what))

    def now(self) -> float:
        """The clock that measures steps."""
        return self._clock()

    def failed(self, where: str, error: Exception) -> None:
        """Report that the store failed."""
        notify_failure(self._notify, where, error)

    def _notify(self, event: Event) -> None:
        try:
            self._context.run(self._observed, event)
        except RuntimeError:  # the thread of an abandoned handler reports at this very moment
            self._observed(event)
