"""Asking the store for the right to execute, and what a store that cannot be asked means."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import uuid4

from oncekey.core.choices import InProgress, StoreErrorPolicy
from oncekey.core.errors import CommitAmbiguousError, RecordUnreadableError, StoreBusyError, StoreError
from oncekey.core.model import SECOND, Bypass, Code, Discarded, HandedBack, Lease, Refuse, Retryable, State
from oncekey.engine import local
from oncekey.flow import adrive

if TYPE_CHECKING:
    from oncekey.core.model import Claim, Replay, Settlement, Verdict
    from oncekey.core.policy import Policy
    from oncekey.engine.shell import AsyncEngine
    from oncekey.flow import Flow
    from oncekey.frameworks.asgi.installation import Installation
    from oncekey.ports import Records

log = logging.getLogger("oncekey")

FIRST_POLL = 0.02
LONGEST_POLL = 0.5
NOT_USED = "claim_not_used"


async def admit(
    installation: Installation,
    engine: AsyncEngine,
    claim: Claim,
    policy: Policy,
    before_waiting: Callable[[], Awaitable[None]],
) -> Verdict:
    """The verdict on a claim; an outage is a refusal before anything was executed (R110)."""

    async def ask() -> Verdict:
        return await patiently(lambda: _claimed(engine, claim, policy), policy, before_waiting)

    return await guarded(installation, engine, claim, policy, ask)


async def _claimed(engine: AsyncEngine, claim: Claim, policy: Policy) -> Verdict:
    """Claim; where the store has one writer, who is at work, what is stored already is looked for first."""
    locks = engine.store.locks
    one_writer = locks is None or locks.one_writer
    if one_writer and engine.crowded:
        said = await _looked_up(engine, claim, policy)
        if said is not None:
            return said
    try:
        return await engine.begin(claim, policy)
    except StoreBusyError:
        said = await _looked_up(engine, claim, policy) if one_writer else None
        if said is None:
            raise
        return said


async def _looked_up(engine: AsyncEngine, claim: Claim, policy: Policy) -> Replay | Refuse | None:
    return await adrive(local.after(engine.store, claim, policy), engine.driver.run)


async def guarded(
    installation: Installation,
    engine: AsyncEngine,
    claim: Claim,
    policy: Policy,
    ask: Callable[[], Awaitable[Verdict]],
    *,
    may_have_claimed: Callable[[], bool] = lambda: True,
) -> Verdict:
    """Ask the store, and turn whatever keeps it from answering into a verdict."""
    if not installation.breaker.allows():
        return _outage(policy)
    try:
        verdict = await ask()
    except RecordUnreadableError as error:
        # The store is there, and so is a record: also a route that fails open must not run now.
        installation.breaker.worked()
        log.error("oncekey: %s", error)
        return Refuse(Code.RECORD_UNREADABLE)
    except StoreBusyError as error:
        # The store is there, and its handlers have their hands full: no reason to turn the others away.
        log.warning("oncekey: a request was turned away: %s", error)
        return _outage(policy)
    except StoreError as error:
        installation.breaker.failed()
        if isinstance(error, CommitAmbiguousError):
            _undo(installation, engine, claim)
        log.error("oncekey: the store could not be asked: %s", type(error).__name__)
        return _outage(policy)
    except asyncio.CancelledError:
        if may_have_claimed():
            _undo(installation, engine, claim)
        raise
    installation.breaker.worked()
    return verdict


async def patiently(
    ask: Callable[[], Awaitable[Verdict]], policy: Policy, before_waiting: Callable[[], Awaitable[None]]
) -> Verdict:
    """In wait mode, look again until the first request is done or the patience is over (R82)."""
    verdict = await ask()
    if policy.on_in_progress is not InProgress.WAIT:
        return verdict
    loop, pause = asyncio.get_running_loop(), FIRST_POLL
    ends = loop.time() + policy.wait_max.total_seconds()
    while isinstance(verdict, Refuse) and verdict.code is Code.IN_PROGRESS and loop.time() < ends:
        await before_waiting()
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, LONGEST_POLL)
        verdict = await ask()
    return verdict


def _outage(policy: Policy) -> Verdict:
    if policy.on_store_error is StoreErrorPolicy.FAIL_OPEN:
        log.error("oncekey: executed without protection, because this route fails open")
        return Bypass()
    return Refuse(Code.STORE_UNAVAILABLE, retry_after=1)


def _undo(installation: Installation, engine: AsyncEngine, claim: Claim) -> None:
    """A claim that may have been made although nobody will use it would look like a crash (F8)."""
    installation.drain.errand(
        lambda: adrive(_taken_back(engine.store, claim), engine.driver.run), patience=claim.lease / SECOND
    )


def _taken_back(records: Records, claim: Claim) -> Flow[None]:
    """Claim once more and give back what is ours then.

    Reading alone could miss a claim that is still being committed; a second one waits for it, or is made and known.
    It has an incarnation of its own, because two lives never share one (F1).
    """
    record = (yield from records.claim(replace(claim, incarnation=uuid4()))).record
    if record is None or record.state is not State.IN_PROGRESS or record.owner != claim.owner:
        return
    # A record that was taken over was there before us, and stays.
    unused: Settlement = Discarded() if record.attempts == 1 else Retryable(NOT_USED)
    if record.memo or record.intent is not None:
        unused = HandedBack(NOT_USED, counted=False)
    yield from records.settle(Lease.of(record), unused)
