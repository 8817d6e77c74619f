"""TRANSITIONS: the table itself, row by row, and what must be true of all of it."""

from collections import defaultdict
from dataclasses import replace
from itertools import combinations, product

import pytest

from core.records import MEMO, NOW, a_record, all_records, an_intent
from harness.each import each
from oncekey.core.guards import Facts, Guard
from oncekey.core.model import HOUR, MINUTE, Effects, EntryKind, MemoEntry, Outcome, Recovery, State
from oncekey.core.transitions import (
    ROWS,
    TRANSITIONS,
    Actor,
    Fence,
    Illegal,
    Proof,
    Transition,
    Trigger,
    find_transition,
)

PENDING, RUNNING, DONE = State.PENDING, State.IN_PROGRESS, State.COMPLETED
FR, UNKNOWN, EXPIRED = State.FAILED_RETRYABLE, State.UNKNOWN, State.EXPIRED
T, A = Trigger, Actor
NO_ROW, OWNER, VERSION = Proof.NO_ROW, Proof.OWNER, Proof.VERSION
PARCEL, OWNER_AND_PARCEL = Proof.PARCEL, Proof.OWNER_AND_PARCEL
FIRST, SAME, UP, GONE = Fence.FIRST, Fence.SAME, Fence.UP, Fence.GONE
STATES = (None, *State)

