"""The sweeper moves records whose lease has expired, and the reaper removes records whose ttl has expired.

The sweeper runs no handler. The stored effects of a record decide its new state: if it may run again it becomes
retryable, for its client or the completer; otherwise it becomes unknown, for a resolver. A live owner renews its lease,
so the sweeper never finds its record.

The reaper never removes a record that a worker or an operator may have to settle. Deletion cannot be undone, so it
deletes only while the clocks agree, and after a grace period: it compares a timestamp of the store with the host's
clocks, and the deleting statement uses that timestamp or an earlier one. Finished records, the common case, are never
read: one statement finds, locks, deletes and audits a batch. After them the reaper processes expired records that were
never finished, one by one.

Requests have priority. A batch is as large as the store can delete in a few milliseconds (`core.batches`), less than a
request takes, so that a concurrent request waits only briefly. After each batch the reaper rests, so that it deletes no
more records per second than necessary (`RATE`). It rests at least as long as the batch took, and up to four times as
long if the store has become slower, and so is probably busy.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from oncekey.core.batches import Bounds, Worked
from oncekey.core.errors import StoreError
from oncekey.core.flow import Flow, Transaction, adrive
from oncekey.core.keys import key_digest
from oncekey.core.model import SECOND, Duration, Instant, Record, State
from oncekey.core.policy import EACH, Policy, micros
from oncekey.core.rulings import FAILED_BY_LEASE, lease_error
from oncekey.core.transitions import Actor, Mover
from oncekey.core.upkeep import RESUMABLE_EXPIRED, START, Expired, Gone, Page, Retention, short_leases
from oncekey.engine import upkeep
from oncekey.engine.notifying import notify_failure, of_sweep
from oncekey.observe.events import PURGED, About, Doubted, Notify, Reaped, ShortLease
from oncekey.ops.tasks import REAPER, SWEEPER
from oncekey.workers.health import FORGOTTEN
from oncekey.workers.service import ClockWatch, Pace, boot, this_process

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from oncekey.engine.upkeep import ReapedUnfinished
    from oncekey.ports.store import Audit, Upkeep
    from oncekey.workers.calling import Sleep

log = logging.getLogger("oncekey.worker")

PAGE: Final = 100
RUNS: Final = 1000
"""How many of the last runs are searched for the slowest ones."""
LEASES_EVERY: Final = 10
"""The number of rounds between two comparisons of leases with the duration of operations."""


class Sweeper:
    """The task that sweeps. Several may run at once: each record is moved by one of them."""

    name: Final = SWEEPER.name
    about: Final = ""

    def __init__(
        self,
        store: Upkeep,
        run: Callable[[Transaction[object]], Awaitable[object]],
        policy: Policy,
        *,
        watch: ClockWatch | None = None,
        healthy: Callable[[], bool] = lambda: True,
        page: int = PAGE,
        who: str | None = None,
        notify: Notify | None = None,
    ) -> None:
        self._store = store
        self._run = run
        self._policy = policy
        self._watch = watch or ClockWatch()
        self._healthy = healthy
        self._page = page
        self._mover = Mover(Actor.SWEEPER, who or this_process())
        self._observed = notify
        self._rounds = 0
        self._stopped = False
        self.failed = 0
        """Rounds that ended early because a clock was wrong, or this process could not renew its own leases."""
        self.counts: Counter[tuple[str, State]] = Counter()
        """Records that were moved, by operation and new state: each of them is a crash."""
        seconds = policy.sweep_interval.total_seconds()
        self.pace = Pace(shortest=seconds, longest=seconds)

    @property
    def done(self) -> int:
        """Records that were moved."""
        return self.counts.total()

    async def run_once(self) -> int:
        """Move everything that is stale; returns how many records were moved.

        After an error, or if this process cannot renew its own leases, the sweeper moves nothing. It resumes only when
        every live owner has had one lease time to renew.
        """
        if not self._healthy():
            self.failed += 1
            log.error("sweeper: this process cannot renew its own leases, so it does not judge others")
            self._watch.disturbed()
            return 0
        try:
            if self._rounds % LEASES_EVERY == 0:
                await self._compare_leases()
            self._rounds += 1
            return await self._sweep()
        except StoreError:
            self._watch.disturbed()
            raise

    async def shut_down(self) -> None:
        """Nothing to wait for: a round leaves nothing open."""

    async def stop(self, grace: float) -> None:  # noqa: ARG002  (a page is never long)
        """Begin no further page."""
        self._stopped = True

    async def _sweep(self) -> int:
        moved, after = 0, None
        while not self._stopped:
            page = await adrive(self._store.stale(self._page, after), self._run)
            if not self._watch.look(page.now):
                self.failed += 1
                log.error("sweeper: stopped because %s", self._watch.why)
                return moved
            trusted_for = self._watch.trusted_for
            if trusted_for is not None and trusted_for < micros(self._policy.lease):
                return moved  # a live owner may not have had time to renew
            swept = await adrive(upkeep.sweep(self._store, page, self._policy, self._mover), self._run)
            for one in swept:
                self._notify(one, page.now)
            moved += len(swept)
            if len(page.records) < self._page:
                return moved
            after = page.records[-1]
        return moved

    def _notify(self, swept: upkeep.SweptRecord, now: Instant) -> None:
        record = swept.record
        if self._observed is not None:
            for event in of_sweep(record, swept.to, Actor.SWEEPER, now, lease_error(record)):
                self._observed(event)
        self.counts[record.operation, swept.to] += 1
        log.log(
            logging.ERROR if lease_error(record) == FAILED_BY_LEASE else logging.WARNING,
            "sweeper: the owner of a key died: %s is now %s (digest %s, attempt %d)",
            record.operation,
            swept.to,
            key_digest(record.id.key),
            record.attempts,
        )

    async def _compare_leases(self) -> None:
        lease = micros(self._policy.lease)
        runs = await adrive(self._store.runs(RUNS), self._run)
        for operation, p99 in short_leases(runs, lease).items():
            if self._observed is not None:
                self._observed(ShortLease(operation, lease, p99))
            log.warning(
                "sweeper: a lease of %g s is short for %s, where 1 in 100 takes %g s or more: make it at least twice "
                "as long, or live owners that miss a heartbeat are treated as dead",
                lease / SECOND,
                operation,
                p99 / SECOND,
            )


SMALLEST: Final = 10
"""If a batch of this size times out, the cause is an outage, not the size of the batch."""
LEAST: Final = 100
"""The smallest batch, even if the store is slow: half as many records would take more than half as long."""
FIRST: Final = 200
"""The maximum number of records in the first batch."""
MOMENT: Final = SECOND // 500
"""How long a batch should take: less than a concurrent request."""
RATE: Final = 20_000
"""The target rate in records per second: a million in less than a minute. A faster reaper rests longer."""
SHORTEST_REST: Final = 1
"""The shortest rest, as a multiple of the batch's duration: a reaper works at most half of the time."""
LONGEST_REST: Final = 4
"""The longest rest below the rate, as a multiple of the batch's duration: the reaper has to keep up with new keys."""
MEMORY: Final = 20
"""The number of batches over which the usual time per record is averaged."""


