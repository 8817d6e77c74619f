"""Claims: the first caller of a key, the callers after it, and many callers at once, of which exactly one wins."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

from oncekey.core import model
from oncekey.testing.claims import DEADLINE, LEASE, OTHER_FINGERPRINT, TTL, a_claim, again, answered
from oncekey_contract.world import World, stand

T = TypeVar("T")

CROWD = 64
ROUNDS = 20


class Claiming:
    """The first caller of an unused key owns it, and no other caller does."""

    def test_an_unused_key_has_no_record(self, world: World) -> None:
        """The snapshot contains the store's clock even so."""
        snapshot = world.find(a_claim().id)

        assert snapshot.record is None
        assert snapshot.now == world.clock.now

    def test_the_first_claim_stores_all_its_fields(self, world: World) -> None:
        """Every field is stored; timestamps come from the store's clock."""
        claim, now = a_claim(), world.clock.now

        verdict = world.begin(claim)

        assert isinstance(verdict, model.Proceed)
        assert verdict.record == model.Record(
            id=claim.id,
            incarnation=claim.incarnation,
            operation=claim.operation,
            effects=claim.effects,
            recovery=claim.recovery,
            method=claim.method,
            path=claim.path,
            fingerprint=claim.fingerprint,
            seed=claim.seed,
            state=model.State.IN_PROGRESS,
            outcome=None,
            entered=True,
            fence=1,
            version=1,
            owner=claim.owner,
            lease_until=now + LEASE,
            deadline=now + DEADLINE,
            call_timeout=claim.call_timeout,
            ttl=TTL,
            attempts=1,
            recovery_point="started",
            memo=(),
            intent=None,
            response=None,
            last_error=None,
            reconcile_after=None,
            reconcile_tries=0,
            created_at=now,
            last_run_at=now,
            finished_at=None,
            expires_at=now + TTL,
        )
        assert verdict.lease == model.Lease.of(verdict.record)
        assert world.record(claim.id) == verdict.record

    def test_a_record_stores_the_effects_and_recovery_of_its_claim(self, world: World) -> None:
        """A crash is handled by the stored effects, not by what the route declares later (P2)."""
        for effects in model.Effects:
            for recovery in model.Recovery:
                claim = a_claim(effects=effects, recovery=recovery, entered=False)
                world.owned(claim)
                record = world.record(claim.id)
                assert (record.effects, record.recovery, record.entered) == (effects, recovery, False)

    def test_a_repeated_claim_succeeds_and_writes_nothing(self, world: World) -> None:
        """A record in progress with our owner id is our own claim (P7)."""
        claim = a_claim()
        first = world.begin(claim)
        assert isinstance(first, model.Proceed)

        now = world.advance(model.SECOND)

        assert world.begin(claim) == replace(first, now=now)
        assert world.record(claim.id).version == 1

    def test_a_claim_succeeds_after_a_lost_reply(self, world: World) -> None:
        """The repeated claim finds its own record (P7, F8)."""
        claim = a_claim()
        world.lose_reply("claim")

        lease = world.owned(claim)

        assert (lease.fence, lease.incarnation) == (1, claim.incarnation)
        assert world.record(claim.id).version == 1

    def test_a_duplicate_is_refused_while_the_lease_is_valid(self, world: World) -> None:
        """A record stays in progress until its lease expires."""
        claim = a_claim()
        world.owned(claim)
        before = world.record(claim.id)
        world.advance(LEASE - 1)

        verdict = world.begin(again(claim))

        assert isinstance(verdict, model.Refuse)
        assert (verdict.code, verdict.record) == (model.Code.IN_PROGRESS, before)
        assert world.record(claim.id) == before

    def test_a_different_request_with_the_same_key_is_refused_in_every_state(self, world: World) -> None:
        """The fingerprint is compared first, in every state, and nothing is written."""
        for state in (
            model.State.IN_PROGRESS,
            model.State.COMPLETED,
            model.State.FAILED_RETRYABLE,
            model.State.UNKNOWN,
        ):
            for wait in (0, LEASE, DEADLINE):
                standing = stand(world, state)
                before = world.record(standing.claim.id)
                world.advance(wait)

                verdict = world.begin(again(standing.claim, fingerprint=OTHER_FINGERPRINT))

                assert verdict == model.Refuse(model.Code.KEY_REUSED), (state, wait)
                assert world.record(standing.claim.id) == before, (state, wait)

    def test_other_scopes_and_keys_are_claimed_independently(self, world: World) -> None:
        """The same key of another tenant is another key, and scope and key cannot run into each other."""
        claim = a_claim("order-1")
        strangers = [
            replace(claim.id, scope="shop|tenant-2"),
            replace(claim.id, key="order-2"),
            replace(claim.id, scope=claim.id.scope + "order", key="-1"),
            replace(claim.id, key="ORDER-1"),
            replace(claim.id, key="order-1 "),
        ]
        world.owned(claim)

        for record_id in strangers:
            world.owned(again(claim, id=record_id))

    def test_a_claim_is_refused_if_another_inserts_the_row_first(self, world: World) -> None:
        """The insert finds the record and reads it, without an error."""
        claim = a_claim()
        world.before("claim", lambda: world.owned(again(claim)))

        verdict = world.begin(claim)

        assert isinstance(verdict, model.Refuse)
        assert verdict.code is model.Code.IN_PROGRESS
        assert world.record(claim.id).version == 1

    def test_a_record_deleted_before_its_takeover_is_claimed_as_new(self, world: World) -> None:
        """Its owner withdrew the claim after we had read it."""
        claim = a_claim()
        lease = world.owned(claim)
        world.advance(LEASE)
        world.before("take_over", lambda: world.settle(lease, model.Discarded()))
        ours = again(claim)

        assert world.owned(ours).fence == 1
        assert world.record(claim.id).incarnation == ours.incarnation


