"""How long a key stays stuck, measured in real time: at most lease + 5 seconds + sweep_interval."""

from __future__ import annotations

import asyncio

import pytest

from harness import flows
from harness.patience import PATIENCE
from harness.tables import empty_tables
from oncekey.core.flow import adrive
from oncekey.core.model import SECOND, Effects, Proceed, Recovery, State
from oncekey.core.policy import Policy
from oncekey.core.transitions import Trigger
from oncekey.core.upkeep import SWEEP_GRACE
from oncekey.testing.claims import a_claim
from oncekey.wire import aconnect
from oncekey.workers.service import Service, boot
from oncekey.workers.upkeep import Sweeper

LEASE = SECOND
INTERVAL = 2 * SECOND


@pytest.fixture(params=["sqlite", "postgresql", "mariadb", "mysql"])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'stuck.db'}"
    if request.param == "postgresql":
        return empty_tables(request.getfixturevalue("upkeep_dsn"))
    return request.getfixturevalue(f"empty_{request.param}")


class Delays:
    """Sleeps as long as it is asked to, and measures how much longer than that the machine took, in microseconds."""

    def __init__(self):
        self.most = 0

    async def sleep(self, seconds):
        asked_at = boot()
        await asyncio.sleep(seconds)
        self.most = max(self.most, boot() - asked_at - round(seconds * SECOND))


class Timed(Sweeper):
    """A sweeper that measures its longest look, and sets an event when it has moved something."""

    longest = 0
    swept: asyncio.Event

    async def run_once(self):
        began = boot()
        moved = await super().run_once()
        self.longest = max(self.longest, boot() - began)
        if moved:
            self.swept.set()
        return moved


async def test_an_expired_lease_is_swept_within_grace_and_interval(url):  # R153, R256
    engine = aconnect(url)
    await engine.migrate()
    policy, delays = Policy(sweep_interval=INTERVAL / SECOND), Delays()
    sweeper = Timed(engine.store.upkeep, engine.driver.run, policy)
    sweeper.swept = asyncio.Event()
    service = Service([sweeper], sleep=delays.sleep)
    running = asyncio.create_task(service.run())
    claim = a_claim(effects=Effects.INLINE, recovery=Recovery.UNKNOWN, lease=LEASE)
    try:
        verdict = await flows.abegin(engine, claim, policy)
        assert isinstance(verdict, Proceed)
        over_at = verdict.record.lease_until
        async with asyncio.timeout(PATIENCE):
            await sweeper.swept.wait()
        assert (await engine.find(claim.id)).record.state is State.UNKNOWN
        lines = await adrive(engine.store.audit.history(claim.id), engine.driver.run)
        (swept_at,) = (line.at for line in lines if line.note.trigger is Trigger.SWEEP)
    finally:
        service.stop()
        await running
        await engine.close()

    late = swept_at - over_at
    # By the store's own clock. What this machine took longer for a pause and for two looks is no part of the bound.
    assert SWEEP_GRACE <= late <= SWEEP_GRACE + INTERVAL + delays.most + 2 * sweeper.longest
