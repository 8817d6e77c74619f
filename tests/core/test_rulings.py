"""RULINGS: what a request hears, for every record that it can meet."""

from dataclasses import replace
from itertools import product
from uuid import UUID

import pytest

from core.records import INCARNATION, MEMO, NOW, a_claim, a_record, an_intent
from harness.each import each
from oncekey.core.answers import LONGEST_WAIT
from oncekey.core.guards import Facts
from oncekey.core.model import (
    HOUR,
    MINUTE,
    SECOND,
    Code,
    Effects,
    Lease,
    Proceed,
    Recovery,
    Refuse,
    Replay,
    Snapshot,
    State,
)
from oncekey.core.policy import BY_EFFECTS, OnExpired, Policy
from oncekey.core.rulings import (
    FAILED_BY_LEASE,
    LEASE_RAN_OUT,
    RULINGS,
    ClaimAgain,
    MarkUnknown,
    Ruling,
    Situation,
    Supersede,
    TakeOver,
    answer_from,
    doubtful,
    rule,
    rule_finished,
    situate,
)
from oncekey.core.transitions import Actor, Transition, Trigger, find_transition

POLICY = Policy()
EXPIRIES = {"before": NOW + 1, "at": NOW, "after": NOW - HOUR}
BEGUN = {"memo": {"memo": MEMO}, "intent": {"intent": an_intent(repeatable=True)}, "none": {}}
LEASES = {"live": NOW + 1, "over": NOW, "none": None}
SAME, OTHER = a_claim(), a_claim(fingerprint="other")


def ruled(record, claim=SAME, policy=POLICY, now=NOW):
    return rule(Snapshot(record, now), claim, policy)


def every_record():
    """State x {before, at, after expiry} x {memo, intent, none} x {lease live, over, none} x effects."""
    for state, expiry, begun, lease, effects in product(State, EXPIRIES, BEGUN, LEASES, Effects):
        yield a_record(
            state,
            effects=effects,
            recovery=BY_EFFECTS[effects],
            expires_at=EXPIRIES[expiry],
            lease_until=LEASES[lease],
            **BEGUN[begun],
        )


# What a record means, said again in the protocol's words.
def meaning(record) -> Situation:
    past = record.expires_at <= NOW
    begun = bool(record.memo) or record.intent is not None
    over = record.lease_until is not None and record.lease_until <= NOW
    return {
        State.PENDING: Situation.PENDING,
        State.IN_PROGRESS: Situation.STALE if over else Situation.LIVE,
        State.COMPLETED: Situation.EXPIRED if past else Situation.COMPLETED,
        State.FAILED_RETRYABLE: Situation.EXPIRED if past and not begun else Situation.RETRYABLE,
        State.UNKNOWN: Situation.UNKNOWN,
        State.EXPIRED: Situation.EXPIRED,
    }[record.state]


def test_rulings_are_total():  # R58
    assert set(RULINGS) == set(Situation)
    assert all(set(rulings) == {True, False} for rulings in RULINGS.values())
    assert {ruling for rulings in RULINGS.values() for ruling in rulings.values()} == set(Ruling)
    assert set(Ruling) == {
        "claim", "refuse_in_progress", "recover", "replay", "take_over", "outcome_unknown", "supersede", "mismatch",
    }  # fmt: skip


def test_live_records_reject_another_fingerprint():  # R38, C8
    for situation, rulings in RULINGS.items():
        if situation not in {Situation.ABSENT, Situation.EXPIRED}:
            assert rulings[False] is Ruling.MISMATCH
        else:
            assert rulings[True] is rulings[False]


def test_every_record_has_its_expected_situation():  # P6, F3, R49
    assert situate(None, NOW) is Situation.ABSENT
    seen = set()
    for record in every_record():
        assert situate(record, NOW) is meaning(record), record
        seen.add(situate(record, NOW))
    assert seen == set(Situation) - {Situation.ABSENT}


def test_expiry_frees_only_finished_records():  # P6, F3
    for record in every_record():
        if situate(record, NOW) is not Situation.EXPIRED:
            continue
        plain = not record.memo and record.intent is None
        finished = record.state in {State.COMPLETED, State.EXPIRED}
        assert finished or (record.state is State.FAILED_RETRYABLE and plain)


def test_other_fingerprint_gets_key_reused_without_the_record():  # R37, R38, R77 in part, C8
    for record in every_record():
        if meaning(record) is Situation.EXPIRED:
            continue
        assert ruled(record, OTHER) == Refuse(Code.KEY_REUSED)


def test_same_request_gets_the_ruling_for_every_record():  # R48, R77 in part
    """The same request, for every record: what it hears, or which write it must try."""
    for record in every_record():
        heard = ruled(record)
        match meaning(record):
            case Situation.PENDING | Situation.LIVE:
                assert (heard.code, heard.record) == (Code.IN_PROGRESS, record)
            case Situation.STALE:
                assert heard in {TakeOver(record), MarkUnknown(record, LEASE_RAN_OUT)}
            case Situation.COMPLETED:
                assert heard == Replay(record, NOW)
            case Situation.RETRYABLE:
                assert heard == TakeOver(record)
            case Situation.UNKNOWN:
                assert (heard.code, heard.record) == (Code.OUTCOME_UNKNOWN, record)
            case Situation.EXPIRED:
                assert heard == Supersede(record)
            case _:
                pytest.fail("no record is absent")


