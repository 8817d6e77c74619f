"""What operators look through: complete, in order, and bounded, on every store that has operators."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest

from oncekey.core.flow import Mode, Transaction
from oncekey.core.model import HOUR, MINUTE, SECOND, Effects, Outcome, ParcelKind, RecordId, State, StoredResponse
from oncekey.core.operate import Search
from oncekey.core.resolution import AnnouncedCall, CallReport, EvidenceVerdict
from oncekey.core.scope import scope_of
from oncekey.core.transitions import Actor, Mover, Note, Trigger
from oncekey.ops.stats import FINISHED, FIRST, FIRST_LETTER, UNFINISHED, LetterWalk, Walk
from operate.rows import NOW, a_parcel, a_row, an_intent, write


def put(world, state, number, *, scope="1:-4:acme", **changes):
    made = {"created_at": NOW - number * MINUTE, "expires_at": NOW + HOUR - number * MINUTE, **changes}
    return write(world, a_row(state, **{"id": RecordId(scope, f"key-{number:04}"), **made}))


def numbers(records):
    return [int(one.id.key.removeprefix("key-")) for one in records]


def all_of(world, wanted, limit, **options):
    """Every record of a walk, page by page, and how many pages that took."""
    found, pages, before = [], 0, None
    while before is None or before:
        part = world.go(world.store.survey.walk(wanted, limit, before, **options))
        found += part.records
        before, pages = dict(part.further), pages + 1
        assert pages < 200
    return found, pages


@pytest.mark.parametrize("state", [*UNFINISHED, *FINISHED])
def test_listing_a_state_returns_all_records_in_order(world, state):
    for number in range(1, 12):
        put(world, state, number)
    found, pages = all_of(world, Walk(states=(state,)), 4)
    assert numbers(found) == list(range(1, 12))
    assert pages == 3
    assert {one.state for one in found} == {state}
    assert all(one.response is None or one.response.body is None for one in found)


def test_listing_merges_all_states_in_order(world):
    states = [State.UNKNOWN, State.PENDING, State.IN_PROGRESS, State.FAILED_RETRYABLE, State.COMPLETED]
    for number in range(1, 41):
        put(world, states[number % 5], number)
    found, _ = all_of(world, Walk(), 7)
    assert numbers(found) == [number for number in range(1, 41) if number % 5 != 4]


def test_records_with_equal_times_are_listed_once_each(world):
    # The order of texts is the database's: nobody else may guess it.
    keys = [f"{letter}{number}" for number in range(3) for letter in "aBä_-~Zz"]
    for place, key in enumerate(keys):
        write(world, a_row(UNFINISHED[place % 4], id=RecordId("1:-4:acme", key), created_at=NOW - MINUTE))
    found, _ = all_of(world, Walk(), 5)
    assert sorted(one.id.key for one in found) == sorted(keys)


def test_listing_applies_every_filter(world):
    put(world, State.UNKNOWN, 1, operation="pay", last_error="status_503")
    put(world, State.UNKNOWN, 2, operation="pay", last_error="call_uncertain", effects=Effects.INLINE)
    put(world, State.UNKNOWN, 3, operation="ship", last_error="status_503", scope="1:-5:other")
    put(world, State.IN_PROGRESS, 90, lease_until=NOW, operation="slow")
    put(world, State.IN_PROGRESS, 91, lease_until=NOW + 1, operation="slow")

    def found(**asked):
        return numbers(all_of(world, Walk(**asked), 10)[0])

    assert found() == [1, 2, 3, 90, 91]
    assert found(operation="pay") == [1, 2]
    assert found(error="status_503") == [1, 3]
    assert found(effects=Effects.INLINE) == [2]
    assert found(scope="1:-5:other") == [3]
    assert found(beginning="key-000") == [1, 2, 3]
    assert found(beginning="key-009", scope="1:-4:acme") == [90, 91]
    assert found(older=2 * MINUTE) == [2, 3, 90, 91]
    assert found(younger=2 * MINUTE) == [1]
    assert found(states=(State.IN_PROGRESS,), stale=True) == [90]
    assert found(beginning="KEY") == []


def test_page_examines_a_bounded_number_and_can_be_continued(world):
    for number in range(1, 31):
        put(world, State.UNKNOWN, number, operation="rare" if number in {3, 25} else "usual")
        put(world, State.PENDING, number + 100, operation="usual")
    survey, wanted = world.store.survey, Walk(operation="rare")
    part = world.go(survey.walk(wanted, 10, looked=10))
    assert numbers(part.records) == [3]
    assert part.broken_off
    found, pages = all_of(world, wanted, 10, looked=10)
    assert numbers(found) == [3, 25]
    assert pages >= 3
    # What one path found behind the place where another was broken off is not shown too early.
    put(world, State.PENDING, 99, operation="rare")
    found, _ = all_of(world, wanted, 10, looked=10)
    assert numbers(found) == [3, 25, 99]


def test_unknown_outcomes_are_walked_oldest_first(world):
    for number in range(1, 12):
        put(world, State.UNKNOWN, number)
    put(world, State.PENDING, 99)
    found, after = [], FIRST
    while after is not None:
        part = world.go(world.store.survey.unknown(4, after))
        found += part.records
        after = part.further.get(State.UNKNOWN)
    assert numbers(found) == list(range(11, 0, -1))


def dead(world, number, *, scope="1:-4:acme", kind=ParcelKind.EMIT, topic="order_created", error="call_uncertain"):
    """A dead letter that died `number` minutes ago."""
    record = a_row(State.COMPLETED, Effects.LOCAL, id=RecordId(scope, f"key-{number:04}"))
    parcel = replace(a_parcel(record, kind), topic=topic)
    world.clock.now = NOW - number * MINUTE
    write(world, record, parcel, error=error)
    world.clock.now = NOW
    return parcel.id


def test_dead_letters_are_filtered_and_walked_oldest_first(world):
    ids = [
        dead(world, 1),
        dead(world, 2, topic="send_refund", kind=ParcelKind.DEFER, scope="1:-4:acme9:principal3:ann"),
        dead(world, 3, scope="1:-5:other"),
        dead(world, 4, error="ConnectionError: the warehouse is away"),
    ]
    survey = world.store.survey

    def found(limit=10, looked=100, **asked):
        places, after, pages = [], FIRST_LETTER, 0
        while after is not None:
            part = world.go(survey.letters(LetterWalk(**asked), limit, after, looked))
            assert part.now == NOW
            places += [ids.index(one.parcel.id) + 1 for one in part.letters]
            after, pages = part.further, pages + 1
        return places, pages

    assert found() == ([4, 3, 2, 1], 1)
    assert found(limit=3)[0] == [4, 3, 2, 1]
    assert found(topic="order_created")[0] == [4, 3, 1]
    assert found(kind=ParcelKind.DEFER)[0] == [2]
    assert found(scope="1:-5:other")[0] == [3]
    assert found(scope="1:-4:acme")[0] == [4, 2, 1]  # one of them is its principal's
    assert found(error="warehouse")[0] == [4]
    assert found(error="WAREHOUSE")[0] == []
    assert found(older=3 * MINUTE)[0] == [4, 3]
    assert found(younger=3 * MINUTE)[0] == [2, 1]
    # A page that looks at two letters finds the one that fits on a later page.
    assert found(looked=2, topic="send_refund") == ([2], 3)


def test_a_record_is_found_by_its_incarnation(world):
    wanted = put(world, State.COMPLETED, 1)
    put(world, State.COMPLETED, 2, incarnation=uuid.uuid4())
    part = world.go(world.store.survey.walk(Walk(states=(State.COMPLETED,), incarnation=wanted.incarnation), 5))
    assert numbers(part.records) == [1]


def test_empty_store_returns_the_time_and_no_records(world):
    part = world.go(world.store.survey.walk(Walk(), 10))
    assert (part.now, part.records, dict(part.further), part.broken_off) == (NOW, (), {}, False)
    tally = world.go(world.store.survey.tally())
    assert tally.now == NOW
    assert tally.of("unknown").found == tally.of("dead").found == 0
    assert world.go(world.store.survey.ended(10)) == ()
    assert world.go(world.store.survey.notes(10)).entries == ()


def test_search_finds_whole_keys_and_prefixes_of_unfinished_ones(world):
    put(world, State.COMPLETED, 11)
    put(world, State.UNKNOWN, 12)
    survey = world.store.survey
    assert numbers(world.go(survey.named("key-0011", None, 5)).records) == [11]
    assert numbers(world.go(survey.named("key-", None, 5)).records) == [12]
    assert world.go(survey.named("key-0011", "1:-5:other", 5)).records == ()


def test_tenant_includes_its_principals_and_no_other_tenant(world):
    acme, ann, bob = "1:-4:acme", "1:-4:acme9:principal3:ann", "1:-4:acme9:principal3:bob"
    for number, scope in enumerate((acme, ann, "1:-5:acme9", "1:-4:acm9", "4:live4:acme", bob), start=1):
        put(world, State.UNKNOWN, number, scope=scope)
        put(world, State.COMPLETED, 9, scope=scope)
    survey, operate = world.store.survey, world.store.operate

    def named(key, scope):
        pages = [world.go(part.named(key, scope, 9)).records for part in (survey, operate)]
        assert pages[0] == pages[1]
        return sorted(one.id.scope for one in pages[0])

    for scope, found in ((acme, [1, 2, 6]), (ann, [2]), ("1:-3:acm", [])):
        assert numbers(all_of(world, Walk(states=(State.UNKNOWN,), scope=scope), 10)[0]) == found
        assert numbers(world.go(operate.search(Search(scope=scope, state=State.UNKNOWN), 10)).records) == found
    assert named("key-0009", acme) == [acme]  # the tenant's own key, if it has one
    assert named("key-0002", acme) == named("key-000", ann) == [ann]
    assert named("key-0009", "1:-4:acme9:principal") == [ann, bob]
    assert named("key-0007", acme) == []
    assert named("key-0", acme) == [acme, ann, bob]


def test_tally_counts_unresolved_work_with_its_oldest_time(world):
    put(world, State.UNKNOWN, 5)
    put(world, State.UNKNOWN, 9)
    put(world, State.IN_PROGRESS, 1, lease_until=NOW - SECOND)
    put(world, State.IN_PROGRESS, 2, lease_until=NOW + SECOND)
    put(world, State.FAILED_RETRYABLE, 3)
    pending = a_row(State.PENDING, Effects.OUTBOX)
    write(world, pending, a_parcel(pending), dead=False)
    lost = a_row(State.UNKNOWN, Effects.OUTBOX, created_at=NOW - MINUTE)
    write(world, lost, a_parcel(lost))
    tally = world.go(world.store.survey.tally())
    counted = {name: (one.found, one.oldest) for name, one in tally.counts.items() if one.found}
    assert counted == {
        "unknown": (3, NOW - 9 * MINUTE),
        "in_progress": (2, NOW - 2 * MINUTE),
        "stuck": (1, NOW - SECOND),
        "failed_retryable": (1, NOW - 3 * MINUTE),
        "pending": (1, pending.created_at),
        "due": (1, NOW),
        "dead": (1, NOW),
    }
    assert not tally.of("unknown").more


def test_ended_lists_outcome_and_duration_of_requests(world):
    put(world, State.COMPLETED, 1, last_run_at=NOW - 3 * SECOND, finished_at=NOW - SECOND)
    put(world, State.COMPLETED, 2, outcome=Outcome.FAILURE, response=StoredResponse(402, (), b"no"))
    put(world, State.UNKNOWN, 3, last_run_at=NOW - MINUTE)
    put(world, State.IN_PROGRESS, 4)
    ends = world.go(world.store.survey.ended(10))
    assert [(one.state, one.outcome) for one in ends] == [
        (State.COMPLETED, Outcome.SUCCESS),
        (State.COMPLETED, Outcome.FAILURE),
        (State.UNKNOWN, None),
    ]
    assert (ends[0].at, ends[0].took) == (NOW - SECOND, 2 * SECOND)
    assert ends[2].at == NOW - MINUTE


def test_record_view_includes_its_evidence_and_parcels(world):
    record = a_row(State.UNKNOWN, Effects.OUTBOX, intent=an_intent())
    dead, ready = a_parcel(record), a_parcel(record, ParcelKind.EMIT)
    write(world, record, dead)
    world.go(_alone(world, lambda: world.store.outbox.putting((ready,))))
    reconcile, survey = world.store.reconcile, world.store.survey
    call = AnnouncedCall(record.id, record.incarnation, "pay", "charge", "dk-9", None, 0)
    assert world.go(reconcile.add_call(call))
    assert world.go(reconcile.name(call, "ch_9"))
    by_key, _ = world.go(reconcile.add(CallReport("hook", "e1", "{}", downstream_key="dk-9")))
    world.go(reconcile.store_verdict(by_key, EvidenceVerdict.SETTLED))
    world.go(reconcile.add(CallReport("hook", "e2", "{}", provider_id="ch_9")))
    world.go(reconcile.add(CallReport("hook", "e3", "{}", downstream_key="another")))

    (found,) = world.go(survey.calls(record.incarnation))
    assert (found.phase, found.downstream_key, found.provider_id) == ("charge", "dk-9", "ch_9")
    report = world.go(survey.reports_about(("dk-9",), ("ch_9",)))
    assert [(one.report.event_id, one.verdict) for one in report] == [("e1", EvidenceVerdict.SETTLED), ("e2", None)]
    parcels = {one.kind: one for one in world.go(survey.parcels(record.incarnation))}
    assert parcels[ParcelKind.DEFER].is_dead
    assert parcels[ParcelKind.DEFER].last_error == "call_uncertain"
    assert not parcels[ParcelKind.EMIT].is_dead
    assert parcels[ParcelKind.EMIT].payload == ready.payload


def test_audit_log_is_listed_newest_first(world):
    record = a_row(State.UNKNOWN)
    for number in range(9):
        actor = Actor.OPERATOR if number in {1, 7} else Actor.SWEEPER
        note = Note.of(record, State.COMPLETED, Trigger.EXECUTED, Mover(actor, "ann"), str(number))
        world.go(_alone(world, lambda note=note: world.store.audit.noting((note,))))
    survey, said, before = world.store.survey, [], None
    while True:
        lines = world.go(survey.notes(4, before))
        said += [one.note.why for one in lines.entries]
        before = lines.further
        if before is None:
            break
    assert said == list("876543210")
    assert [one.note.why for one in world.go(survey.notes(4, None, Actor.OPERATOR)).entries] == ["7", "1"]
    few = world.go(survey.notes(4, None, Actor.OPERATOR, looked=3))
    assert [one.note.why for one in few.entries] == ["7"]
    assert few.further is not None


def test_two_tenants_with_the_same_key_are_two_records(world):
    record = a_row(State.UNKNOWN, id=RecordId(scope_of("-", "a"), "same"))
    write(world, record)
    write(world, replace(record, id=RecordId(scope_of("-", "b"), "same"), incarnation=uuid.uuid4()))
    assert len(all_of(world, Walk(), 1)[0]) == 2


def _alone(world, body):
    return (yield Transaction("test", Mode.ATOMIC, body))
