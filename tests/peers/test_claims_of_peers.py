"""Bugs of other idempotency layers that live in the claim and its record, tried on ours.

The numbers are those of the list of peers' bugs; what lives in the ASGI layer is tested there under the same numbers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import flows
from oncekey.core.model import Code, Discarded, Lease, Proceed, Refuse, Replay, Retryable, State
from oncekey.core.policy import Policy
from oncekey.engine.shell import Engine
from oncekey.testing.claims import LEASE, OTHER_FINGERPRINT, TTL, ManualClock, a_claim, again, answered
from oncekey.wire import connect

POLICY = Policy()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["memory", "sqlite"])
def engine(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock):
    url = "memory:" if request.param == "memory" else f"sqlite:///{tmp_path / 'peers.db'}"
    engine = connect(url, clock=clock)
    engine.migrate()
    yield engine
    engine.close()


def proceed(engine: Engine, claim) -> Lease:
    verdict = flows.begin(engine, claim, POLICY)
    assert isinstance(verdict, Proceed)
    return verdict.lease


def test_every_claim_has_a_lease_expiry(engine: Engine) -> None:  # peers 1
    claim = a_claim()
    proceed(engine, claim)
    for _ in range(5):
        assert isinstance(flows.begin(engine, again(claim), POLICY), Refuse)
    assert flows.find(engine, claim.id).record.lease_until is not None


def test_request_that_read_before_the_claim_gets_a_replay(engine: Engine) -> None:  # peers 2, 4, 5, 8
    claim, late = a_claim(), None
    late = again(claim)
    assert flows.find(engine, late.id).record is None  # the second request looks, and sees nothing
    lease = proceed(engine, claim)
    assert flows.settle(engine, lease, answered()).ours  # the first one is done before the second one asks
    verdict = flows.begin(engine, late, POLICY)
    assert isinstance(verdict, Replay)
    assert verdict.record.response == answered().response


def test_refused_request_cannot_release_the_claim(engine: Engine) -> None:  # peers 3, 6
    claim, second = a_claim(), None
    owner = proceed(engine, claim)
    second = again(claim)
    assert isinstance(flows.begin(engine, second, POLICY), Refuse)
    stranger = Lease(second.id, second.incarnation, 1, 1, second.effects, 0, 0, 0)
    for settlement in (Discarded(), Retryable("x"), answered(b"false")):
        flows.settle(engine, stranger, settlement)
    # The third one still finds the first one's claim.
    assert isinstance(flows.begin(engine, again(claim), POLICY), Refuse)
    assert flows.settle(engine, owner, answered()).ours


def test_two_retries_after_a_dead_owner_and_one_of_them_runs(engine: Engine, clock: ManualClock) -> None:  # peers 9
    claim = a_claim()
    proceed(engine, claim)
    clock.advance(LEASE)
    seen = flows.find(engine, claim.id).record
    first, second = again(claim), again(claim)
    # Both saw the same stale record; the second take-over compares with what is not there any more.
    assert engine.store is not None
    won = [isinstance(flows.begin(engine, retry, POLICY), Proceed) for retry in (first, second)]
    assert won == [True, False]
    assert flows.find(engine, claim.id).record.fence == seen.fence + 1


def test_retry_of_a_discarded_record_acquires_a_claim(engine: Engine) -> None:  # peers 10
    claim = a_claim()
    lease = proceed(engine, claim)
    assert flows.settle(engine, lease, Discarded()).ours
    retry = again(claim)
    verdict = flows.begin(engine, retry, POLICY)
    assert isinstance(verdict, Proceed)
    assert flows.find(engine, claim.id).record.owner == retry.owner  # it runs with a claim of its own


def test_nothing_in_progress_is_ever_evicted(engine: Engine) -> None:  # peers 11
    first = a_claim()
    proceed(engine, first)
    for _ in range(500):
        proceed(engine, a_claim())
    assert isinstance(flows.begin(engine, again(first), POLICY), Refuse)


@pytest.mark.parametrize(
    "word", [answered(b"zombie"), Retryable("zombie"), Discarded()], ids=lambda w: type(w).__name__
)
def test_former_owner_cannot_change_the_record_of_its_successor(
    engine: Engine, clock: ManualClock, word
) -> None:  # peers 13, P1
    claim = a_claim()
    zombie = proceed(engine, claim)
    clock.advance(LEASE)
    successor = proceed(engine, again(claim))
    before = flows.find(engine, claim.id).record
    assert not flows.settle(engine, zombie, word).ours
    assert flows.renew(engine, zombie, LEASE) is None  # nor does its heartbeat keep the thief alive
    assert flows.find(engine, claim.id).record == before
    assert flows.settle(engine, successor, answered()).ours
    assert not flows.settle(engine, zombie, word).ours
    assert isinstance(flows.begin(engine, again(claim), POLICY), Replay)


def test_renewed_lease_lasts_until_the_response_is_stored(engine: Engine, clock: ManualClock) -> None:  # peers 14
    claim = a_claim()
    lease = proceed(engine, claim)
    for _ in range(4):
        clock.advance(LEASE * 2 // 3)
        assert flows.renew(engine, lease, LEASE) is not None
    assert isinstance(flows.begin(engine, again(claim), POLICY), Refuse)
    assert flows.settle(engine, lease, answered()).ours


def test_repeated_claim_write_finds_its_own_record(engine: Engine) -> None:  # peers 18, P7
    claim = a_claim()
    first, second = proceed(engine, claim), proceed(engine, claim)
    assert first == second
    assert flows.find(engine, claim.id).record.attempts == 1


def test_lease_ends_before_the_record_expires(engine: Engine, clock: ManualClock) -> None:
    claim = a_claim()  # peers 17, R86
    proceed(engine, claim)
    record = flows.find(engine, claim.id).record
    assert record.lease_until - clock.now == LEASE < TTL == record.expires_at - clock.now
    clock.advance(LEASE)
    assert isinstance(flows.begin(engine, again(claim), POLICY), Proceed)


def test_completing_keeps_the_fingerprint(engine: Engine) -> None:  # peers 21, 22, R32
    claim = a_claim()
    assert flows.settle(engine, proceed(engine, claim), answered()).ours
    assert flows.find(engine, claim.id).record.fingerprint == claim.fingerprint
    assert isinstance(flows.begin(engine, again(claim), POLICY), Replay)
    other = flows.begin(engine, again(claim, fingerprint=OTHER_FINGERPRINT), POLICY)
    assert isinstance(other, Refuse)
    assert other.code is Code.KEY_REUSED


def test_a_take_over_keeps_the_fingerprint_too(engine: Engine, clock: ManualClock) -> None:  # peers 12, E2, R38
    claim = a_claim()
    proceed(engine, claim)
    clock.advance(LEASE)
    other = flows.begin(engine, again(claim, fingerprint=OTHER_FINGERPRINT), POLICY)
    assert isinstance(other, Refuse)
    assert other.code is Code.KEY_REUSED
    proceed(engine, again(claim))
    assert flows.find(engine, claim.id).record.fingerprint == claim.fingerprint


def test_state_and_response_are_stored_in_one_write(engine: Engine) -> None:  # peers 16: no reader between two writes
    claim = a_claim()
    lease = proceed(engine, claim)
    assert flows.find(engine, claim.id).record.response is None
    settled = flows.settle(engine, lease, answered())
    record = settled.snapshot.record
    assert (record.state, record.response) == (State.COMPLETED, answered().response)
