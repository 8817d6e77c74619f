"""What an ended handler means: the whole matrix, and what is kept of its answer."""

from dataclasses import replace
from itertools import product
from uuid import UUID

import pytest

from harness.each import each
from oncekey.core.answers import accepted_form
from oncekey.core.endings import (
    ACTS,
    NEVER_STORED,
    Act,
    Business,
    Decision,
    Ending,
    Progress,
    Reading,
    by_table,
    decide,
    kept_headers,
    read,
    returned,
    stored_response,
)
from oncekey.core.model import (
    Completed,
    Deferred,
    Discarded,
    Doubtful,
    Effects,
    HandedBack,
    Outcome,
    Parcel,
    ParcelKind,
    RecordId,
    Retryable,
    StoredResponse,
)
from oncekey.core.policy import On5xx, Policy

LOCAL, PHASED, OUTBOX, INLINE = Effects.LOCAL, Effects.PHASED, Effects.OUTBOX, Effects.INLINE

SUCCESSES = (200, 201, 202, 204, 299, 301, 303, 304, 399)
STORABLE = (400, 402, 404, 405, 409, 410, 412, 413, 418, 422, 423, 424, 428, 431, 451, 499)
FORBIDDEN = (401, 403, 408, 425, 429)
SERVER_ERRORS = (500, 501, 502, 503, 504, 511, 599)
NO_ANSWER = (None, 0, 100, 103, 199, 600, 999)
EVERY = SUCCESSES + STORABLE + FORBIDDEN + SERVER_ERRORS + NO_ANSWER

BODY = b'{"id":7}'


def ended(status, **changes) -> Ending:
    plain = Ending(
        status=status,
        headers=((b"content-type", b"application/json"),),
        body=BODY,
        entered=True,
        raised=False,
        not_executed=False,
    )
    return replace(plain, **changes)


def a_parcel(position=0) -> Parcel:
    return Parcel(
        UUID(int=position), ParcelKind.DEFER, RecordId("s", "k"), UUID(int=9), "charge", "{}", "dk", position=position
    )


A, B = a_parcel(0), a_parcel(1)
ACCEPTED = accepted_form(((b"content-type", b"application/json"),), BODY)
BEGUN = Progress(begun=True)
OPEN = Progress(begun=True, call_open=True)
REPEATABLE = Progress(begun=True, call_open=True, repeatable=True)
PROGRESS = tuple(
    replace(progress, exhausted=exhausted, parked=parked)
    for progress, exhausted, parked in product(
        (Progress(), BEGUN, OPEN, REPEATABLE), (False, True), (None, "replay_diverged")
    )
)


def settled(effects, ending, policy=None):
    return decide(effects, policy or Policy(), ending).settlement


def rows(effects, ending, policy=None):
    return decide(effects, policy or Policy(), ending).business


def test_the_table_is_total():
    assert set(ACTS) == set(product(Effects, On5xx))
    assert all(set(row) == set(Reading) for row in ACTS.values())


# P4, L6
@pytest.mark.parametrize(
    ("effects", "on_5xx"),
    [(LOCAL, On5xx.CLASSIFY), (PHASED, On5xx.CLASSIFY), (OUTBOX, On5xx.CLASSIFY)]
    + [(INLINE, on_5xx) for on_5xx in On5xx],
)
def test_fast_path_decides_like_the_table(effects, on_5xx):
    policy = Policy(on_5xx=on_5xx, not_executed_statuses=frozenset({409, 503}), max_response_bytes=len(BODY))
    flags = ("entered", "raised", "not_executed", "kept", "rolled_back")
    settings = [dict(zip(flags, setting, strict=True)) for setting in product((False, True), repeat=len(flags))]
    ways = [
        Progress(*setting, parked=parked, halted=halted, unused=unused)
        for setting in product((False, True), repeat=4)
        for parked, halted, unused in product((None, "replay_diverged"), (False, True), (False, True))
    ]
    for status, body in product((201, 404, 500, None), (BODY, None)):
        for setting, progress in product(settings, ways):
            ending = Ending(status, ((b"location", b"/7"),), body, progress=progress, **setting)
            assert decide(effects, policy, ending) == by_table(effects, policy, ending)
    for deferred, error, undone in product(((), (A,), (A, B)), (None, "card_declined"), (False, True)):
        progress = Progress(undone=undone, begun=True)
        ending = ended(201, deferred=deferred, error=error, progress=progress)
        assert decide(effects, policy, ending) == by_table(effects, policy, ending)


