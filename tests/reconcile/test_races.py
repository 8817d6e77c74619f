"""A webhook against the poller, on the same record at the same time: one of them moves it, and one line tells so."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from harness.patience import PATIENCE
from oncekey.core.flow import adrive
from oncekey.core.model import State
from oncekey.core.resolvers import Executed, Rejected
from oncekey.core.transitions import Actor
from oncekey.databases.postgres.asyncpg import AsyncpgDriver
from oncekey.databases.postgres.generated.psycopg import PsycopgDriver
from oncekey.databases.postgres.store import PostgresStore
from oncekey.engine import reconcile
from oncekey.workers.reconciler import Reconciler
from oncekey_contract.world import blocking
from reconcile.doubts import POLICY, WEBHOOK, inline, phased, report, resolving

ROUNDS, ABREAST = 1000, 10


async def test_webhook_and_poller_settle_each_record_once(empty_dsn):  # R145
    """The webhook says declined and the poller executed, so that a second write could not hide behind the first."""
    with blocking(PostgresStore, PsycopgDriver(empty_dsn, pool_size=1)) as world:
        claims = [phased(world) if number % 2 else inline(world) for number in range(ROUNDS)]
    rng = random.Random(7)
    driver, store = AsyncpgDriver(empty_dsn, pool_size=8, timeout=PATIENCE), PostgresStore(clock=world.clock)
    resolvers, _ = resolving(Executed({"id": "ch_1"}))
    poller = Reconciler(store, driver.run, resolvers, POLICY, page=ABREAST, who="test")

    async def webhook(claim):
        await asyncio.sleep(rng.random() * 0.02)
        message = report(claim, Rejected({"why": "card"}))
        return await adrive(reconcile.receive(store, message, WEBHOOK, lambda _: POLICY, resolvers), driver.run)

    async def webhooks():
        for start in range(0, ROUNDS, ABREAST):
            await asyncio.gather(*(webhook(claim) for claim in claims[start : start + ABREAST]))

    try:
        await asyncio.gather(webhooks(), poller.run_once())
        movers: Counter[Actor] = Counter()
        for claim in claims:
            lines = [entry.note for entry in await adrive(store.audit.history(claim.id), driver.run)]
            moves = [note for note in lines if note.to is not State.UNKNOWN]
            assert len(moves) == 1, lines
            record = (await adrive(store.find(claim.id), driver.run)).record
            declined = record.response.status == 402 if record.response else "rejected" in record.memo[-1].result
            assert declined == (moves[0].actor is Actor.WEBHOOK)
            assert record.state is moves[0].to
            movers[moves[0].actor] += 1
    finally:
        await driver.close()
    assert movers.total() == ROUNDS
    assert set(movers) == {Actor.WEBHOOK, Actor.RESOLVER}  # or nothing was raced
