"""Replies that are lost and a store that is away, at each write of a phased handler (P7)."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from frameworks.realshop import PostgresDatabase
from harness.dsn import through
from harness.patience import PATIENCE
from harness.proxy import Proxy
from oncekey.core.errors import CommitAmbiguousError, StoreUnavailableError
from oncekey.engine import steps
from phased.bank import Bank, Call, Phase, paying

KINDS = [("asyncpg", False), ("psycopg", False), ("psycopg", True)]


def script(op: Any) -> Generator[Any, Any, Any]:
    order = yield Phase("order", {"number": 1})
    charge = yield Call("charge-through-a-proxy", repeatable=False)
    paid = yield Phase("paid", charge["id"])
    return {"order": order, "paid": paid}


KEEP = b"oncekey.keep"
"""What the message of a phase's COMMIT has in it."""

LOSSES = {
    "the commit of a phase": (KEEP, b"COMMIT"),
    "the announcement": (b"charge-through-a-proxy", b"charge-through-a-proxy"),
    "the result": (b"ch_", b"ch_"),
}


@pytest.mark.parametrize("lost", LOSSES)
@pytest.mark.parametrize(("package", "blocking"), KINDS, ids=["asyncpg", "psycopg", "psycopg-def"])
async def test_a_lost_database_reply_does_not_repeat_a_step(
    phased_dsn: str, empty: None, package: str, blocking: bool, lost: str
) -> None:
    # P7: what may have been written is asked after, and done once
    with Proxy.before(phased_dsn) as proxy:
        bank = Bank(PostgresDatabase(through(phased_dsn, proxy.port), package, pool_size=3), blocking=blocking)
        bank.provider.dedup = False
        async with bank.process(script) as process:
            request, answer = LOSSES[lost]
            happened = proxy.lose_reply(request, answer)
            reply = await process.send()
            assert happened.is_set()
            assert reply.status == 201
            assert (await process.send()).body == reply.body
        assert (bank.effects, bank.provider.charges, process.runs) == (["order", "paid"], 1, 1)
        assert [entry.name for entry in (await bank.record()).memo] == ["order", "charge-through-a-proxy", "paid"]


@pytest.mark.parametrize(("package", "blocking"), KINDS, ids=["asyncpg", "psycopg", "psycopg-def"])
async def test_a_lost_commit_request_rolls_the_phase_back(
    phased_dsn: str, empty: None, package: str, blocking: bool
) -> None:
    with Proxy.before(phased_dsn) as proxy:
        bank = Bank(PostgresDatabase(through(phased_dsn, proxy.port), package, pool_size=3), blocking=blocking)
        async with bank.process(script) as process:
            happened = proxy.lose_request(KEEP)
            assert (await process.send()).status == 500
            assert happened.is_set()
            assert (bank.effects, bank.state) == ([], "failed_retryable")
            assert (await process.send()).status == 201
        assert (bank.effects, bank.provider.charges) == (["order", "paid"], 1)


class Faulty:
    """A driver that fails at transactions of a name, before or after they were made."""

    def __init__(self, driver: Any, name: str, times: int, *, after: bool = False) -> None:
        self.driver = driver
        self.name = name
        self.left = times
        self.after = after
        self.begin = driver.begin

    async def run(self, transaction: Any) -> Any:
        if transaction.name != self.name or not self.left:
            return await self.driver.run(transaction)
        self.left -= 1
        if self.after:
            await self.driver.run(transaction)
            raise CommitAmbiguousError("its reply was lost")
        raise StoreUnavailableError("it is down")

    async def close(self) -> None:
        await self.driver.close()


class FaultyBlocking(Faulty):
    def run(self, transaction: Any) -> Any:  # type: ignore[override]
        if transaction.name != self.name or not self.left:
            return self.driver.run(transaction)
        self.left -= 1
        if self.after:
            self.driver.run(transaction)
            raise CommitAmbiguousError("its reply was lost")
        raise StoreUnavailableError("it is down")

    def close(self) -> None:  # type: ignore[override]
        self.driver.close()