@pytest.mark.parametrize("effects", Effects)
def test_the_short_path_is_for_successes_of_every_status(effects):
    policy = Policy(max_response_bytes=len(BODY))
    headers = ((b"Content-Type", b"text/plain"), (b"connection", b"etag"), (b"etag", b"1"))
    for status, body in product((None, *range(1000)), (BODY, b"", BODY + b"!", None)):
        ending = ended(status, headers=headers, body=body)
        short = returned(effects, policy, status, headers, body)
        done = status is not None and 200 <= status < 400 and body in (BODY, b"") and effects is not OUTBOX
        assert short == (by_table(effects, policy, ending) if done else None)


# R108, P4, L6, F5, F6: nothing that a handler, an app or an operator does has no meaning
@pytest.mark.parametrize("effects", Effects)
@pytest.mark.parametrize("on_5xx", On5xx)
def test_every_ending_has_a_decision(effects, on_5xx):
    policy = Policy(on_5xx=on_5xx, not_executed_statuses=frozenset({503}))
    flags = ("entered", "raised", "not_executed", "kept", "rolled_back")
    for status, progress, deferred in product((201, 303, 404, 429, 500, 503, None), PROGRESS, ((), (A,), (A, B))):
        for setting in product((False, True), repeat=len(flags)):
            ending = ended(status, progress=progress, deferred=deferred, **dict(zip(flags, setting, strict=True)))
            decision = decide(effects, policy, ending)
            match decision.settlement:
                case Completed(response, outcome):
                    # F5, F6, R113: an answer is only ever kept of a handler that ran and has no call open
                    assert ending.entered
                    assert not progress.call_open
                    assert progress.parked is None
                    assert status not in FORBIDDEN
                    assert response.status == status
                    assert (outcome is Outcome.SUCCESS) == (status < 400)
                    # O1: the request's own call is a worker's, so its answer is not there yet
                    assert effects is not OUTBOX or status >= 400
                case Retryable(error):
                    # What is stored is not begun again, it is gone on with (row 10 asks for no memo)
                    assert error
                    assert effects is not PHASED or not progress.begun
                    assert not progress.call_open
                    assert decision.business is Business.ROLLBACK
                case HandedBack(error):
                    # H6, row 11: there is something to go on with, and an attempt left to do so
                    assert error
                    assert progress.begun
                    assert not progress.exhausted
                    assert progress.repeatable or not progress.call_open
                    assert decision.business is Business.ROLLBACK
                case Doubtful(error):
                    assert error
                    assert decision.business is Business.ROLLBACK
                case Deferred(parcel):
                    assert (effects, parcel, deferred) == (OUTBOX, A, (A,))
                    assert decision.business is Business.COMMIT
                case Discarded():
                    assert not ending.entered
                    assert not progress.begun
                    assert decision.business is Business.ROLLBACK


class TestNotEntered:
    # P4, F5, R73: validation, authentication and routing happen before the handler, whatever they answer
    @each("effects", Effects)
    @each("status", EVERY)
    @each("raised", [False, True])
    def test_handler_not_entered_releases_the_key(self, effects, status, raised):
        ending = ended(status, entered=False, raised=raised)
        assert decide(effects, Policy(), ending).settlement == Discarded()

    @pytest.mark.parametrize("on_5xx", On5xx)
    def test_handler_not_entered_releases_the_key_under_every_on_5xx(self, on_5xx):
        assert settled(INLINE, ended(500, entered=False), Policy(on_5xx=on_5xx)) == Discarded()