class Racing:
    """One statement decides, so exactly one caller wins."""

    def test_concurrent_claims_of_a_new_key_have_one_winner(self, world: World) -> None:
        """64 threads, one execution."""
        claim = a_claim()
        verdicts = at_once([lambda: world.begin(again(claim))] * CROWD)

        winner = only_winner(verdicts)
        record = world.record(claim.id)
        assert (record.owner, record.fence, record.version) == (winner.lease.owner, 1, 1)

    def test_two_concurrent_claims_have_one_winner_in_every_round(self, world: World) -> None:
        """Each round has one winner."""
        for _ in range(ROUNDS):
            claim = a_claim()
            only_winner(at_once([partial(world.begin, again(claim)), partial(world.begin, again(claim))]))

    def test_concurrent_retries_after_a_failure_have_one_winner(self, world: World) -> None:
        """Ten retries: one executes, nine have to wait."""
        claim = stand(world, model.State.FAILED_RETRYABLE).claim

        winner = only_winner(at_once([lambda: world.begin(again(claim))] * 10))

        assert (winner.lease.fence, world.record(claim.id).fence) == (2, 2)

    def test_concurrent_takeovers_of_an_expired_lease_have_one_winner(self, world: World) -> None:
        """One caller takes over (13)."""
        claim = stand(world, model.State.IN_PROGRESS).claim
        world.advance(LEASE)

        winner = only_winner(at_once([lambda: world.begin(again(claim))] * 10))

        assert (winner.lease.fence, world.record(claim.id).fence) == (2, 2)

    def test_concurrent_claims_of_an_expired_key_have_one_winner(self, world: World) -> None:
        """One caller starts again (31)."""
        claim = stand(world, model.State.COMPLETED).claim
        world.advance(TTL)

        winner = only_winner(at_once([lambda: world.begin(again(claim))] * 10))

        assert (winner.lease.fence, world.record(claim.id).fence) == (2, 2)

    def test_concurrent_retries_mark_a_non_repeatable_record_unknown_once(self, world: World) -> None:
        """No caller wins, and the record is marked unknown once (15)."""
        claim = stand(
            world, model.State.IN_PROGRESS, effects=model.Effects.INLINE, recovery=model.Recovery.UNKNOWN
        ).claim
        world.advance(LEASE)

        verdicts = at_once([lambda: world.begin(again(claim))] * 10)

        assert {verdict.code for verdict in verdicts if isinstance(verdict, model.Refuse)} == {
            model.Code.OUTCOME_UNKNOWN
        }
        assert len(verdicts) == 10  # noqa: PLR2004  (as many as were sent)
        assert world.record(claim.id).version == 2  # noqa: PLR2004  (the claim and the doubt)

    def test_concurrent_retries_all_replay_a_stored_response(self, world: World) -> None:
        """All callers receive it as a replay."""
        claim = stand(world, model.State.COMPLETED).claim

        verdicts = at_once([lambda: world.begin(again(claim))] * 16)

        assert all(isinstance(verdict, model.Replay) for verdict in verdicts)

    def test_either_a_late_owner_or_its_successor_wins(self, world: World) -> None:
        """Either the response is stored and replayed, or the successor runs and the response is refused."""
        for _ in range(ROUNDS):
            standing = stand(world, model.State.IN_PROGRESS)
            world.advance(LEASE)
            calls: list[Callable[[], object]] = [
                partial(world.settle, standing.lease, answered()),
                partial(world.begin, again(standing.claim)),
            ]
            settled, verdict = at_once(calls)
            assert isinstance(settled, model.Settled)
            assert isinstance(verdict, model.Replay if settled.ours else model.Proceed)

    def test_concurrent_identical_settlements_write_once(self, world: World) -> None:
        """The same settlement from many threads is written once."""
        standing = stand(world, model.State.IN_PROGRESS)

        settled = at_once([lambda: world.settle(standing.lease, answered())] * 16)

        assert all(one.ours for one in settled)
        assert world.record(standing.claim.id).version == 2  # noqa: PLR2004  (the claim and the answer)

    def test_concurrent_requests_with_different_keys_are_independent(self, world: World) -> None:
        """Each key has its own winner and its own response."""

        def whole(number: int) -> None:
            claim = a_claim()
            body = b"%d" % number
            assert world.settle(world.owned(claim), answered(body)).ours
            verdict = world.begin(again(claim))
            assert isinstance(verdict, model.Replay)
            assert verdict.record.response == answered(body).response

        at_once([partial(whole, number) for number in range(32)])


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make all calls at the same moment, each in a thread; returns their results in order."""
    barrier = threading.Barrier(len(calls))

    def call(one: Callable[[], T]) -> T:
        barrier.wait()
        return one()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call, one) for one in calls]]


def only_winner(verdicts: Sequence[model.Verdict]) -> model.Proceed:
    """The verdict of the caller that may execute; all others must have been refused as in progress."""
    winners = [verdict for verdict in verdicts if isinstance(verdict, model.Proceed)]
    losers = [verdict for verdict in verdicts if isinstance(verdict, model.Refuse)]
    assert len(winners) == 1, f"{len(winners)} winners"
    assert {loser.code for loser in losers} == {model.Code.IN_PROGRESS}
    assert len(losers) == len(verdicts) - 1
    return winners[0]