# The protocol's section 1, transcribed by hand: sources, triggers, target, who, proof, fence.
# "executed / declined" is one trigger with two outcomes; "phase / intent" and "result" are two each (ADR 0054).
PROTOCOL = {
    1: [((None,), (T.CLAIM,), RUNNING, (A.REQUESTER,), NO_ROW, FIRST)],
    2: [((None,), (T.COMMIT,), DONE, (A.REQUESTER,), NO_ROW, FIRST)],
    3: [
        ((None,), (T.DEFER,), PENDING, (A.REQUESTER,), NO_ROW, FIRST),
        ((RUNNING,), (T.DEFER,), PENDING, (A.OWNER,), OWNER, SAME),  # the requester, once it owns the record
    ],
    4: [((RUNNING,), (T.RENEW,), RUNNING, (A.OWNER,), OWNER, SAME)],
    5: [((RUNNING,), (T.CHECKPOINT, T.ANNOUNCE), RUNNING, (A.OWNER,), OWNER, SAME)],
    6: [
        ((RUNNING, UNKNOWN, FR), (T.RESULT,), RUNNING, (A.OWNER,), OWNER, SAME),
        ((RUNNING, UNKNOWN, PENDING), (T.DEFERRED_RESULT,), RUNNING, (A.OWNER,), OWNER, SAME),
    ],
    7: [((RUNNING,), (T.SETTLE,), DONE, (A.OWNER,), OWNER, SAME)],
    8: [((UNKNOWN, FR), (T.SETTLE,), DONE, (A.OWNER,), OWNER, SAME)],
    9: [((RUNNING,), (T.DISCARD,), None, (A.OWNER,), OWNER, GONE)],
    10: [((RUNNING,), (T.NOT_EXECUTED,), FR, (A.OWNER,), OWNER, SAME)],
    11: [((RUNNING,), (T.HAND_BACK,), FR, (A.OWNER,), OWNER, SAME)],
    12: [((RUNNING,), (T.DOUBT,), UNKNOWN, (A.OWNER,), OWNER, SAME)],
    13: [((RUNNING,), (T.TAKE_OVER,), RUNNING, (A.REQUESTER, A.COMPLETER), VERSION, UP)],
    14: [((RUNNING,), (T.SWEEP,), FR, (A.SWEEPER, A.OPERATOR), VERSION, SAME)],  # A1: `keys release`
    15: [((RUNNING,), (T.SWEEP,), UNKNOWN, (A.SWEEPER, A.REQUESTER, A.OPERATOR), VERSION, SAME)],
    16: [
        ((FR,), (T.TAKE_OVER,), RUNNING, (A.REQUESTER,), VERSION, UP),
        ((FR,), (T.TAKE_OVER,), RUNNING, (A.COMPLETER,), VERSION, UP),
    ],
    17: [((FR,), (T.COMMIT,), DONE, (A.REQUESTER,), VERSION, UP)],
    18: [((FR,), (T.EXPIRE,), UNKNOWN, (A.REAPER,), VERSION, SAME)],
    19: [((UNKNOWN,), (T.EXECUTED,), DONE, (A.RESOLVER, A.WEBHOOK, A.OPERATOR), VERSION, SAME)],
    20: [((UNKNOWN,), (T.EXECUTED,), FR, (A.RESOLVER, A.WEBHOOK, A.OPERATOR), VERSION, SAME)],
    21: [((UNKNOWN,), (T.NOT_EXECUTED,), FR, (A.RESOLVER, A.WEBHOOK, A.OPERATOR), VERSION, SAME)],
    22: [
        ((UNKNOWN,), (T.NOT_EXECUTED,), PENDING, (A.RESOLVER, A.WEBHOOK, A.OPERATOR), VERSION, SAME),
        ((UNKNOWN,), (T.DLQ_RETRY,), PENDING, (A.OPERATOR,), VERSION, SAME),
    ],
    23: [((UNKNOWN,), (T.STILL_UNKNOWN,), UNKNOWN, (A.RESOLVER,), VERSION, SAME)],
    24: [((PENDING, RUNNING), (T.WORKER_CLAIM,), RUNNING, (A.WORKER,), PARCEL, UP)],
    25: [((PENDING, RUNNING), (T.WORKER_CLAIM,), UNKNOWN, (A.WORKER,), PARCEL, SAME)],
    26: [((RUNNING,), (T.TRY_AGAIN,), PENDING, (A.WORKER,), OWNER_AND_PARCEL, SAME)],
    27: [((RUNNING,), (T.DEAD_LETTER, T.DOUBT), UNKNOWN, (A.WORKER,), OWNER_AND_PARCEL, SAME)],
    28: [((PENDING,), (T.ABANDON,), DONE, (A.REAPER,), VERSION, SAME)],
    29: [((DONE,), (T.EXPIRE,), EXPIRED, (A.REAPER,), VERSION, SAME)],
    # "Re-checked in the DELETE" is what a version proof is, for a record whose version moves with every write.
    30: [((DONE, EXPIRED, FR), (T.PURGE,), None, (A.REAPER,), VERSION, GONE)],
    31: [
        ((DONE, EXPIRED, FR), (T.SUPERSEDE,), RUNNING, (A.REQUESTER,), VERSION, UP),  # as 1
        ((DONE, EXPIRED, FR), (T.COMMIT,), DONE, (A.REQUESTER,), VERSION, UP),  # as 2
        ((DONE, EXPIRED, FR), (T.DEFER,), PENDING, (A.REQUESTER,), VERSION, UP),  # as 3
    ],
    32: [((DONE,), (T.BUST,), FR, (A.OPERATOR,), VERSION, UP)],
    33: [((RUNNING,), (T.WITHDRAW,), RUNNING, (A.OWNER,), OWNER, SAME)],  # ADR 0011
    34: [((FR, UNKNOWN), (T.REPLACE,), FR, (A.OPERATOR,), VERSION, UP)],  # ADR 0025
    35: [((DONE,), (T.EXTEND,), DONE, (A.OPERATOR,), VERSION, SAME)],
}

FLAGS = ("waited", "result_given", "parcel_sent", "parcel_repeatable", "locked")


def shape(row: Transition):
    return (row.number, row.source, row.trigger, row.to, row.by, row.proof, row.fence)


def allowed(trigger, actor, record, **facts):
    return find_transition(trigger, actor, Facts(record, NOW, **facts))


def number(trigger, actor, record, **facts):
    row = allowed(trigger, actor, record, **facts)
    return row.number if isinstance(row, Transition) else row.why