class TestOpenCall:
    # F6, P4: the answer of a handler that swallowed an uncertain call is not used
    @each("effects", Effects)
    @each("status", EVERY)
    @each("not_executed", [False, True])
    @each("on_5xx", On5xx)
    def test_becomes_unknown_whatever_the_response_was(self, effects, status, not_executed, on_5xx):
        policy = Policy(on_5xx=on_5xx, not_executed_statuses=frozenset({402, 503}))
        ending = ended(status, progress=OPEN, not_executed=not_executed)
        assert settled(effects, ending, policy) == Doubtful("call_uncertain")

    # H2, F6: the same call may be made once more, so nobody has to doubt; its answer is still not used
    @each("status", EVERY)
    @each("not_executed", [False, True])
    @each("entered", [False, True])
    def test_repeatable_call_is_handed_back_for_resume(self, status, not_executed, entered):
        ending = ended(status, progress=REPEATABLE, not_executed=not_executed, entered=entered)
        assert settled(PHASED, ending) == HandedBack("call_uncertain")

    # H6, F27: the last attempt hands nothing back
    @each("status", EVERY)
    def test_exhausted_attempts_become_unknown(self, status):
        ending = ended(status, progress=replace(REPEATABLE, exhausted=True))
        assert settled(PHASED, ending) == Doubtful("attempts_exhausted")
        ending = ended(status, progress=replace(OPEN, exhausted=True))
        assert settled(PHASED, ending) == Doubtful("call_uncertain")


class TestPhased:
    """H6, F5, F27: what is done is done, and the rest is gone on with."""

    # P4, R87, R91
    @each("status", SUCCESSES + STORABLE)
    @each("raised", [False, True])
    @each("progress", [Progress(), BEGUN, replace(BEGUN, exhausted=True)])
    def test_final_response_is_stored(self, status, raised, progress):
        decision = decide(PHASED, Policy(), ended(status, raised=raised, progress=progress))
        assert isinstance(decision.settlement, Completed)
        assert decision.settlement.outcome is (Outcome.SUCCESS if status < 400 else Outcome.FAILURE)
        assert decision.business is Business.COMMIT

    # F5: a 429 or a crash after a finished phase forgets nothing
    @each("status", FORBIDDEN + SERVER_ERRORS)
    @each("raised", [False, True])
    def test_anything_else_is_handed_back(self, status, raised):
        ending = ended(status, raised=raised, progress=BEGUN, resume_after=7)
        assert settled(PHASED, ending) == HandedBack(f"status_{status}", resume_after=7)

    @pytest.mark.parametrize("status", NO_ANSWER)
    def test_missing_response_is_handed_back_for_resume(self, status):
        assert settled(PHASED, ended(status, raised=True, progress=BEGUN)) == HandedBack("handler_raised")
        assert settled(PHASED, ended(status, progress=BEGUN)) == HandedBack("response_incomplete")

    # R100, R102
    @each("status", STORABLE + FORBIDDEN + SERVER_ERRORS + NO_ANSWER)
    def test_not_executed_after_finished_steps_is_resumed(self, status):
        ending = ended(status, raised=True, not_executed=True, progress=BEGUN)
        assert settled(PHASED, ending) == HandedBack("not_executed")

    # Nothing stored is nothing to resume: the next request runs from the beginning
    @each("status", FORBIDDEN + SERVER_ERRORS + NO_ANSWER)
    @each("not_executed", [False, True])
    @each("exhausted", [False, True])
    def test_before_its_first_step_it_is_retryable(self, status, not_executed, exhausted):
        ending = ended(status, not_executed=not_executed, progress=Progress(exhausted=exhausted))
        assert isinstance(settled(PHASED, ending), Retryable)

    # H6, F27
    @each("status", FORBIDDEN + SERVER_ERRORS + NO_ANSWER)
    @each("not_executed", [False, True])
    def test_failure_of_the_last_attempt_becomes_unknown(self, status, not_executed):
        ending = ended(status, not_executed=not_executed, progress=replace(BEGUN, exhausted=True))
        assert settled(PHASED, ending) == Doubtful("attempts_exhausted")

    # X13: what a phase that raised has written is rolled back, so a success would be said of nothing
    @pytest.mark.parametrize("status", SUCCESSES)
    def test_rolled_back_success_is_handed_back(self, status):
        ending = ended(status, raised=True, progress=replace(BEGUN, undone=True))
        assert settled(PHASED, ending) == HandedBack("success_rolled_back")
        assert settled(PHASED, replace(ending, progress=Progress(undone=True))) == Retryable("success_rolled_back")

    # H1, H4, F25, F26: whatever the handler made of it, also if a call could be repeated
    @each("status", EVERY)
    @each("progress", [Progress(), BEGUN, OPEN, REPEATABLE])
    @each("parked", ["replay_diverged", "result_not_storable"])
    def test_parked_handler_becomes_unknown_with_its_reason(self, status, progress, parked):
        ending = ended(status, progress=replace(progress, parked=parked))
        assert settled(PHASED, ending) == Doubtful(parked)

    # F5, R73: a login that ran out between two attempts must not become the answer of a charge that was made
    @each("status", EVERY)
    def test_resumed_run_that_never_entered_the_handler_stores_nothing(self, status):
        ending = ended(status, entered=False, progress=BEGUN)
        assert settled(PHASED, ending) == HandedBack("not_entered")
        ending = ended(status, entered=False, progress=replace(BEGUN, exhausted=True))
        assert settled(PHASED, ending) == Doubtful("attempts_exhausted")