def test_no_row_is_claimed():
    assert ruled(None) == ruled(None, OTHER) == ClaimAgain()


def impossible(record) -> bool:
    """No row leads there: a deferred request that is retryable (O2), or an expiry that a clock took back."""
    deferred = record.effects is Effects.OUTBOX and bool(record.memo or record.intent)
    taken_back = record.state is State.EXPIRED and record.expires_at > NOW
    return taken_back or (deferred and record.state is State.FAILED_RETRYABLE)


def test_rule_finished_agrees_with_rule():  # R38, R42, R77 in part
    """`rule_finished` is the short form of `rule` for every completed record."""
    for record, claim, expired in product(every_record(), (SAME, OTHER), OnExpired):
        if record.state is not State.COMPLETED:
            continue
        policy = Policy(on_expired=expired)
        heard = ruled(record, claim, policy)
        short = rule_finished(record, NOW, claim.fingerprint, policy)
        assert short == (None if isinstance(heard, Supersede) else heard), record


def test_the_two_tables_agree():
    """Whatever write the rulings ask for, a row allows it to the requester."""
    triggers = {TakeOver: Trigger.TAKE_OVER, Supersede: Trigger.SUPERSEDE, MarkUnknown: Trigger.SWEEP}
    tried = set()
    for record in every_record():
        if impossible(record):
            continue
        wanted = type(ruled(record))
        if wanted in triggers:
            facts = Facts(record, NOW, max_attempts=POLICY.max_attempts)
            assert isinstance(find_transition(triggers[wanted], Actor.REQUESTER, facts), Transition), record
            tried.add(wanted)
    assert tried == set(triggers)


class TestStale:
    @each("route", Effects)
    @each("stored", Effects)
    def test_the_record_decides_and_not_the_route(self, stored, route):  # P2, F4, R55
        record = a_record(effects=stored, recovery=BY_EFFECTS[stored], lease_until=NOW)
        heard = ruled(record, a_claim(effects=route, recovery=BY_EFFECTS[route]))
        again = stored is not Effects.INLINE
        assert heard == (TakeOver(record) if again else MarkUnknown(record, LEASE_RAN_OUT))

    @each("route", Effects)
    @each(("recovery", "error"), [(Recovery.UNKNOWN, LEASE_RAN_OUT), (Recovery.FAIL, FAILED_BY_LEASE)])
    @each("stored", Effects)
    def test_a_stricter_policy_that_was_stored_is_kept(self, stored, recovery, error, route):  # P2, C11
        record = a_record(effects=stored, recovery=recovery, lease_until=NOW)
        heard = ruled(record, a_claim(effects=route, recovery=BY_EFFECTS[route]))
        assert heard == MarkUnknown(record, error)

    def test_naturally_idempotent_inline_runs_again(self):  # P2
        record = a_record(effects=Effects.INLINE, recovery=Recovery.RETRY, lease_until=NOW)
        assert ruled(record) == TakeOver(record)

    def test_phased_resumes_unless_an_unrepeatable_call_is_open(self):  # H3, F23
        record = a_record(effects=Effects.PHASED, recovery=Recovery.RESUME, lease_until=NOW, memo=MEMO)
        assert ruled(record) == TakeOver(record)
        repeatable = replace(record, intent=an_intent(repeatable=True))
        assert ruled(repeatable) == TakeOver(repeatable)
        once = replace(record, intent=an_intent())
        assert ruled(once) == MarkUnknown(once, LEASE_RAN_OUT)
        assert ruled(repeatable, now=repeatable.intent.repeatable_until) == MarkUnknown(repeatable, LEASE_RAN_OUT)

    def test_attempts_are_bounded_by_the_policy(self):  # H6
        record = a_record(effects=Effects.PHASED, recovery=Recovery.RESUME, lease_until=NOW, attempts=3)
        assert ruled(record, policy=Policy(max_attempts=4)) == TakeOver(record)
        assert ruled(record, policy=Policy(max_attempts=3)) == MarkUnknown(record, LEASE_RAN_OUT)

    def test_deferred_record_owned_by_a_worker_is_never_stale(self):  # O1, F32
        record = a_record(effects=Effects.OUTBOX, lease_until=None, intent=an_intent())
        assert ruled(record, now=NOW + 1000 * HOUR).code is Code.IN_PROGRESS

    def test_an_outbox_record_that_has_done_something_is_not_run_again(self):  # O2, F29
        """Even if a lease was left on it by mistake."""
        for begun in ({"memo": MEMO}, {"intent": an_intent(repeatable=True)}):
            record = a_record(effects=Effects.OUTBOX, lease_until=NOW, **begun)
            assert ruled(record) == MarkUnknown(record, LEASE_RAN_OUT)