@each("row_number", PROTOCOL)
def test_row_matches_the_protocol(row_number):  # R45
    expected = {
        (row_number, source, trigger, to, frozenset(by), proof, fence)
        for sources, triggers, to, by, proof, fence in PROTOCOL[row_number]
        for source in sources
        for trigger in triggers
    }
    assert {shape(row) for row in ROWS if row.number == row_number} == expected


def test_table_contains_exactly_35_row_numbers():
    assert {row.number for row in ROWS} == set(PROTOCOL) == set(range(1, 36))


def test_the_table_holds_the_rows_and_nothing_else():
    tabled = [row for moves in TRANSITIONS.values() for rows in moves.values() for row in rows]
    assert sorted(map(id, tabled)) == sorted(map(id, ROWS))
    for source, moves in TRANSITIONS.items():
        for trigger, rows in moves.items():
            assert all((row.source, row.trigger) == (source, trigger) for row in rows)


def test_missing_transition_is_illegal_for_every_actor():
    pairs = {
        (source, trigger)
        for expected in PROTOCOL.values()
        for sources, triggers, *_ in expected
        for source in sources
        for trigger in triggers
    }
    for source, trigger, actor in product(STATES, Trigger, Actor):
        if (source, trigger) not in pairs:
            verdict = allowed(trigger, actor, a_record(source) if source else None)
            assert verdict == Illegal(f"{trigger} is not possible from {source or 'no row'}")


@pytest.mark.parametrize("state", STATES)
def test_verdict_names_the_trigger_and_never_raises(state):
    """The product of states, triggers and actors, with records of every kind, all facts off and all on."""
    names = (*FLAGS, "never_sent", "parcel_claimed", "reason", "runs_again", "soft", "call_open")
    records = all_records(state)[::17] if state else [None]
    for record, facts in product(records, ({}, dict.fromkeys(names, True))):
        for trigger, actor in product(Trigger, Actor):
            verdict = allowed(trigger, actor, record, **facts)
            if isinstance(verdict, Transition):
                assert actor in verdict.by
                assert (verdict.source, verdict.trigger) == (state, trigger)
            else:
                assert str(trigger) in verdict.why


GROUPS = defaultdict(list)
for _row in ROWS:
    GROUPS[_row.source, _row.trigger].append(_row)
RIVALS = {key: rows for key, rows in GROUPS.items() if any(a.by & b.by for a, b in combinations(rows, 2))}


def test_some_transitions_have_competing_rows():
    assert len(RIVALS) >= 6


@pytest.mark.parametrize("pair", RIVALS, ids=" ".join)
def test_at_most_one_row_holds(pair):
    source, _ = pair
    rows = RIVALS[pair]
    for record in all_records(source):
        for flags in product((False, True), repeat=len(FLAGS)):
            facts = Facts(record, NOW, **dict(zip(FLAGS, flags, strict=True)))
            holding = [row for row in rows if all(guard.holds(facts) for guard in row.when)]
            for one, other in combinations(holding, 2):
                assert not one.by & other.by, (record, facts, one, other)


def test_only_ownership_changes_raise_the_fence():  # P1, F11
    """Sweeping, resolving, parking and expiring never take a fence away from its owner."""
    up = {(row.number, row.trigger) for row in ROWS if row.fence is Fence.UP}
    assert up == {
        (13, T.TAKE_OVER),
        (16, T.TAKE_OVER),
        (17, T.COMMIT),
        (24, T.WORKER_CLAIM),
        (31, T.SUPERSEDE),
        (31, T.COMMIT),
        (31, T.DEFER),
        (32, T.BUST),
        (34, T.REPLACE),  # whoever ran with the result that was there before
    }
    assert all((row.fence is Fence.FIRST) is (row.source is None) for row in ROWS)
    assert all((row.fence is Fence.GONE) is (row.to is None) for row in ROWS)


def test_only_inserts_require_a_missing_row():
    assert all((row.proof is Proof.NO_ROW) is (row.source is None) for row in ROWS)


def test_owners_prove_the_fence_and_others_the_version():  # P1, S8
    owners = {A.OWNER, A.WORKER}
    for row in ROWS:
        if row.by <= owners:
            assert row.proof in {OWNER, PARCEL, OWNER_AND_PARCEL}
        else:
            assert not row.by & owners
            assert row.proof in {NO_ROW, VERSION}


