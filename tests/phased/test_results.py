"""What a call returns, by its declaration: read from what is stored, on the first run and on every later one."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pytest
from pydantic import BaseModel

from oncekey.core.errors import ResultInvalidError
from oncekey.core.flow import adrive
from oncekey.core.model import State
from oncekey.core.operate import Forbidden, Moved, OperatorCommand, Order
from oncekey.core.transitions import Actor, Mover
from oncekey.engine import operate
from oncekey.testing import operation, sync_operation
from phased.bank import Bank, Call, Here, Phase

ANN = Mover(Actor.OPERATOR, "ann")


@dataclass(frozen=True)
class Charge:
    id: str
    amount: Decimal


class Model(BaseModel):
    id: str
    amount: Decimal


def made(value: Any) -> Charge:
    return Charge(value["id"], Decimal(value["amount"]))


def script_of(declared: Any, seen: list[Any], *, repeatable: bool = True) -> Any:
    def script(op: Any) -> Generator[Any, Any, Any]:
        charge = yield Call(result=declared, repeatable=repeatable)
        seen.append(charge)
        yield Here("charged")
        yield Phase("paid", {"by": charge.id})
        return {"charge": charge.id, "amount": str(charge.amount)}

    return script


@pytest.mark.parametrize("declared", [Charge, Model, made], ids=["dataclass", "pydantic", "function"])
async def test_the_handler_gets_the_same_value_on_every_run(mixed_bank: Bank, declared: Any) -> None:
    bank, seen = mixed_bank, []
    async with bank.process(script_of(declared, seen)) as dead, bank.process(script_of(declared, seen)) as alive:
        await dead.send_and_freeze("charged")
        bank.lease_over()
        assert (await alive.send()).status == 201
    first, again = seen
    assert first == again
    assert (type(first), first.amount) == (Model if declared is Model else Charge, Decimal(7))
    assert bank.provider.charges == 1


async def test_a_call_may_return_its_declared_type(small_bank: Bank) -> None:
    for declared in (Charge, Model):
        seen: list[Any] = []
        small_bank.provider.faults.append(declared(id="ch_1", amount=Decimal("1.50")))
        async with small_bank.process(script_of(declared, seen)) as process:
            assert (await process.send(key=f"key-of-{declared.__name__}-0000001")).status == 201
        assert seen == [declared(id="ch_1", amount=Decimal("1.50"))]


async def test_an_invalid_result_is_stored_and_parks_the_record(mixed_bank: Bank, caplog: Any) -> None:
    # F26: the call was made, so its result is kept, and a person looks
    bank, seen = mixed_bank, []
    bank.provider.dedup = False
    bank.provider.faults.append({"id": 7, "sum": "secret-1"})
    async with bank.process(script_of(Charge, seen, repeatable=False)) as process:
        first = await process.send()
        replies = [await process.send() for _ in range(2)]
        record = await bank.record()
        assert (first.status, first.code) == (500, "idempotency_execution_failed")
        assert {reply.code for reply in replies} == {"idempotency_outcome_unknown"}
        assert (record.state, record.last_error, record.intent) == (State.UNKNOWN, "result_not_valid", None)
        assert [entry.result for entry in record.memo] == ['{"id":7,"sum":"secret-1"}']
        # Nothing of it was given by hand, so nobody replaces the provider's own word.
        refused = await act(process, bank, Order.EXECUTED, '{"id":"ch_1","amount":"7"}')
        assert isinstance(refused, Forbidden)
        # The code is mended and deployed, and the operator lets it go on: no second call.
        assert isinstance(await act(process, bank, Order.RELEASE), Moved)
    lenient = script_of(lambda value: Charge(str(value["id"]), Decimal(7)), seen, repeatable=False)
    async with bank.process(lenient) as mended:
        assert (await mended.send()).status == 201
    assert (bank.provider.charges, bank.effects, seen) == (1, ["paid"], [Charge("7", Decimal(7))])
    assert "amount is missing" in caplog.text
    assert "secret-1" not in caplog.text


async def test_an_operator_may_replace_a_result_until_the_next_step(mixed_bank: Bank) -> None:
    # H5: resolved with a wrong result; the handler cannot read it; the right one is given, and it goes on
    bank, seen = mixed_bank, []
    bank.provider.faults.append(ConnectionResetError())
    async with bank.process(script_of(Charge, seen, repeatable=False)) as process:
        assert (await process.send()).code == "idempotency_outcome_unknown"
        assert isinstance(await act(process, bank, Order.EXECUTED, '{"amount":"7"}'), Moved)
        # Before anybody ran with it:
        moved = await act(process, bank, Order.EXECUTED, '{"id":7}')
        assert isinstance(moved, Moved)
        assert (moved.move.row.number, moved.move.seen.fence + 1) == (34, moved.snapshot.record.fence)
        # After a run that could not read it:
        assert (await process.send()).status == 500
        assert (await bank.record()).state is State.UNKNOWN
        assert isinstance(await act(process, bank, Order.EXECUTED, '{"id":"ch_9","amount":"7"}'), Moved)
        assert (await process.send()).status == 201
        late = await act(process, bank, Order.EXECUTED, '{"id":"ch_8","amount":"7"}')
        assert isinstance(late, Forbidden)
        assert "until the next step is stored" in late.why
        engine = process.once.asynchronous()
        record = await bank.record()
        lines = await adrive(engine.store.audit.history(record.id), engine.driver.run)
    notes = [line.note for line in lines if line.note.incarnation == record.incarnation]
    by_hand = [note.trigger.value for note in notes if note.actor is Actor.OPERATOR]
    assert by_hand == ["executed", "replace", "replace"]
    assert (seen, bank.provider.charges, bank.effects) == ([Charge("ch_9", Decimal(7))], 1, ["paid"])


async def test_an_owner_with_a_replaced_result_writes_nothing(mixed_bank: Bank) -> None:
    # P1, P3: it stands still before its next step, is released, and wakes after the result was replaced
    bank, seen = mixed_bank, []
    bank.provider.faults.append(ConnectionResetError())
    script = script_of(Charge, seen, repeatable=False)
    async with bank.process(script) as slow, bank.process(script) as quick:
        await slow.send()
        await act(slow, bank, Order.EXECUTED, '{"id":"wrong","amount":"1"}')
        await slow.send_and_freeze("charged")
        bank.lease_over()
        assert isinstance(await act(quick, bank, Order.EXECUTED, '{"id":"right","amount":"7"}'), Forbidden)
        assert isinstance(await act(quick, bank, Order.RELEASE), Moved)
        assert isinstance(await act(quick, bank, Order.EXECUTED, '{"id":"right","amount":"7"}'), Moved)
        reply = await quick.send()
    assert (reply.status, reply.json()["charge"]) == (201, "right")
    assert [charge.id for charge in seen] == ["wrong", "right"]
    assert bank.effects == ["paid"]


async def act(process: Any, bank: Bank, order: Order, result: str | None = None) -> Any:
    engine = process.once.asynchronous()
    record = await bank.record()
    wish = OperatorCommand(order, "seen in the dashboard", result=result)
    return await adrive(operate.act(engine.store, record.id, wish, ANN), engine.driver.run)


async def test_unit_test_operations_validate_declared_results() -> None:
    op = operation()
    charge = await op.call("charge", lambda key: {"id": "ch_1", "amount": 7}, repeatable=True, result=Charge)
    assert charge == Charge("ch_1", Decimal(7))
    assert await op.resumed().call("charge", lambda key: None, repeatable=True, result=Charge) == charge
    blocking = sync_operation()
    with pytest.raises(ResultInvalidError, match=r"the result of 'charge' is not Charge: amount is missing"):
        blocking.call("charge", lambda key: {"id": "ch_1"}, repeatable=True, result=Charge)
    assert blocking.steps == {"charge": {"id": "ch_1"}}
    with pytest.raises(Exception, match="waits for an operator"):
        blocking.phase("paid", lambda _: None)
