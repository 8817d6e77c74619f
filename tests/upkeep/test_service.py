"""Sweeper and reaper as a service runs them, on the store's own clock."""

from __future__ import annotations

from contextlib import asynccontextmanager

from harness import flows
from oncekey.core.model import Effects, Proceed, Recovery, State
from oncekey.core.policy import Policy
from oncekey.testing.claims import a_claim, answered
from oncekey.wire import aconnect
from oncekey.workers.service import Service
from oncekey.workers.tasks import reaper_of, sweeper_of


@asynccontextmanager
async def connected(url):
    engine = aconnect(url)
    await engine.migrate()
    yield engine
    await engine.close()


async def test_sweeper_and_reaper_use_the_stores_clock(tmp_path):
    """No clock is given: the store's is SQLite's, the host's are the system's, and they agree."""
    async with connected(f"sqlite:///{tmp_path}/keys.db") as engine:
        stale = a_claim(effects=Effects.INLINE, recovery=Recovery.UNKNOWN, lease=1)
        old = a_claim(ttl=1)
        assert isinstance(await flows.abegin(engine, stale, Policy()), Proceed)
        verdict = await flows.abegin(engine, old, Policy())
        assert (await flows.asettle(engine, verdict.lease, answered())).ours
        # Both have their grace: nothing is due yet.
        assert (await Service([sweeper_of(engine, Policy()), reaper_of(engine, Policy())]).once()).done == 0
        assert (await engine.find(stale.id)).record.state is State.IN_PROGRESS
        assert (await engine.find(old.id)).record.state is State.COMPLETED


async def test_a_store_without_upkeep_has_no_tasks():
    engine = aconnect("memory:")
    assert (sweeper_of(engine, Policy()).name, reaper_of(engine, Policy()).name) == ("sweeper", "reaper")
    engine.store.upkeep = None
    assert (sweeper_of(engine, Policy()), reaper_of(engine, Policy())) == (None, None)