class TestRetryAfter:
    @each("state", [State.IN_PROGRESS, State.PENDING])
    @each("running", [0, 1, SECOND, 7 * SECOND, HOUR])
    @each("left", [None, 1, SECOND - 1, SECOND, SECOND + 1, 5 * MINUTE])
    def test_retry_after_is_positive_and_within_the_lease(self, left, running, state):  # R80
        lease = None if left is None else NOW + left
        record = a_record(state, lease_until=lease, last_run_at=NOW - running)
        wait = ruled(record).retry_after
        assert isinstance(wait, int)
        assert 1 <= wait <= LONGEST_WAIT
        assert (wait - 1) * SECOND < (left or SECOND)

    def test_it_grows_with_the_running_time(self):  # R80, ADR 0006
        waits = [
            ruled(a_record(lease_until=NOW + HOUR, last_run_at=NOW - running * SECOND)).retry_after
            for running in (0, 1, 5, 30, 600)
        ]
        assert waits == [1, 1, 5, 30, LONGEST_WAIT]

    @pytest.mark.parametrize(
        ("after", "wait"), [(None, None), (NOW - 1, None), (NOW, None), (NOW + SECOND, 1), (NOW + HOUR, LONGEST_WAIT)]
    )
    def test_retry_after_of_unknown_is_the_next_reconciliation(self, after, wait):  # R80
        record = a_record(State.UNKNOWN, reconcile_after=after)
        assert ruled(record).retry_after == doubtful(record, NOW).retry_after == wait


class TestExpired:
    EXPIRED = a_record(State.COMPLETED, expires_at=NOW)

    @pytest.mark.parametrize("claim", [SAME, OTHER])
    def test_it_is_a_new_request_by_default(self, claim):  # C15
        assert ruled(self.EXPIRED, claim) == Supersede(self.EXPIRED)

    @pytest.mark.parametrize("claim", [SAME, OTHER])
    def test_expired_key_returns_gone_if_configured(self, claim):  # C15
        assert ruled(self.EXPIRED, claim, Policy(on_expired=OnExpired.GONE)) == Refuse(Code.KEY_EXPIRED)

    def test_record_replays_until_its_last_microsecond(self):
        record = a_record(State.COMPLETED, expires_at=NOW + 1)
        assert ruled(record) == Replay(record, NOW)


class TestOurs:
    def test_record_with_our_owner_in_progress_proceeds(self):  # P7, F8, ADR 0001
        for lease in LEASES.values():
            record = a_record(owner=SAME.owner, lease_until=lease, fence=3)
            assert ruled(record) == Proceed(Lease.of(record), record, NOW)

    def test_matching_incarnation_alone_does_not_proceed(self):  # ADR 0001
        record = a_record(incarnation=SAME.incarnation)
        assert ruled(record).code is Code.IN_PROGRESS

    @pytest.mark.parametrize("state", [state for state in State if state is not State.IN_PROGRESS])
    def test_settled_or_swept_record_does_not_proceed(self, state):  # P7
        """A claim that was swept before its owner heard of it must not run."""
        record = a_record(state, owner=SAME.owner)
        assert not isinstance(ruled(record), Proceed)


HEARD_BY_A_REFUSED_OWNER = {
    State.PENDING: Code.IN_PROGRESS,
    State.IN_PROGRESS: Code.IN_PROGRESS,
    State.FAILED_RETRYABLE: Code.IN_PROGRESS,
    State.UNKNOWN: Code.OUTCOME_UNKNOWN,
    State.EXPIRED: Code.OUTCOME_UNKNOWN,
}


class TestRefusedOwner:
    """What the caller of an operation hears whose own settlement was not written."""

    LEASE = Lease.of(a_record())

    def heard(self, record):
        return answer_from(Snapshot(record, NOW), self.LEASE)

    @pytest.mark.parametrize("state", HEARD_BY_A_REFUSED_OWNER)
    def test_refusal_follows_the_state_of_the_record(self, state):  # P3
        record = a_record(state)
        assert record.incarnation == self.LEASE.incarnation == INCARNATION
        heard = self.heard(record)
        assert (heard.code, heard.record) == (HEARD_BY_A_REFUSED_OWNER[state], record)

    def test_stored_response_is_replayed_for_any_owner(self):  # P7, U2, F8
        record = a_record(State.COMPLETED, fence=7)
        assert self.heard(record) == Replay(record, NOW)

    def test_no_row_is_an_outage(self):  # P3
        assert self.heard(None) == Refuse(Code.STORE_UNAVAILABLE, retry_after=1)

    @pytest.mark.parametrize("state", State)
    def test_record_of_another_incarnation_means_outcome_unknown(self, state):  # F1, P1
        assert self.heard(a_record(state, incarnation=UUID(int=9))) == Refuse(Code.OUTCOME_UNKNOWN)

    def test_every_state_has_a_refusal(self):
        assert {*HEARD_BY_A_REFUSED_OWNER, State.COMPLETED} == set(State)

    def test_retry_after_never_exceeds_the_lease(self):  # R80
        heard = self.heard(a_record(lease_until=NOW + 3 * SECOND, last_run_at=NOW - HOUR))
        assert heard.retry_after == 3