@dataclass(slots=True)
class BatchRests:
    """The rest after a batch: until the next one is due by the rate, and longer if the store has become slow."""

    usual: float | None = None
    """The usual time per record."""
    rate: float = RATE
    """The target rate in records per second."""

    def after(self, took: Duration, moved: int) -> float:
        """The seconds to rest."""
        shortest, longest = SHORTEST_REST * took, LONGEST_REST * took
        if moved <= 0 or took <= 0:
            return shortest / SECOND
        each = took / moved
        usual = each if self.usual is None else self.usual
        self.usual = usual + (each - usual) / MEMORY
        rest = max(shortest, moved * SECOND / self.rate - took)
        return max(rest, min(longest, rest * each / usual)) / SECOND


class Reaper:
    """The task that reaps. Several may run at once; each skips rows that another one has locked."""

    name: Final = REAPER.name
    about: Final = ""

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
        rate: float = RATE,
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
        self._rate = rate
        self._observed = notify
        self._stopped = False
        self.failed = 0
        """Rounds that ended early because a clock was wrong."""
        self.counts: Counter[str] = Counter()
        """Records by what was done (`purged`, `marked`, `parked`, `abandoned`), `notes`, and dead `workers`."""
        seconds = policy.reap_interval.total_seconds()
        self.pace = Pace(shortest=seconds, longest=seconds)

    @property
    def done(self) -> int:
        """Records that were moved."""
        return sum(count for what, count in self.counts.items() if what not in {"notes", "workers"})

    @property
    def batch(self) -> int:
        """The size of the next batch: as many records as take `MOMENT`, and fewer after a timeout."""
        return self._batch

    async def run_once(self) -> int:
        """End everything that has expired; returns how many records were moved."""
        before, done = self.counts.copy(), self.done
        agreed = await self._end_expiring()
        # Records that this round has marked are not due yet: the longer age also counts from their expiry.
        agreed = agreed and await self._end_kept()
        if agreed and self._audit is not None:
            await self._forget(self._audit)
        if agreed:
            self.counts["workers"] += await adrive(self._store.forget_workers(FORGOTTEN), self._run)
        did = self.counts - before  # without zeros
        if did:
            log.info("reaper: %s", ", ".join(f"{count} {what}" for what, count in sorted(did.items())))
        return self.done - done

    async def shut_down(self) -> None:
        """Nothing to wait for: a round leaves nothing open."""

    async def stop(self, grace: float) -> None:  # noqa: ARG002  (a batch is never long)
        """Begin no further batch."""
        self._stopped = True

    async def _end_expiring(self) -> bool:
        """End expired records. Returns False if the clocks disagree: then the round must end."""
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
        """Delete records that were marked and kept long enough. Returns False if the clocks disagree."""
        age = self._retention.grace + self._retention.kept
        first = await self._looked(self._store.kept_expired(1, age))
        if first is None or not first.records:
            return first is not None
        return await self._end_finished(self._store.purge_kept, PURGED, first.now, age)

    async def _end_finished(
        self,
        move: Callable[..., Flow[Gone]],
        what: str,
        now: Instant,
        age: Duration,
    ) -> bool:
        """Move finished records in batches, each by a checked timestamp. Returns False if the clocks disagree."""
        mover = self._mover if self._policy.audit else None
        after, rests = START, BatchRests(rate=self._rate)
        while not self._stopped:
            due = Expired(age, now - age, soft=self._retention.soft, trusted_for=self._watch.trusted_for)
            began, size = self._clock(), self._batch
            try:
                gone = await adrive(move(due, size, after, mover, each=self._policy.audit == EACH), self._run)
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
        """End the remaining records, page by page. Returns False if the clocks disagree."""
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
        log.error("reaper: stopped because %s", self._watch.why)
        return False

    def _cared(self, page: Page) -> Flow[ReapedUnfinished]:
        trusted_for = self._watch.trusted_for
        return upkeep.reap(self._store, page, self._policy, self._retention, self._mover, trusted_for=trusted_for)

    async def _forget(self, audit: Audit) -> None:
        age, size, rests = micros(self._policy.audit_ttl), self._batch, BatchRests(rate=self._rate)
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
            log.error("reaper: started and never finished, so its outcome is unknown: %s (%s)", *_named(record))
        for record in cared.abandoned:
            log.warning("reaper: no worker took its deferred call, so it has timed out: %s (%s)", *_named(record))


def _named(record: Record) -> tuple[str, str]:
    return record.operation, f"digest {key_digest(record.id.key)}"
