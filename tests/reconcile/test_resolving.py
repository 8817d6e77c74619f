"""What a resolver's answers do, for every kind of effects, and from when on "not executed" is believed."""

from __future__ import annotations

import asyncio
import json

import pytest

from oncekey.core.errors import ResultNotStorableError
from oncekey.core.model import HOUR, MINUTE, SECOND, Doubtful, Effects, EntryKind, MemoEntry, Outcome, Recovery, State
from oncekey.core.operate import OperatorCommand, Order, Search
from oncekey.core.policy import Policy
from oncekey.core.resolution import EXHAUSTED, EvidenceVerdict
from oncekey.core.resolvers import Executed, NotExecuted, Rejected, Resolvers, Undecided
from oncekey.core.topics import Reply
from oncekey.core.transitions import Actor, Mover
from oncekey.engine import operate, reconcile
from oncekey.engine.reconcile import Became, EvidenceTarget
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
    resolving,
    taken_up,
)

WAIT = {"inline": 6 * MINUTE, "phased": (5 + 30 + 60) * SECOND, "outbox": (5 + 30 + 60) * SECOND}
"""U1: INLINE max(lease, 5 min) and the provider's lag; else what may still be sent, answered and shown."""


def given(kind, status=201):
    return {"id": "ch_1"} if kind == "phased" else Reply(status, {"id": "ch_1"})


@pytest.mark.parametrize("kind", KINDS)
async def test_what_was_executed_is_answered_at_once(world, kind):  # R107, R137, R144, H5
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
async def test_what_was_declined_is_the_answer_from_now_on(world, kind):  # R107, R144
    claim = KINDS[kind](world)
    resolvers, _ = resolving(Rejected({"why": "card"}))
    assert await a_reconciler(world, resolvers).run_once() == 1
    record = world.record(claim.id)
    if kind == "phased":
        assert record.memo[-1].result == '{"$":"rejected","v":{"why":"card"}}'
    else:
        assert (record.outcome, record.response.status) == (Outcome.FAILURE, 402)


@pytest.mark.parametrize("kind", KINDS)
async def test_not_executed_is_believed_only_by_who_asked_after_the_wait(world, kind):  # R107, R141, R144, U1, F34
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
async def test_a_reference_that_was_closed_needs_no_wait(world, kind):  # U1
    claim = KINDS[kind](world)
    resolvers, _ = resolving(NotExecuted(closed=True))
    assert await a_reconciler(world, resolvers).run_once() == 1
    assert world.record(claim.id).state in {State.FAILED_RETRYABLE, State.PENDING}


async def test_who_has_just_begun_to_look_waits_by_its_own_clock(world):  # U1, ADR 0009
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


async def test_a_question_that_began_before_the_wait_was_over_proves_nothing(world):  # F34
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


async def test_a_paused_owner_that_sends_late_is_not_overtaken(world):  # F34
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


async def test_a_late_owner_still_counts(world):  # U2, F35
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


async def test_who_is_asked_in_vain_is_asked_ever_more_slowly_and_at_last_no_more(world):  # R137, R138, R143
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


async def test_an_operator_and_a_resolver_settle_by_the_same_move(world):  # R145
    claim = inline(world)
    command = OperatorCommand(Order.EXECUTED, "seen at the provider", answer=answered())

    def by_hand(_):
        world.go(operate.act(world.store, claim.id, command, Mover(Actor.OPERATOR, "anna")))
        return Rejected()

    resolvers, _ = resolving(by_hand)
    assert await a_reconciler(world, resolvers).run_once() == 0
    assert world.record(claim.id).response == answered().response
    assert history(world, claim) == [(Actor.OPERATOR, State.COMPLETED)]


async def test_an_answer_that_does_not_fit_is_asked_for_again(world):  # H5
    claim = phased(world)
    resolvers, _ = resolving(Executed(Reply(201, {})))
    assert await a_reconciler(world, resolvers).run_once() == 0
    assert (world.record(claim.id).state, world.record(claim.id).reconcile_tries) == (State.UNKNOWN, 1)


async def test_a_page_of_what_nobody_can_ask_about_hides_nothing(world):
    strangers = [inline(world, key=f"stranger-{n:020}") for n in range(3)]
    resolvers, _ = resolving(Executed(Reply(201, {})))
    mine = inline(world)
    none = Resolvers()
    assert await a_reconciler(world, none, page=2).run_once() == 0
    assert await a_reconciler(world, resolvers, page=2).run_once() == 4
    assert {world.record(claim.id).state for claim in (*strangers, mine)} == {State.COMPLETED}


