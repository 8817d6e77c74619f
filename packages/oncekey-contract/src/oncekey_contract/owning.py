"""What an owner may write with heartbeats and settlements, what the next owner must prove, and what it takes over."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from oncekey.core import model
from oncekey.core.memo import FINISHED
from oncekey.core.rulings import FAILED_BY_LEASE, LEASE_RAN_OUT
from oncekey.testing.claims import DEADLINE, LEASE, OTHER_FINGERPRINT, TTL, a_claim, again, answered
from oncekey_contract.world import SETTLEMENTS, STATES, World, forgeries, stand

_C, _F, _U = model.State.COMPLETED, model.State.FAILED_RETRYABLE, model.State.UNKNOWN

_WRITES: Mapping[model.State | None, Mapping[str, model.State | None]] = MappingProxyType(
    {
        model.State.IN_PROGRESS: {
            "completed": _C,
            "completed otherwise": _C,
            "retryable": _F,
            "retryable otherwise": _F,
            "doubtful": _U,
            "doubtful otherwise": _U,
            "discarded": None,
        },
        _F: {"completed": _C, "completed otherwise": _C},
        _U: {"completed": _C, "completed otherwise": _C},
        _C: {},
        None: {},
    }
)
"""By state, the settlements that the owner may still write, and the state that each leads to (7 to 12, U2)."""

_REPEATS = frozenset({(_C, "completed"), (_F, "retryable"), (_U, "doubtful"), (None, "discarded")})
"""Repeats of the settlement that led to this state: nothing is written, and the owner gets a success."""


class Settling:
    """A settlement is written once, and only by the owner."""

    def test_completing_stores_the_response_and_releases_the_lease(self, world: World) -> None:
        """One write sets state, response, timestamps and expiry (7)."""
        for settlement, outcome in (
            (answered(), model.Outcome.SUCCESS),
            (answered(b"declined", status=402), model.Outcome.FAILURE),
        ):
            claim = a_claim()
            lease = world.owned(claim)
            before = world.record(claim.id)
            now = world.advance(model.SECOND)

            settled = world.settle(lease, settlement)

            assert settled.ours
            assert settled.snapshot.now == now
            assert settled.snapshot.record == replace(
                before,
                state=model.State.COMPLETED,
                outcome=outcome,
                version=2,
                owner=None,
                lease_until=None,
                recovery_point=FINISHED,
                response=settlement.response,
                finished_at=now,
                expires_at=now + TTL,
            )
            assert world.record(claim.id) == settled.snapshot.record

    def test_each_state_accepts_only_its_allowed_settlements(self, world: World) -> None:
        """Every pair of the table above: written, a repeat, or refused without any change."""
        for state in STATES:
            for name, settlement in SETTLEMENTS.items():
                case = (state, name)
                standing = stand(world, state)
                before = world.find(standing.claim.id).record

                settled = world.settle(standing.lease, settlement)

                after = world.find(standing.claim.id).record
                if name in _WRITES[state]:
                    assert settled.ours, case
                    assert (after and after.state) == _WRITES[state][name], case
                    assert after is None or (before and after.version == before.version + 1), case
                else:
                    assert settled.ours == (case in _REPEATS), case
                    assert after == before, case
                    assert settled.snapshot.record == before, case

    def test_a_settlement_with_a_wrong_proof_is_refused(self, world: World) -> None:
        """With another fence or another incarnation it is refused in every state (P1, F1)."""
        for state in STATES:
            for name, settlement in SETTLEMENTS.items():
                standing = stand(world, state)
                before = world.find(standing.claim.id).record
                for forged in forgeries(standing.lease):
                    settled = world.settle(forged, settlement)
                    gone = before is None or forged.incarnation != standing.lease.incarnation
                    assert settled.ours == (gone and settlement == model.Discarded()), (state, name)
                    assert world.find(standing.claim.id).record == before, (state, name)

    def test_settling_twice_changes_nothing(self, world: World) -> None:
        """A cancelled settlement is repeated, and the repeat finds the first one."""
        for name in ("completed", "retryable", "doubtful", "discarded"):
            claim = a_claim()
            lease = world.owned(claim)
            assert world.settle(lease, SETTLEMENTS[name]).ours, name
            before = world.find(claim.id).record
            world.advance(model.SECOND)

            assert world.settle(lease, SETTLEMENTS[name]).ours, name

            assert world.find(claim.id).record == before, name

    def test_a_settlement_succeeds_after_a_lost_reply(self, world: World) -> None:
        """Whether one reply is lost, or all of them until the flow gives up (P7)."""
        for name, settlement in SETTLEMENTS.items():
            claim = a_claim()
            lease = world.owned(claim)
            world.lose_reply("settle")

            assert world.settle(lease, settlement).ours, name

            record = world.find(claim.id).record
            assert (record and record.version) == (None if name == "discarded" else 2), name

    def test_an_unclaimed_key_cannot_be_completed(self, world: World) -> None:
        """It is an error of the caller; the store does not insert a record."""
        claim = a_claim()
        lease = replace(world.owned(a_claim()), id=claim.id)

        settled = world.settle(lease, answered())

        assert not settled.ours
        assert world.find(claim.id).record is None

    def test_an_owner_can_settle_after_its_lease_expired_without_a_takeover(self, world: World) -> None:
        """The owner has the best evidence of what happened (U2)."""
        claim = a_claim()
        lease = world.owned(claim)
        world.advance(DEADLINE + LEASE)

        assert world.settle(lease, answered()).ours
        assert isinstance(world.begin(again(claim)), model.Replay)

    def test_an_owner_can_settle_after_its_record_was_marked_unknown(self, world: World) -> None:
        """Becoming unknown does not change the fence, so the owner's result still counts (8, F35)."""
        claim = a_claim()
        lease = world.owned(claim)
        world.advance(LEASE)
        assert world.go(world.store.mark_unknown(world.record(claim.id), "swept")) is not None

        assert world.settle(lease, answered()).ours

        record = world.record(claim.id)
        assert (record.state, record.last_error, record.reconcile_after) == (_C, None, None)

    def test_failed_and_unknown_records_store_the_error_and_release_the_lease(self, world: World) -> None:
        """Only IN_PROGRESS has an owner and a lease; an unknown record is due for the reconciler at once (10, 12)."""
        for state, error in ((_F, "provider_refused"), (_U, "provider_timeout")):
            standing = stand(world, state)
            record = world.record(standing.claim.id)
            assert (record.state, record.last_error) == (state, error)
            assert (record.owner, record.lease_until) == (None, None)
            assert (record.response, record.outcome, record.finished_at) == (None, None, None)
            assert record.reconcile_after == (world.clock.now if state is _U else None)

    def test_a_discarded_claim_leaves_an_unused_key(self, world: World) -> None:
        """The next request with the key executes as a new one (9)."""
        standing = stand(world, None)

        lease = world.owned(again(standing.claim))

        assert (lease.fence, lease.attempt) == (1, 1)
        assert not world.settle(standing.lease, answered()).ours

    def test_a_replay_does_not_change_the_record(self, world: World) -> None:
        """However many requests replay it."""
        standing = stand(world, model.State.COMPLETED)
        before = world.record(standing.claim.id)
        for _ in range(3):
            now = world.advance(model.SECOND)
            assert world.begin(again(standing.claim)) == model.Replay(before, now)
        assert world.record(standing.claim.id) == before


