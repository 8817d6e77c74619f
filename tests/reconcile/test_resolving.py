"""What a resolver's answers do, for every kind of effects, and from when on "not executed" is believed."""

from __future__ import annotations

import asyncio
import json

import pytest

from oncekey.core.errors import ResultNotStorableError
from oncekey.core.model import (
    HOUR,
    MINUTE,
    SECOND,
    Completed,
    Doubtful,
    Effects,
    EntryKind,
    MemoEntry,
    Outcome,
    Recovery,
    State,
    StoredResponse,
)
from oncekey.core.operate import Forbidden, OperatorCommand, Order, Search
from oncekey.core.policy import Policy
from oncekey.core.resolution import EXHAUSTED, EvidenceVerdict
from oncekey.core.resolvers import Executed, NotExecuted, Rejected, Resolvers, Undecided
from oncekey.core.topics import Reply
from oncekey.core.transitions import Actor, Mover
from oncekey.engine import operate, reconcile
from oncekey.engine.reconcile import EvidenceEffect, EvidenceTarget
from oncekey.ops.stats import Roll
from oncekey.testing.claims import LEASE, a_claim, again, answered
from reconcile.doubts import (
    CALL,
    KINDS,
    a_reconciler,
    announced,
    history,
    inline,
    key_of,
    outbox,
    parked,
    phased,
    receive,
    report,
    resolving,
    taken_up,
)

WAIT = {"inline": 6 * MINUTE, "phased": (5 + 30 + 60) * SECOND, "outbox": (5 + 30 + 60) * SECOND}
"""U1: INLINE max(lease, 5 min) and the provider's lag; else what may still be sent, answered and shown."""


def given(kind, status=201):
    return {"id": "ch_1"} if kind == "phased" else Reply(status, {"id": "ch_1"})


@pytest.mark.parametrize("kind", KINDS)
async def test_an_executed_call_settles_the_record_at_once(world, kind):  # R107, R137, R144, H5
    claim = KINDS[kind](world)
    resolvers, asked = resolving(Executed(given(kind), provider_id="ch_1"))
    assert await a_reconciler(world, resolvers).run_once() == 1
    record = world.record(claim.id)
    if kind == "phased":
        assert (record.state, record.memo[-1].name) == (State.FAILED_RETRYABLE, CALL)
        assert json.loads(record.memo[-1].result) == {"id": "ch_1"}
        assert record.intent is None
    else:
        assert (record.state, record.outcome, record.response.status) == (State.COMPLETED, Outcome.SUCCESS, 201)
        assert world.begin(again(claim)).record.response.body == b'{"id":"ch_1"}'
    assert [question.downstream_key for question in asked] == [key_of(claim)]
    assert asked[0].payload == ({"amount": 7} if kind == "outbox" else None)
    assert world.go(world.store.outbox.dead_letters(10)) == ()
    assert history(world, claim)[-1] == (Actor.RESOLVER, record.state)
    if kind != "inline":
        (call,) = world.go(world.store.reconcile.calls_of(None, "ch_1"))
        assert (call.incarnation, call.phase) == (claim.incarnation, CALL)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_rejected_call_is_stored_as_the_outcome(world, kind):  # R107, R144
    claim = KINDS[kind](world)
    resolvers, _ = resolving(Rejected({"why": "card"}))
    assert await a_reconciler(world, resolvers).run_once() == 1
    record = world.record(claim.id)
    if kind == "phased":
        assert record.memo[-1].result == '{"$":"rejected","v":{"why":"card"}}'
    else:
        assert (record.outcome, record.response.status) == (Outcome.FAILURE, 402)


@pytest.mark.parametrize("kind", KINDS)
async def test_not_executed_is_accepted_only_after_the_wait(world, kind):  # R107, R141, R144, U1, F34
    claim = KINDS[kind](world)
    resolvers, asked = resolving(NotExecuted())
    reconciler = a_reconciler(world, resolvers)
    assert await reconciler.run_once() == 0
    record = world.record(claim.id)
    assert (record.state, record.reconcile_tries) == (State.UNKNOWN, 0)  # asked too early is no vain try
    world.advance(WAIT[kind] - SECOND)
    assert await reconciler.run_once() == 0
    world.advance(2 * SECOND)
    assert await reconciler.run_once() == 1
    to = State.PENDING if kind == "outbox" else State.FAILED_RETRYABLE
    assert (world.record(claim.id).state, world.record(claim.id).intent) == (to, None)
    assert len(asked) == 2  # nobody asks in vain while it waits
    if kind == "outbox":  # O2: its item is due again, its handler never runs again
        (held,) = world.go(world.store.outbox.due("next", (CALL,), 10, LEASE))
        assert held.parcel.downstream_key == key_of(claim)