def test_nothing_is_completed_over_an_open_call():  # F6, U2
    """Only a late inline owner, or whoever resolves the open call itself, completes past an intent."""
    for state in State:
        for record in all_records(state):
            if record.intent is None:
                continue
            for row in (row for row in ROWS if row.source is state and row.to is DONE):
                facts = Facts(record, NOW, locked=True, parcel_claimed=True, effects=Effects.LOCAL)
                if not all(guard.holds(facts) for guard in row.when):
                    continue
                late_inline = row.number == 8 and record.effects is Effects.INLINE
                resolved = row.number == 19 and record.effects in {Effects.INLINE, Effects.OUTBOX}
                let_go = row.number == 31 and state in {DONE, EXPIRED}  # all else is cleared
                retried = row.number == 17 and record.effects is Effects.LOCAL  # has no calls
                assert late_inline or resolved or let_go or retried, row


def test_owner_with_an_open_call_cannot_settle():  # F6
    """Also when somebody else has closed the intent in the record meanwhile."""
    for state, effects in product((RUNNING, UNKNOWN, FR), Effects):
        record = a_record(state, effects=effects)
        assert "calls_known" in allowed(T.SETTLE, A.OWNER, record, call_open=True).why


def test_terminal_states_are_left_only_by_expiry_and_by_an_operator():  # S7, S11
    leaving = {(row.source, row.trigger) for row in ROWS if row.source in {DONE, EXPIRED}}
    assert {trigger for _, trigger in leaving} == {
        T.EXPIRE, T.PURGE, T.SUPERSEDE, T.COMMIT, T.DEFER, T.BUST, T.EXTEND,
    }  # fmt: skip
    for source, trigger in leaving - {(DONE, T.BUST), (DONE, T.EXTEND)}:
        for actor in Actor:
            fresh = a_record(source, expires_at=NOW + 1)
            verdict = allowed(trigger, actor, fresh, soft=True, locked=True, effects=Effects.OUTBOX)
            assert isinstance(verdict, Illegal), (source, trigger, actor)


def test_expiry_frees_only_finished_or_plain_records():  # P6, F3, R43
    for state in State:
        for record in all_records(state):
            facts = {"locked": True, "effects": Effects.LOCAL}
            freed = [
                isinstance(allowed(T.PURGE, A.REAPER, record), Transition),
                isinstance(allowed(T.SUPERSEDE, A.REQUESTER, record), Transition),
                number(T.COMMIT, A.REQUESTER, record, **facts) == 31,
                number(T.DEFER, A.REQUESTER, record, effects=Effects.OUTBOX) == 31,
            ]
            plain = state is FR and not record.memo and record.intent is None
            may = record.expires_at <= NOW and (state in {DONE, EXPIRED} or plain)
            assert freed == [may] * 4


@pytest.mark.parametrize("trigger", [T.EXECUTED, T.NOT_EXECUTED])
def test_resolver_webhook_and_operator_share_the_same_rows(trigger):
    for record in all_records(UNKNOWN):
        for waited in (False, True):
            facts = {"waited": waited, "result_given": True, "parcel_repeatable": False}
            said = {number(trigger, actor, record, **facts) for actor in (A.RESOLVER, A.WEBHOOK, A.OPERATOR)}
            assert len(said) == 1


