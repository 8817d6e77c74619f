"""Many callers at once: exactly one wins, and every other one gets a clean answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from oncekey.core.model import Code, Effects, Proceed, Recovery, Refuse, Replay, Settled, State
from oncekey.testing.claims import LEASE, TTL, a_claim, again, answered
from oncekey.testing.contract.standings import stand

if TYPE_CHECKING:
    from oncekey.core.model import Verdict
    from oncekey.testing.contract.world import World

T = TypeVar("T")

CROWD = 64
ROUNDS = 20


class Racing:
    """One statement decides, so one caller wins."""

    def test_a_crowd_on_a_new_key(self, world: World) -> None:
        """64 threads, one execution."""
        claim = a_claim()
        verdicts = at_once([lambda: world.begin(again(claim))] * CROWD)

        winner = only_winner(verdicts)
        record = world.record(claim.id)
        assert (record.owner, record.fence, record.version) == (winner.lease.owner, 1, 1)

    def test_two_claimers_again_and_again(self, world: World) -> None:
        """Each round has one winner."""
        for _ in range(ROUNDS):
            claim = a_claim()
            only_winner(at_once([partial(world.begin, again(claim)), partial(world.begin, again(claim))]))

    def test_a_crowd_of_retries_after_a_failure(self, world: World) -> None:
        """Ten retries, one execution, nine are answered to wait."""
        claim = stand(world, State.FAILED_RETRYABLE).claim

        winner = only_winner(at_once([lambda: world.begin(again(claim))] * 10))

        assert (winner.lease.fence, world.record(claim.id).fence) == (2, 2)

    def test_a_crowd_on_a_stale_lease(self, world: World) -> None:
        """One successor (13)."""
        claim = stand(world, State.IN_PROGRESS).claim
        world.advance(LEASE)

        winner = only_winner(at_once([lambda: world.begin(again(claim))] * 10))

        assert (winner.lease.fence, world.record(claim.id).fence) == (2, 2)

    def test_a_crowd_on_an_expired_key(self, world: World) -> None:
        """One new start (31)."""
        claim = stand(world, State.COMPLETED).claim
        world.advance(TTL)

        winner = only_winner(at_once([lambda: world.begin(again(claim))] * 10))

        assert (winner.lease.fence, world.record(claim.id).fence) == (2, 2)

    def test_a_crowd_on_what_nobody_may_repeat(self, world: World) -> None:
        """No caller wins, and the doubt is written once (15)."""
        claim = stand(world, State.IN_PROGRESS, effects=Effects.INLINE, recovery=Recovery.UNKNOWN).claim
        world.advance(LEASE)

        verdicts = at_once([lambda: world.begin(again(claim))] * 10)

        assert {verdict.code for verdict in verdicts if isinstance(verdict, Refuse)} == {Code.OUTCOME_UNKNOWN}
        assert len(verdicts) == 10  # noqa: PLR2004  (as many as were sent)
        assert world.record(claim.id).version == 2  # noqa: PLR2004  (the claim and the doubt)

    def test_a_crowd_on_an_answer(self, world: World) -> None:
        """All of them replay it."""
        claim = stand(world, State.COMPLETED).claim

        verdicts = at_once([lambda: world.begin(again(claim))] * 16)

        assert all(isinstance(verdict, Replay) for verdict in verdicts)

    def test_an_owner_that_comes_back_races_its_successor(self, world: World) -> None:
        """Either the answer is stored and replayed, or the successor runs and the answer is refused."""
        for _ in range(ROUNDS):
            standing = stand(world, State.IN_PROGRESS)
            world.advance(LEASE)
            calls: list[Callable[[], object]] = [
                partial(world.settle, standing.lease, answered()),
                partial(world.begin, again(standing.claim)),
            ]
            settled, verdict = at_once(calls)
            assert isinstance(settled, Settled)
            assert isinstance(verdict, Replay if settled.ours else Proceed)

    def test_a_crowd_settles_one_operation(self, world: World) -> None:
        """The same settlement from many threads is written once."""
        standing = stand(world, State.IN_PROGRESS)

        settled = at_once([lambda: world.settle(standing.lease, answered())] * 16)

        assert all(one.ours for one in settled)
        assert world.record(standing.claim.id).version == 2  # noqa: PLR2004  (the claim and the answer)

    def test_many_keys_at_once_do_not_disturb_each_other(self, world: World) -> None:
        """Each its own winner and its own answer."""

        def whole(number: int) -> None:
            claim = a_claim()
            body = b"%d" % number
            assert world.settle(world.owned(claim), answered(body)).ours
            verdict = world.begin(again(claim))
            assert isinstance(verdict, Replay)
            assert verdict.record.response == answered(body).response

        at_once([partial(whole, number) for number in range(32)])


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make all calls at the same moment, each in a thread; their results in order."""
    barrier = threading.Barrier(len(calls))

    def call(one: Callable[[], T]) -> T:
        barrier.wait()
        return one()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call, one) for one in calls]]


def only_winner(verdicts: Sequence[Verdict]) -> Proceed:
    """The verdict of the caller that may execute; all others must have been answered to wait."""
    winners = [verdict for verdict in verdicts if isinstance(verdict, Proceed)]
    losers = [verdict for verdict in verdicts if isinstance(verdict, Refuse)]
    assert len(winners) == 1, f"{len(winners)} winners"
    assert {loser.code for loser in losers} == {Code.IN_PROGRESS}
    assert len(losers) == len(verdicts) - 1
    return winners[0]
