"""Expiry: which records a store may replace after their ttl, and which never; and sweeps and reaps, if it has upkeep.

The store may contain records of other scenarios during a sweep or reap.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

from oncekey.core import model
from oncekey.core.memo import STARTED
from oncekey.core.policy import OnExpired, Policy
from oncekey.core.transitions import Actor, Mover, Note, Trigger
from oncekey.core.upkeep import EXPIRED, Expired, ReapPosition, expired_batch
from oncekey.testing.claims import LEASE, OTHER_FINGERPRINT, TTL, a_claim, again, answered
from oncekey_contract.world import ORDER, SETTLEMENTS, STATES, World, begun, stand

if TYPE_CHECKING:
    from oncekey.ports.store import Upkeep

EXPIRING = (model.State.COMPLETED, model.State.FAILED_RETRYABLE)
_MANY = 100_000
_F, _U, _C = model.State.FAILED_RETRYABLE, model.State.UNKNOWN, model.State.COMPLETED


class Expiring:
    """Only finished records expire; a key that is used again has a new incarnation."""

    def test_a_response_is_replayed_until_it_expires(self, world: World) -> None:
        """And not one microsecond longer."""
        standing = stand(world, model.State.COMPLETED)
        world.advance(TTL - 1)
        assert isinstance(world.begin(again(standing.claim)), model.Replay)
        world.advance(1)
        assert isinstance(world.begin(again(standing.claim)), model.Proceed)

    def test_an_expired_key_starts_a_new_incarnation_with_a_higher_fence(self, world: World) -> None:
        """It has a new incarnation and a new request; only the counters continue (31, F1)."""
        for state in EXPIRING:
            standing = stand(world, state)
            before = world.record(standing.claim.id)
            now = world.advance(TTL)
            claim = again(
                standing.claim,
                fingerprint=OTHER_FINGERPRINT,
                effects=model.Effects.INLINE,
                recovery=model.Recovery.UNKNOWN,
                operation="another",
                method="PATCH",
                path="/elsewhere",
                seed=b"\x00\xff",
                lease=7,
                deadline=70,
                call_timeout=5,
                ttl=700,
                entered=False,
            )

            verdict = world.begin(claim)

            assert isinstance(verdict, model.Proceed), state
            assert verdict.record == replace(
                before,
                incarnation=claim.incarnation,
                fingerprint=OTHER_FINGERPRINT,
                effects=model.Effects.INLINE,
                recovery=model.Recovery.UNKNOWN,
                operation="another",
                method="PATCH",
                path="/elsewhere",
                seed=b"\x00\xff",
                state=model.State.IN_PROGRESS,
                outcome=None,
                entered=False,
                fence=before.fence + 1,
                version=before.version + 1,
                owner=claim.owner,
                lease_until=now + 7,
                deadline=now + 70,
                call_timeout=5,
                ttl=700,
                attempts=1,
                recovery_point=STARTED,
                response=None,
                last_error=None,
                created_at=now,
                last_run_at=now,
                finished_at=None,
                expires_at=now + 700,
            ), state
            assert world.record(claim.id) == verdict.record, state

    def test_an_owner_of_an_earlier_incarnation_writes_nothing(self, world: World) -> None:
        """Neither after a new start, nor after the row was deleted and recreated with the same fence (F1)."""
        expired, taken_back = stand(world, model.State.FAILED_RETRYABLE), stand(world, None)
        world.advance(TTL)
        for standing in (expired, taken_back):
            world.owned(again(standing.claim))
            before = world.record(standing.claim.id)

            assert world.renew(standing.lease, LEASE) is None
            for name, settlement in SETTLEMENTS.items():
                assert world.settle(standing.lease, settlement).ours == (name == "discarded"), name
            assert world.record(standing.claim.id) == before

    def test_an_unfinished_record_does_not_expire(self, world: World) -> None:
        """However much time passes, a running record stays in progress, and an unknown one stays unknown (P6, F3)."""
        unknown = stand(world, model.State.UNKNOWN)
        inline = stand(world, model.State.IN_PROGRESS, effects=model.Effects.INLINE, recovery=model.Recovery.UNKNOWN)
        local = stand(world, model.State.IN_PROGRESS, deadline=10 * TTL)
        world.advance(2 * TTL)

        for standing in (unknown, inline):
            verdict = world.begin(again(standing.claim))
            assert isinstance(verdict, model.Refuse)
            assert verdict.code is model.Code.OUTCOME_UNKNOWN
            assert world.record(standing.claim.id).incarnation == standing.claim.incarnation
        assert world.renew(local.lease, LEASE) is not None
        verdict = world.begin(again(local.claim))
        assert isinstance(verdict, model.Refuse)
        assert verdict.code is model.Code.IN_PROGRESS
        world.advance(LEASE)
        taken = world.owned(again(local.claim))
        assert (taken.incarnation, taken.fence) == (local.claim.incarnation, 2)

    def test_an_unfinished_key_past_its_ttl_refuses_a_different_request(self, world: World) -> None:
        """A different body is still refused a day later (F3)."""
        for state in (model.State.IN_PROGRESS, model.State.UNKNOWN):
            standing = stand(world, state)
            world.advance(2 * TTL)
            verdict = world.begin(again(standing.claim, fingerprint=OTHER_FINGERPRINT))
            assert verdict == model.Refuse(model.Code.KEY_REUSED), state

    def test_a_late_response_is_kept_for_a_full_ttl(self, world: World) -> None:
        """However late a response is stored, it is kept for a whole ttl (P6, F2)."""
        for settled_from in (model.State.IN_PROGRESS, model.State.FAILED_RETRYABLE, model.State.UNKNOWN):
            standing = stand(world, settled_from)
            now = world.advance(TTL + model.HOUR)

            assert world.settle(standing.lease, answered()).ours, settled_from

            assert world.record(standing.claim.id).expires_at == now + TTL, settled_from
            assert isinstance(world.begin(again(standing.claim)), model.Replay), settled_from

    def test_a_response_never_expires_earlier_than_its_claim(self, world: World) -> None:
        """Expiry moves forward only: max(expires_at, now + ttl) (P6)."""
        claim = a_claim()
        lease = world.owned(claim)
        world.advance(-model.HOUR)

        assert world.settle(lease, answered()).ours

        assert world.record(claim.id).expires_at == lease.expires_at

    def test_an_expired_key_is_refused_if_the_policy_is_gone(self, world: World) -> None:
        """If the policy says so, an expired key is refused, and nothing is written."""
        gone = Policy(on_expired=OnExpired.GONE)
        for state in EXPIRING:
            standing = stand(world, state)
            before = world.record(standing.claim.id)
            world.advance(TTL)
            assert world.begin(again(standing.claim), gone) == model.Refuse(model.Code.KEY_EXPIRED), state
            assert world.record(standing.claim.id) == before, state

    def test_a_claim_of_an_expired_key_succeeds_after_a_lost_reply(self, world: World) -> None:
        """A second read finds the request's own claim (P7)."""
        standing = stand(world, model.State.COMPLETED)
        world.advance(TTL)
        world.lose_reply("supersede")

        lease = world.owned(again(standing.claim))

        assert (lease.fence, world.record(standing.claim.id).version) == (2, 3)

    def test_a_response_stored_before_a_new_incarnation_is_replayed(self, world: World) -> None:
        """The response was stored after the read, so it is replayed (V in 31)."""
        standing = stand(world, model.State.FAILED_RETRYABLE)
        world.advance(TTL)
        world.before("supersede", lambda: world.settle(standing.lease, answered()))

        assert isinstance(world.begin(again(standing.claim)), model.Replay)