class TestOutbox:
    """O1: exactly one parcel is the request's own call."""

    @pytest.mark.parametrize("status", SUCCESSES)
    def test_one_parcel_is_deferred_with_its_rows(self, status):
        decision = decide(OUTBOX, Policy(), ended(status, deferred=(A,)))
        assert decision == Decision(Deferred(A, ACCEPTED), Business.COMMIT)

    @pytest.mark.parametrize("body", [b"", b"null", None, b"x" * 9])
    def test_empty_or_oversized_body_is_not_stored_for_the_202(self, body):
        ending = replace(ended(202, deferred=(A,)), body=body)
        assert settled(OUTBOX, ending, Policy(max_response_bytes=8)) == Deferred(A)

    # X13: the parcel is one of the rows, so it can neither be sent without them nor they be given up without it
    @each("status", SUCCESSES)
    @each("deferred", [(), (A,)])
    @each("undone", [{"raised": True}, {"rolled_back": True}, {"rolled_back": True, "kept": True}])
    def test_rolled_back_success_defers_nothing(self, status, deferred, undone):
        decision = decide(OUTBOX, Policy(), ended(status, deferred=deferred, **undone))
        assert decision == Decision(Retryable("success_rolled_back"), Business.ROLLBACK)

    @pytest.mark.parametrize("status", SUCCESSES)
    def test_a_raised_success_that_is_kept_is_deferred(self, status):
        assert settled(OUTBOX, ended(status, raised=True, kept=True, deferred=(A,))) == Deferred(A, ACCEPTED)

    @each("status", SUCCESSES)
    @each("deferred", [(), (A, B)])
    def test_zero_or_two_deferred_calls_roll_back(self, status, deferred):
        decision = decide(OUTBOX, Policy(), ended(status, deferred=deferred))
        assert decision.settlement == Retryable("not_deferred_once")
        assert decision.business is Business.ROLLBACK

    # The handler said no before a worker had to: its answer is final, and no parcel goes with it
    @each("status", STORABLE)
    def test_final_failure_needs_no_deferred_call(self, status):
        assert isinstance(settled(OUTBOX, ended(status)), Completed)

    @each("status", FORBIDDEN + SERVER_ERRORS + NO_ANSWER)
    @each("deferred", [(), (A,), (A, B)])
    def test_retryable_failure_rolls_back_deferred_calls(self, status, deferred):
        decision = decide(OUTBOX, Policy(), ended(status, deferred=deferred))
        assert isinstance(decision.settlement, Retryable)
        assert decision.business is Business.ROLLBACK


