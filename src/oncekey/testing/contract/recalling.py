"""The short read of a finished record by a repeat: it returns the same as a full read, or nothing."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from oncekey.core.choices import OnExpired
from oncekey.core.model import Completed, Finished, Outcome, Record, RecordId, Refuse, Replay, State, StoredResponse
from oncekey.core.policy import Policy
from oncekey.core.rulings import rule_finished
from oncekey.testing.claims import FINGERPRINT, OTHER_FINGERPRINT, TTL, a_claim, again, answered
from oncekey.testing.contract.standings import STATES, stand

if TYPE_CHECKING:
    from oncekey.testing.contract.world import World


def _of(record: Record) -> Finished:
    return Finished(
        id=record.id,
        incarnation=record.incarnation,
        operation=record.operation,
        effects=record.effects,
        fingerprint=record.fingerprint,
        response=record.response,
        expires_at=record.expires_at,
    )


class Recalling:
    """The short read never says more than the whole record, and says all that an answer needs."""

    def test_only_a_completed_record_is_recalled(self, world: World) -> None:
        """For any other record the short read returns nothing, and the request has to read the whole record (P6)."""
        for state in STATES:
            standing = stand(world, state)
            glimpse = world.go(world.store.recall(standing.claim.id))
            if state is State.COMPLETED:
                assert glimpse == (_of(world.record(standing.claim.id)), world.clock())
            else:
                assert glimpse is None, state
        assert world.go(world.store.recall(RecordId("shop|tenant-1", "nobody-used-this-one"))) is None

    def test_a_key_is_recalled_in_its_own_scope(self, world: World) -> None:
        """The same key of another tenant is another key."""
        standing = stand(world, State.COMPLETED)
        assert world.go(world.store.recall(RecordId("shop|tenant-2", standing.claim.id.key))) is None

    def test_an_answer_is_recalled_byte_for_byte(self, world: World) -> None:
        """Headers in order and repeated, a body that is no text, and a body that was not kept."""
        headers = ((b"content-type", b"application/octet-stream"), (b"set-cookie", b"a=\xff"), (b"set-cookie", b"b"))
        for body in (bytes(range(256)), b"", None):
            claim, response = a_claim(), StoredResponse(402, headers, body)
            assert world.settle(world.owned(claim), Completed(response, Outcome.FAILURE)).ours
            glimpse = world.go(world.store.recall(claim.id))
            assert glimpse is not None
            assert glimpse.finished.response == response

    def test_many_are_recalled_as_each_by_itself(self, world: World) -> None:
        """In whatever state they are, asked for twice, unknown, and none at all."""
        ids = [stand(world, state).claim.id for state in (*STATES, State.COMPLETED)]
        odd = a_claim('a "quoted" \\ key, with ü and 漢字')
        assert world.settle(world.owned(odd), answered()).ours
        ids += [odd.id, odd.id, RecordId("shop|tenant-2", odd.id.key)]
        each = {one: world.go(world.store.recall(one)) for one in ids}
        found = world.go(world.store.recall_all(tuple(ids)))
        assert found == {one: glimpse for one, glimpse in each.items() if glimpse is not None}
        assert len(found) == 3  # noqa: PLR2004  (two that were made to stand, and the odd one)
        assert world.go(world.store.recall_all(())) == {}

    def test_a_repeat_hears_what_a_claim_would(self, world: World) -> None:
        """The same request and another one, until the last microsecond of its life and after it."""
        for age, mark, policy in product(
            (0, TTL - 1, TTL), (FINGERPRINT, OTHER_FINGERPRINT), (Policy(), Policy(on_expired=OnExpired.GONE))
        ):
            standing = stand(world, State.COMPLETED)
            world.advance(age)
            glimpse = world.go(world.store.recall(standing.claim.id))
            assert glimpse is not None
            ruled = rule_finished(glimpse.finished, glimpse.now, mark, policy)
            verdict = world.begin(again(standing.claim, fingerprint=mark), policy)
            if isinstance(verdict, Replay):
                assert isinstance(verdict.record, Record)
                assert ruled == Replay(_of(verdict.record), verdict.now)
            else:
                assert ruled == (verdict if isinstance(verdict, Refuse) else None)

    def test_what_begins_anew_is_not_recalled(self, world: World) -> None:
        """Neither while it runs, nor the earlier answer when it has another one (31)."""
        standing = stand(world, State.COMPLETED)
        world.advance(TTL)
        lease = world.owned(again(standing.claim))
        assert world.go(world.store.recall(lease.id)) is None
        assert world.settle(lease, answered(b"another answer")).ours
        assert world.go(world.store.recall(lease.id)) == (_of(world.record(lease.id)), world.clock())

    def test_the_stores_own_clock_says_how_old_an_answer_is(self, world: World) -> None:
        """Without a clock of the test's the read brings the store's, as every other one does."""
        standing = stand(world, State.COMPLETED)
        glimpse = world.go(world.unclocked.recall(standing.claim.id))
        assert glimpse is not None
        before = world.go(world.unclocked.find(standing.claim.id)).now
        again_ = world.go(world.unclocked.recall(standing.claim.id))
        assert again_ is not None
        assert glimpse.now <= before <= again_.now