class TestLeases:
    def test_live_lease_cannot_be_taken_over_or_swept(self):  # R55, F39
        for effects, lease in product(Effects, (None, NOW + 1)):
            record = a_record(effects=effects, lease_until=lease)
            for trigger, actor in product((T.TAKE_OVER, T.SWEEP), Actor):
                assert isinstance(allowed(trigger, actor, record), Illegal)

    def test_a_lease_ends_at_its_very_instant(self):
        assert number(T.TAKE_OVER, A.REQUESTER, a_record(lease_until=NOW)) == 13
        assert "lease_over" in number(T.TAKE_OVER, A.REQUESTER, a_record(lease_until=NOW + 1))

    def test_sweeper_grants_retryable_records_a_grace_period(self):
        record = a_record(lease_until=NOW - MINUTE)
        assert number(T.SWEEP, A.SWEEPER, record, grace=MINUTE) == 14
        assert "grace_over" in number(T.SWEEP, A.SWEEPER, record, grace=MINUTE + 1)
        doubtful = replace(record, effects=Effects.INLINE, recovery=Recovery.UNKNOWN)
        assert number(T.SWEEP, A.SWEEPER, doubtful, grace=HOUR) == 15

    def test_stale_lease_is_either_retryable_or_unknown(self):  # C11
        """What runs again is taken over or swept to retryable, everything else is in doubt."""
        for record in all_records(RUNNING):
            if record.lease_until is None or record.lease_until > NOW:
                continue
            taken = number(T.TAKE_OVER, A.REQUESTER, record)
            swept = number(T.SWEEP, A.SWEEPER, record)
            doubted = number(T.SWEEP, A.REQUESTER, record)
            assert (taken, swept) == (13, 14) or (swept, doubted) == (15, 15)
            assert (taken == 13) is not (doubted == 15)

    def test_inline_is_never_run_again_by_default(self):  # P2, C10
        record = a_record(effects=Effects.INLINE, recovery=Recovery.UNKNOWN, lease_until=NOW)
        assert number(T.SWEEP, A.REQUESTER, record) == 15
        assert isinstance(allowed(T.TAKE_OVER, A.REQUESTER, record), Illegal)

    def test_the_heartbeat_stops_at_the_deadline(self):  # P5, F9
        """A lease that nobody acted on may be revived."""
        assert number(T.RENEW, A.OWNER, a_record(lease_until=NOW - HOUR)) == 4
        assert "before_deadline" in number(T.RENEW, A.OWNER, a_record(deadline=NOW))


class TestCalls:
    def test_one_call_is_open_at_a_time(self):  # H1
        record = a_record(effects=Effects.PHASED, recovery=Recovery.RESUME, intent=an_intent(repeatable=True))
        assert "no_intent_or_same_again" in number(T.ANNOUNCE, A.OWNER, record, phase="receipt")

    def test_a_repeatable_call_is_announced_again_within_its_window(self):  # H2, H3, F23, ADR 0009
        record = a_record(effects=Effects.PHASED, recovery=Recovery.RESUME, intent=an_intent(repeatable=True))
        assert number(T.ANNOUNCE, A.OWNER, record, phase="charge") == 5
        over = replace(record, intent=replace(record.intent, repeatable_until=NOW))
        assert "same_again" in number(T.ANNOUNCE, A.OWNER, over, phase="charge")
        never = replace(record, intent=an_intent())
        assert "same_again" in number(T.ANNOUNCE, A.OWNER, never, phase="charge")

    @pytest.mark.parametrize("state", [RUNNING, UNKNOWN, FR])
    def test_late_result_is_stored_unless_one_exists(self, state):  # U2, F35
        """Also after "not executed" has closed the intent."""
        record = a_record(state, effects=Effects.PHASED, recovery=Recovery.RESUME)
        assert number(T.RESULT, A.OWNER, record, phase="charge") == 6
        assert "no_result_yet" in number(T.RESULT, A.OWNER, replace(record, memo=MEMO), phase="charge")

    def test_only_a_first_send_can_be_proven_unmade(self):  # F24, H2, R102
        first = a_record(effects=Effects.PHASED, intent=an_intent(repeatable=True))
        second = replace(first, intent=an_intent(repeatable=True, sends=2))
        for record in (first, second):  # what was announced is withdrawn first, by row 33 (ADR 0054)
            assert "no_intent" in number(T.NOT_EXECUTED, A.OWNER, record, never_sent=True)
        assert number(T.WITHDRAW, A.OWNER, first, never_sent=True) == 33
        assert "sent_once" in number(T.WITHDRAW, A.OWNER, second, never_sent=True)

    def test_a_record_that_did_something_is_not_evicted(self):  # F5, P4, R113
        plain = a_record(effects=Effects.PHASED)
        assert number(T.DISCARD, A.OWNER, plain, entered=False) == 9
        assert "not_entered" in number(T.DISCARD, A.OWNER, plain)
        assert "plain" in number(T.DISCARD, A.OWNER, replace(plain, memo=MEMO), entered=False)
        assert "plain" in number(T.DISCARD, A.OWNER, replace(plain, intent=an_intent()), entered=False)

    def test_only_resumable_records_can_be_handed_back(self):  # H6, F27
        """Bounded attempts, then doubt."""
        record = a_record(effects=Effects.PHASED, recovery=Recovery.RESUME, memo=MEMO)
        assert number(T.HAND_BACK, A.OWNER, record) == 11
        assert number(T.HAND_BACK, A.OWNER, record, max_attempts=1) != 11
        assert number(T.HAND_BACK, A.OWNER, replace(record, intent=an_intent())) != 11
        assert number(T.HAND_BACK, A.OWNER, replace(record, intent=an_intent(repeatable=True))) == 11
        for effects in (Effects.LOCAL, Effects.INLINE, Effects.OUTBOX):
            assert number(T.HAND_BACK, A.OWNER, replace(record, effects=effects)) != 11


