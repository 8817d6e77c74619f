"""What `begin` makes of lost replies, statement by statement; the simulator found both cases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from oncekey.core.errors import CommitAmbiguousError, StoreError, StoreUnavailableError
from oncekey.core.flow import Flow, Transaction, drive, run_body
from oncekey.core.model import Claim, Completed, Outcome, Proceed, Retryable, StoredResponse
from oncekey.core.policy import Policy
from oncekey.engine.request import LOSSES, ROUNDS, begin, settle
from oncekey.stores.memory import MemoryStore
from oncekey.stores.statements import REPEATS
from oncekey.testing.claims import a_claim, again

POLICY = Policy()
HOURS = 3_600_000_000


class Wire:
    """The memory store behind a connection that loses what the test says."""

    def __init__(self) -> None:
        self.now = 0
        self.table: dict[Any, Any] = {}
        self.said: list[str] = []
        self.plan: Iterator[str] = iter(())
        self.store = MemoryStore(clock=lambda: self.now)

    def run(self, flow: Flow[Any], *plan: str) -> Any:
        """Run a flow; each word of the plan is the fate of one transaction, and "ok" what comes after."""
        self.plan = iter(plan)
        return drive(flow, self._transact)

    def _transact(self, transaction: Transaction[Any]) -> Any:
        fate = next(self.plan, "ok")
        self.said.append(transaction.name)
        if fate == "down":
            raise StoreUnavailableError(fate)
        if fate == "lost before":
            raise CommitAmbiguousError(fate)
        result = run_body(transaction.body(), lambda said: said.command(self.table, **said.params))
        if fate == "lost":
            raise CommitAmbiguousError(fate)
        if fate == "lost, and asleep for a day":
            self._days_pass()
            raise CommitAmbiguousError(fate)
        return result

    def _days_pass(self) -> None:
        """The claim's lease runs out, another request completes it, and its record expires."""
        self.now += HOURS
        taker = again(CLAIM)
        verdict = drive(begin(self.store, taker, POLICY), lambda one: self._quietly(one))
        drive(settle(self.store, verdict.lease, DONE), lambda one: self._quietly(one))
        self.now += 30 * HOURS

    def _quietly(self, transaction: Transaction[Any]) -> Any:
        return run_body(transaction.body(), lambda said: said.command(self.table, **said.params))


CLAIM: Claim = a_claim()
DONE = Completed(StoredResponse(201, (), b"made"), Outcome.SUCCESS)


@pytest.mark.parametrize("fate", ["lost", "lost before"])
def test_claim_with_lost_reply_is_found_or_created(fate: str) -> None:
    """P7, F8: what names our owner is ours."""
    wire = Wire()

    verdict = wire.run(begin(wire.store, CLAIM, POLICY), fate)

    assert isinstance(verdict, Proceed)
    assert (verdict.record.owner, verdict.record.fence) == (CLAIM.owner, 1)
    assert wire.said == ["claim", "claim"]


def test_claim_retried_after_its_record_expired_gets_a_new_incarnation() -> None:
    """F1, row 31: a claim whose reply was lost slept past the whole life of its own record."""
    wire = Wire()

    verdict = wire.run(begin(wire.store, CLAIM, POLICY), "lost, and asleep for a day")

    assert isinstance(verdict, Proceed)
    assert wire.said == ["claim", "claim", "supersede"]
    assert verdict.record.fence == 3
    assert verdict.record.incarnation != CLAIM.incarnation
    assert verdict.lease.incarnation == verdict.record.incarnation


def test_undisturbed_claim_keeps_its_incarnation() -> None:
    wire = Wire()

    assert wire.run(begin(wire.store, CLAIM, POLICY)).record.incarnation == CLAIM.incarnation


def test_an_outage_after_a_lost_reply_stays_ambiguous() -> None:
    """P7: nothing of the second try happened, but of the first it may have; the caller must take it back."""
    wire = Wire()

    with pytest.raises(CommitAmbiguousError):
        wire.run(begin(wire.store, CLAIM, POLICY), "lost", "down")


def test_outage_without_lost_reply_is_store_unavailable() -> None:
    wire = Wire()

    with pytest.raises(StoreUnavailableError):
        wire.run(begin(wire.store, CLAIM, POLICY), "down")


def test_repeatedly_lost_replies_raise_commit_ambiguous() -> None:
    """No request may be told to wait for itself."""
    wire = Wire()

    with pytest.raises(CommitAmbiguousError):
        wire.run(begin(wire.store, CLAIM, POLICY), *["lost before"] * ROUNDS)
    assert wire.said == ["claim"] * LOSSES


@pytest.mark.parametrize(
    ("fates", "error"),
    [
        (["down"], StoreUnavailableError),
        (["lost", "down"], CommitAmbiguousError),
        (["lost before"] * (REPEATS + 1), CommitAmbiguousError),
    ],
)
def test_failed_settlement_raises_the_matching_error(fates: list[str], error: type[StoreError]) -> None:
    wire = Wire()
    lease = wire.run(begin(wire.store, CLAIM, POLICY)).lease

    with pytest.raises(error):
        wire.run(settle(wire.store, lease, Retryable("not_executed")), *fates)


def test_settlement_with_lost_reply_is_repeated() -> None:
    wire = Wire()
    lease = wire.run(begin(wire.store, CLAIM, POLICY)).lease

    assert wire.run(settle(wire.store, lease, DONE), "lost", "lost").ours
