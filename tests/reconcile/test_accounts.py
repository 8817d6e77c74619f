"""Which call a message is about: two accounts may use the same ids, and one id may come with two messages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oncekey.core.model import SECOND
from oncekey.core.resolution import Executed, NotExecuted, Rejected, Undecided
from oncekey.core.resolvers import Resolvers
from oncekey.engine import reconcile
from oncekey.engine.reconcile import EvidenceEffect
from reconcile.doubts import POLICY, WEBHOOK, a_reconciler, announced, key_of, phased, report

STATES = {"unknown": phased, "in_progress": lambda world: announced(world)[0]}


def told(world, claim, resolution, source, event_id, **names):
    """A message of one account's webhook."""
    message = replace(report(claim, resolution, event_id, **names), source=source)
    return world.go(reconcile.receive(world.store, message, WEBHOOK, lambda _: POLICY, Resolvers()))


def both(claim, provider_id):
    return {"downstream_key": key_of(claim), "provider_id": provider_id}


def result_of(world, claim):
    """The result of the settled call, or None while its outcome is unknown."""
    record = world.record(claim.id)
    return record.memo[-1].result if record.memo else None


async def test_the_downstream_key_takes_precedence_over_provider_ids(world):
    one = phased(world)
    world.advance(SECOND)
    two = phased(world)
    # The newest call has this id, too, and it is another tenant's.
    assert told(world, two, Undecided(), "account-2", "e1", **both(two, "1001")).became is EvidenceEffect.KEPT
    assert told(world, one, Executed("one's"), "account-1", "e1", **both(one, "1001")).became is EvidenceEffect.SETTLED
    assert await a_reconciler(world).run_once() == 0
    assert (result_of(world, one), result_of(world, two)) == ('"one\'s"', None)


async def test_a_provider_id_is_unique_within_its_account(world):
    claim = phased(world)
    told(world, claim, Undecided(), "account-2", "e1", **both(claim, "1001"))
    assert told(world, claim, Executed(1), "account-1", "e2", provider_id="1001").became is EvidenceEffect.UNCLEAR
    assert await a_reconciler(world).run_once() == 0
    assert result_of(world, claim) is None
    assert told(world, claim, Executed(2), "account-2", "e2", provider_id="1001").became is EvidenceEffect.SETTLED
    assert result_of(world, claim) == "2"


@pytest.mark.parametrize("state", STATES)
async def test_an_ambiguous_provider_id_settles_no_record(world, state):
    # U3
    one, two = STATES[state](world), STATES[state](world)
    for claim in (one, two):
        told(world, claim, Undecided(), "account-1", key_of(claim), **both(claim, "1001"))
    assert told(world, one, Executed(1), "account-1", "e9", provider_id="1001").became is EvidenceEffect.UNCLEAR
    assert await a_reconciler(world).run_once() == 0
    assert (result_of(world, one), result_of(world, two)) == (None, None)


def test_a_report_with_an_unknown_id_is_stored(world):
    claim = phased(world)
    assert told(world, claim, Executed(1), "account-1", "e1", provider_id="77").became is EvidenceEffect.KEPT
    assert told(world, claim, Executed(1), "account-1", "e2", downstream_key="another").became is EvidenceEffect.KEPT
    assert result_of(world, claim) is None


async def test_an_unknown_key_is_not_overridden_by_a_known_id(world):
    claim = phased(world)
    told(world, claim, Undecided(), "account-1", "e1", **both(claim, "1001"))
    names = {"downstream_key": "another", "provider_id": "1001"}
    assert told(world, claim, Executed(1), "account-1", "e2", **names).became is EvidenceEffect.KEPT
    assert await a_reconciler(world).run_once() == 0
    assert result_of(world, claim) is None


def test_an_identical_event_is_reported_as_repeated(world):
    claim = phased(world)
    first = told(world, claim, Undecided(), "account-1", "e1")
    again = told(world, claim, Undecided(), "account-1", "e1")
    assert [(one.became, one.repeated, one.conflict) for one in (first, again)] == [
        (EvidenceEffect.KEPT, False, False),
        (EvidenceEffect.KEPT, True, False),
    ]


def test_a_reused_event_id_is_a_conflicting_report(world):
    claim = phased(world)
    told(world, claim, Undecided(), "account-1", "e1")
    second = told(world, claim, Executed("done"), "account-1", "e1")
    assert (second.became, second.repeated, second.conflict) == (EvidenceEffect.SETTLED, False, True)
    again = told(world, claim, Executed("done"), "account-1", "e1")
    assert (again.became, again.repeated) == (EvidenceEffect.AGREES, True)
    assert len(world.go(world.store.survey.reports_about((key_of(claim),), ()))) == 2


@pytest.mark.parametrize("second", [Rejected("no"), NotExecuted(closed=True)])
def test_one_event_id_may_settle_two_calls(world, second):
    one, two = phased(world), phased(world)
    assert told(world, one, Executed("one's"), "account-1", "e1").became is EvidenceEffect.SETTLED
    assert told(world, two, second, "account-1", "e1").became is EvidenceEffect.SETTLED
    assert result_of(world, one) == '"one\'s"'
    assert "one's" not in str(result_of(world, two))


async def test_stored_reports_apply_only_to_the_call_they_name(world):
    one, two = phased(world), phased(world)
    told(world, two, Undecided(), "account-2", "e1", **both(two, "1001"))
    # These wait for an outcome of calls that are not ours, under ids and events that ours have, too.
    told(world, one, Executed("foreign"), "account-1", "e1", provider_id="1001")
    told(world, one, Executed("foreign"), "account-2", "e1", downstream_key="another")
    assert await a_reconciler(world).run_once() == 0
    assert (result_of(world, one), result_of(world, two)) == (None, None)