class TestDoubt:
    def test_executed_settles_inline_and_stores_a_phased_result(self):  # H5, F22
        inline = a_record(UNKNOWN, effects=Effects.INLINE)
        phased = a_record(UNKNOWN, effects=Effects.PHASED, intent=an_intent())
        assert number(T.EXECUTED, A.WEBHOOK, inline) == 19
        assert number(T.EXECUTED, A.WEBHOOK, phased, result_given=True) == 20
        assert number(T.EXECUTED, A.WEBHOOK, phased) == "executed from unknown needs inline_or_outbox, result_given"

    def test_a_result_given_by_hand_is_replaced_until_the_next_step(self):  # H5
        given = MemoEntry("charge", EntryKind.CALL, '"ch_1"', by_hand=True)
        said = {"result_given": True, "reason": True}
        for state in (FR, UNKNOWN):
            record = a_record(state, effects=Effects.PHASED, memo=(*MEMO, given))
            assert number(T.REPLACE, A.OPERATOR, record, **said) == 34
            assert "not for the resolver" in number(T.REPLACE, A.RESOLVER, record, **said)
            later = replace(record, memo=(*record.memo, *MEMO))
            assert "last_result_by_hand" in number(T.REPLACE, A.OPERATOR, later, **said)
            provider = replace(record, memo=(*MEMO, replace(given, by_hand=False)))
            assert "last_result_by_hand" in number(T.REPLACE, A.OPERATOR, provider, **said)
            announced = replace(record, intent=an_intent())
            assert "no_intent" in number(T.REPLACE, A.OPERATOR, announced, **said)
        running = a_record(RUNNING, effects=Effects.PHASED, memo=(*MEMO, given))
        assert "not possible" in number(T.REPLACE, A.OPERATOR, running, **said)

    def test_a_resolver_cannot_give_the_result_of_a_call_that_is_not_open(self):
        record = a_record(UNKNOWN, effects=Effects.PHASED, memo=MEMO)
        assert "intent_open" in number(T.EXECUTED, A.RESOLVER, record, result_given=True)

    def test_not_executed_requires_the_waiting_time(self):  # U1, F34
        for record in (
            a_record(UNKNOWN, effects=Effects.INLINE),
            a_record(UNKNOWN, effects=Effects.PHASED, intent=an_intent()),
        ):
            assert number(T.NOT_EXECUTED, A.RESOLVER, record, waited=True) == 21
            assert "waited" in number(T.NOT_EXECUTED, A.RESOLVER, record)

    def test_fenced_record_without_open_call_is_released_at_once(self):  # ADR 0009
        """Else a doubtful local record, or a phased one without an open call, could never be released."""
        for effects, memo in ((Effects.LOCAL, ()), (Effects.PHASED, MEMO), (Effects.OUTBOX, ())):
            record = a_record(UNKNOWN, effects=effects, memo=memo)
            assert number(T.NOT_EXECUTED, A.OPERATOR, record) == 21

    def test_a_deferred_request_is_due_again_and_its_handler_never_runs_again(self):  # O2, F29
        for evidence in ({"memo": MEMO}, {"intent": an_intent()}):
            parked = a_record(UNKNOWN, effects=Effects.OUTBOX, **evidence)
            assert number(T.NOT_EXECUTED, A.RESOLVER, parked, waited=True) == 22
            assert number(T.DLQ_RETRY, A.OPERATOR, parked, parcel_repeatable=True) == 22
            assert isinstance(allowed(T.DLQ_RETRY, A.OPERATOR, parked), Illegal)
            retryable = replace(parked, state=FR)
            assert "worker_never_began" in number(T.TAKE_OVER, A.REQUESTER, retryable)
            running = replace(parked, state=RUNNING, lease_until=NOW - HOUR)
            assert isinstance(allowed(T.TAKE_OVER, A.REQUESTER, running), Illegal)
            assert isinstance(allowed(T.NOT_EXECUTED, A.OWNER, running, never_sent=True), Illegal)