class TestLocalOrBeforeTheDefer:
    """L6, F17, and OUTBOX up to its defer (O1); `TestOutbox` has its successes."""

    pytestmark = pytest.mark.parametrize("effects", [LOCAL, OUTBOX])

    # F17, L6
    @each("status", STORABLE)
    def test_returned_commits_with_the_record(self, effects, status):
        decision = decide(effects, Policy(), ended(status))
        assert isinstance(decision.settlement, Completed)
        assert decision.business is Business.COMMIT

    # F17, L6: the record is then stored alone
    @each("status", STORABLE)
    def test_raised_and_mapped_rolls_back_and_is_stored(self, effects, status):
        decision = decide(effects, Policy(), ended(status, raised=True))
        assert isinstance(decision.settlement, Completed)
        assert decision.business is Business.ROLLBACK

    # F17, R113
    @each("status", FORBIDDEN)
    @each("raised", [False, True])
    def test_a_never_stored_status_leaves_nothing_behind(self, effects, status, raised):
        decision = decide(effects, Policy(), ended(status, raised=raised))
        assert decision.settlement == Retryable(f"status_{status}")
        assert decision.business is Business.ROLLBACK

    # R104, F17
    @each("status", SERVER_ERRORS)
    @each("raised", [False, True])
    def test_a_server_error_leaves_nothing_behind(self, effects, status, raised):
        decision = decide(effects, Policy(), ended(status, raised=raised))
        assert decision.settlement == Retryable(f"status_{status}")
        assert decision.business is Business.ROLLBACK

    @pytest.mark.parametrize("status", NO_ANSWER)
    def test_missing_response_is_retryable(self, effects, status):
        assert settled(effects, ended(status, raised=True)) == Retryable("handler_raised")
        assert settled(effects, ended(status)) == Retryable("response_incomplete")

    @each("status", STORABLE)
    def test_handler_may_keep_its_rows_although_it_raised(self, effects, status):
        assert rows(effects, ended(status, raised=True, kept=True)) is Business.COMMIT

    # L6: rows without a record would be written again by the retry
    @each("status", FORBIDDEN + SERVER_ERRORS + NO_ANSWER)
    def test_rows_are_not_kept_without_a_record(self, effects, status):
        assert rows(effects, ended(status, raised=True, kept=True)) is Business.ROLLBACK

    @each("status", STORABLE)
    @each("kept", [False, True])
    def test_handler_may_roll_back_and_return_a_response(self, effects, status, kept):
        decision = decide(effects, Policy(), ended(status, rolled_back=True, kept=kept))
        assert isinstance(decision.settlement, Completed)
        assert decision.business is Business.ROLLBACK

    # F7: a knob of inline handlers has no say here
    @pytest.mark.parametrize("on_5xx", On5xx)
    def test_on_5xx_changes_nothing(self, effects, on_5xx):
        assert settled(effects, ended(500), Policy(on_5xx=on_5xx)) == Retryable("status_500")

    # R102
    @each("status", STORABLE + FORBIDDEN + SERVER_ERRORS + NO_ANSWER)
    def test_not_executed_is_retryable(self, effects, status):
        decision = decide(effects, Policy(), ended(status, raised=True, not_executed=True))
        assert decision.settlement == Retryable("not_executed")
        assert decision.business is Business.ROLLBACK


class TestLocal:
    """F17, L6: a local handler's success is its answer."""

    @each("status", SUCCESSES)
    @each("raised", [False, True])
    @each("kept", [False, True])
    @each("rolled_back", [False, True])
    def test_success_is_stored_unless_it_was_raised_without_kept_rows(self, status, raised, kept, rolled_back):
        decision = decide(LOCAL, Policy(), ended(status, raised=raised, kept=kept, rolled_back=rolled_back))
        if raised and not (kept or rolled_back):
            # X13: a raised success has no rows, and nobody said that it needs none
            assert decision.settlement == Retryable("success_rolled_back")
        else:
            assert isinstance(decision.settlement, Completed)
        undone = rolled_back or (raised and not kept)
        assert decision.business is (Business.ROLLBACK if undone else Business.COMMIT)