@pytest.mark.parametrize("kind", KINDS)
async def test_not_executed_with_a_closed_reference_needs_no_wait(world, kind):  # U1
    claim = KINDS[kind](world)
    resolvers, _ = resolving(NotExecuted(closed=True))
    assert await a_reconciler(world, resolvers).run_once() == 1
    assert world.record(claim.id).state in {State.FAILED_RETRYABLE, State.PENDING}


async def test_a_new_reconciler_waits_by_its_own_clock(world):  # U1, ADR 0009
    claim = phased(world)
    boot = [0]
    resolvers, _ = resolving(NotExecuted())
    reconciler = a_reconciler(world, resolvers, clock=lambda: boot[0])
    world.advance(60 * MINUTE)  # the store's clock jumped, and nobody has waited
    assert await reconciler.run_once() == 0
    world.advance(2 * MINUTE)
    assert await reconciler.run_once() == 0
    boot[0] = 2 * MINUTE
    world.advance(2 * MINUTE)
    assert await reconciler.run_once() == 1
    assert world.record(claim.id).state is State.FAILED_RETRYABLE


async def test_a_query_started_before_the_wait_is_ignored(world):  # F34
    claim = phased(world)
    resolvers, _ = resolving(NotExecuted())
    reconciler = a_reconciler(world, resolvers)
    await reconciler.run_once()
    world.advance(WAIT["phased"] - SECOND)

    def slowly(_):
        world.advance(10 * MINUTE)
        return NotExecuted()

    slow, _ = resolving(slowly)
    reconciler._resolvers = slow
    with_wait = world.record(claim.id)
    assert world.go(world.store.reconcile.later(with_wait, 0, counted=False))
    assert await reconciler.run_once() == 0
    assert world.record(claim.id).state is State.UNKNOWN


async def test_a_late_call_during_the_wait_is_found(world):  # F34
    """The owner stands still between its intent and its send; whoever looks meanwhile sees nothing at the provider."""
    claim, lease = announced(world)
    sent = []
    resolvers, _ = resolving(lambda _: Executed({"id": sent[0]}) if sent else NotExecuted())
    world.advance(6 * MINUTE)
    assert world.go(world.store.mark_unknown(world.record(claim.id), "in_progress_lock_expired"))
    reconciler = a_reconciler(world, resolvers)
    assert await reconciler.run_once() == 0
    sent.append("ch_late")  # it wakes up and sends, as late as it pleases
    world.advance(WAIT["phased"])
    assert await reconciler.run_once() == 1
    record = world.record(claim.id)
    assert json.loads(record.memo[-1].result) == {"id": "ch_late"}
    # U2: it is the same fence, and what it brings is what is there already.
    assert world.go(world.store.phases.result(lease, (), record.memo, LEASE)) is not None


async def test_a_late_owner_may_still_store_its_result(world):  # U2, F35
    claim, lease = announced(world)
    world.advance(6 * MINUTE)
    assert world.go(world.store.mark_unknown(world.record(claim.id), "in_progress_lock_expired"))
    memo = (MemoEntry(CALL, EntryKind.CALL, '{"id":"ch_owner"}'),)
    assert world.go(world.store.phases.result(lease, (), memo, LEASE)) is not None
    resolvers, asked = resolving(Executed({"id": "ch_resolver"}))
    assert await a_reconciler(world, resolvers).run_once() == 0
    assert asked == []
    assert world.settle(lease, answered()).ours
    assert world.record(claim.id).memo == memo


