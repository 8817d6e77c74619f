"""The reaper: removes expired records in batches, and never one that a worker or an operator may have to settle.

Deleting cannot be undone. So the reaper deletes only while the clocks agree, and after a grace: it compares an instant
of the store with the host's clocks, and the statement that deletes uses that instant or an earlier one. Finished
records, the ordinary case, are never read: one statement finds, locks, deletes and notes a batch. After them the reaper
looks at the records that were never finished, one by one.

Requests come first. A batch is as large as the store can delete in a moment (`core.pacing`), which is shorter than a
request, so that a request beside it waits for less than it takes itself. After each batch the reaper rests two and a
half times as long as the batch took; and longer, up to four times, the slower the store has become, because it is busy.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from oncekey.core.audit import Mover
from oncekey.core.errors import StoreError
from oncekey.core.keys import key_digest
from oncekey.core.model import SECOND
from oncekey.core.pacing import Bounds, Worked
from oncekey.core.policy import micros
from oncekey.core.transitions import Actor
from oncekey.core.upkeep import RESUMABLE_EXPIRED, START, Expired, Retention
from oncekey.engine import upkeep
from oncekey.engine.notifying import notify_failure
from oncekey.flow import adrive
from oncekey.observe.events import PURGED, About, Doubted, Reaped
from oncekey.workers.health import FORGOTTEN
from oncekey.workers.service import ClockWatch, Pace, boot, this_process

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from oncekey.core.model import Duration, Instant, Record
    from oncekey.core.policy import Policy
    from oncekey.core.upkeep import Gone, Page, ReapPosition
    from oncekey.engine.upkeep import ReapedUnfinished
    from oncekey.flow import Flow, Transaction
    from oncekey.observe.events import Notify
    from oncekey.ports import Audit, Upkeep
    from oncekey.workers.calling import Sleep

log = logging.getLogger("oncekey.worker")

SMALLEST: Final = 10
"""If a batch of this size times out, it is an outage, and the batch is not too large."""
LEAST: Final = 100
"""The smallest batch, however slow the store is: half as many records would take more than half as long."""
FIRST: Final = 200
"""How many records the first batch has at most."""
MOMENT: Final = SECOND // 500
"""How long a batch should take: less than a request beside it."""
REST: Final = 2.5
"""The rest after a batch, as a multiple of its duration, if the store is as fast as usual."""
LONGEST_REST: Final = 4
"""The longest rest, as a multiple of the batch's duration: the reaper has to keep up with new keys."""
MEMORY: Final = 20
"""Over how many batches the usual time per record is averaged: a store that stays slow becomes the usual."""


@dataclass(slots=True)
class Rests:
    """How long to rest after a batch: in proportion to it, and longer if a record took longer than usual."""

    usual: float | None = None
    """How long a record usually takes."""
    least: float = REST
    """The rest as a multiple of the batch's duration, at least."""

    def after(self, took: Duration, moved: int) -> float:
        """The seconds to rest."""
        if moved <= 0 or took <= 0:
            return self.least * took / SECOND
        each = took / moved
        usual = each if self.usual is None else self.usual
        self.usual = usual + (each - usual) / MEMORY
        return min(LONGEST_REST, self.least * max(1.0, each / usual)) * took / SECOND


