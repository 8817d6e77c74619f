"""Passes the end of a handler to the core for its decision, and builds the responses of replays and refusals."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeVar, assert_never
from uuid import UUID, uuid4

from oncekey.core import answers
from oncekey.core.endings import (
    DIVERGED,
    NOT_DEFERRED,
    STOPPED,
    Business,
    Decision,
    Ending,
    Progress,
    Reading,
    decide,
    read,
    returned,
)
from oncekey.core.errors import NotExecutedError
from oncekey.core.keys import key_digest
from oncekey.core.model import (
    Bypass,
    Code,
    Deferred,
    Doubtful,
    Effects,
    HandedBack,
    Proceed,
    Refuse,
    Replay,
    Retryable,
    State,
)
from oncekey.core.policy import On5xx, Policy, micros
from oncekey.core.scope import names_of, shown_scope
from oncekey.engine.local import record_as_claimed

if TYPE_CHECKING:
    from oncekey.core.answers import Answer
    from oncekey.core.model import Claim, Record, Verdict
    from oncekey.engine.enrolment import Enrolment
    from oncekey.engine.operation import Operation, SyncOperation
    from oncekey.engine.run import Run
    from oncekey.ports.store import Asker, Captured


log = logging.getLogger("oncekey")
E = TypeVar("E", bound=BaseException)

UNKNOWN: Final = "oncekey: the outcome of %(operation)s for %(tenant)s is unknown: %(why)s (digest %(key_digest)s)"
_NUMBERS: Final = count(1)
_ACCEPTED: Final = 202
_LEFT: Final = "__oncekey_left__"
_MOST_DOUBLINGS: Final = 10
"""How often a worker's wait before the next attempt doubles: up to 85 minutes with the defaults."""

operation_begins: Final = _NUMBERS.__next__
"""Returns the number at which an operation begins."""

RAISED_SUCCESS: Final = (
    "oncekey: %s ended with a success (%s) whose rows were rolled back, because it was raised: return it, or call "
    "op.keep() first"
)
NO_PROOF: Final = (
    "oncekey: %s returned %s, which does not prove that nothing was executed, so the client receives "
    "idempotency_outcome_unknown instead: if nothing was executed, raise NotExecutedError, or list the status in "
    "not_executed_statuses"
)
DEFER_ONCE: Final = "a handler with effects=OUTBOX must call op.defer exactly once if it succeeds"


@dataclass(slots=True)
class HandlerEnded:
    """How the handler ended."""

    entered: bool = False
    kept: bool = False
    rolled_back: bool = False
    error: BaseException | None = None
    """The handler's exception, even if the application turned it into a response."""
    cancelled: bool = False
    """The exception was a cancellation."""
    began: int = field(default_factory=operation_begins)
    """The number at which the operation began, by the counter of `leaving`."""


def decided(
    run: Run, ended: HandlerEnded, captured: Captured, error: BaseException | None
) -> tuple[Decision, Answer | None]:
    """The decision, and oncekey's response if the handler's must not be sent; `error` has left the application."""
    policy, effects = run.policy, run.enrolment.effects
    raised = ended.error or error
    if (
        raised is None
        and captured.refused is None
        and ended.entered
        and not ended.rolled_back
        and run.phased_run is None
    ):
        short = returned(effects, policy, captured.status, captured.headers, captured.kept)
        if short is not None:
            return short, None
    ending = _ending(run, ended, captured, raised)
    forgotten = None if run.phased_run is None or raised is not None else run.phased_run.forgotten()
    if forgotten is not None:
        log.error("oncekey: the response of %s is not stored: %s", run.enrolment.operation, forgotten)
        return _failed(run, replace(ending, error="step_not_awaited"))
    if error is None and captured.refused is None:
        decision = decide(effects, policy, ending)
        return decision, _instead(run, decision, ending)
    if captured.refused is not None:
        log.error("oncekey: the response cannot be captured: %s", captured.refused)
        return _failed(run, replace(ending, error=captured.refused))
    # The application's error page is created outside this middleware and may show a traceback: it is never stored.
    final = isinstance(raised, Exception) and not ending.not_executed  # a cancellation is not a final outcome
    if effects is Effects.INLINE and policy.on_5xx is On5xx.STORE and final:
        failed = refused(run, Refuse(Code.EXECUTION_FAILED, final=True))
        ours = replace(ending, status=failed.status, headers=failed.headers, body=failed.body)
        return decide(effects, policy, ours), failed
    unfinished = replace(ending, status=None)  # an incomplete response does not count
    decision = decide(effects, policy, unfinished)
    instead = _instead(run, decision, unfinished)
    if instead is None and isinstance(raised, NotExecutedError) and not is_inner(raised, ended.began):
        instead = refused(run, Refuse(Code.EXECUTION_FAILED))
    return decision, instead


