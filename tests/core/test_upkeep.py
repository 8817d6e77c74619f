"""What is due, and which clock is believed: pure rules, walked through."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.records import NOW, a_record
from harness.each import each
from oncekey.core.model import (
    HOUR,
    MINUTE,
    SECOND,
    Effects,
    EntryKind,
    Intent,
    MemoEntry,
    Outcome,
    Recovery,
    State,
    StoredResponse,
)
from oncekey.core.policy import Policy
from oncekey.core.upkeep import (
    CLOCK_TOLERANCE,
    REAP_GRACE,
    SWEEP_GRACE,
    Reaping,
    Retention,
    Run,
    Trust,
    percentile,
    reaping_of,
    short_leases,
    sweep_to,
    timed_out,
)

STEP = MemoEntry("order", EntryKind.PHASE, "1")
OPEN = Intent("charge", "k", "d", 1, NOW - HOUR, NOW - HOUR, None)
HARD, SOFT = Retention(), Retention(soft=True, kept=HOUR)


def finished(state=State.COMPLETED, **changes):
    answer = {"outcome": Outcome.SUCCESS, "response": StoredResponse(201, (), b"")}
    free = {"state": state, "owner": None, "lease_until": None, "expires_at": NOW - REAP_GRACE}
    return a_record(**{**free, **(answer if state is State.COMPLETED else {}), **changes})


# R147, rows 14, 15: every effect, recovery and begun-ness
@each("effects", Effects)
@each("recovery", Recovery)
@each("memo", [(), (STEP,)])
@each("intent", [None, OPEN])
def test_sweep_marks_only_repeatable_records_as_retryable(effects, recovery, memo, intent):
    record = a_record(
        effects=effects, recovery=recovery, memo=memo, intent=intent, lease_until=NOW - SWEEP_GRACE, attempts=1
    )
    again = (effects is Effects.PHASED and recovery is Recovery.RESUME and intent is None) or (
        effects is not Effects.PHASED and recovery is Recovery.RETRY and not memo and intent is None
    )
    assert sweep_to(record, NOW) is (State.FAILED_RETRYABLE if again else State.UNKNOWN)
    assert sweep_to(record, NOW - 1) is None
    assert sweep_to(replace(record, lease_until=None), NOW) is None


@pytest.mark.parametrize("state", [state for state in State if state is not State.IN_PROGRESS])
def test_only_in_progress_records_are_swept(state):
    assert sweep_to(a_record(state=state, lease_until=NOW - HOUR), NOW) is None


# R165, F3: each state before and after its expiry, with and without something to resume
@each("retention", [HARD, SOFT])
@each("state", State)
@each("begun", [False, True])
def test_only_finished_records_are_reaped(retention, state, begun):
    record = finished(state, memo=(STEP,) if begun else (), expires_at=NOW - REAP_GRACE - HOUR)
    expected = {
        State.COMPLETED: Reaping.MARK if retention.soft else Reaping.PURGE,
        State.EXPIRED: Reaping.PURGE,
        State.FAILED_RETRYABLE: Reaping.PARK if begun else Reaping.PURGE,
        State.PENDING: Reaping.ABANDON,
    }
    assert reaping_of(record, NOW, retention) is expected.get(state)
    assert reaping_of(replace(record, expires_at=NOW - REAP_GRACE + 1), NOW, retention) is None


def test_soft_retention_keeps_expired_records_longer():
    record = finished(State.EXPIRED, expires_at=NOW - REAP_GRACE - HOUR + 1)
    assert reaping_of(record, NOW, SOFT) is None
    assert reaping_of(record, NOW, HARD) is Reaping.PURGE


def test_records_are_kept_until_clocks_agreed_for_their_ttl():
    # A3
    record = finished()
    assert reaping_of(record, NOW, HARD, record.ttl - 1) is None
    assert reaping_of(record, NOW, HARD, record.ttl) is Reaping.PURGE


class TestTrust:
    """Three clocks: the store's, the host's own, and one that nobody can set."""

    def test_clocks_that_go_together_are_always_trusted(self):
        trust = Trust()
        for passed in range(0, 100 * HOUR, HOUR):
            trust = trust.looked(NOW + passed, NOW + passed + MINUTE, passed)
            assert not trust.wrong
            assert trust.trusted_for(passed) is None

    @pytest.mark.parametrize("sign", [-1, 1])
    def test_clock_difference_within_tolerance_is_accepted(self, sign):
        assert not Trust().looked(NOW + sign * CLOCK_TOLERANCE, NOW, 0).wrong
        assert Trust().looked(NOW + sign * (CLOCK_TOLERANCE + 1), NOW, 0).wrong

    @pytest.mark.parametrize("sign", [-1, 1])
    def test_clock_jump_is_detected_even_if_the_host_jumps_too(self, sign):
        # F41: SQLite, or a database on the same machine
        trust = Trust().looked(NOW, NOW, 0)
        jump = sign * (CLOCK_TOLERANCE + 1)
        trust = trust.looked(NOW + jump, NOW + jump, 0)
        assert trust.wrong
        assert "moved" in trust.why
        trust = trust.looked(NOW + jump + SECOND, NOW + jump + SECOND, SECOND)
        assert not trust.wrong
        assert trust.trusted_for(SECOND + 5) == 5  # also the first good look counts as a bad one

    def test_a_machine_that_slept_is_not_wrong(self):
        trust = Trust().looked(NOW, NOW, 0).looked(NOW + 20 * HOUR, NOW + 20 * HOUR, 20 * HOUR)
        assert not trust.wrong

    def test_clock_is_trusted_again_after_correction(self):
        trust = Trust().looked(NOW, NOW + HOUR, 0)
        assert "differ by 3600 s" in trust.why
        trust = trust.looked(NOW + SECOND, NOW + SECOND, SECOND)
        assert not trust.wrong
        assert trust.trusted_for(2 * SECOND) == SECOND

    def test_outage_restarts_the_trust_period(self):
        assert Trust().looked(NOW, NOW, 0).disturbed(7).trusted_for(10) == 3


class TestLeases:
    def test_the_99th_percentile(self):
        assert percentile(list(range(1, 101)), 99) == 99
        assert percentile([5], 99) == 5
        assert percentile([3, 1, 2], 50) == 2

    def test_lease_shorter_than_twice_the_99th_percentile_is_reported(self):
        # R149
        runs = [Run("slow", 10)] * 20 + [Run("fast", 1)] * 20 + [Run("rare", 1000)] * 3
        assert short_leases(runs, 19) == {"slow": 10}
        assert short_leases(runs, 20) == {}


@pytest.mark.parametrize("status", [408, 410])
@pytest.mark.parametrize("error_format", ["problem", "code", "fault"])
@pytest.mark.parametrize("flavor", ["ietf", "stripe"])
def test_abandoned_request_has_a_response_in_every_format(status, error_format, flavor):
    # R112
    answer = timed_out(Policy(abandoned_status=status, error_format=error_format, flavor=flavor))
    assert (answer.response.status, answer.outcome) == (status, Outcome.FAILURE)
    assert b"timed_out" in answer.response.body.lower()
