"""From when on "the provider knows nothing of it" is a fact: the waiting rule, as a function of clocks alone (U1)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.records import a_record
from oncekey.core.model import HOUR, MINUTE, SECOND, Effects, EntryKind, Intent, MemoEntry, Outcome, State
from oncekey.core.resolution import (
    Patience,
    Sight,
    has_waited,
    is_about,
    known_outcome,
    not_before,
    still_to_wait,
    wait_span,
)

LAG, WINDOW, TIMEOUT = 60 * SECOND, 5 * SECOND, 30 * SECOND
PATIENCE = Patience(lag=LAG, send_window=WINDOW, lease=5 * MINUTE)
DOUBTED = 10 * HOUR
SENT = Intent("charge", "key-1", "d", 1, DOUBTED - WINDOW, DOUBTED, None)
FIRST = Sight(DOUBTED + SECOND, 100 * SECOND)


def in_doubt(effects, **changes):
    unknown = {
        "effects": effects,
        "state": State.UNKNOWN,
        "owner": None,
        "lease_until": None,
        "last_error": "time_out",
        "call_timeout": TIMEOUT,
        "deadline": DOUBTED + HOUR,
        "reconcile_after": DOUBTED,
        "reconcile_tries": 0,
        "intent": None,
        "memo": (),
    }
    return replace(a_record(), **{**unknown, **changes})


ANNOUNCED = in_doubt(Effects.PHASED, intent=SENT)
INLINE = in_doubt(Effects.INLINE)


@pytest.mark.parametrize(
    ("record", "span", "earliest"),
    [
        (ANNOUNCED, WINDOW + TIMEOUT + LAG, DOUBTED + TIMEOUT + LAG),
        (in_doubt(Effects.OUTBOX, intent=SENT), WINDOW + TIMEOUT + LAG, DOUBTED + TIMEOUT + LAG),
        (INLINE, 5 * MINUTE + LAG, DOUBTED + 5 * MINUTE + LAG),
        # Once it was asked about, nobody knows from the record when its doubt began: the first sight bounds it.
        (in_doubt(Effects.INLINE, reconcile_tries=3), 5 * MINUTE + LAG, FIRST.store + 5 * MINUTE + LAG),
        (in_doubt(Effects.PHASED), 0, a_record().last_run_at),
    ],
)
def test_wait_span_and_earliest_time_per_record(record, span, earliest):
    assert wait_span(record, PATIENCE) == span
    assert not_before(record, PATIENCE, FIRST) == earliest


def test_a_longer_lease_is_a_longer_wait_where_nothing_is_announced():
    patient = replace(PATIENCE, lease=20 * MINUTE)
    assert wait_span(INLINE, patient) == 20 * MINUTE + LAG
    assert wait_span(ANNOUNCED, patient) == wait_span(ANNOUNCED, PATIENCE)


@pytest.mark.parametrize("record", [ANNOUNCED, INLINE], ids=["announced", "inline"])
def test_both_clocks_have_to_have_waited(record):
    span, earliest = wait_span(record, PATIENCE), not_before(record, PATIENCE, FIRST)
    by_store, by_boot = max(earliest, FIRST.store), FIRST.boot + span
    assert has_waited(record, PATIENCE, FIRST, Sight(by_store, by_boot))
    assert not has_waited(record, PATIENCE, FIRST, Sight(earliest - 1, by_boot))
    assert not has_waited(record, PATIENCE, FIRST, Sight(by_store, by_boot - 1))
    # A store's clock that jumps ahead waits for nobody.
    assert not has_waited(record, PATIENCE, FIRST, Sight(by_store + 100 * HOUR, FIRST.boot))


@pytest.mark.parametrize("passed", [0, SECOND, MINUTE, 10 * MINUTE])
def test_waiting_the_reported_time_is_sufficient(passed):
    asked = Sight(FIRST.store + passed, FIRST.boot + passed)
    for record in (ANNOUNCED, INLINE, in_doubt(Effects.PHASED)):
        wait = still_to_wait(record, PATIENCE, FIRST, asked)
        assert (wait == 0) == has_waited(record, PATIENCE, FIRST, asked)
        later = Sight(asked.store + wait, asked.boot + wait)
        assert has_waited(record, PATIENCE, FIRST, later)


def test_evidence_applies_only_to_its_own_call():
    assert is_about(ANNOUNCED, "key-1")
    assert not is_about(ANNOUNCED, "key-2")
    assert not is_about(in_doubt(Effects.PHASED), "key-1")
    assert is_about(INLINE, "anything")


def test_known_outcome_of_a_recorded_call():
    def said(result):
        return known_outcome(in_doubt(Effects.PHASED, memo=(MemoEntry("charge", EntryKind.CALL, result),)), "charge")

    assert said('{"id":1}') is Outcome.SUCCESS
    assert said('{"$":"rejected","v":1}') is Outcome.FAILURE
    assert said('{"$":"not_sent","v":null}') is Outcome.FAILURE
    assert known_outcome(ANNOUNCED, "charge") is None