class TestResumable:
    @pytest.mark.parametrize("begun", [{"memo": MEMO}, {"intent": an_intent()}])
    def test_started_record_is_resumed_or_expired_but_not_purged(self, begun):  # F3, F27, ADR 0009
        """An open call without any finished phase is something begun, too."""
        record = a_record(FR, effects=Effects.PHASED, expires_at=NOW, **begun)
        assert number(T.TAKE_OVER, A.COMPLETER, record) == 16
        assert number(T.EXPIRE, A.REAPER, record) == 18
        assert "free" in number(T.PURGE, A.REAPER, record)

    def test_completer_ignores_records_without_steps(self):
        record = a_record(FR, effects=Effects.PHASED)
        assert number(T.TAKE_OVER, A.REQUESTER, record) == 16
        assert "begun" in number(T.TAKE_OVER, A.COMPLETER, record)

    def test_late_owner_can_settle_a_swept_record(self):  # U2, F35
        """A phased record with results is resumed instead."""
        for effects in Effects:
            assert number(T.SETTLE, A.OWNER, a_record(FR, effects=effects)) == 8
        assert "not_resumable" in number(T.SETTLE, A.OWNER, a_record(FR, effects=Effects.PHASED, memo=MEMO))


class TestItems:
    def test_parcel_is_claimed_if_repeatable_and_parked_otherwise(self):  # O1, F31
        for state in (PENDING, RUNNING):
            record = a_record(state, effects=Effects.OUTBOX, lease_until=None, intent=an_intent())
            assert number(T.WORKER_CLAIM, A.WORKER, record) == 24
            assert number(T.WORKER_CLAIM, A.WORKER, record, parcel_sent=True, parcel_repeatable=True) == 24
            assert number(T.WORKER_CLAIM, A.WORKER, record, parcel_sent=True) == 25

    def test_with_a_stored_result_an_item_is_always_safe_to_claim(self):  # O1
        """Nothing is called."""
        record = a_record(RUNNING, effects=Effects.OUTBOX, lease_until=None, memo=MEMO)
        assert number(T.WORKER_CLAIM, A.WORKER, record, parcel_sent=True) == 24

    def test_try_again_and_dead_letter(self):  # O3
        record = a_record(RUNNING, effects=Effects.OUTBOX, lease_until=None, intent=an_intent())
        assert number(T.TRY_AGAIN, A.WORKER, record) == 26
        assert "parcel_safe" in number(T.TRY_AGAIN, A.WORKER, record, parcel_sent=True)
        assert number(T.DEAD_LETTER, A.WORKER, record, parcel_sent=True) == 27
        assert number(T.DOUBT, A.WORKER, record, parcel_sent=True) == 27

    def test_only_a_never_claimed_parcel_is_abandoned(self):  # O4, F30
        record = a_record(PENDING, effects=Effects.OUTBOX, expires_at=NOW)
        assert number(T.ABANDON, A.REAPER, record) == 28
        assert "parcel_never_claimed" in number(T.ABANDON, A.REAPER, record, parcel_claimed=True)


