"""The verdict over books that were made up: a run that is well, and one finding for each way in which it is not."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from oncekey.core.model import State
from oncekey_demo.checker import Rule
from oncekey_demo.history import ClientOperation, ClientSaw, Effect, Write
from oncekey_demo.torture.clients import IntendedRequest
from oncekey_demo.torture.shop import Wanted
from oncekey_demo.torture.verdict import ROW, Charge, FinalRecord, RunEvidence, broken_promises, story_of, stuck

SCOPE, KEY = "s", "torture-1-01-000001"
BODY = json.dumps({"charge": "ch_1", "attempt": 1}).encode()


@dataclass
class Books:
    """A payment that went well; each test spoils one thing."""

    intended: IntendedRequest = field(default_factory=lambda: IntendedRequest(KEY, "/payments", Wanted(KEY, 100)))
    operations: list[ClientOperation] = field(
        default_factory=lambda: [ClientOperation("r1", SCOPE, KEY, "100 cents", 10, 90, ClientSaw.OK, 201, BODY)]
    )
    charges: list[Charge] = field(default_factory=lambda: [Charge("ch_1", KEY, 100, 50)])
    rows: list[Effect] = field(default_factory=lambda: [Effect("row", SCOPE, KEY, "100 cents", 40, kind=ROW)])
    record: FinalRecord | None = field(
        default_factory=lambda: FinalRecord(
            KEY, "life", "phased", State.COMPLETED, "100 cents", 1, True, 201, BODY, None, ticket=False
        )
    )
    writes: list[Write] = field(
        default_factory=lambda: [
            Write(20, SCOPE, KEY, "in_progress", "life", 1, 1, fingerprint="100 cents"),
            Write(80, SCOPE, KEY, "completed", "life", 1, 2, fingerprint="100 cents"),
        ]
    )
    deliveries: dict[str, int] = field(default_factory=lambda: {"d1": 2})
    parcels: list[dict[str, Any]] = field(default_factory=list)
    dead: list[dict[str, Any]] = field(default_factory=list)
    answered: bool = True

    def evidence(self) -> RunEvidence:
        return RunEvidence(
            scope=SCOPE,
            intended_requests={KEY: self.intended},
            answered=frozenset({KEY} if self.answered else ()),
            operations=self.operations,
            charges={KEY: self.charges} if self.charges else {},
            rows=self.rows,
            records={} if self.record is None else {KEY: self.record},
            writes=self.writes,
            deliveries={KEY: self.deliveries} if self.deliveries else {},
            parcels=self.parcels,
            dead_letters=self.dead,
        )

    def kept(self, **changes: Any) -> None:
        assert self.record is not None
        self.record = replace(self.record, **changes)

    @property
    def broken(self) -> set[Rule]:
        found = broken_promises(self.evidence())
        assert all(finding.key == KEY for finding in found)
        return {finding.rule for finding in found}


def test_a_run_that_is_well_has_no_finding() -> None:
    books = Books()
    assert broken_promises(books.evidence()) == []
    assert len(story_of(books.evidence(), KEY)) == 6


def test_a_second_charge_is_a_duplicate() -> None:
    books = Books()
    books.charges.append(Charge("ch_2", KEY, 100, 60))
    assert books.broken == {Rule.ONE_EFFECT, Rule.CONSERVED}


def test_response_without_its_charge_or_row_is_a_lost_acknowledgement() -> None:
    books = Books(charges=[])
    assert books.broken == {Rule.NO_LOST_ACK, Rule.CONSERVED}
    assert Books(rows=[]).broken == {Rule.NO_LOST_ACK}


def test_charge_that_differs_from_the_response_is_a_violation() -> None:
    assert Rule.CONSERVED in Books(charges=[Charge("ch_1", KEY, 101, 50)]).broken
    assert Books(charges=[Charge("ch_9", KEY, 100, 50)]).broken == {Rule.CONSERVED}


def test_charge_without_a_record_is_a_violation() -> None:
    books = Books(record=None, operations=[], rows=[], writes=[], deliveries={}, answered=True)
    assert Rule.CONSERVED in books.broken


@pytest.mark.parametrize(
    ("deliveries", "dead", "rules"),
    [
        ({}, [], {Rule.OUTBOX}),
        ({"d1": 1, "d2": 1}, [], {Rule.OUTBOX}),
        ({"d1": 1}, [{"key": KEY, "kind": "emit", "last_error": "x"}], {Rule.OUTBOX}),
    ],
)
def test_verdict_checks_message_deliveries_and_dead_letters(
    deliveries: dict[str, int], dead: list[dict[str, Any]], rules: set[Rule]
) -> None:
    assert Books(deliveries=deliveries, dead=dead).broken == rules


def test_unfinished_work_violates_progress() -> None:
    assert Books(answered=False).broken == {Rule.PROGRESS}
    assert Books(parcels=[{"key": KEY, "topic": "t", "state": "ready"}]).broken == {Rule.EMPTY}
    assert [finding.rule for finding in stuck({KEY: "phased in_progress"})] == [Rule.PROGRESS]
    books = Books(operations=[], writes=[], deliveries={})
    books.kept(state=State.FAILED_RETRYABLE, status=None, body=None)
    assert Rule.PROGRESS in books.broken


def test_unknown_is_a_violation_if_the_provider_recognises_the_key() -> None:
    unheard = ClientOperation("r1", SCOPE, KEY, "100 cents", 10, None, ClientSaw.INFO)
    books = Books(operations=[unheard], writes=[], deliveries={})
    books.kept(state=State.UNKNOWN, status=None, body=None, ticket=True)
    assert books.broken == {Rule.TRUTH}
    books.intended = replace(books.intended, wanted=replace(books.intended.wanted, recognises=False))
    assert books.broken == set()
    books.charges.append(Charge("ch_2", KEY, 100, 60))
    assert books.broken == {Rule.ONE_EFFECT}


def test_response_of_a_superseded_owner_violates_fencing() -> None:
    books = Books()
    books.kept(attempts=2)
    assert books.broken == {Rule.FENCED}


def test_an_illegal_move_in_the_log() -> None:
    books = Books()
    books.writes.insert(1, Write(30, SCOPE, KEY, "expired", "life", 1, 2, fingerprint="100 cents"))
    assert Rule.LEGAL in books.broken
