"""The state of one run of a phased handler: the stored steps, the requested steps, and which may come next.

No I/O: the `PhasedRun` determines what to write; the flows of `engine.steps` write it and report the result.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from inspect import CORO_CLOSED, CORO_CREATED, getcoroutinestate
from typing import TYPE_CHECKING, Any, Final

from oncekey.canonical.digests import downstream_key
from oncekey.core.endings import DIVERGED, Progress
from oncekey.core.errors import (
    CallUncertainError,
    ConfigurationError,
    LeaseLostError,
    NotExecutedError,
    RejectedError,
    ReplayDivergedError,
    ResultInvalidError,
    ResultNotStorableError,
    StoppingError,
)
from oncekey.core.memo import (
    REPEATABLE,
    RESTORE,
    Script,
    decode,
    digest_of,
    encode,
    is_rejection,
    mismatch,
    not_sent,
    recovery_point,
    rejected,
    was_not_sent,
)
from oncekey.core.model import Announcement, EntryKind, Instant, Intent, Lease, MemoEntry, Record, Snapshot
from oncekey.core.policy import Policy, micros
from oncekey.core.results import fitted, plain_of
from oncekey.engine.actions import Interrupted
from oncekey.engine.deciding import is_inner, proves_nothing_sent
from oncekey.engine.operation import LOST

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from oncekey.engine.notifying import Notifier

log = logging.getLogger("oncekey")

UNKNOWN_POINT: Final = "unknown_recovery_point"
NOT_STORABLE: Final = "result_not_storable"
NOT_VALID: Final = "result_not_valid"
OTHER_PARAMETERS: Final = "call_parameters_changed"
NOT_AWAITED: Final = "the step {step} was not awaited, so it has not run: write `await` before it"
TOO_LATE: Final = "the call was not made: too much time had passed since it was announced"


@dataclass(slots=True)
class PhasedRun:
    """One run of a phased handler, on top of the steps that earlier runs have stored."""

    lease: Lease
    policy: Policy
    seed: bytes
    stored: tuple[MemoEntry, ...]
    intent: Intent | None
    exhausted: bool
    now: Instant
    """The store's clock when the record was last read."""
    clock: Callable[[], float]
    """Seconds since an arbitrary start, by a clock that continues while the machine sleeps."""
    stopping: Callable[[], bool] = bool
    """Whether this process is being stopped: then no further step is begun."""
    script: Script = field(default_factory=Script)
    step: str | None = None
    in_phase: bool = False
    failed: str | None = None
    """The last step that ended with an error: it stored nothing, not even that it failed."""
    unsent_call: bool = False
    """That step was a call that was provably not made."""
    undone: bool = False
    """That step was a phase, whose rows were rolled back."""
    parked: str | None = None
    diverged: str | None = None
    """A sentence about the stored step that the handler did not run."""
    lost: bool = False
    halted: bool = False
    notifier: Notifier | None = None
    """Reports each step to the observers, if there are any."""
    begun: dict[str, Coroutine[Any, Any, Any]] = field(default_factory=dict)
    """The steps of an `async def` handler, by the code that it wrote."""
    _read_at: float = 0.0

    @classmethod
    def of(
        cls,
        record: Record,
        lease: Lease,
        policy: Policy,
        now: Instant,
        clock: Callable[[], float],
        *,
        stopping: Callable[[], bool] = bool,
    ) -> PhasedRun:
        """The run of the current owner of the record."""
        phased_run = cls(
            lease=lease,
            policy=policy,
            seed=record.seed,
            stored=record.memo,
            intent=record.intent,
            exhausted=record.attempts >= policy.max_attempts,
            now=now,
            clock=clock,
            stopping=stopping,
            script=Script(record.memo),
        )
        phased_run._read_at = phased_run.clock()
        if record.recovery_point != recovery_point(record.memo):
            phased_run.parked = UNKNOWN_POINT  # a label that this code never wrote: no step may follow it
        return phased_run

    def check(self) -> None:
        """Raise if the record is parked: no step may begin."""
        if self.parked is not None:
            raise ReplayDivergedError(f"this operation waits for an operator ({self.parked}): nothing more is run")

    def parked_because(self, last_error: str) -> str:
        """Why the record is parked, for the log: the stored step that the handler did not run, and what to do."""
        if self.parked is None and not self.script.used_up:
            missing = self.script.memo[len(self.script.asked)]
            self.diverged = f"the handler ended without the stored {missing.kind} {missing.name!r}: {RESTORE}"
        return last_error if self.diverged is None else f"{last_error}: {self.diverged}"

    # Steps

    @contextmanager
    def open_step(self, name: str, kind: EntryKind) -> Iterator[MemoEntry | None]:
        """Open one step; yields its stored entry, or None if it has to run now. One step at a time."""
        self._may_go_on(name)
        stored = self._asked(name, kind)
        self.step, self.in_phase = name, stored is None and kind is EntryKind.PHASE
        notifier = self.notifier
        since = 0.0 if notifier is None else notifier.now()
        try:
            yield stored
        except (Exception, Interrupted) as error:  # not GeneratorExit: a dropped flow proves nothing about its step
            self._failed(name, kind)
            if notifier is not None:
                notifier.stepped(name, kind, since, recalled=False, error=error)
            raise
        else:
            if notifier is not None:
                notifier.stepped(name, kind, since, recalled=stored is not None, error=None)
        finally:
            self.step, self.in_phase = None, False

    def _failed(self, name: str, kind: EntryKind) -> None:
        """Note a failed phase or value: the handler may request it again, but no other step in its place."""
        if kind is not EntryKind.CALL and self.script.asked[-1:] == [name]:
            self.script.asked.pop()
            self.failed, self.unsent_call, self.undone = name, False, kind is EntryKind.PHASE

    def _asked(self, name: str, kind: EntryKind) -> MemoEntry | None:
        try:
            stored = self.script.ask(name, kind)
        except ReplayDivergedError as error:
            self.parked, self.diverged = DIVERGED, str(error)
            raise
        if stored is None and self.intent is not None and (kind, name) != (EntryKind.CALL, self.intent.phase):
            self.parked = DIVERGED
            self.diverged = mismatch(EntryKind.CALL, self.intent.phase, kind, name)
            raise ReplayDivergedError(self.diverged)
        return stored

    def entry(self, name: str, kind: EntryKind, value: object) -> MemoEntry:
        """The stored form of a result."""
        return MemoEntry(name, kind, encode(value, self.policy.max_result_bytes))

    def with_entry(self, entry: MemoEntry) -> tuple[MemoEntry, ...]:
        """The memo with one more finished step, and with the values that are not written yet."""
        return (*self.script.memo, entry)

    def remember(self, entry: MemoEntry) -> None:
        """Keep a value until the next step writes it; until then it cannot have had an effect."""
        self.script.learn(entry)

    def written(self, memo: tuple[MemoEntry, ...], snapshot: Snapshot | None) -> None:
        """Note that the store has the memo."""
        self.stored = self.script.memo = memo
        self.intent = None
        if snapshot is not None:
            self._look(snapshot)

    # Calls

    def announcement(self, name: str, *, repeatable: bool | timedelta, parameters: object) -> Announcement:
        """The announcement that is stored before a call is made, for the first time or again."""
        digest = digest_of(parameters, self.policy.max_result_bytes)
        if self.intent is not None and self.intent.digest != digest:
            self.parked = OTHER_PARAMETERS
            raise ReplayDivergedError(f"the call {name!r} may have been made with other parameters: it is not repeated")
        if self.intent is not None and not self.repeatable:
            raise CallUncertainError(f"the call {name!r} may have been made, and repeating it is not safe any more")
        span = REPEATABLE if repeatable is True else repeatable or None
        return Announcement(
            phase=name,
            downstream_key=downstream_key(self.seed, name),
            digest=digest,
            sends=1 if self.intent is None else self.intent.sends + 1,
            repeatable=None if span is None else micros(span),
            send_window=micros(self.policy.send_window),
            call_timeout=micros(self.policy.call_timeout),
        )

    def announced(self, snapshot: Snapshot | None) -> None:
        """Note that the intent is stored: until the result is stored, the outcome is uncertain."""
        if snapshot is None or snapshot.record is None:
            raise self.mark_lost()
        self.stored, self.intent = snapshot.record.memo, snapshot.record.intent
        self._look(snapshot)

    def unsent(self, error: Exception) -> bool:
        """Whether an error proves that the open call was never made, which is possible only on the first attempt."""
        first = self.intent is not None and self.intent.sends == 1 and self.parked is None
        return first and proves_nothing_sent(error, self.policy)

    def in_time(self, since: float) -> None:
        """Refuse to make a call that was announced too long ago: a resolver may already assume that it has ended."""
        if self.clock() - since > self.policy.send_window.total_seconds():
            raise NotExecutedError(TOO_LATE)

    def withdrawn(self, snapshot: Snapshot | None) -> None:
        """Note that the announcement was withdrawn; if that failed, it stays open."""
        if snapshot is not None and snapshot.record is not None:
            # Values were written with the announcement, even if its reply was lost; they stay.
            self.stored, self.intent = snapshot.record.memo, None
            self._look(snapshot)
            # The step did not happen, so a handler that catches the error may request it again.
            self.failed, self.unsent_call = self.script.asked.pop(), True

    @staticmethod
    def not_made(name: str, error: Exception) -> NotExecutedError | None:
        """The error for a call that was not made, as a resumed run would raise it. None: raise the original one."""
        said = type(error).__name__ if is_inner(error, 0) or not isinstance(error, NotExecutedError) else None
        return None if said is None else NotExecutedError(f"{name!r} was not made: {said}")

    def result(self, name: str, value: object, *, final_no: bool, declared: object = None) -> MemoEntry:
        """The entry of a call that returned; a result that cannot be stored parks the record."""
        try:
            entry = self.entry(name, EntryKind.CALL, value if declared is None else plain_of(value))
        except ResultNotStorableError:
            self.parked = NOT_STORABLE
            raise
        return rejected(entry) if final_no else entry

    def recalled(self, entry: MemoEntry, declared: Any) -> Any:  # noqa: ANN401  (of the declared type)
        """The stored result of a call, converted as declared.

        If that fails, nothing is lost, because the result is stored; but the handler would fail on every run. So the
        record is parked for an operator.
        """
        value = recalled(entry)
        if declared is None:
            return value
        try:
            return fitted(value, declared)
        except ResultInvalidError as error:
            self.parked = NOT_VALID
            log.error(
                "oncekey: the result of the call %r is %s; the operation waits for an operator", entry.name, error
            )
            raise ResultInvalidError(f"the result of {entry.name!r} is {error}") from None

    def mark_lost(self) -> LeaseLostError:
        """Note that a write was refused: from now on every step raises."""
        self.lost = True
        return LeaseLostError(LOST)

    # The end

    def forgotten(self) -> str | None:
        """A sentence about a step that the handler has passed without `await`, so that it has not run."""
        for step, coroutine in self.begun.items():
            state = getcoroutinestate(coroutine)
            if state == CORO_CREATED:
                coroutine.close()  # Python would warn, too
                return NOT_AWAITED.format(step=step)
            if state != CORO_CLOSED:
                return None  # it is being awaited, and those after it may be
        return None

    def progress(self) -> Progress:
        """The handler's progress, for the decision about its end."""
        return Progress(
            begun=bool(self.stored) or self.intent is not None,
            call_open=self.intent is not None,
            repeatable=self.intent is not None and self.repeatable,
            exhausted=self.exhausted,
            parked=self.parked,
            halted=self.halted,
            unused=not self.script.used_up,
            undone=self.undone,
        )

    @property
    def repeatable(self) -> bool:
        """Whether the open call may be repeated, by our estimate of the store's clock."""
        until = self.intent.repeatable_until if self.intent else None
        return until is not None and self._store_now() < until

    def _store_now(self) -> Instant:
        return self.now + int((self.clock() - self._read_at) * 1_000_000)

    def _look(self, snapshot: Snapshot) -> None:
        self.now, self._read_at = snapshot.now, self.clock()

    def _may_go_on(self, name: str) -> None:
        if self.lost:
            raise LeaseLostError(LOST)
        self.check()
        forgotten = self.forgotten()
        if forgotten is not None:
            raise ConfigurationError(forgotten)
        if self.step is not None:
            raise ConfigurationError(
                f"{name!r} was begun while {self.step!r} is open: one step at a time, and no call inside a phase"
            )
        self._after_failure(name)
        if self.intent is not None and self.script.asked and self.script.asked[-1] == self.intent.phase:
            raise CallUncertainError(f"the outcome of {self.intent.phase!r} is unknown, so {name!r} is not begun")
        if self.halted or self.stopping():
            self.halted = True
            raise StoppingError(f"this process is being stopped, so {name!r} is left to the next owner")

    def _after_failure(self, name: str) -> None:
        """Allow only the failed step again. After a call that was not made, another step may follow; that is stored."""
        failed, self.failed = self.failed, None
        if failed is None or failed == name:
            self.undone = False
            return
        if not self.unsent_call:
            self.failed = failed
            raise ConfigurationError(
                f"{name!r} cannot follow {failed!r}, which failed: the failure is not stored, so a resumed handler "
                f"would run {failed!r} again; run it again here, or return the finding from it instead of raising"
            )
        self.script.asked.append(failed)
        self.script.learn(not_sent(failed))


def recalled(entry: MemoEntry) -> Any:  # noqa: ANN401  (of any stored type)
    """Return a stored result; raise if it is the provider's final refusal, or shows that no call was made."""
    value = decode(entry.result)
    if is_rejection(entry):
        raise RejectedError(value)
    if was_not_sent(entry):
        raise NotExecutedError(f"{entry.name!r} was not made")
    return value
