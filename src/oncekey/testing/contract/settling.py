"""Heartbeats and settlements: what an owner may write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from oncekey.core.memo import FINISHED
from oncekey.core.model import SECOND, Discarded, Outcome, Replay, State
from oncekey.testing.claims import DEADLINE, LEASE, TTL, a_claim, again, answered
from oncekey.testing.contract.standings import SETTLEMENTS, STATES, forgeries, stand

if TYPE_CHECKING:
    from oncekey.testing.contract.world import World

_C, _F, _U = State.COMPLETED, State.FAILED_RETRYABLE, State.UNKNOWN

_WRITES: Mapping[State | None, Mapping[str, State | None]] = MappingProxyType(
    {
        State.IN_PROGRESS: {
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
"""From each state, the settlements that its owner may still write, and where they lead (7 to 12, U2)."""

_SAID_BEFORE = frozenset({(_C, "completed"), (_F, "retryable"), (_U, "doubtful"), (None, "discarded")})
"""Repeats of the settlement that brought the record there: nothing is written, and the owner gets a success."""


class Settling:
    """What an owner writes is written once, and only by the owner."""

    def test_completing_stores_the_answer_and_frees_the_record(self, world: World) -> None:
        """State, answer, times and expiry in one write (7)."""
        for settlement, outcome in (
            (answered(), Outcome.SUCCESS),
            (answered(b"declined", status=402), Outcome.FAILURE),
        ):
            claim = a_claim()
            lease = world.owned(claim)
            before = world.record(claim.id)
            now = world.advance(SECOND)

            settled = world.settle(lease, settlement)

            assert settled.ours
            assert settled.snapshot.now == now
            assert settled.snapshot.record == replace(
                before,
                state=State.COMPLETED,
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

    def test_every_settlement_in_every_state(self, world: World) -> None:
        """The table above, pair by pair: written, said before, or refused without a trace."""
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
                    assert settled.ours == (case in _SAID_BEFORE), case
                    assert after == before, case
                    assert settled.snapshot.record == before, case

    def test_no_settlement_is_written_with_a_false_proof(self, world: World) -> None:
        """Neither another fence nor another incarnation, in no state (P1, F1)."""
        for state in STATES:
            for name, settlement in SETTLEMENTS.items():
                standing = stand(world, state)
                before = world.find(standing.claim.id).record
                for forged in forgeries(standing.lease):
                    settled = world.settle(forged, settlement)
                    gone = before is None or forged.incarnation != standing.lease.incarnation
                    assert settled.ours == (gone and settlement == Discarded()), (state, name)
                    assert world.find(standing.claim.id).record == before, (state, name)

    def test_settling_twice_changes_nothing(self, world: World) -> None:
        """A cancelled settlement is repeated, and the second finds the first."""
        for name in ("completed", "retryable", "doubtful", "discarded"):
            claim = a_claim()
            lease = world.owned(claim)
            assert world.settle(lease, SETTLEMENTS[name]).ours, name
            before = world.find(claim.id).record
            world.advance(SECOND)

            assert world.settle(lease, SETTLEMENTS[name]).ours, name

            assert world.find(claim.id).record == before, name

    def test_a_settlement_whose_reply_was_lost_is_ours(self, world: World) -> None:
        """Once, or until the flow gives up asking (P7)."""
        for name, settlement in SETTLEMENTS.items():
            claim = a_claim()
            lease = world.owned(claim)
            world.lose_reply("settle")

            assert world.settle(lease, settlement).ours, name

            record = world.find(claim.id).record
            assert (record and record.version) == (None if name == "discarded" else 2), name

    def test_a_key_that_was_never_claimed_cannot_be_completed(self, world: World) -> None:
        """An error of the caller, and no upsert."""
        claim = a_claim()
        lease = replace(world.owned(a_claim()), id=claim.id)

        settled = world.settle(lease, answered())

        assert not settled.ours
        assert world.find(claim.id).record is None

    def test_an_owner_whose_lease_ran_out_may_settle_while_nobody_took_over(self, world: World) -> None:
        """The best evidence there is (U2)."""
        claim = a_claim()
        lease = world.owned(claim)
        world.advance(DEADLINE + LEASE)

        assert world.settle(lease, answered()).ours
        assert isinstance(world.begin(again(claim)), Replay)

    def test_an_owner_that_was_only_doubted_may_settle_late(self, world: World) -> None:
        """Doubt does not move the fence, so what the owner knows still counts (8, F35)."""
        claim = a_claim()
        lease = world.owned(claim)
        world.advance(LEASE)
        assert world.go(world.store.doubt(world.record(claim.id), "swept")) is not None

        assert world.settle(lease, answered()).ours

        record = world.record(claim.id)
        assert (record.state, record.last_error, record.reconcile_after) == (_C, None, None)

    def test_doubt_and_failure_say_why_and_free_the_record(self, world: World) -> None:
        """No owner and no lease outside of IN_PROGRESS; doubt is to be looked into at once (10, 12)."""
        for state, error in ((_F, "provider_refused"), (_U, "provider_timeout")):
            standing = stand(world, state)
            record = world.record(standing.claim.id)
            assert (record.state, record.last_error) == (state, error)
            assert (record.owner, record.lease_until) == (None, None)
            assert (record.response, record.outcome, record.finished_at) == (None, None, None)
            assert record.reconcile_after == (world.clock.now if state is _U else None)

    def test_a_claim_taken_back_leaves_a_fresh_key(self, world: World) -> None:
        """As if it had never been used: the next one starts at the beginning (9)."""
        standing = stand(world, None)

        lease = world.owned(again(standing.claim))

        assert (lease.fence, lease.attempt) == (1, 1)
        assert not world.settle(standing.lease, answered()).ours

    def test_a_replay_reads_and_writes_nothing(self, world: World) -> None:
        """However often a request asks, and whichever request it is."""
        standing = stand(world, State.COMPLETED)
        before = world.record(standing.claim.id)
        for _ in range(3):
            now = world.advance(SECOND)
            assert world.begin(again(standing.claim)) == Replay(before, now)
        assert world.record(standing.claim.id) == before


class Renewing:
    """A heartbeat moves the end of a lease, and nothing else."""

    def test_renewing_moves_the_end(self, world: World) -> None:
        """From now on, for as long as it says (4)."""
        claim = a_claim()
        lease = world.owned(claim)
        before = world.record(claim.id)
        now = world.advance(LEASE // 3)

        assert world.renew(lease, LEASE) == now + LEASE
        assert world.record(claim.id) == replace(before, lease_until=now + LEASE, version=2)

    def test_renewing_stops_at_the_deadline(self, world: World) -> None:
        """A hung handler does not live for ever (P5, F9)."""
        claim = a_claim()
        lease = world.owned(claim)
        world.advance(DEADLINE - SECOND)
        assert world.renew(lease, LEASE) == lease.deadline
        world.advance(SECOND)
        before = world.record(claim.id)

        assert world.renew(lease, LEASE) is None
        assert world.record(claim.id) == before

    def test_renewing_revives_a_lease_that_nobody_acted_on(self, world: World) -> None:
        """The owner was only late."""
        claim = a_claim()
        lease = world.owned(claim)
        now = world.advance(2 * LEASE)

        assert world.renew(lease, LEASE) == now + LEASE

    def test_renewing_is_for_the_owner_of_a_record_in_progress(self, world: World) -> None:
        """Not after a settlement, not with a false proof, not for a row that is gone (P1, P3)."""
        for state in STATES:
            standing = stand(world, state)
            before = world.find(standing.claim.id).record
            leases = [*forgeries(standing.lease)]
            if state is not State.IN_PROGRESS:
                leases.append(standing.lease)
            for lease in leases:
                assert world.renew(lease, LEASE) is None, state
            assert world.find(standing.claim.id).record == before, state

    def test_a_renewal_whose_reply_was_lost_is_made_again(self, world: World) -> None:
        """Once more does no harm."""
        claim = a_claim()
        lease = world.owned(claim)
        world.lose_reply("renew")

        assert world.renew(lease, LEASE) == world.clock.now + LEASE