def _resumable(world: World) -> model.Record:
    """A phased record that was started and handed back."""
    claim, lease = begun(world, ttl=TTL)
    assert world.checkpoint(lease, (), (ORDER,), LEASE) is not None
    assert world.settle(lease, model.HandedBack("stopped")).ours
    return world.record(claim.id)


def _stale(world: World, upkeep: Upkeep) -> dict[model.RecordId, model.Record]:
    return {record.id: record for record in world.go(upkeep.stale(_MANY)).records}


def _due(world: World, **changes: object) -> Expired:
    return replace(Expired(age=0, until=world.clock.now), **changes)  # type: ignore[arg-type]  # fields of it


class Sweeping:
    """The sweeper ends only expired leases, and the reaper removes only expired records."""

    def test_a_sweep_ends_an_expired_lease(self, world: World) -> None:
        """It becomes retryable if the work may run again, else unknown; the fence stays for a late owner (14, 15)."""
        upkeep = world.store.upkeep
        if upkeep is None:
            return
        for effects, recovery, to in (
            (model.Effects.LOCAL, model.Recovery.RETRY, _F),
            (model.Effects.PHASED, model.Recovery.RESUME, _F),
            (model.Effects.INLINE, model.Recovery.UNKNOWN, _U),
        ):
            claim = a_claim(effects=effects, recovery=recovery)
            lease = world.owned(claim)
            assert claim.id not in _stale(world, upkeep)
            seen = world.record(claim.id)
            assert not world.go(upkeep.sweep(seen, to, "swept")), "a live lease is not swept"
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
            if effects is not model.Effects.PHASED:
                assert world.settle(lease, answered()).ours

    def test_a_sweep_is_refused_after_a_heartbeat(self, world: World) -> None:
        """A heartbeat and a response each change the version, so the sweep is refused."""
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
        assert world.record(claim.id).state is model.State.IN_PROGRESS

    def test_a_sweep_does_not_make_a_non_repeatable_record_retryable(self, world: World) -> None:
        """The store refuses the move of a sweeper that decides wrongly (P2)."""
        upkeep = world.store.upkeep
        if upkeep is None:
            return
        claim = a_claim(effects=model.Effects.INLINE, recovery=model.Recovery.UNKNOWN)
        world.owned(claim)
        world.advance(LEASE)
        assert not world.go(upkeep.sweep(world.record(claim.id), _F, "swept"))

    def test_a_sweep_marks_an_expired_resumable_record_unknown(self, world: World) -> None:
        """The reaper does not delete it, and no worker resumes it (18)."""
        upkeep = world.store.upkeep
        if upkeep is None:
            return
        seen = _resumable(world)
        assert not world.go(upkeep.sweep(seen, _U, "expired"))
        now = world.advance(TTL + model.MINUTE)
        assert world.go(upkeep.sweep(seen, _U, "expired"))
        parked = world.record(seen.id)
        assert (parked.state, parked.last_error, parked.reconcile_after) == (_U, "expired", now)
        assert (parked.memo, parked.fence) == (seen.memo, seen.fence)
        failed = world.record(stand(world, _F).claim.id)
        world.advance(TTL)
        assert not world.go(upkeep.sweep(failed, _U, "expired")), "no worker sweeps a record without finished steps"

    def test_a_purge_deletes_only_finished_expired_records(self, world: World) -> None:
        """Responses and plain failures are deleted, not a moment early; unfinished records stay (30, P6)."""
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
        assert left == {model.State.IN_PROGRESS, _U}
        assert world.find(begun_before).record is not None

    def test_a_purge_resumes_at_the_last_position(self, world: World) -> None:
        """The records that expired first are deleted first, up to the limit."""
        upkeep = world.store.upkeep
        if upkeep is None:
            return
        place = ReapPosition(world.advance(500 * TTL), "", "")  # behind whatever other scenarios left
        ids = []
        for _ in range(5):
            ids.append(stand(world, _C).claim.id)
            world.advance(model.SECOND)
        world.advance(TTL)
        for _ in range(_MANY):
            gone = world.go(upkeep.purge(_due(world), 2, place))
            assert gone.moved <= 2  # noqa: PLR2004  (as asked for)
            left = [world.find(one).record is not None for one in ids]
            assert left == sorted(left), "the oldest is deleted first"
            if gone.last is None or not gone.full:
                break
            place = gone.last
        assert not any(left)

    def test_expired_responses_are_marked_first_and_purged_later(self, world: World) -> None:
        """If expired records are kept for a while: only responses are marked, and only marked ones kept (29, 30)."""
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
        assert world.record(seen.id) == replace(seen, state=model.State.EXPIRED, version=seen.version + 1)
        assert world.record(failed).state is _F
        world.go(upkeep.purge(_due(world, soft=True), _MANY))
        assert world.find(failed).record is None
        assert world.record(seen.id).state is model.State.EXPIRED
        assert seen.id in {record.id for record in world.go(upkeep.kept_expired(_MANY, 0)).records}
        assert world.go(upkeep.purge_kept(_due(world), _MANY)).moved >= 1
        assert world.find(seen.id).record is None

    def test_a_batch_writes_audit_entries_per_scope_or_per_record(self, world: World) -> None:
        """It has the number, the time span and the worker; an entry about one record names it (29, 30)."""
        upkeep = world.store.upkeep
        if upkeep is None:
            return
        mover = Mover(Actor.REAPER, "worker-7")
        for soft, each in ((False, False), (False, True), (True, False), (True, True)):
            place = ReapPosition(world.advance(500 * TTL), "", "")  # behind whatever other scenarios left
            many, one = (f"shop|{uuid.uuid4()}" for _ in range(2))
            records = []
            for scope in (many, many, one, many):
                claim = stand(world, _C, id=model.RecordId(scope, uuid.uuid4().hex)).claim
                records.append(world.record(claim.id))
                world.advance(model.SECOND)
            world.advance(TTL)
            moves: list[tuple[Trigger, model.State, model.State | None]]
            if soft:
                moves = [(Trigger.EXPIRE, _C, model.State.EXPIRED), (Trigger.PURGE, model.State.EXPIRED, None)]
                marked = world.go(upkeep.mark(_due(world, soft=True), _MANY, place, mover, each=each))
                assert marked.moved == len(records)
                gone = world.go(upkeep.purge_kept(_due(world), _MANY, place, mover, each=each))
            else:
                moves = [(Trigger.PURGE, _C, None)]
                gone = world.go(upkeep.purge(_due(world), _MANY, place, mover, each=each))
            assert gone.moved == len(records)
            if world.store.audit is None:
                continue
            named = [record for record in records if each or record.id.scope == one]
            for record in records:
                lines = [entry.note for entry in world.go(world.store.audit.history(record.id))]
                moved_by = Note.of(record, None, Trigger.PURGE, mover, EXPIRED)
                whole = [replace(moved_by, trigger=trigger, source=source, to=to) for trigger, source, to in moves]
                assert lines == (whole if record in named else [])
            ends = [record.expires_at for record in records if record.id.scope == many]
            batches = world.go(world.store.audit.deletions(many, 10))
            assert [(line.note.trigger, line.note.source, line.note.to) for line in batches] == (
                [] if each else moves[::-1]
            )
            for line in batches:
                assert (line.at, line.note.why) == (world.clock.now, expired_batch(ends))
                assert (line.note.actor, line.note.who) == (Actor.REAPER, "worker-7")
            assert world.go(world.store.audit.deletions(one, 10)) == ()

    def test_a_purge_keeps_an_expired_key_that_was_claimed_again(self, world: World) -> None:
        """The purge checks the current row, not an earlier read."""
        upkeep = world.store.upkeep
        if upkeep is None:
            return
        standing = stand(world, _C)
        world.advance(TTL)
        due = _due(world)
        lease = world.owned(again(standing.claim))
        world.go(upkeep.purge(due, _MANY))
        assert world.settle(lease, answered()).ours
