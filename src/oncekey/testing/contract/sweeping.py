"""Sweeps and reaps, if a store has upkeep. Records of other scenarios may be there, too."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from oncekey.core.model import MINUTE, SECOND, Effects, HandedBack, Recovery, State
from oncekey.core.upkeep import Expired, ReapPosition
from oncekey.testing.claims import LEASE, TTL, a_claim, again, answered
from oncekey.testing.contract.standings import ORDER, STATES, begun, stand

if TYPE_CHECKING:
    from oncekey.core.model import Record, RecordId
    from oncekey.ports import Upkeep
    from oncekey.testing.contract.world import World

_MANY = 100_000
_F, _U, _C = State.FAILED_RETRYABLE, State.UNKNOWN, State.COMPLETED


def _resumable(world: World) -> Record:
    """A phased record that was begun and handed back."""
    claim, lease = begun(world, ttl=TTL)
    assert world.checkpoint(lease, (), (ORDER,), LEASE) is not None
    assert world.settle(lease, HandedBack("stopped")).ours
    return world.record(claim.id)


def _stale(world: World, upkeep: Upkeep) -> dict[RecordId, Record]:
    return {record.id: record for record in world.go(upkeep.stale(_MANY)).records}


def _due(world: World, **changes: object) -> Expired:
    return replace(Expired(age=0, until=world.clock.now), **changes)  # type: ignore[arg-type]  # fields of it


class Sweeping:
    """The sweeper ends only leases that ran out, and the reaper removes only expired records."""

    def test_a_sweep_ends_a_lease_that_ran_out(self, world: World) -> None:
        """To retryable where the work may run again, else to unknown; the fence stays for the late owner (14, 15)."""
        upkeep = world.store.upkeep
        if upkeep is None:
            return
        for effects, recovery, to in (
            (Effects.LOCAL, Recovery.RETRY, _F),
            (Effects.PHASED, Recovery.RESUME, _F),
            (Effects.INLINE, Recovery.UNKNOWN, _U),
        ):
            claim = a_claim(effects=effects, recovery=recovery)
            lease = world.owned(claim)
            assert claim.id not in _stale(world, upkeep)
            seen = world.record(claim.id)
            assert not world.go(upkeep.sweep(seen, to, "swept")), "a lease that is not over is not swept"
            now = world.advance(LEASE)
            assert _stale(world, upkeep)[claim.id] == seen
            assert world.go(upkeep.sweep(seen, to, "swept"))
            assert world.record(claim.id) == replace(
                seen,
                state=to,
                version=seen.version + 1,
                owner=None,
                lease_until=None,
                last_error="swept",
                reconcile_after=now if to is _U else None,
            )
            assert not world.go(upkeep.sweep(seen, to, "swept")), "once"
            if effects is not Effects.PHASED:
                assert world.settle(lease, answered()).ours

    def test_a_sweep_leaves_who_was_heard_again(self, world: World) -> None:
        """A heartbeat and an answer move the version."""
        upkeep = world.store.upkeep
        if upkeep is None:
            return
        claim = a_claim()
        lease = world.owned(claim)
        world.advance(LEASE)
        seen = world.record(claim.id)
        assert world.renew(lease, LEASE) is not None
        world.advance(LEASE)
        for to in (_F, _U):
            assert not world.go(upkeep.sweep(seen, to, "swept")), to
        assert world.record(claim.id).state is State.IN_PROGRESS

    def test_what_nobody_may_run_again_is_not_swept_to_retryable(self, world: World) -> None:
        """A sweeper that decides so is wrong, and the store refuses the move (P2)."""
        upkeep = world.store.upkeep
        if upkeep is None:
            return
        claim = a_claim(effects=Effects.INLINE, recovery=Recovery.UNKNOWN)
        world.owned(claim)
        world.advance(LEASE)
        assert not world.go(upkeep.sweep(world.record(claim.id), _F, "swept"))

    def test_what_was_begun_is_parked_when_its_time_is_over(self, world: World) -> None:
        """The reaper does not delete it, and no worker goes on with it (18)."""
        upkeep = world.store.upkeep
        if upkeep is None:
            return
        seen = _resumable(world)
        assert not world.go(upkeep.sweep(seen, _U, "expired"))
        now = world.advance(TTL + MINUTE)
        assert world.go(upkeep.sweep(seen, _U, "expired"))
        parked = world.record(seen.id)
        assert (parked.state, parked.last_error, parked.reconcile_after) == (_U, "expired", now)
        assert (parked.memo, parked.fence) == (seen.memo, seen.fence)
        failed = world.record(stand(world, _F).claim.id)
        world.advance(TTL)
        assert not world.go(upkeep.sweep(failed, _U, "expired")), "no worker looks at what was never begun"

    def test_what_is_finished_is_purged_when_its_time_is_over(self, world: World) -> None:
        """Answers and plain failures, not a moment before; what is unfinished stays for ever (30, P6)."""
        upkeep = world.store.upkeep
        if upkeep is None:
            return
        standing = {state: stand(world, state).claim.id for state in STATES if state is not None}
        begun_before = _resumable(world).id
        world.advance(TTL - 1)
        world.go(upkeep.purge(_due(world), _MANY))
        assert all(world.find(one).record is not None for one in standing.values())

        world.advance(1)
        world.go(upkeep.purge(_due(world, age=1), _MANY))
        world.go(upkeep.purge(_due(world, until=world.clock.now - 1), _MANY))
        world.go(upkeep.purge(_due(world, trusted_for=TTL - 1), _MANY))
        assert all(world.find(one).record is not None for one in standing.values())

        assert world.go(upkeep.purge(_due(world), _MANY)).moved >= 2  # noqa: PLR2004  (the answer and the failure)
        left = {state for state, one in standing.items() if world.find(one).record is not None}
        assert left == {State.IN_PROGRESS, _U}
        assert world.find(begun_before).record is not None

    def test_a_purge_goes_on_from_where_it_came_to(self, world: World) -> None:
        """Longest ago first, no more than asked for."""
        upkeep = world.store.upkeep
        if upkeep is None:
            return
        place = ReapPosition(world.advance(500 * TTL), "", "")  # behind whatever other scenarios left
        ids = []
        for _ in range(5):
            ids.append(stand(world, _C).claim.id)
            world.advance(SECOND)
        world.advance(TTL)
        for _ in range(_MANY):
            gone = world.go(upkeep.purge(_due(world), 2, place))
            assert gone.moved <= 2  # noqa: PLR2004  (as asked for)
            left = [world.find(one).record is not None for one in ids]
            assert left == sorted(left), "the oldest goes first"
            if gone.last is None or not gone.full:
                break
            place = gone.last
        assert not any(left)

    def test_answers_are_marked_and_purged_later(self, world: World) -> None:
        """Where expired records are kept for a while: only answers are marked, and only marked ones kept (29, 30)."""
        upkeep = world.store.upkeep
        if upkeep is None:
            return
        standing = stand(world, _C)
        failed = stand(world, _F).claim.id
        seen = world.record(standing.claim.id)
        world.go(upkeep.mark(_due(world), _MANY))
        assert world.record(seen.id) == seen
        world.advance(TTL)

        assert world.go(upkeep.mark(_due(world), _MANY)).moved >= 1
        assert world.record(seen.id) == replace(seen, state=State.EXPIRED, version=seen.version + 1)
        assert world.record(failed).state is _F
        world.go(upkeep.purge(_due(world, soft=True), _MANY))
        assert world.find(failed).record is None
        assert world.record(seen.id).state is State.EXPIRED
        assert seen.id in {record.id for record in world.go(upkeep.kept_expired(_MANY, 0)).records}
        assert world.go(upkeep.purge_kept(_due(world), _MANY)).moved >= 1
        assert world.find(seen.id).record is None

    def test_a_purge_leaves_a_key_that_is_used_anew(self, world: World) -> None:
        """The purge checks the row as it is at that moment."""
        upkeep = world.store.upkeep
        if upkeep is None:
            return
        standing = stand(world, _C)
        world.advance(TTL)
        due = _due(world)
        lease = world.owned(again(standing.claim))
        world.go(upkeep.purge(due, _MANY))
        assert world.settle(lease, answered()).ours
