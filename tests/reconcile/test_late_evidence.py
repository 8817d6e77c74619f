"""An owner that lost its key and executed all the same: its result is refused, and kept as evidence (U2, F35)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from oncekey.core.errors import StoreUnavailableError
from oncekey.core.flow import adrive, drive
from oncekey.core.memo import encode
from oncekey.core.model import INLINE, Completed, Effects, EntryKind, Lease, MemoEntry, Outcome, StoredResponse
from oncekey.core.operate import Forbidden, OperatorCommand, Order
from oncekey.core.policy import Policy
from oncekey.core.resolution import Executed, NotExecuted
from oncekey.core.resolvers import from_text
from oncekey.core.transitions import Actor, Mover
from oncekey.engine import operate, reconcile, settle
from oncekey.stores.memory import MemoryStore
from oncekey.workers.tasks import reconciler_of
from phased.bank import Here, paying
from reconcile.doubts import announced
from reconcile.test_webhooks import evidence

POLICY = Policy()
HOUR = 3_600_000_000


def calling(status):
    def script(op):
        yield Here("called")
        return status, {"id": "ch_1"}

    return script


async def not_executed(process, bank):
    """Whoever is asked says that it was never done."""
    engine, record = process.once.asynchronous(), await bank.record()
    target = reconcile.EvidenceTarget(record.id, record.incarnation, "", "")
    mover = Mover(Actor.RESOLVER, "test")
    closed = NotExecuted(closed=True)
    flow = reconcile.settle(
        engine.store, target, closed, mover, process.once.policy_of, why="asked too early", waited=True
    )
    assert isinstance(await adrive(flow, engine.driver.run), reconcile.Moved)


async def ordered(process, bank, command):
    """What an operator's command comes to."""
    engine, record = process.once.asynchronous(), await bank.record()
    flow = operate.act(engine.store, record.id, command, Mover(Actor.OPERATOR, "ann"))
    return await adrive(flow, engine.driver.run)


@pytest.mark.parametrize(("said", "verdict"), [(201, "agrees"), (422, "contradicts")])
async def test_a_late_inline_response_is_stored_as_evidence(bank, caplog, said, verdict):
    # U2, F35: it was taken for not executed and run again, and was executed after all
    async with (
        bank.process(calling(201), effects=INLINE) as dead,
        bank.process(calling(said), effects=INLINE) as alive,
    ):
        await dead.send_and_freeze("called")
        bank.lease_over()
        assert (await alive.send()).code == "idempotency_outcome_unknown"
        await not_executed(alive, bank)
        assert (await alive.send()).status == said
        finished = await bank.record()
        assert evidence(bank) == []
        assert (await dead.wake()).status == said  # its client hears what the record says
        assert await bank.record() == finished
    assert evidence(bank) == [(f"{finished.incarnation}/1/finished", verdict)]
    assert "the request was executed by an owner that had lost its key" in caplog.text


async def test_a_rejected_late_result_settles_an_unknown_record(bank):  # U2, U3, H5
    async with bank.process(paying()) as dead, bank.process(paying()) as alive:
        await dead.send_and_freeze("before charge")
        bank.lease_over()
        await alive.send_and_freeze("before charge")  # took it over, and is not heard of again
        await dead.wake()
        record = await bank.record()
        assert (record.fence, evidence(bank)) == (2, [(f"{record.incarnation}/1/charge", None)])
        bank.clock.advance(21 * HOUR)  # nobody may repeat the call any more
        async with bank.process(paying()) as third:
            assert ((await third.send()).status, bank.state) == (409, "unknown")
            for order in (Order.NOT_EXECUTED, Order.DECLINED):
                command = OperatorCommand(
                    order, "a guess", result='"no"' if order is Order.DECLINED else None, closed=True
                )
                refused = await ordered(third, bank, command)
                assert isinstance(refused, Forbidden)
                assert "that the provider executed the call, and this report has not been applied yet" in refused.why
            assert bank.state == "unknown"
            assert await reconciler_of(third.once).run_once() == 1
            assert (await third.send()).status == 201
    assert evidence(bank) == [(f"{record.incarnation}/1/charge", "settled")]
    assert (bank.effects, bank.provider.charges) == (["order", "paid"], 1)


def refused(world):
    """Somebody who announced a call, and its lease."""
    claim, lease = announced(world)
    entry = MemoEntry("charge", EntryKind.CALL, encode({"id": "ch_1"}, 1000))
    return lambda: reconcile.keep_refused_result(world.store, lease, claim.seed, entry, POLICY)


def test_repeated_late_evidence_is_stored_once(world):  # U2
    testify = refused(world)
    for _ in range(3):
        world.go(testify())
    (kept,) = world.go(world.store.reconcile.undecided(10))
    assert (kept.report.source, from_text(kept.report.resolution)) == ("owner", Executed({"id": "ch_1"}))


def test_a_store_outage_loses_only_the_evidence(world, caplog):
    def away(_):
        raise StoreUnavailableError("away")

    drive(refused(world)(), away)
    assert "could not be stored" in caplog.text
    assert "charge was executed" in caplog.text
    assert world.go(world.store.reconcile.undecided(10)) == ()


def answered(world, effects, outcome):
    _, lease = announced(world)
    lease = Lease(**{name: getattr(lease, name) for name in Lease.__slots__} | {"effects": effects})
    run = SimpleNamespace(store=world.store, policy=POLICY)
    return settle._keep_refused_answer(run, lease, Completed(StoredResponse(201, (), b"{}"), outcome))


def test_only_a_late_inline_success_is_stored_as_evidence(world):
    # What LOCAL did is rolled back, what PHASED did is in its memo, and a final no did nothing.
    for effects in (Effects.LOCAL, Effects.PHASED, Effects.OUTBOX):
        world.go(answered(world, effects, Outcome.SUCCESS))
    world.go(answered(world, Effects.INLINE, Outcome.FAILURE))
    assert world.go(world.store.reconcile.undecided(10)) == ()
    world.go(answered(world, Effects.INLINE, Outcome.SUCCESS))
    assert len(world.go(world.store.reconcile.undecided(10))) == 1


def test_a_store_without_evidence_only_logs(world, caplog):
    memory = MemoryStore()
    assert memory.reconcile is None
    claim, lease = announced(world)
    entry = MemoEntry("charge", EntryKind.CALL, encode({"id": "ch_1"}, 1000))

    def nothing(transaction):
        raise AssertionError(f"{transaction.name} was said to it")

    drive(reconcile.keep_refused_result(memory, lease, claim.seed, entry, POLICY), nothing)
    assert "charge was executed" in caplog.text