class Renewing:
    """A heartbeat changes the end of the lease, and nothing else."""

    def test_a_renewal_extends_the_lease(self, world: World) -> None:
        """The lease ends the given time from now (4)."""
        claim = a_claim()
        lease = world.owned(claim)
        before = world.record(claim.id)
        now = world.advance(LEASE // 3)

        assert world.renew(lease, LEASE) == now + LEASE
        assert world.record(claim.id) == replace(before, lease_until=now + LEASE, version=2)

    def test_a_renewal_does_not_extend_the_lease_past_the_deadline(self, world: World) -> None:
        """A hung handler does not keep its lease forever (P5, F9)."""
        claim = a_claim()
        lease = world.owned(claim)
        world.advance(DEADLINE - model.SECOND)
        assert world.renew(lease, LEASE) == lease.deadline
        world.advance(model.SECOND)
        before = world.record(claim.id)

        assert world.renew(lease, LEASE) is None
        assert world.record(claim.id) == before

    def test_an_expired_lease_can_be_renewed_before_a_takeover(self, world: World) -> None:
        """The owner was only late."""
        claim = a_claim()
        lease = world.owned(claim)
        now = world.advance(2 * LEASE)

        assert world.renew(lease, LEASE) == now + LEASE

    def test_only_the_owner_of_a_record_in_progress_can_renew(self, world: World) -> None:
        """Refused after a settlement, with a wrong proof, and for a deleted row (P1, P3)."""
        for state in STATES:
            standing = stand(world, state)
            before = world.find(standing.claim.id).record
            leases = [*forgeries(standing.lease)]
            if state is not model.State.IN_PROGRESS:
                leases.append(standing.lease)
            for lease in leases:
                assert world.renew(lease, LEASE) is None, state
            assert world.find(standing.claim.id).record == before, state

    def test_a_renewal_is_repeated_after_a_lost_reply(self, world: World) -> None:
        """Renewing twice is harmless."""
        claim = a_claim()
        lease = world.owned(claim)
        world.lose_reply("renew")

        assert world.renew(lease, LEASE) == world.clock.now + LEASE


class TakingOver:
    """The next owner proves which version it has read, and increments the fence."""

    def test_a_repeatable_record_is_taken_over_after_its_lease_expired(self, world: World) -> None:
        """The incarnation stays; fence and attempts are incremented; the lease is new; the rest is kept (13)."""
        claim = a_claim()
        world.owned(claim)
        before = world.record(claim.id)
        now = world.advance(LEASE)
        successor = again(claim)

        verdict = world.begin(successor)

        assert isinstance(verdict, model.Proceed)
        assert verdict.record == replace(
            before,
            fence=2,
            version=2,
            owner=successor.owner,
            attempts=2,
            lease_until=now + LEASE,
            deadline=now + DEADLINE,
            last_run_at=now,
        )
        assert world.record(claim.id) == verdict.record

    def test_a_non_repeatable_record_becomes_unknown_after_its_lease_expired(self, world: World) -> None:
        """One request marks it unknown, and all receive the same verdict; the fence stays for a late owner (15)."""
        claim = a_claim(effects=model.Effects.INLINE, recovery=model.Recovery.UNKNOWN)
        world.owned(claim)
        before = world.record(claim.id)
        now = world.advance(LEASE)

        verdicts = [world.begin(again(claim)), world.begin(again(claim))]

        doubted = replace(
            before,
            state=model.State.UNKNOWN,
            version=2,
            owner=None,
            lease_until=None,
            last_error=LEASE_RAN_OUT,
            reconcile_after=now,
        )
        for verdict in verdicts:
            assert isinstance(verdict, model.Refuse)
            assert (verdict.code, verdict.record) == (model.Code.OUTCOME_UNKNOWN, doubted)
        assert world.record(claim.id) == doubted

    def test_an_expired_lease_with_recovery_fail_is_left_to_an_operator(self, world: World) -> None:
        """It becomes unknown, and no resolver is called for it (15)."""
        claim = a_claim(effects=model.Effects.INLINE, recovery=model.Recovery.FAIL)
        world.owned(claim)
        world.advance(LEASE)

        verdict = world.begin(again(claim))

        assert isinstance(verdict, model.Refuse)
        record = world.record(claim.id)
        assert (record.state, record.last_error) == (model.State.UNKNOWN, FAILED_BY_LEASE)
        assert record.reconcile_after is None

    def test_a_retryable_record_is_taken_over_immediately(self, world: World) -> None:
        """The error is cleared, the fence continues (16)."""
        standing = stand(world, model.State.FAILED_RETRYABLE)

        verdict = world.begin(again(standing.claim))

        assert isinstance(verdict, model.Proceed)
        assert (verdict.lease.fence, verdict.lease.attempt) == (2, 2)
        assert verdict.record is not None
        assert verdict.record.last_error is None
        assert verdict.record.incarnation == standing.claim.incarnation

    def test_a_takeover_keeps_the_fingerprint_and_replaces_the_effects(self, world: World) -> None:
        """The successor runs the same request; nothing was done yet, so its own effects apply after a crash (P2)."""
        standing = stand(world, model.State.FAILED_RETRYABLE)
        seen = world.record(standing.claim.id)
        other = again(
            standing.claim,
            fingerprint=OTHER_FINGERPRINT,
            effects=model.Effects.INLINE,
            recovery=model.Recovery.UNKNOWN,
            seed=b"other",
            operation="another",
            ttl=1,
            call_timeout=1,
        )

        taken = world.go(world.store.take_over(other, seen))

        assert taken is not None
        assert taken.record is not None
        for name in ("fingerprint", "seed", "operation", "ttl", "incarnation"):
            assert getattr(taken.record, name) == getattr(seen, name), name
        for name in ("effects", "recovery", "call_timeout"):
            assert getattr(taken.record, name) == getattr(other, name), name

    def test_a_write_with_another_version_or_incarnation_is_refused(self, world: World) -> None:
        """Version and incarnation are compared in the statement that writes (P1)."""
        for state in STATES:
            standing = stand(world, state)
            world.advance(TTL)  # an expired lease and an expired record would allow each of these
            now = world.find(standing.claim.id).record
            seen = now or world.record(stand(world, model.State.FAILED_RETRYABLE).claim.id)
            for blind in (
                replace(seen, version=seen.version - 1),
                replace(seen, version=seen.version + 1),
                replace(seen, incarnation=uuid.uuid4()),
            ):
                absent = replace(blind, id=standing.claim.id)
                ours = again(standing.claim)
                assert world.go(world.store.take_over(ours, absent)) is None, state
                assert world.go(world.store.supersede(ours, absent)) is None, state
                assert world.go(world.store.mark_unknown(absent, "lost")) is None, state
            assert world.find(standing.claim.id).record == now, state

    def test_a_takeover_fails_if_the_lease_was_renewed_after_the_read(self, world: World) -> None:
        """A renewed lease is not taken over (4)."""
        claim = a_claim()
        lease = world.owned(claim)
        world.advance(LEASE)
        world.before("take_over", lambda: world.renew(lease, LEASE))

        verdict = world.begin(again(claim))

        assert isinstance(verdict, model.Refuse)
        assert verdict.code is model.Code.IN_PROGRESS
        assert world.record(claim.id).fence == 1

    def test_a_takeover_replays_a_response_stored_after_the_read(self, world: World) -> None:
        """A response stored after the read is not overwritten but replayed (V in 13 and 16)."""
        claim = a_claim()
        lease = world.owned(claim)
        world.advance(LEASE)
        world.before("take_over", lambda: world.settle(lease, answered()))

        verdict = world.begin(again(claim))

        assert isinstance(verdict, model.Replay)
        assert verdict.record.response == answered().response

    def test_a_takeover_succeeds_after_a_lost_reply(self, world: World) -> None:
        """A second read finds the request's own claim (P7)."""
        standing = stand(world, model.State.FAILED_RETRYABLE)
        world.lose_reply("take_over")

        lease = world.owned(again(standing.claim))

        assert (lease.fence, world.record(standing.claim.id).version) == (2, 3)

    def test_a_replaced_owner_writes_nothing(self, world: World) -> None:
        """The store refuses every write of the old owner (P1, F11)."""
        claim = a_claim()
        zombie = world.owned(claim)
        world.advance(LEASE)
        world.owned(again(claim))
        before = world.record(claim.id)

        assert world.renew(zombie, LEASE) is None
        for name, settlement in SETTLEMENTS.items():
            settled = world.settle(zombie, settlement)
            assert not settled.ours, name
            assert settled.snapshot.record == before, name
        assert world.record(claim.id) == before

    def test_each_failure_can_be_retried(self, world: World) -> None:
        """Fence, attempts and version keep counting."""
        claim = a_claim()
        lease = world.owned(claim)
        turns = 4
        for turn in range(1, turns + 1):
            assert (lease.fence, lease.attempt) == (turn, turn)
            assert world.settle(lease, model.Retryable(f"try {turn}")).ours
            assert world.record(claim.id).last_error == f"try {turn}"
            lease = world.owned(again(claim))
        assert world.record(claim.id).version == 2 * turns + 1
