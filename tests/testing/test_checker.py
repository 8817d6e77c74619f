"""The checker itself: a good history passes, and each kind of violation is recognised on a history made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oncekey.core.model import Code
from oncekey_demo.checker import LOOKS, Rule, check
from oncekey_demo.history import ClientOperation, ClientSaw, Effect, Final, History, Lapse, LapseSighting, Proof, Write

SCOPE, KEY = "tenant", "key"
A, B = "body-a", "body-b"
ONE, TWO = "1111aaaa", "2222bbbb"
TTL = 1_000
ANSWER = b"made"


def op(name: str, invoked: int, ended: int | None, kind: ClientSaw = ClientSaw.OK, **more) -> ClientOperation:
    if kind is ClientSaw.OK:
        more = {"status": 201, "body": ANSWER, "incarnation": ONE, **more}
    body = more.pop("fingerprint", A)
    return ClientOperation(name, SCOPE, KEY, body, invoked, ended, kind, **more)


def effect(name: str, at: int, **more) -> Effect:
    body = more.pop("fingerprint", A)
    return Effect(name, SCOPE, KEY, body, at, **{"operation": "first", "incarnation": ONE, **more})


def write(at: int, state: str | None, fence: int = 1, version: int = 1, **more) -> Write:
    """A write by a stranger who saw the version before, or a claim, unless told otherwise."""
    claim = version == 1
    proof = {"proof": Proof.NO_ROW} if claim else {"proof": Proof.VERSION, "proven_version": version - 1}
    given = {"incarnation": ONE, "fingerprint": A, "now": at, "elapsed": at, "ttl": TTL, **proof, **more}
    given.setdefault("name", state or "purge")
    given.setdefault("proven_incarnation", given["incarnation"])
    if given["proof"] is Proof.OWNER:
        given.setdefault("proven_fence", fence)
    return Write(at, SCOPE, KEY, state, fence=fence, version=version, **given)


def settled(at: int, fence: int = 1, version: int = 2, **more) -> Write:
    more = {"proof": Proof.OWNER, "expires_at": at + TTL, **more}
    return write(at, "completed", fence, version, **more)


def record(state: str = "completed", **more) -> Final:
    return Final(SCOPE, KEY, **{"incarnation": ONE, "state": state, "status": 201, "body": ANSWER, **more})


GOOD = History(
    operations=(
        op("first", 1, 10),
        op("meanwhile", 3, 4, ClientSaw.FAIL, code=Code.IN_PROGRESS),
        op("other", 5, 6, ClientSaw.FAIL, code=Code.KEY_REUSED, fingerprint=B),
        op("retry", 11, 13, replayed=True),
        op("lost", 14, None, ClientSaw.INFO),
    ),
    business=(effect("row", 8),),
    writes=(write(2, "in_progress", operation="first", lease_until=60), settled(8)),
    records=(record(),),
    healed=True,
)


def broken(history: History) -> set[Rule]:
    return {violation.rule for violation in check(history)}


def sentences(rule: Rule, writes: tuple[Write, ...]) -> list[str]:
    """What is said of the writes, without the name of the statement."""
    return [found.sentence.partition(": ")[2] for found in check(History(writes=writes), frozenset({rule}))]


def but(**changes) -> History:
    return replace(GOOD, **changes)


def test_a_good_history_passes() -> None:
    assert check(GOOD) == ()


def test_a_history_without_the_stores_log_passes_too() -> None:
    """A black box shows answers and effects only."""
    nameless = tuple(replace(one, incarnation=None) for one in GOOD.operations)
    effects = tuple(replace(one, incarnation=None, operation=None) for one in GOOD.business)

    assert check(History(operations=nameless, ledger=effects)) == ()


def test_every_rule_is_looked_for() -> None:
    assert set(LOOKS) == set(Rule)


def test_two_effects_in_one_incarnation_are_detected() -> None:
    twice = (effect("row", 8), effect("row again", 9))

    assert broken(but(business=twice)) == {Rule.ONE_EFFECT}
    assert broken(but(business=(), ledger=twice)) == {Rule.ONE_EFFECT}
    assert broken(but(ledger=(effect("charge", 9),))) == {Rule.ONE_EFFECT}


def test_undone_effect_does_not_count() -> None:
    assert broken(but(ledger=(effect("charge", 7, undone=True),))) == set()


def test_two_effects_are_detected_without_store_log() -> None:
    effects = (effect("charge", 8, incarnation=None), effect("charge again", 9, incarnation=None))

    assert broken(History(ledger=effects, operations=(op("first", 1, 10, incarnation=None),))) == {Rule.ONE_EFFECT}


def test_success_without_effect_is_detected() -> None:
    assert broken(but(business=())) == {Rule.NO_LOST_ACK}


def test_response_missing_from_its_record_is_detected() -> None:
    assert broken(but(records=(record("failed_retryable"),))) == {Rule.NO_LOST_ACK, Rule.TRUTH}
    assert broken(but(records=())) == {Rule.NO_LOST_ACK}


def test_response_changed_in_its_record_is_detected() -> None:
    assert broken(but(records=(record(body=b"other"),))) == {Rule.NO_LOST_ACK}


def test_two_responses_in_one_incarnation_are_detected() -> None:
    other = op("retry", 11, 13, replayed=True, body=b"made otherwise")

    assert Rule.ONE_ANSWER in broken(but(operations=(GOOD.operations[0], other)))


def test_two_first_responses_are_detected() -> None:
    both = (op("first", 1, 10), op("second", 2, 11))

    assert broken(but(operations=both)) == {Rule.ONE_ANSWER}


def test_effect_without_a_request_is_detected() -> None:
    stranger = effect("charge", 8, fingerprint="body-c", incarnation=TWO)

    assert broken(but(ledger=(stranger,))) == {Rule.NO_PHANTOM}


def test_effect_before_its_request_is_detected() -> None:
    assert Rule.NO_PHANTOM in broken(but(business=(effect("row", 1),)))


def test_failed_operation_with_an_effect_is_detected() -> None:
    failed = op("first", 1, 10, ClientSaw.FAIL, code=Code.EXECUTION_FAILED)
    operations = (failed, *GOOD.operations[1:])

    assert broken(but(operations=operations)) == {Rule.NO_PHANTOM}


def test_replay_to_another_request_is_detected() -> None:
    operations = (*GOOD.operations, op("other", 20, 21, replayed=True, fingerprint=B))

    assert Rule.NO_PHANTOM in broken(but(operations=operations))


def test_effect_with_another_body_is_detected() -> None:
    operations = (*GOOD.operations, op("b", 1, None, ClientSaw.INFO, fingerprint=B))

    assert Rule.NO_PHANTOM in broken(but(operations=operations, business=(effect("row", 8, fingerprint=B),)))


def test_operation_that_conflicts_with_itself_is_detected() -> None:
    """The insert is repeated under another name, and the request conflicts with its own first try."""
    waits = op("first", 1, 10, ClientSaw.FAIL, code=Code.IN_PROGRESS)
    history = History(operations=(waits,), writes=(write(2, "in_progress", operation="first"),))

    assert broken(history) == {Rule.NO_PHANTOM}


def test_owner_after_a_takeover_may_receive_in_progress() -> None:
    waits = op("first", 1, 10, ClientSaw.FAIL, code=Code.IN_PROGRESS)
    writes = (
        write(2, "in_progress", operation="first", lease_until=4),
        write(5, "in_progress", 2, 2, operation="second"),
    )

    assert broken(History(operations=(waits,), writes=writes)) == set()


@pytest.mark.parametrize(
    "heard",
    [
        op("late", 20, 21, ClientSaw.FAIL, code=Code.IN_PROGRESS),
        op("late", 20, 21, ClientSaw.FAIL, code=Code.OUTCOME_UNKNOWN),
        op("late", 20, 21),
        op("late", 20, 21, replayed=True, incarnation=TWO),
    ],
    ids=["in progress", "unknown", "executed", "another life"],
)
def test_later_operation_without_the_stored_response_is_detected(heard: ClientOperation) -> None:
    assert Rule.REAL_TIME in broken(but(operations=(*GOOD.operations, heard)))


@pytest.mark.parametrize(
    "heard",
    [
        op("late", 20, 21, replayed=True),
        op("late", 20, 21, ClientSaw.FAIL, code=Code.STORE_UNAVAILABLE),
        op("late", 20, 21, ClientSaw.INFO),
        op("early", 9, 21, ClientSaw.FAIL, code=Code.IN_PROGRESS),
    ],
    ids=["replayed", "outage", "no reply", "at the same time"],
)
def test_allowed_responses_after_a_stored_response(heard: ClientOperation) -> None:
    assert broken(but(operations=(*GOOD.operations, heard))) == set()


def test_new_incarnation_after_expiry_is_independent() -> None:
    """TTL edge: the same key again, after its record expired and was reaped."""
    writes = (
        *GOOD.writes,
        write(2000, None, 1, 2, proven_version=2, proof=Proof.VERSION),
        write(2002, "in_progress", operation="again", incarnation=TWO),
        settled(2003, incarnation=TWO),
    )
    operations = (*GOOD.operations, op("again", 2001, 2004, incarnation=TWO))
    effects = (*GOOD.business, effect("row two", 2003, incarnation=TWO, operation="again"))
    records = (record(incarnation=TWO),)

    assert broken(but(writes=writes, operations=operations, business=effects, records=records)) == set()


@pytest.mark.parametrize(
    "heard",
    [
        op("b", 3, 4, ClientSaw.FAIL, code=Code.IN_PROGRESS, fingerprint=B),
        op("b", 3, 4, ClientSaw.FAIL, code=Code.OUTCOME_UNKNOWN, fingerprint=B),
        op("b", 11, 12, replayed=True, fingerprint=B),
    ],
    ids=["in flight", "unknown", "replayed"],
)
def test_another_body_accepted_by_a_live_record_is_detected(heard: ClientOperation) -> None:
    assert Rule.MISMATCH in broken(but(operations=(*GOOD.operations, heard)))


def test_another_body_before_the_record_is_not_a_mismatch() -> None:
    early = op("b", 1, 5, ClientSaw.FAIL, code=Code.IN_PROGRESS, fingerprint=B)

    assert broken(but(operations=(*GOOD.operations, early))) == set()


ILLEGAL = {
    "unknown -> in_progress in a new life is not a legal move": (
        write(2, "in_progress"),
        write(3, "unknown", 1, 2),
        write(9999, "in_progress", 2, 3, incarnation=TWO),
    ),
    "completed -> completed cannot be made by proving incarnation and fence": (*GOOD.writes, settled(20, 1, 3)),
    "completed -> no row cannot be made by proving incarnation and fence": (
        *GOOD.writes,
        write(20, None, 1, 2, proof=Proof.OWNER, proven_fence=1),
    ),
    "failed_retryable -> in_progress changed the fence from 1 to 1": (
        write(2, "failed_retryable"),
        write(3, "in_progress", 1, 2),
    ),
    "in_progress -> unknown changed the fence from 1 to 2": (
        write(2, "in_progress", lease_until=2),
        write(3, "unknown", 2, 2),
    ),
    "no row -> in_progress changed the fence from 0 to 3": (write(2, "in_progress", 3),),
    "in_progress -> in_progress changed the version from 1 to 1": (
        write(2, "in_progress"),
        write(3, "in_progress", 1, 1, proof=Proof.OWNER, proven_fence=1),
    ),
    "in_progress -> in_progress changed the fingerprint from body-a to body-b": (
        write(2, "in_progress", lease_until=2),
        write(3, "in_progress", 2, 2, fingerprint=B),
    ),
    "moved a record with a live lease": (write(2, "in_progress", lease_until=50), write(3, "in_progress", 2, 2)),
    "ended a life before it expired": (*GOOD.writes, write(20, None, 1, 2, proof=Proof.VERSION, proven_version=2)),
    "completed, but it expires before its time to live has passed": (
        write(2, "in_progress"),
        settled(5, expires_at=100),
    ),
    "in_progress -> no row cannot be made by proving incarnation and version": (
        write(2, "in_progress"),
        write(3, None, 1, 1, proof=Proof.VERSION, proven_version=1),
    ),
    "incarnation 1111aaaa began a second time": (
        *GOOD.writes,
        write(2000, None, 1, 2, proof=Proof.VERSION, proven_version=2),
        write(2001, "in_progress"),
    ),
}


@pytest.mark.parametrize(("sentence", "writes"), ILLEGAL.items(), ids=ILLEGAL.keys())
def test_illegal_transitions_are_detected(sentence: str, writes: tuple[Write, ...]) -> None:
    """R78: what is not a row of TRANSITIONS is not a legal move, and its proof and its moment count."""
    assert sentence in sentences(Rule.LEGAL, writes)


def test_clock_set_back_after_a_read_is_no_violation() -> None:
    taken = write(3, "in_progress", 2, 2, seen_at=60)

    assert broken(History(writes=(write(2, "in_progress", lease_until=50), taken))) == set()


UNFENCED = {
    "the owner of 1111aaaa/1 wrote to 1111aaaa/2": (
        write(2, "in_progress", lease_until=2),
        write(3, "in_progress", 2, 2),
        settled(5, 2, 3, proven_fence=1),
    ),
    "the owner of 2222bbbb/1 wrote to 1111aaaa/1": (write(2, "in_progress"), settled(5, proven_incarnation=TWO)),
    "another process that had read version 1111aaaa/1 wrote to 1111aaaa/2": (
        write(2, "in_progress", lease_until=2),
        settled(5),
        write(2000, "in_progress", 2, 3, incarnation=TWO, proven_incarnation=ONE, proven_version=1),
    ),
    "it proved incarnation and fence, but there was no row": (settled(5, version=1),),
    "a claim overwrote an existing row": (
        write(2, "in_progress"),
        write(3, "in_progress", 1, 2, proof=Proof.NO_ROW),
    ),
}


@pytest.mark.parametrize(("sentence", "writes"), UNFENCED.items(), ids=UNFENCED.keys())
def test_writes_without_proof_are_detected(sentence: str, writes: tuple[Write, ...]) -> None:
    assert sentence in sentences(Rule.FENCED, writes)


def test_log_without_proofs_skips_the_proof_check() -> None:
    writes = tuple(replace(one, proof=None, proven_fence=None, proven_version=None) for one in GOOD.writes)

    assert broken(but(writes=writes)) == set()


def test_response_deleted_too_early_by_the_store_clock_is_detected() -> None:
    """F41: the store's clock says that the time has come, and it has not."""
    reaped = write(5000, None, 1, 2, proof=Proof.VERSION, proven_version=2, elapsed=100)

    assert broken(History(writes=(*GOOD.writes, reaped))) == {Rule.KEPT}