def break_(process: Any, name: str, times: int, *, after: bool = False) -> Faulty:
    """Make the handler's own writes of a name fail so often."""
    if process.bank.blocking:
        engine = process.once.blocking()
        engine.driver = faulty = FaultyBlocking(engine.driver, name, times, after=after)
    else:
        engine = process.once.asynchronous()
        engine.driver = faulty = Faulty(engine.driver, name, times, after=after)
    return faulty


@pytest.mark.parametrize("times", [1, 3])
async def test_a_result_is_stored_after_a_store_outage(small_bank: Bank, times: int) -> None:
    # P7, H1: it was paid for, and cannot be had a second time
    small_bank.provider.dedup = False
    async with small_bank.process(paying(repeatable=False)) as process:
        faulty = break_(process, "result", times)
        assert (await process.send()).status == 201
        assert faulty.left == 0
    assert (small_bank.provider.charges, small_bank.state) == (1, "completed")


@pytest.mark.parametrize(("repeatable", "state"), [(True, "failed_retryable"), (False, "unknown")])
async def test_a_permanent_outage_leaves_the_call_uncertain(
    small_bank: Bank, repeatable: bool, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(steps, "LONGEST_PAUSE", 0.0)
    async with small_bank.process(paying(repeatable=repeatable)) as process:
        break_(process, "result", 8)
        reply = await process.send()
        assert reply.status == (500 if repeatable else 409)
        assert small_bank.state == state
        if repeatable:
            assert (await process.send()).status == 201
    assert small_bank.provider.charges == 1


async def test_an_unconfirmed_announcement_is_withdrawn(small_bank: Bank) -> None:
    # row 33: nothing was sent yet, so nobody has to look into it
    async with small_bank.process(paying(repeatable=False)) as process:
        faulty = break_(process, "announce", 4, after=True)
        assert (await process.send()).status == 500
        assert faulty.left == 0
        record = await small_bank.record()
        assert (record.state.value, record.intent, small_bank.provider.keys) == ("failed_retryable", None, [])
        assert (await process.send()).status == 201
    assert (small_bank.effects, small_bank.provider.charges) == (["order", "paid"], 1)


async def test_a_failed_withdrawal_is_repeated(small_bank: Bank) -> None:
    small_bank.provider.faults.append((ConnectionRefusedError(),))
    options = {"is_definitely_not_executed": lambda error: isinstance(error, ConnectionRefusedError)}
    async with small_bank.process(paying(repeatable=False), **options) as process:
        break_(process, "withdraw", 2)
        assert (await process.send()).status == 500
        assert small_bank.state == "failed_retryable"
        assert (await process.send()).status == 201


@pytest.mark.parametrize("where", ["announce", "phase"])
async def test_a_cancellation_at_any_await_repeats_no_step(async_bank: Bank, where: str) -> None:
    # P4, P7: wherever the run is cancelled, the retry gets to the same end
    from frameworks.shop import new_key
    from harness.asgi import cancelled_at

    bank = async_bank
    script = paying(repeatable=False) if where == "announce" else paying()
    async with bank.process(script) as process:
        ended = 0
        for number in range(1, 60, 2):
            key = new_key()
            before = bank.provider.charges
            if await cancelled_at(number, process.send(key=key)) is not None:
                ended += 1
                if ended > 1:
                    break
            await process.once._installed[process.app].running_work.wait(PATIENCE)
            reply = await process.send(key=key)
            assert bank.provider.charges - before <= 1, number
            if reply.status != 201:
                assert reply.code == "idempotency_outcome_unknown", (number, reply)
                assert where == "announce", number
        assert ended
    charged = bank.provider.charges
    assert bank.effects.count("order") >= charged >= bank.effects.count("paid")
