"""Workers that die before and after every statement and every call: the provider's ledger has one entry, or fewer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from oncekey.core.deferred import TakenUp
from oncekey.core.flow import drive
from oncekey.core.model import SECOND, State, StoredResponse
from oncekey.core.policy import Policy
from oncekey.engine import relay
from oncekey.engine.relay import CallAnswered, CallFailed, ParcelEnded, lease_of
from outbox.sending import WINDOW, Post

POLICY = Policy()
ROUNDS = 30
EVERY_LIBRARY = pytest.mark.parametrize("world", ["sqlite", "psycopg", "asyncpg"], indirect=True)


class Crash(Exception):  # noqa: N818  (no fault of anybody)
    """The worker's process is gone."""


@dataclass
class Provider:
    """A ledger, with or without a memory for keys."""

    remembers: bool
    charges: list[str] = field(default_factory=list)
    keys: Counter[str] = field(default_factory=Counter)

    def charge(self, key: str) -> str:
        """Make the charge, or find it."""
        self.keys[key] += 1
        if not (self.remembers and key in self.charges):
            self.charges.append(key)
        return f"ch_{key}"


@dataclass
class Worker:
    """One process, which dies at the given point; points are before and after each statement, commit and call."""

    post: Post
    provider: Provider
    dies_at: int = 0
    passed: int = 0

    def point(self) -> None:
        self.passed += 1
        if self.passed == self.dies_at:
            raise Crash

    def go(self, flow: Any) -> Any:
        return drive(flow, self._transact)

    def work(self, repeatable: int | None) -> list[ParcelEnded]:
        """Claim, call and settle."""
        box = self.post.box
        ended = []
        for held in self.go(box.due(f"{id(self)}:{self.passed}", (self.post.topic,), 1, lease_of(POLICY))):
            taken = self.go(relay.begin_call(box, held, f"{id(self)}:{held.fence}", repeatable, POLICY))
            if isinstance(taken, TakenUp):
                self.point()
                charge = self.provider.charge(held.parcel.downstream_key)
                self.point()
                answered = CallAnswered(StoredResponse(201, (), charge.encode()), provider_id=charge)
                taken = self.go(relay.end_call(box, taken, answered, POLICY))
            ended.append(taken)
        return ended

    def _transact(self, transaction: Any) -> Any:
        self.point()
        result = self.post.go(_once(replace(transaction, body=lambda: self._stepping(transaction.body()))))
        self.point()
        return result

    def _stepping(self, steps: Any) -> Any:
        try:
            statement = next(steps)
            while True:
                self.point()
                rows = yield statement
                self.point()
                statement = steps.send(rows)
        except StopIteration as stop:
            return stop.value


def _once(transaction: Any) -> Any:
    return (yield transaction)


def outcomes(post: Post, *, remembers: bool, repeatable: int | None) -> list[tuple[State, int]]:
    """The end of the record and the charges made, for every point at which a first worker can die."""
    ends = []
    point = 1
    while True:
        provider = Provider(remembers)
        parcel = post.deferred()
        first = Worker(post, provider, dies_at=point)
        try:
            first.work(repeatable)
        except Crash:
            died = True
        else:
            died = False
        for _ in range(ROUNDS):
            if post.record(parcel).state in {State.COMPLETED, State.UNKNOWN}:
                break
            post.world.advance(lease_of(POLICY))
            Worker(post, provider).work(repeatable)
        record = post.record(parcel)
        ends.append((record.state, len(provider.charges)))
        assert post.in_outbox(parcel) is None, point
        assert (post.dead(parcel) is None) == (record.state is State.COMPLETED), point
        assert set(provider.keys) <= {parcel.downstream_key}  # R126: one key over all attempts
        if record.state is State.COMPLETED:
            assert record.response.body == f"ch_{parcel.downstream_key}".encode(), point
        if not died:
            assert point > 25
            return ends
        point += 1


@pytest.fixture
def post(world):
    return Post(world)


@EVERY_LIBRARY
def test_repeatable_calls_complete_once_after_any_crash(post):  # R125, R127, R130, F31
    ends = outcomes(post, remembers=True, repeatable=WINDOW)

    assert set(ends) == {(State.COMPLETED, 1)}


@EVERY_LIBRARY
def test_nonrepeatable_calls_are_never_made_twice(post):  # F31, R130
    ends = outcomes(post, remembers=False, repeatable=None)

    # Not sent and parked, sent and parked, and done; never two charges, and never "done" without one.
    assert set(ends) == {(State.COMPLETED, 1), (State.UNKNOWN, 0), (State.UNKNOWN, 1)}


@pytest.mark.parametrize("world", ["sqlite"], indirect=True)
def test_the_crash_test_detects_a_repeated_call(post):
    """The proof of the test: calling an unsafe provider "repeatable" makes two charges."""
    ends = outcomes(post, remembers=False, repeatable=WINDOW)

    assert (State.COMPLETED, 2) in ends


def test_a_crash_after_the_stored_result_repeats_no_call(post):  # R127
    """Every point from the committed result on: the provider was asked once."""
    provider = Provider(remembers=False)
    parcel = post.deferred()
    (held,) = post.claim()
    taken = post.go(relay.begin_call(post.box, held, "w1", None, POLICY))
    charge = provider.charge(parcel.downstream_key)
    answered = CallAnswered(StoredResponse(201, (), charge.encode()), provider_id=charge)
    entry = relay.entry_of(post.topic, answered, POLICY)
    post.go(post.box.result(taken.lease, taken.held, entry, lease_of(POLICY)))
    assert relay.answer_of(post.record(parcel).memo[0]) == answered

    post.world.advance(lease_of(POLICY))
    assert Worker(post, provider).work(None) == [ParcelEnded.DELIVERED]

    assert (post.record(parcel).state, provider.keys.total()) == (State.COMPLETED, 1)


def test_repeated_worker_crashes_create_a_dead_letter(post):  # R128: also a crash loop is bounded
    parcel = post.deferred()
    policy = Policy(outbox_max_attempts=3)
    for _ in range(3):
        (held,) = post.claim(lease=lease_of(policy))
        assert isinstance(post.go(relay.begin_call(post.box, held, str(held.fence), WINDOW, policy)), TakenUp)
        post.world.advance(lease_of(policy))

    (held,) = post.claim()
    assert post.go(relay.begin_call(post.box, held, "last", WINDOW, policy)) is ParcelEnded.PARKED
    assert (post.record(parcel).state, post.record(parcel).last_error) == (State.UNKNOWN, "dead_letter")


def test_a_deferred_call_that_always_fails_ends_as_a_dead_letter(post):  # R128, O3
    parcel = post.deferred()
    policy = Policy(outbox_max_attempts=3)
    ended = []
    while post.record(parcel).state is not State.UNKNOWN:
        (held,) = post.claim()
        taken = post.go(relay.begin_call(post.box, held, str(held.fence), WINDOW, policy))
        ended.append(post.go(relay.end_call(post.box, taken, CallFailed("Busy", SECOND), policy)))
        post.world.advance(SECOND)

    assert ended == [ParcelEnded.POSTPONED, ParcelEnded.POSTPONED, ParcelEnded.PARKED]
    assert post.record(parcel).last_error == "dead_letter"