def test_overlapping_handlers_and_waits_in_transactions_are_detected() -> None:
    for lapse, rule in ((Lapse.OVERLAP, Rule.ONE_RUNNER), (Lapse.HELD, Rule.EMPTY_HANDS)):
        assert broken(but(sightings=(LapseSighting(lapse, SCOPE, KEY, "first", 3),))) == {rule}


def test_expired_record_does_not_bind_later_operations() -> None:
    """In one commit nothing is written before the end, so the old row is there while its key is used anew."""
    writes = tuple(replace(one, expires_at=500) for one in GOOD.writes)
    late = op("late", 50, 60, kind=ClientSaw.FAIL, status=None, body=None, code=Code.IN_PROGRESS)

    assert Rule.REAL_TIME in broken(but(writes=writes, operations=(*GOOD.operations, replace(late, latest=499))))
    assert Rule.REAL_TIME not in broken(but(writes=writes, operations=(*GOOD.operations, replace(late, latest=500))))


def test_record_with_started_steps_denies_no_effect() -> None:
    done = effect("payment", 5)
    told = replace(record("failed_retryable", status=None, body=None), begun=True)
    assert broken(History(business=(done,), records=(told,), healed=True)) <= {Rule.NO_PHANTOM}


def test_unfinished_record_after_healing_is_detected() -> None:
    assert broken(History(records=(record("in_progress"),), healed=True)) == {Rule.PROGRESS}
    assert broken(History(records=(record("unknown"),), healed=True)) == {Rule.PROGRESS}
    assert broken(History(records=(record("unknown", ticket=True),), healed=True)) == set()
    assert broken(History(records=(record("in_progress"),))) == set()


def test_record_that_denies_an_effect_is_detected() -> None:
    operations = (op("first", 1, None, ClientSaw.INFO),)
    history = History(operations=operations, ledger=(effect("charge", 5),), records=(record("failed_retryable"),))

    assert broken(history) == {Rule.TRUTH}


def test_rules_can_be_chosen() -> None:
    both = but(business=(), records=())

    assert {one.rule for one in check(both, frozenset({Rule.ONE_EFFECT}))} == set()


def test_keys_are_checked_independently() -> None:
    elsewhere = replace(effect("row", 8), key="another")
    asked = replace(op("there", 1, 10), key="another")

    assert check(but(operations=(*GOOD.operations, asked), business=(*GOOD.business, elsewhere))) == ()


def test_violation_text_contains_its_history() -> None:
    (violation,) = check(but(business=(effect("row", 8), effect("row again", 9))))

    text = str(violation)
    assert text.startswith(
        "S1 at most one effect: key 'key' of 'tenant': life 1111aaaa was executed 2 times: row, row again"
    )
    assert "first sent with body-a" in text
    assert "business row committed: row again for body-a by first" in text
    assert "first got ok: 201 b'made'" in text
    assert "completed: completed, incarnation 1111aaaa fence 1 version 2" in text
