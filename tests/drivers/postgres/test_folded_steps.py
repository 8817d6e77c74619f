"""A finished phase in the message of its COMMIT: the rows that `checkpointing` writes, or nothing at all."""

from __future__ import annotations

from dataclasses import replace

import psycopg
import pytest
from psycopg.rows import dict_row

from drivers.postgres.drivers import ASYNCPG, ask, engine, opened
from harness import flows
from harness.cutting import CuttingProxy
from harness.dsn import through
from oncekey.core.errors import RolledBackError
from oncekey.core.model import Effects, EntryKind, MemoEntry, Proceed, Recovery
from oncekey.core.policy import Policy
from oncekey.databases.postgres import asyncpg_transactions, psycopg_async_transactions
from oncekey.databases.postgres.generated import psycopg_transactions
from oncekey.databases.postgres.store import PostgresStore
from oncekey.stores.rows import LONGEST_FOLDED
from oncekey.testing.claims import LEASE, START, ManualClock, a_claim
from oncekey_contract.world import CHARGE, ORDER, REQUEST

FIRST = (ORDER,)
SECOND_ONE = MemoEntry("ship", EntryKind.PHASE, '"back\\\\slash \\"quoted\\" é, (1)"')
OURS = {"incarnation", "key"}
"""Columns that differ from record to record."""


async def owned(driver, clock=None, **changes):
    claim = a_claim(**{"effects": Effects.PHASED, "recovery": Recovery.RESUME, "request": REQUEST, **changes})
    verdict = await flows.abegin(engine(driver, clock), claim, Policy())
    assert isinstance(verdict, Proceed)
    return verdict.lease


def rows(raw: psycopg.Connection, lease) -> list[dict]:
    found = []
    for table in ("record", "work"):
        text = f"SELECT * FROM oncekey.{table} WHERE key = %s".encode()
        found += raw.cursor(row_factory=dict_row).execute(text, [lease.id.key]).fetchall()
    return [{name: value for name, value in row.items() if name not in OURS} for row in found]


async def kept(driver, lease, seen, memo, item=None, *, store=None):
    """A phase that writes a row and is kept; what the driver says."""
    tx = await driver.begin()
    if item is not None:
        await ask(tx, f"INSERT INTO orders (item) VALUES ('{item}')")
    fold = (store or PostgresStore()).phases.keeping(lease, seen, memo, LEASE)
    return await tx.commit_with(fold.statement)


def orders(raw: psycopg.Connection, item: str) -> int:
    return raw.execute("SELECT count(*) FROM orders WHERE item = %s", [item]).fetchone()[0]


@pytest.mark.parametrize("request_kept", [REQUEST, None])
async def test_folded_checkpoint_writes_the_same_rows(kind, dsn, raw, request_kept):
    clock = ManualClock(START)
    store = PostgresStore(clock=clock)
    async with opened(kind, dsn) as driver:
        folded, apart = [await owned(driver, clock, request=request_kept, owner="one") for _ in range(2)]
        for seen, memo in (((), FIRST), (FIRST, (ORDER, SECOND_ONE))):
            clock.advance(LEASE // 2)
            assert await kept(driver, folded, seen, memo, store=store) == ()
            tx = await driver.begin()
            assert await tx.run(store.phases.checkpointing(apart, seen, memo, LEASE))
            await tx.commit()
            assert rows(raw, folded) == rows(raw, apart)
            assert len(rows(raw, folded)) == 2


async def test_a_phase_takes_three_messages(kind, dsn):
    with CuttingProxy.before(dsn) as proxy:
        async with opened(kind, through(dsn, proxy.port), pool_size=1) as driver:
            for _ in range(2):
                lease = await owned(driver)
                proxy.count()
                assert await kept(driver, lease, (), FIRST, lease.id.key) == ()
                said = [one for one, _ in proxy.messages]  # of the second time: asyncpg has prepared the INSERT then
    assert len(said) == (4 if kind == ASYNCPG else 3), said  # its INSERT has the value in it, so it is another one
    assert b"COMMIT" in said[-1]
    assert b"oncekey.keep" in said[-1]


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE oncekey.record SET fence = fence + 1",
        "UPDATE oncekey.record SET incarnation = gen_random_uuid()",
        "UPDATE oncekey.record SET state = 'unknown', owner = NULL, lease_until = NULL, last_error = 'x'",
        "UPDATE oncekey.record SET memo_version = 7",
        "UPDATE oncekey.work SET intent = '{}'",
        "DELETE FROM oncekey.record",
    ],
)
async def test_lost_ownership_rolls_back_the_phase(kind, dsn, raw, change):
    async with opened(kind, dsn, pool_size=2) as driver:
        lease = await owned(driver)
        raw.execute(f"{change} WHERE key = %s".encode(), [lease.id.key])
        before = rows(raw, lease)
        assert await kept(driver, lease, (), FIRST, lease.id.key) is None
        assert (rows(raw, lease), orders(raw, lease.id.key)) == (before, 0)


async def test_changed_memo_is_not_overwritten(kind, dsn, raw):
    async with opened(kind, dsn, pool_size=2) as driver:
        lease = await owned(driver)
        assert await kept(driver, lease, (), FIRST) == ()
        for seen in ((), (CHARGE,)):
            assert await kept(driver, lease, seen, (*FIRST, SECOND_ONE), lease.id.key) is None
        assert orders(raw, lease.id.key) == 0


async def test_long_memo_is_not_folded_into_the_commit(dsn):
    async with opened(ASYNCPG, dsn) as driver:
        lease = await owned(driver)
        long = replace(ORDER, result='"' + "x" * LONGEST_FOLDED + '"')
        assert PostgresStore().phases.keeping(lease, (), (long,), LEASE) is None


@pytest.mark.parametrize("commits", [True, False])
async def test_failure_after_the_checkpoint_is_classified(kind, dsn, raw, monkeypatch, commits):
    # F20: a refused COMMIT is a roll-back; a clean-up that fails is none
    async with opened(kind, dsn, pool_size=2) as driver:
        lease = await owned(driver)
        tx = await driver.begin()
        if commits:
            for module in (asyncpg_transactions, psycopg_transactions, psycopg_async_transactions):
                monkeypatch.setattr(module, "RESET", "SELECT 1 / 0")
        else:
            raw.execute("INSERT INTO orders (item) VALUES (%s)", [lease.id.key])
            await ask(tx, "SET CONSTRAINTS ALL DEFERRED")
        await ask(tx, f"INSERT INTO orders (item) VALUES ('{lease.id.key}')")
        statement = PostgresStore().phases.keeping(lease, (), FIRST, LEASE).statement
        if commits:
            assert await tx.commit_with(statement) == ()
        else:
            with pytest.raises(RolledBackError):
                await tx.commit_with(statement)
        monkeypatch.undo()
        assert orders(raw, lease.id.key) == 1
        assert (await kept(driver, lease, (), FIRST) is None) == commits