async def test_a_failing_resolver_backs_off_and_gives_up(world):  # R137, R138, R143
    claim = inline(world)
    resolvers, asked = resolving(RuntimeError("the provider is down"))
    policy = Policy(reconcile_max_tries=4, reconcile_interval=10)
    reconciler = a_reconciler(world, resolvers, policy)
    pauses = []
    for _ in range(3):
        before = world.clock()
        await reconciler.run_once()
        record = world.record(claim.id)
        pauses.append((record.reconcile_after - before) // SECOND)
        world.advance(record.reconcile_after - before)
    assert pauses == [10, 20, 40]
    await reconciler.run_once()
    record = world.record(claim.id)
    assert (record.state, record.reconcile_tries, record.reconcile_after) == (State.UNKNOWN, 4, None)
    assert record.last_error == "time_out"  # what is wrong with the operation itself is kept
    notes = world.go(world.store.audit.history(claim.id))
    assert notes[-1].note.why == f"{EXHAUSTED}: RuntimeError"
    world.advance(60 * MINUTE)
    assert await reconciler.run_once() == 0
    assert len(asked) == 4
    # From now on it is an operator's, and stays where operators look.
    page = world.go(world.store.operate.search(Search(state=State.UNKNOWN), 10))
    assert [one.id for one in page.records] == [claim.id]


async def test_an_operator_settlement_wins_over_the_resolver(world):  # R145
    claim = inline(world)
    command = OperatorCommand(Order.EXECUTED, "seen at the provider", answer=answered())

    def by_hand(_):
        world.go(operate.act(world.store, claim.id, command, Mover(Actor.OPERATOR, "anna")))
        return Rejected()

    resolvers, _ = resolving(by_hand)
    assert await a_reconciler(world, resolvers).run_once() == 0
    assert world.record(claim.id).response == answered().response
    assert history(world, claim) == [(Actor.OPERATOR, State.COMPLETED)]


async def test_an_invalid_resolver_result_is_retried(world):  # H5
    claim = phased(world)
    resolvers, _ = resolving(Executed(Reply(201, {})))
    assert await a_reconciler(world, resolvers).run_once() == 0
    assert (world.record(claim.id).state, world.record(claim.id).reconcile_tries) == (State.UNKNOWN, 1)


async def test_records_without_a_resolver_do_not_block_others(world):
    strangers = [inline(world, key=f"stranger-{n:020}") for n in range(3)]
    resolvers, _ = resolving(Executed(Reply(201, {})))
    mine = inline(world)
    none = Resolvers()
    assert await a_reconciler(world, none, page=2).run_once() == 0
    assert await a_reconciler(world, resolvers, page=2).run_once() == 4
    assert {world.record(claim.id).state for claim in (*strangers, mine)} == {State.COMPLETED}


async def test_two_reconcilers_settle_a_record_once(world):  # R145
    claim = outbox(world)
    resolvers, _ = resolving(Executed(Reply(201, {"id": "ch_1"})))
    one, two = a_reconciler(world, resolvers), a_reconciler(world, resolvers)
    assert sum(await asyncio.gather(one.run_once(), two.run_once())) == 1
    assert len(history(world, claim)) == 2  # parked by the worker, settled by one of them


async def test_an_undecided_result_counts_as_a_try(world):
    claim = inline(world)
    resolvers, _ = resolving(Undecided("pending at the provider"))
    await a_reconciler(world, resolvers).run_once()
    assert world.record(claim.id).reconcile_tries == 1


@pytest.mark.parametrize("kind", ["inline", "outbox"])
async def test_the_response_is_built_from_the_webhooks_object(world, kind):  # R136
    claim = KINDS[kind](world)

    def answer(question, charge):
        return Reply(201, {"charge": charge["id"], "payload": question.payload, "key": question.downstream_key})

    resolvers, asked = resolving(Undecided(), answer=answer)
    received = receive(world, claim, Executed({"id": "ch_1"}), resolvers=resolvers)
    assert received.became is EvidenceEffect.SETTLED
    record = world.record(claim.id)
    payload = {"amount": 7} if kind == "outbox" else None
    assert json.loads(record.response.body) == {"charge": "ch_1", "payload": payload, "key": key_of(claim)}
    assert (record.response.status, asked) == (201, [])
    assert world.go(world.store.outbox.dead_letters(10)) == ()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("refused_call", [False, True], ids=["executed", "refused"])
def test_an_operator_cannot_contradict_a_report_that_was_not_applied(world, kind, refused_call, monkeypatch):
    # the webhook came before its record was unknown, and no worker has run since: "not executed" would send it again
    claim = KINDS[kind](world)
    monkeypatch.setattr(Roll, "inline_calls", lambda roll, operation: (CALL,))
    said = Rejected({"no": 1}) if refused_call else Executed({"id": "ch_1"})
    world.go(world.store.reconcile.add(report(claim, said)))
    state = world.record(claim.id).state
    answer = Completed(StoredResponse(201, (), b""), Outcome.SUCCESS)
    refusal = Completed(StoredResponse(402, (), b""), Outcome.FAILURE)
    phase = kind == "phased"
    commands = [
        OperatorCommand(Order.NOT_EXECUTED, "a guess", closed=True),
        OperatorCommand(Order.EXECUTED, "a guess", answer=None if phase else answer, result='"x"' if phase else None)
        if refused_call
        else OperatorCommand(
            Order.DECLINED, "a guess", answer=None if phase else refusal, result='"x"' if phase else None
        ),
        *([OperatorCommand(Order.RETRY, "a guess", closed=True)] if kind == "outbox" else []),
    ]
    for command in commands:
        done = world.go(operate.act(world.store, claim.id, command, Mover(Actor.OPERATOR, "ann")))
        assert isinstance(done, Forbidden)
        wanted = "refused" if refused_call else "executed"
        assert f"that the provider {wanted} the call, and this report has not been applied yet" in done.why
    assert world.record(claim.id).state is state


async def test_an_early_webhook_settles_an_inline_call_later(world):  # U3, F36
    claim = a_claim(effects=Effects.INLINE, recovery=Recovery.UNKNOWN, operation="pay")
    lease = world.owned(claim)
    resolvers, asked = resolving(Undecided())
    assert receive(world, claim, Executed(Reply(201, {"id": 1})), resolvers=resolvers).became is EvidenceEffect.KEPT
    assert world.settle(lease, Doubtful("time_out")).ours
    assert await a_reconciler(world, resolvers).run_once() == 1
    assert (world.record(claim.id).state, asked) == (State.COMPLETED, [])


async def test_evidence_of_an_earlier_call_is_not_applied(world):  # F1
    claim = phased(world)
    receive(world, claim, Undecided("pending"), "evt_0")
    assert receive(world, claim, Executed({"id": "ch_old"}), provider_id="nobody").became is EvidenceEffect.KEPT
    world.advance(SECOND)
    other = phased(world)
    assert await a_reconciler(world).run_once() == 0
    assert {world.record(one.id).state for one in (claim, other)} == {State.UNKNOWN}


async def test_executed_evidence_for_a_released_record_contradicts(world, caplog):  # F35
    claim = inline(world)
    resolvers, _ = resolving(NotExecuted(closed=True))
    assert await a_reconciler(world, resolvers).run_once() == 1
    assert world.record(claim.id).state is State.FAILED_RETRYABLE
    target = EvidenceTarget(claim.id, claim.incarnation, CALL, key_of(claim))
    verdict = world.go(reconcile.compared(world.store, target, Executed()))
    assert verdict is EvidenceVerdict.CONTRADICTS


async def test_old_evidence_is_deleted_but_calls_of_live_records_stay(world):
    claim, other = phased(world), phased(world)
    receive(world, claim, Executed({"id": "ch_1"}))
    world.advance(100 * 24 * HOUR)
    receive(world, other, Undecided(), "evt_new")
    port = world.store.reconcile
    assert world.go(port.forget(90 * 24 * HOUR, 100)) == 1
    assert len(world.go(port.calls(0, 10))) == 2
    assert [one.report.event_id for one in world.go(port.undecided(10))] == ["evt_new"]


async def test_a_concurrent_state_change_keeps_the_webhook_as_evidence(world):  # U3
    claim, taken = taken_up(world)
    resolvers, _ = resolving(Undecided(), answer=lambda _, charge: Reply(201, {"made_of": charge["id"]}))
    world.before("operate", lambda: parked(world, taken))
    assert receive(world, claim, Executed({"id": "ch_1"}), resolvers=resolvers).became is EvidenceEffect.KEPT
    assert world.record(claim.id).state is State.IN_PROGRESS  # whoever only looks moves nothing
    world._before.clear()
    parked(world, taken)
    assert await a_reconciler(world, resolvers).run_once() == 1
    response = world.record(claim.id).response
    assert (response.status, response.body) == (201, b'{"made_of":"ch_1"}')


class PanicException(BaseException):
    pass


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_panicking_resolver_affects_only_its_record(world, caplog, blocking):
    broken, fine = phased(world), phased(world)
    resolvers = Resolvers()

    def answer(question):
        if question.downstream_key == key_of(broken):
            raise PanicException("index out of bounds")
        return Executed({"id": "ch_1"})

    async def resolve(question):
        return answer(question)

    resolvers.resolver("pay")(answer if blocking else resolve)
    reconciler = a_reconciler(world, resolvers)
    assert await reconciler.run_once() == 1
    assert [world.record(one.id).state for one in (broken, fine)] == [State.UNKNOWN, State.FAILED_RETRYABLE]
    assert (reconciler.failed, reconciler.counts["postponed"]) == (1, 1)
    assert "the resolver of pay failed with PanicException" in caplog.text


async def test_a_failing_record_does_not_block_the_reconciler(world, monkeypatch, caplog):
    broken, fine = phased(world), phased(world)
    resolvers, _ = resolving(Executed({"id": "ch_1"}))
    reconciler = a_reconciler(world, resolvers, page=1)
    tend = reconciler._tend

    async def tended(record, at):
        if record.id == broken.id:
            raise PanicException("index out of bounds")
        await tend(record, at)

    monkeypatch.setattr(reconciler, "_tend", tended)
    assert await reconciler.run_once() == 1
    assert world.record(fine.id).state is State.FAILED_RETRYABLE
    assert "failed with PanicException" in caplog.text


async def test_a_panicking_response_builder_keeps_the_evidence(world):
    def panics(*_):
        raise PanicException("index out of bounds")

    claim = phased(world)
    resolvers, _ = resolving(Undecided(), answer=panics)
    with pytest.raises(ResultNotStorableError, match="PanicException"):
        receive(world, claim, Executed({"id": "ch_1"}), resolvers=resolvers)
    assert world.record(claim.id).state is State.UNKNOWN
    reconciler = a_reconciler(world, resolvers)
    assert await reconciler.run_once() == 0
    assert reconciler.failed > 0