class TestSent:
    """INLINE: what was sent cannot be taken back."""

    pytestmark = pytest.mark.parametrize("effects", [INLINE])

    # P4, R87
    @each("status", SUCCESSES)
    @each("raised", [False, True])
    def test_success_is_stored(self, effects, status, raised):
        decision = decide(effects, Policy(), ended(status, raised=raised))
        assert decision.settlement == Completed(
            StoredResponse(status, ((b"content-type", b"application/json"),), BODY), Outcome.SUCCESS
        )
        assert decision.business is Business.COMMIT

    # P4, R91
    @each("status", STORABLE)
    @each("raised", [False, True])
    def test_final_failure_is_stored(self, effects, status, raised):
        settlement = settled(effects, ended(status, raised=raised))
        assert isinstance(settlement, Completed)
        assert (settlement.response.status, settlement.outcome) == (status, Outcome.FAILURE)

    # F5, R101, R108: 429 may come from the second provider, after the first was charged
    @each("status", FORBIDDEN + SERVER_ERRORS)
    @each("raised", [False, True])
    def test_other_statuses_become_unknown(self, effects, status, raised):
        assert settled(effects, ended(status, raised=raised)) == Doubtful(f"status_{status}")

    # R101
    @pytest.mark.parametrize("status", NO_ANSWER)
    def test_missing_response_becomes_unknown(self, effects, status):
        assert settled(effects, ended(status, raised=True)) == Doubtful("handler_raised")
        assert settled(effects, ended(status)) == Doubtful("response_incomplete")

    # R100, R102
    @each("status", STORABLE + FORBIDDEN + SERVER_ERRORS + NO_ANSWER)
    def test_proof_that_nothing_was_sent_allows_a_retry(self, effects, status):
        assert settled(effects, ended(status, raised=True, not_executed=True)) == Retryable("not_executed")

    # R100: for an app that cannot be decorated
    @each("status", STORABLE + FORBIDDEN + SERVER_ERRORS)
    def test_a_status_that_is_only_sent_before_execution_allows_a_retry(self, effects, status):
        policy = Policy(not_executed_statuses=frozenset({status}))
        assert settled(effects, ended(status), policy) == Retryable("not_executed")
        other = 502 if status != 502 else 504
        assert settled(effects, ended(other), policy) == Doubtful(f"status_{other}")

    # An acknowledged answer is replayed, whatever the handler believes
    @pytest.mark.parametrize("status", SUCCESSES)
    def test_a_success_is_kept_even_if_nothing_was_executed(self, effects, status):
        assert isinstance(settled(effects, ended(status, raised=True, not_executed=True)), Completed)


class TestOn5xx:
    # R105
    @pytest.mark.parametrize("status", SERVER_ERRORS)
    def test_store_keeps_a_server_error(self, status):
        settlement = settled(INLINE, ended(status, raised=True), Policy(on_5xx=On5xx.STORE))
        assert isinstance(settlement, Completed)
        assert (settlement.response.status, settlement.outcome) == (status, Outcome.FAILURE)

    # R113, R105: what is never stored stays so, and bytes that are not there cannot be
    @pytest.mark.parametrize("status", FORBIDDEN + NO_ANSWER)
    def test_store_setting_stores_no_other_status(self, status):
        assert isinstance(settled(INLINE, ended(status), Policy(on_5xx=On5xx.STORE)), Doubtful)

    def test_store_setting_does_not_override_not_executed(self):
        policy = Policy(on_5xx=On5xx.STORE)
        assert settled(INLINE, ended(503, not_executed=True), policy) == Retryable("not_executed")

    # R104
    @each("status", FORBIDDEN + SERVER_ERRORS + NO_ANSWER)
    def test_retry_fresh_runs_again(self, status):
        policy = Policy(on_5xx=On5xx.RETRY_FRESH, naturally_idempotent=True)
        assert isinstance(settled(INLINE, ended(status), policy), Retryable)

    @each("on_5xx", On5xx)
    @each("status", SUCCESSES + STORABLE)
    def test_does_not_affect_other_statuses(self, on_5xx, status):
        assert isinstance(settled(INLINE, ended(status), Policy(on_5xx=on_5xx)), Completed)

    # F7: phased handlers refuse the knob at enrolment; here it has no effect
    @pytest.mark.parametrize("on_5xx", On5xx)
    def test_does_not_affect_phased_handlers(self, on_5xx):
        assert settled(PHASED, ended(500, progress=BEGUN), Policy(on_5xx=on_5xx)) == HandedBack("status_500")


