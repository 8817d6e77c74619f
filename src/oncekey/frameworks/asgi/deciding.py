"""From a handler's end, as the exchange saw it, to the decision, and to our own answer where its own cannot go out."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol

from oncekey.core.choices import On5xx
from oncekey.core.errors import NotExecuted
from oncekey.core.model import Code, Deferred, Doubtful, Effects, HandedBack, Refuse, Retryable
from oncekey.core.policy import micros
from oncekey.core.settle import DIVERGED, NOT_DEFERRED, STOPPED, Decision, Ending, Progress, Reading, decide, read
from oncekey.engine.phases import proves_nothing_sent

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.core.answers import Answer
    from oncekey.core.model import Record
    from oncekey.engine.enrolment import Enrolment
    from oncekey.engine.parcels import Parcels
    from oncekey.engine.phases import Course
    from oncekey.frameworks.asgi.capture import Capture
    from oncekey.frameworks.asgi.installation import Installation

log = logging.getLogger("oncekey")

RAISED_SUCCESS: Final = (
    "oncekey: %s ended with a success (%s) whose rows were rolled back, because it was raised: return it, or call "
    "op.keep() before"
)
DEFER_ONCE: Final = "effects=OUTBOX means that a handler which succeeds has called op.defer exactly once"


class Ended(Protocol):
    """What is known of a run whose handler has ended."""

    installation: Installation
    course: Course | None
    parcels: Parcels | None
    record: Record | None
    error: BaseException | None
    entered: bool
    kept: bool
    rolled_back: bool


def decided(
    run: Ended,
    enrolment: Enrolment,
    capture: Capture,
    error: BaseException | None,
    answer: Callable[[Refuse], Answer],
) -> tuple[Decision, Answer | None]:
    """The decision, and our own answer where the handler's cannot be sent."""
    policy, effects = enrolment.policy, enrolment.effects
    raised = run.error or error
    ending = _ending(run, enrolment, capture, raised)
    if error is None and capture.refused is None:
        decision = decide(effects, policy, ending)
        return decision, _instead(run, enrolment, decision, ending, answer)
    failed = answer(Refuse(Code.EXECUTION_FAILED))
    if capture.refused is not None:
        log.error("oncekey: the answer cannot be captured: %s", capture.refused)
        return decide(effects, policy, replace(ending, status=None, error=capture.refused)), failed
    # The application's own error page is made outside of us and may show a traceback: never store that one.
    final = isinstance(raised, Exception) and not ending.not_executed  # a cancellation is nobody's last word
    if effects is Effects.INLINE and policy.on_5xx is On5xx.STORE and final:
        ours = replace(ending, status=failed.status, headers=failed.headers, body=failed.body)
        return decide(effects, policy, ours), failed
    unfinished = replace(ending, status=None)  # whatever had been begun of an answer
    decision = decide(effects, policy, unfinished)
    told = _instead(run, enrolment, decision, unfinished, answer)
    return decision, failed if told is None and isinstance(raised, NotExecuted) else told


def _ending(run: Ended, enrolment: Enrolment, capture: Capture, raised: BaseException | None) -> Ending:
    policy = enrolment.policy
    if run.course is not None and run.installation.stopping and isinstance(raised, asyncio.CancelledError):
        run.course.halted = True  # by a server that stops
    return Ending(
        status=capture.status,
        headers=capture.headers,
        body=capture.kept,
        entered=run.entered,
        raised=raised is not None,
        not_executed=raised is not None and proves_nothing_sent(raised, policy),
        kept=run.kept,
        rolled_back=run.rolled_back,
        progress=Progress() if run.course is None else run.course.progress(),
        deferred=() if run.parcels is None else run.parcels.deferred,
        resume_after=micros(policy.complete_interval),
    )


def _instead(
    run: Ended, enrolment: Enrolment, decision: Decision, ending: Ending, answer: Callable[[Refuse], Answer]
) -> Answer | None:
    """Our own answer where the handler's would say what is not so: its call is open, or not made yet (P4)."""
    progress = ending.progress
    match decision.settlement:
        case Deferred():
            return answer(Refuse(Code.IN_PROGRESS, retry_after=1, record=run.record))
        case Doubtful(last_error) if progress.parked is not None or last_error == DIVERGED:
            log.error("oncekey: %s is parked: %s", enrolment.operation, last_error)
            return answer(Refuse(Code.EXECUTION_FAILED))
        case Doubtful() if progress.call_open:
            return answer(Refuse(Code.OUTCOME_UNKNOWN))
        case HandedBack(last_error) if last_error == STOPPED:
            return answer(Refuse(Code.IN_PROGRESS, retry_after=1))
        case HandedBack() if progress.call_open:
            return answer(Refuse(Code.EXECUTION_FAILED))
        case Retryable(last_error) if last_error == NOT_DEFERRED:
            log.error("oncekey: %s: %s", enrolment.operation, DEFER_ONCE)
            return answer(Refuse(Code.EXECUTION_FAILED))
        case _ if read(enrolment.effects, ending, enrolment.policy) is Reading.UNDONE:
            log.error(RAISED_SUCCESS, enrolment.operation, ending.status)
            return answer(Refuse(Code.EXECUTION_FAILED))
        case _:
            return None