def _failed(run: Run, ending: Ending) -> tuple[Decision, Answer]:
    """The decision about a handler whose response is not used."""
    decision = decide(run.enrolment.effects, run.policy, replace(ending, status=None))
    return decision, refused(run, Refuse(Code.EXECUTION_FAILED))


def _ending(run: Run, ended: HandlerEnded, captured: Captured, raised: BaseException | None) -> Ending:
    policy, phased_run = run.policy, run.phased_run
    earlier = 0 if run.record is None else run.record.attempts - 1
    if phased_run is not None and ended.cancelled and run.site.stopping():
        phased_run.halted = True  # the server is stopping
    return Ending(
        status=captured.status,
        headers=captured.headers,
        body=captured.kept,
        entered=ended.entered,
        raised=raised is not None,
        not_executed=_is_proof(raised, ended, policy),
        kept=ended.kept,
        rolled_back=ended.rolled_back,
        progress=Progress() if phased_run is None else phased_run.progress(),
        deferred=run.parcels.deferred,
        resume_after=micros(policy.complete_interval) << min(earlier, _MOST_DOUBLINGS),
    )


def _is_proof(raised: BaseException | None, ended: HandlerEnded, policy: Policy) -> bool:
    """Whether the handler's exception proves that nothing was sent; an inner call's error concerns only that call."""
    return raised is not None and not is_inner(raised, ended.began) and proves_nothing_sent(raised, policy)


def _record_of(run: Run) -> Record:
    """The record. A new key in one commit has none yet: then the record that a claim would have created."""
    if run.record is not None:
        return run.record
    assert run.one_commit is not None
    return record_as_claimed(run.claim, run.one_commit.target, run.now)


def _instead(run: Run, decision: Decision, ending: Ending) -> Answer | None:
    """Replaces a response of the handler that is untrue: a call is open or deferred, or rows were rolled back."""
    progress, operation = ending.progress, run.enrolment.operation
    reading = read(run.enrolment.effects, ending, run.policy)
    match decision.settlement:
        case Deferred(accepted=accepted):
            record = replace(_record_of(run), state=State.PENDING, request=accepted)
            return refused(run, Refuse(Code.IN_PROGRESS, retry_after=1, record=record))
        case Doubtful(last_error) if progress.parked is not None or last_error == DIVERGED:
            assert run.phased_run is not None
            log.error("oncekey: %s waits for an operator: %s", operation, run.phased_run.parked_because(last_error))
            return refused(run, Refuse(Code.EXECUTION_FAILED))
        case Doubtful() if progress.call_open:
            return refused(run, Refuse(Code.OUTCOME_UNKNOWN))
        case Doubtful() if reading is Reading.NEVER_STORED:
            # Clients treat each of these statuses as proof that nothing was executed.
            log.error(NO_PROOF, operation, ending.status)
            return refused(run, Refuse(Code.OUTCOME_UNKNOWN))
        case HandedBack(last_error) if last_error == STOPPED:
            return refused(run, Refuse(Code.IN_PROGRESS, retry_after=1))
        case HandedBack() if progress.call_open:
            return refused(run, Refuse(Code.EXECUTION_FAILED))
        case Retryable(last_error) if last_error == NOT_DEFERRED:
            log.error("oncekey: %s: %s", operation, DEFER_ONCE)
            return refused(run, Refuse(Code.EXECUTION_FAILED))
        case _ if reading is Reading.UNDONE:
            log.error(RAISED_SUCCESS, operation, ending.status)
            return refused(run, Refuse(Code.EXECUTION_FAILED))
        case _:
            return None


security = logging.getLogger("oncekey.security")
"""Gets a warning for each misused key: a client has a bug, or an attacker tries a known key with another payload."""


def refusal(
    refused: Refuse,
    policy: Policy,
    *,
    claim: Claim | None = None,
    echo: bytes | None = None,
    status_url: str | None = None,
    trace_id: str = "",
) -> Answer:
    """The response to a request that is not executed, which is logged with the instance id in its body."""
    instance = uuid4()
    answer = answers.refuse(refused, policy, echo=echo, status_url=status_url, fault_id=instance.hex, trace_id=trace_id)
    if answer.status != _ACCEPTED:
        _log_refusal(refused, claim, _shown_in(answer, instance))
    return answer