# R113
def test_never_stored_statuses_are_these():
    assert frozenset(FORBIDDEN) == NEVER_STORED


# The order of precedence, one step at a time
@each(
    ("ending", "reading"),
    [
        (ended(201, progress=replace(REPEATABLE, parked="replay_diverged")), Reading.PARKED),
        (ended(201, progress=REPEATABLE, entered=False), Reading.CALL_REPEATABLE),
        (ended(201, progress=OPEN, entered=False), Reading.CALL_OPEN),
        (ended(201, entered=False), Reading.NOT_ENTERED),
        (ended(201, entered=False, progress=BEGUN), Reading.NOT_ENTERED),
        (ended(201, not_executed=True), Reading.DONE),
        (ended(303, raised=True, progress=BEGUN), Reading.DONE),
        (ended(303, raised=True, progress=replace(BEGUN, undone=True)), Reading.UNDONE),
        (ended(303, progress=replace(BEGUN, undone=True)), Reading.DONE),
        (ended(404, raised=True, progress=replace(BEGUN, undone=True)), Reading.DECLINED),
        (ended(303, raised=True, entered=False, progress=replace(BEGUN, undone=True)), Reading.NOT_ENTERED),
        (ended(429, not_executed=True), Reading.NOT_EXECUTED),
        (ended(429), Reading.NEVER_STORED),
        (ended(404), Reading.DECLINED),
        (ended(503), Reading.SERVER_ERROR),
        (ended(None), Reading.INCOMPLETE),
    ],
)
def test_endings_of_a_phased_handler_are_classified(ending, reading):
    assert read(PHASED, ending, Policy()) is reading


@pytest.mark.parametrize(
    ("ending", "reading"),
    [
        (ended(201, deferred=(A,), entered=False), Reading.NOT_ENTERED),
        (ended(201, deferred=(A,), not_executed=True), Reading.DEFERRED),
        (ended(201, not_executed=True), Reading.NOT_DEFERRED),
        (ended(404, deferred=(A,), not_executed=True), Reading.NOT_EXECUTED),
        (ended(404, deferred=(A,)), Reading.DECLINED),
    ],
)
def test_endings_of_an_outbox_handler_are_classified(ending, reading):
    assert read(OUTBOX, ending, Policy()) is reading


class TestLastError:
    """A code for people and metrics; never a text that could quote the request (R143, R195)."""

    def test_a_code_of_the_adapter_is_taken(self):
        assert settled(INLINE, ended(None, error="spool_full")) == Doubtful("spool_full")
        assert settled(LOCAL, ended(500, error="commit_failed")) == Retryable("commit_failed")

    @pytest.mark.parametrize(
        "text",
        ["card 4242 declined", "KeyError: 'alice@example.com'", "", "a" * 65, "Timeout", "x\ny", "1st"],
    )
    def test_free_text_is_not_recorded_as_error_code(self, text):
        assert settled(INLINE, ended(None, raised=True, error=text)) == Doubtful("handler_raised")