async def test_two_reconcilers_settle_it_once(world):  # R145
    claim = outbox(world)
    resolvers, _ = resolving(Executed(Reply(201, {"id": "ch_1"})))
    one, two = a_reconciler(world, resolvers), a_reconciler(world, resolvers)
    assert sum(await asyncio.gather(one.run_once(), two.run_once())) == 1
    assert len(history(world, claim)) == 2  # parked by the worker, settled by one of them


async def test_undecided_is_no_answer(world):
    claim = inline(world)
    resolvers, _ = resolving(Undecided("pending at the provider"))
    await a_reconciler(world, resolvers).run_once()
    assert world.record(claim.id).reconcile_tries == 1


@pytest.mark.parametrize("kind", ["inline", "outbox"])
async def test_a_webhook_brings_the_providers_object_and_the_operation_its_answer(world, kind):  # R136
    claim = KINDS[kind](world)

    def answer(question, charge):
        return Reply(201, {"charge": charge["id"], "payload": question.payload, "key": question.downstream_key})

    resolvers, asked = resolving(Undecided(), answer=answer)
    received = receive(world, claim, Executed({"id": "ch_1"}), resolvers=resolvers)
    assert received.became is Became.SETTLED
    record = world.record(claim.id)
    payload = {"amount": 7} if kind == "outbox" else None
    assert json.loads(record.response.body) == {"charge": "ch_1", "payload": payload, "key": key_of(claim)}
    assert (record.response.status, asked) == (201, [])
    assert world.go(world.store.outbox.dead_letters(10)) == ()


async def test_an_early_word_about_an_inline_call_is_found_when_it_is_needed(world):  # U3, F36
    claim = a_claim(effects=Effects.INLINE, recovery=Recovery.UNKNOWN, operation="pay")
    lease = world.owned(claim)
    resolvers, asked = resolving(Undecided())
    assert receive(world, claim, Executed(Reply(201, {"id": 1})), resolvers=resolvers).became is Became.KEPT
    assert world.settle(lease, Doubtful("time_out")).ours
    assert await a_reconciler(world, resolvers).run_once() == 1
    assert (world.record(claim.id).state, asked) == (State.COMPLETED, [])


async def test_what_was_heard_before_a_key_began_anew_is_not_about_it(world):  # F1
    claim = phased(world)
    receive(world, claim, Undecided("pending"), "evt_0")
    assert receive(world, claim, Executed({"id": "ch_old"}), provider_id="nobody").became is Became.KEPT
    world.advance(SECOND)
    other = phased(world)
    assert await a_reconciler(world).run_once() == 0
    assert {world.record(one.id).state for one in (claim, other)} == {State.UNKNOWN}


async def test_executed_though_it_may_run_again_is_an_alarm(world, caplog):  # F35
    claim = inline(world)
    resolvers, _ = resolving(NotExecuted(closed=True))
    assert await a_reconciler(world, resolvers).run_once() == 1
    assert world.record(claim.id).state is State.FAILED_RETRYABLE
    target = EvidenceTarget(claim.id, claim.incarnation, CALL, key_of(claim))
    verdict = world.go(reconcile.compared(world.store, target, Executed()))
    assert verdict is EvidenceVerdict.CONTRADICTS


async def test_old_calls_and_evidence_are_forgotten_and_calls_of_live_records_are_not(world):
    claim, other = phased(world), phased(world)
    receive(world, claim, Executed({"id": "ch_1"}))
    world.advance(100 * 24 * HOUR)
    receive(world, other, Undecided(), "evt_new")
    port = world.store.reconcile
    assert world.go(port.forget(90 * 24 * HOUR, 100)) == 1
    assert len(world.go(port.calls(0, 10))) == 2
    assert [one.report.event_id for one in world.go(port.undecided(10))] == ["evt_new"]


async def test_a_record_that_turns_unknown_meanwhile_gets_no_answer_that_was_not_made_for_it(world):  # U3
    claim, taken = taken_up(world)
    resolvers, _ = resolving(Undecided(), answer=lambda _, charge: Reply(201, {"made_of": charge["id"]}))
    world.before("operate", lambda: parked(world, taken))
    assert receive(world, claim, Executed({"id": "ch_1"}), resolvers=resolvers).became is Became.KEPT
    assert world.record(claim.id).state is State.IN_PROGRESS  # whoever only looks moves nothing
    world._before.clear()
    parked(world, taken)
    assert await a_reconciler(world, resolvers).run_once() == 1
    response = world.record(claim.id).response
    assert (response.status, response.body) == (201, b'{"made_of":"ch_1"}')


class PanicException(BaseException):
    pass


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_resolver_that_panics_concerns_its_record_only(world, caplog, blocking):
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


async def test_a_record_that_cannot_be_tended_keeps_nobody_else_waiting(world, monkeypatch, caplog):
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


async def test_an_answer_that_panics_leaves_the_message_as_evidence(world):
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