class Reaper:
    """The task that reaps. Several may run side by side; each skips the rows that another one has locked."""

    name: Final = "reaper"

    def __init__(
        self,
        store: Upkeep,
        audit: Audit | None,
        run: Callable[[Transaction[object]], Awaitable[object]],
        policy: Policy,
        *,
        watch: ClockWatch | None = None,
        sleep: Sleep = asyncio.sleep,
        clock: Callable[[], Instant] = boot,
        who: str | None = None,
        notify: Notify | None = None,
        moment: Duration = MOMENT,
        least: int = LEAST,
        rest: float = REST,
    ) -> None:
        self._store = store
        self._audit = audit
        self._run = run
        self._policy = policy
        self._retention = Retention.by(policy)
        self._watch = watch or ClockWatch()
        self._sleep = sleep
        self._clock = clock
        self._mover = Mover(Actor.REAPER, who or this_process())
        self._bounds = Bounds(min(least, policy.reap_batch), policy.reap_batch, moment)
        self._batch = min(FIRST, policy.reap_batch)
        self._rest = rest
        self._observed = notify
        self._stopped = False
        self.failed = 0
        """Looks that were ended early, because a clock is wrong."""
        self.counts: Counter[str] = Counter()
        """Records by what was done (`purged`, `marked`, `parked`, `abandoned`), `notes`, and dead `workers`."""
        seconds = policy.reap_interval.total_seconds()
        self.pace = Pace(shortest=seconds, longest=seconds)

    @property
    def batch(self) -> int:
        """How many records the next batch takes: as many as take a moment, and fewer after a time-out."""
        return self._batch

    async def run_once(self) -> int:
        """Look once for everything that has expired; how many records were moved."""
        before = self.counts.copy()
        agreed = await self._end_expiring()
        # Records that this round has marked are not due yet: the longer age counts from their expiry, too.
        agreed = agreed and await self._end_kept()
        if agreed and self._audit is not None:
            await self._forget(self._audit)
        if agreed:
            self.counts["workers"] += await adrive(self._store.forget_workers(FORGOTTEN), self._run)
        did = self.counts - before  # without what is zero
        if did:
            log.info("reaper: %s", ", ".join(f"{count} {what}" for what, count in sorted(did.items())))
        return sum(count for what, count in did.items() if what not in {"notes", "workers"})

    async def shut_down(self) -> None:
        """Nothing to wait for: a round leaves nothing open."""

    async def stop(self, grace: float) -> None:  # noqa: ARG002  (a batch is never long)
        """Begin no further batch."""
        self._stopped = True

    async def _end_expiring(self) -> bool:
        """End expired records. False if the clocks do not agree, so that nothing more may be ended."""
        age, soft = self._retention.grace, self._retention.soft
        first = await self._looked(self._store.expiring(1, age))
        if first is None or not first.records:
            return first is not None
        if soft and not await self._end_finished(self._store.mark, "marked", first.now, age):
            return False
        if not await self._end_finished(self._store.purge, PURGED, first.now, age):
            return False
        return await self._end_unfinished(age)

    async def _end_kept(self) -> bool:
        """Delete records that were marked and kept long enough; False as above."""
        age = self._retention.grace + self._retention.kept
        first = await self._looked(self._store.kept_expired(1, age))
        if first is None or not first.records:
            return first is not None
        return await self._end_finished(self._store.purge_kept, PURGED, first.now, age)

    async def _end_finished(
        self,
        move: Callable[[Expired, int, ReapPosition, Mover | None], Flow[Gone]],
        what: str,
        now: Instant,
        age: Duration,
    ) -> bool:
        """Move finished records in batches, each by an instant compared with the host's clocks; False as above."""
        mover = self._mover if self._policy.audit else None
        after, rests = START, Rests(least=self._rest)
        while not self._stopped:
            due = Expired(age, now - age, soft=self._retention.soft, trusted_for=self._watch.trusted_for)
            began, size = self._clock(), self._batch
            try:
                gone = await adrive(move(due, size, after, mover), self._run)
            except StoreError as error:
                if size <= SMALLEST:
                    raise
                notify_failure(self._observed, self.name, error)
                self._batch = max(SMALLEST, size // 2)
                await self._sleep((self._clock() - began) / SECOND)
                continue
            took = self._clock() - began
            self.counts[what] += gone.moved
            if self._observed is not None and gone.moved:
                self._observed(Reaped(what, gone.moved))
            self._batch = self._bounds.after(size, Worked(size, size if gone.full else gone.moved, took))
            if not gone.full or gone.last is None or gone.now is None:
                return True
            if not self._agrees(gone.now):
                return False
            now, after = gone.now, gone.last
            await self._sleep(rests.after(took, gone.moved))
        return True

    async def _end_unfinished(self, age: Duration) -> bool:
        """Look at the remaining records, page by page; False as above."""
        after: Record | None = None
        size = min(FIRST, self._policy.reap_batch)
        while not self._stopped:
            began = self._clock()
            try:
                page = await self._looked(self._store.expiring(size, age, after))
                if page is None:
                    return False
                self._notify(await adrive(self._cared(page), self._run))
            except StoreError as error:
                if size <= SMALLEST:
                    raise
                notify_failure(self._observed, self.name, error)
                size = max(SMALLEST, size // 2)
            else:
                if len(page.records) < size:
                    return True
                after = page.records[-1]
            await self._sleep((self._clock() - began) / SECOND)
        return True

    async def _looked(self, look: Flow[Page]) -> Page | None:
        """A page, or None if its clock cannot be trusted."""
        page = await adrive(look, self._run)
        return page if self._agrees(page.now) else None

    def _agrees(self, now: Instant) -> bool:
        if self._watch.look(now):
            return True
        self.failed += 1
        log.error("reaper: stopped, because %s", self._watch.why)
        return False

    def _cared(self, page: Page) -> Flow[ReapedUnfinished]:
        trusted_for = self._watch.trusted_for
        return upkeep.reap(self._store, page, self._policy, self._retention, self._mover, trusted_for=trusted_for)

    async def _forget(self, audit: Audit) -> None:
        age, size, rests = micros(self._policy.audit_ttl), self._batch, Rests(least=self._rest)
        while not self._stopped:
            began = self._clock()
            gone = await adrive(audit.forget(age, size), self._run)
            took = self._clock() - began
            self.counts["notes"] += gone
            if gone < size:
                return
            size = self._bounds.after(size, Worked(size, gone, took))
            await self._sleep(rests.after(took, gone))

    def _notify(self, cared: ReapedUnfinished) -> None:
        self.counts.update(parked=len(cared.parked), abandoned=len(cared.abandoned))
        if self._observed is not None:
            for record in cared.parked:
                self._observed(Doubted(About.of(record), RESUMABLE_EXPIRED, Actor.REAPER))
            if cared.abandoned:
                self._observed(Reaped("abandoned", len(cared.abandoned)))
        for record in cared.parked:
            log.error("reaper: begun and never ended, so it is unknown now: %s (%s)", *_named(record))
        for record in cared.abandoned:
            log.warning("reaper: its parcel was never taken, so it has timed out: %s (%s)", *_named(record))


def _named(record: Record) -> tuple[str, str]:
    return record.operation, f"digest {key_digest(record.id.key)}"