class TestKeptHeaders:
    # R90
    def test_the_allow_list_in_order_and_in_lower_case(self):
        headers = (
            (b"ETag", b'"v1"'),
            (b"X-Request-Id", b"r1"),
            (b"Content-Type", b"application/json"),
            (b"LOCATION", b"/orders/7"),
            (b"content-language", b"en"),
        )
        assert kept_headers(headers, Policy()) == (
            (b"etag", b'"v1"'),
            (b"content-type", b"application/json"),
            (b"location", b"/orders/7"),
            (b"content-language", b"en"),
        )

    # R90: made anew, of one caller, or of one connection
    @pytest.mark.parametrize(
        "name",
        [
            b"Set-Cookie",
            b"Date",
            b"Content-Length",
            b"Connection",
            b"Keep-Alive",
            b"Transfer-Encoding",
            b"TE",
            b"Trailer",
            b"Upgrade",
            b"Proxy-Connection",
            b"WWW-Authenticate",
            b"Proxy-Authenticate",
            b"Authentication-Info",
            b"Idempotency-Key",
        ],
    )
    def test_excluded_headers_are_never_stored(self, name):
        assert kept_headers(((name, b"x"), (b"etag", b"y")), Policy()) == ((b"etag", b"y"),)

    # A body in an encoding cannot be read without it, whatever the allow-list says
    @pytest.mark.parametrize("allowed", [(), ("etag",)])
    @pytest.mark.parametrize("name", [b"Content-Encoding", b"Content-Type", b"Location"])
    def test_configured_headers_are_stored(self, allowed, name):
        policy = Policy(replay_headers=allowed)
        assert kept_headers(((name, b"x"), (b"vary", b"y")), policy) == ((name.lower(), b"x"),)

    def test_repeated_fields_stay_repeated_and_in_order(self):
        policy = Policy(replay_headers=("link",))
        headers = ((b"Link", b"<a>"), (b"etag", b"x"), (b"link", b"<b>"))
        assert kept_headers(headers, policy) == ((b"link", b"<a>"), (b"link", b"<b>"))

    # RFC 9110, 7.6.1
    def test_headers_listed_in_connection_are_not_stored(self):
        policy = Policy(replay_headers=("x-node", "x-total"))
        headers = ((b"Connection", b"close, X-Node"), (b"X-Node", b"a"), (b"X-Total", b"9"))
        assert kept_headers(headers, policy) == ((b"x-total", b"9"),)


class TestStoredResponse:
    # R87, R89, R92
    def test_stores_the_response_body_byte_for_byte(self):
        body = b'{"b":1e2,"a":"\\u0000"}\xff'
        stored = stored_response(ended(201, body=body), Policy())
        assert stored == StoredResponse(201, ((b"content-type", b"application/json"),), body, schema_version=1)

    def test_empty_body_is_stored_as_empty_body(self):
        assert stored_response(ended(204, body=b""), Policy()).body == b""

    # A4, F42, R97: done stays done; it is only not kept
    @pytest.mark.parametrize("body", [b"x" * 11, None])
    @pytest.mark.parametrize("allowed", [("etag",), ("location", "content-type")])
    def test_over_the_cap_is_a_tombstone_with_its_location(self, body, allowed):
        headers = (
            (b"Content-Type", b"text/csv"),
            (b"Location", b"/exports/9"),
            (b"Content-Encoding", b"gzip"),
        )
        policy = Policy(max_response_bytes=10, replay_headers=allowed)
        ending = ended(200, headers=headers, body=body)
        tombstone = StoredResponse(200, ((b"location", b"/exports/9"),), None)
        assert stored_response(ending, policy) == tombstone
        for effects in (LOCAL, PHASED, INLINE):
            decision = decide(effects, policy, ending)
            assert decision.settlement == Completed(tombstone, Outcome.SUCCESS)
            assert decision.business is Business.COMMIT

    def test_body_at_the_size_limit_is_stored(self):
        body = b"x" * 10
        assert stored_response(ended(200, body=body), Policy(max_response_bytes=10)).body == body

    def test_an_incomplete_response_cannot_be_stored(self):
        with pytest.raises(ValueError, match="incomplete"):
            stored_response(ended(None), Policy())


def test_every_act_is_used():
    assert {act for row in ACTS.values() for act in row.values()} == set(Act)