def _log_refusal(refused: Refuse, claim: Claim | None, instance: str) -> None:
    log.info("oncekey: refused with %s%s", refused.code.value, f" (instance {instance})" if instance else "")
    if refused.code is Code.KEY_REUSED and claim is not None:
        known = fields_of("key_misuse", claim, **({"instance": instance} if instance else {}))
        security.warning(
            "oncekey: a key of %s was used for another request of %s (digest %s%s)",
            shown_scope(claim.id.scope),
            claim.operation,
            known["key_digest"],
            f", instance {instance}" if instance else "",
            extra={"oncekey": known},
        )


def _shown_in(answer: Answer, instance: UUID) -> str:
    """The instance id as a client can quote it; empty if the format of errors has none."""
    return next((one for one in (str(instance), instance.hex) if one.encode("ascii") in answer.body), "")


def replayed(verdict: Replay, policy: Policy, asker: Asker) -> Answer:
    """The stored response. Only the problem that replaces a body that was not stored has an instance and a location."""
    stored = verdict.record.response
    if stored is not None and stored.body is not None:
        return answers.replay(verdict, policy, echo=asker.echo)
    instance = uuid4()
    answer = answers.replay(
        verdict, policy, echo=asker.echo, status_url=asker.status_url, fault_id=instance.hex, trace_id=asker.trace_id
    )
    _log_refusal(Refuse(Code.RESPONSE_NOT_STORED), None, _shown_in(answer, instance))
    return answer


def fields_of(event: str, claim: Claim, **more: str) -> dict[str, str]:
    """The fields of a log line about a request: never the key, only its digest."""
    known = {"operation": claim.operation, **names_of(claim.id.scope), "key_digest": key_digest(claim.id.key)}
    return {"event": event, **known, **more}


def log_unknown(claim: Claim, why: str) -> None:
    """Log that a record became unknown."""
    known = fields_of("unknown", claim, why=why)
    log.error(UNKNOWN, known, extra={"oncekey": known})


def refused(run: Run, refuse: Refuse) -> Answer:
    """The refusal as the response to the request of a run."""
    asker = run.asker
    return refusal(
        refuse, run.policy, claim=run.claim, echo=asker.echo, status_url=asker.status_url, trace_id=asker.trace_id
    )


def in_doubt(run: Run) -> Answer:
    """503 with the code of an unknown outcome: the operation may have been executed, and no record confirms it."""
    policy = run.policy.override(on_unknown=503)
    unknown, asker = Refuse(Code.OUTCOME_UNKNOWN, retry_after=1), run.asker
    return refusal(unknown, policy, echo=asker.echo, status_url=asker.status_url, trace_id=asker.trace_id)


def answer_to(run: Run, verdict: Verdict) -> Answer:
    """The response of a verdict, which replaces the handler's."""
    match verdict:
        case Replay():
            return replayed(verdict, run.policy, run.asker)
        case Refuse():
            return refused(run, verdict)
        case Proceed() | Bypass():
            raise AssertionError("an operation that proceeds has no response yet")
        case _:
            assert_never(verdict)


def proves_nothing_sent(error: BaseException, policy: Policy) -> bool:
    """Whether an error proves that nothing was sent to a provider; a hook that raises proves nothing."""
    try:
        return isinstance(error, NotExecutedError) or policy.is_definitely_not_executed(error)
    except Exception as failure:  # noqa: BLE001  (the application's own hook)
        log.error("oncekey: is_definitely_not_executed failed, which proves nothing: %s", type(failure).__name__)
        return False


def rows_of(enrolment: Enrolment, op: Operation[Any] | SyncOperation[Any], ended: object, *, raised: bool) -> Business:
    """Whether to commit the rows of a handler without a record, by the status of its response or HTTP exception."""
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


# A handler's exception may decide its outcome: `NotExecutedError` means that nothing was sent, `RejectedError` is a
# final refusal. If it comes from a protected function that the handler called, it concerns only that call, and proves
# nothing about the handler. So each error that leaves a protected function gets the next number of a counter, and
# each operation stores the number at which it began: an error with a later number is an inner one. An error object that
# an application raises repeatedly is not mistaken for one.


def leaving(error: E) -> E:
    """Number an error that leaves a protected function, and return it."""
    with suppress(AttributeError, TypeError):  # an exception class may refuse attributes
        setattr(error, _LEFT, next(_NUMBERS))
    return error


def is_inner(error: BaseException, began: int) -> bool:
    """Whether the error left a protected function after the operation with the number `began` had begun."""
    number = getattr(error, _LEFT, 0)
    return isinstance(number, int) and number > began