class TestWithdraw:
    """R100, F24, ADR 0011: an announcement that was provably never followed by a call is taken back."""

    def test_only_the_first_send_can_be_proven_unmade(self):
        record = a_record(RUNNING, effects=Effects.PHASED, memo=MEMO, intent=an_intent(sends=1))
        assert number(T.WITHDRAW, A.OWNER, record, never_sent=True) == 33
        assert "never_sent" in number(T.WITHDRAW, A.OWNER, record)
        second = replace(record, intent=an_intent(sends=2))
        assert "sent_once" in number(T.WITHDRAW, A.OWNER, second, never_sent=True)

    def test_withdraw_requires_an_open_call(self):
        record = a_record(RUNNING, effects=Effects.PHASED, memo=MEMO)
        assert "sent_once" in number(T.WITHDRAW, A.OWNER, record, never_sent=True)

    @pytest.mark.parametrize("effects", [Effects.LOCAL, Effects.OUTBOX, Effects.INLINE])
    def test_withdraw_applies_only_to_phased_records(self, effects):
        record = a_record(RUNNING, effects=effects, intent=an_intent(sends=1))
        assert "phased" in number(T.WITHDRAW, A.OWNER, record, never_sent=True)


class TestOperators:
    def test_busting_a_success_requires_confirmation(self):  # A1, F39
        success, failure = a_record(DONE), a_record(DONE, outcome=Outcome.FAILURE)
        assert number(T.BUST, A.OPERATOR, success, reason=True, runs_again=True) == 32
        assert "confirmed_if_success" in number(T.BUST, A.OPERATOR, success, reason=True)
        assert number(T.BUST, A.OPERATOR, failure, reason=True) == 32
        assert "reason" in number(T.BUST, A.OPERATOR, failure)
        deferred = a_record(DONE, effects=Effects.OUTBOX, outcome=Outcome.FAILURE)
        assert "not_outbox" in number(T.BUST, A.OPERATOR, deferred, reason=True)


class TestOneCommit:
    def test_without_the_lock_nothing_is_committed(self):  # L1
        assert "locked" in number(T.COMMIT, A.REQUESTER, None)
        assert number(T.COMMIT, A.REQUESTER, None, locked=True) == 2
        assert "local" in number(T.COMMIT, A.REQUESTER, None, locked=True, effects=Effects.INLINE)

    def test_live_retryable_record_continues_its_incarnation(self):  # L3
        """An expired retryable record is a new incarnation's, a live one keeps its own."""
        record = a_record(FR)
        assert number(T.COMMIT, A.REQUESTER, record, locked=True) == 17
        assert number(T.COMMIT, A.REQUESTER, replace(record, expires_at=NOW), locked=True) == 31

    def test_new_incarnation_takes_the_effects_of_its_request(self):  # P2, F4
        """The record's effects decide about the record, the route's only about what starts anew."""
        old = a_record(DONE, effects=Effects.INLINE, expires_at=NOW)
        assert number(T.COMMIT, A.REQUESTER, old, locked=True, effects=Effects.LOCAL) == 31
        assert number(T.DEFER, A.REQUESTER, old, effects=Effects.OUTBOX) == 31
        assert "request_outbox" in number(T.DEFER, A.REQUESTER, old, effects=Effects.LOCAL)


def test_illegal_verdict_names_the_missing_guards():
    """An operator reads it."""
    assert number(T.SETTLE, A.OWNER, None) == "settle is not possible from no row"
    assert number(T.SETTLE, A.SWEEPER, a_record()) == "settle from in_progress is not for the sweeper"
    assert number(T.BUST, A.OPERATOR, a_record(DONE)) == "bust from completed needs confirmed_if_success, reason"


def test_guards_are_all_used_and_distinct():
    assert {guard for row in ROWS for guard in row.when} == set(Guard)
    assert len(Guard.__members__) == len(set(Guard))
