"""The reaper: removes what has expired, in batches, and never what somebody may still have to settle (R156-R174).

Deleting cannot be undone. So it goes only by clocks that agree, after a grace, and the statement that deletes looks at
the state and the expiry once more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import TYPE_CHECKING, Final

from oncekey.core.audit import Mover
from oncekey.core.errors import StoreError
from oncekey.core.keys import key_digest
from oncekey.core.model import SECOND
from oncekey.core.policy import micros
from oncekey.core.transitions import Actor
from oncekey.core.upkeep import Retention
from oncekey.engine import upkeep
from oncekey.flow import adrive
from oncekey.workers.clocks import Watch, boot, this_process
from oncekey.workers.presence import FORGOTTEN
from oncekey.workers.service import Pace

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from oncekey.core.model import Duration, Instant, Record
    from oncekey.core.policy import Policy
    from oncekey.core.upkeep import Page
    from oncekey.engine.upkeep import Reaped
    from oncekey.flow import Flow, Transaction
    from oncekey.ports import Audit, Upkeep
    from oncekey.workers.calling import Sleep

log = logging.getLogger("oncekey.worker")

SMALLEST: Final = 10
"""A batch of so few that times out is an outage, and no batch too large."""


class Reaper:
    """A task that reaps. Several may run side by side; what one of them has locked, the others leave."""

    name: Final = "reaper"

    def __init__(
        self,
        store: Upkeep,
        audit: Audit | None,
        run: Callable[[Transaction[object]], Awaitable[object]],
        policy: Policy,
        *,
        watch: Watch | None = None,
        sleep: Sleep = asyncio.sleep,
        clock: Callable[[], Instant] = boot,
        who: str | None = None,
    ) -> None:
        self._store = store
        self._audit = audit
        self._run = run
        self._policy = policy
        self._retention = Retention.by(policy)
        self._watch = watch or Watch()
        self._sleep = sleep
        self._clock = clock
        self._mover = Mover(Actor.REAPER, who or this_process())
        self._batch = policy.reap_batch
        self._stopped = False
        self.failed = 0
        """Looks that were broken off, because a clock is wrong."""
        self.counts: Counter[str] = Counter()
        """Records by what became of them (`purged`, `marked`, `parked`, `abandoned`), `notes`, and dead `workers`."""
        seconds = policy.reap_interval.total_seconds()
        self.pace = Pace(shortest=seconds, longest=seconds)

    @property
    def batch(self) -> int:
        """How many records it takes at a time now: fewer after a time-out, and slowly more again."""
        return self._batch

    async def run_once(self) -> int:
        """One look at everything that has expired; how many records were moved."""
        before = self.counts.copy()
        kept = self._retention.grace + self._retention.kept
        agreed = await self._reap(self._store.expiring, self._retention.grace)
        # Those that this very round has marked are not due yet: the longer age is counted from their expiry, too.
        agreed = agreed and await self._reap(self._store.kept_expired, kept)
        if agreed and self._audit is not None:
            await self._forget(self._audit)
        if agreed:
            self.counts["workers"] += await adrive(self._store.forget_workers(FORGOTTEN), self._run)
        did = self.counts - before  # without what is zero
        if did:
            log.info("reaper: %s", ", ".join(f"{count} {what}" for what, count in sorted(did.items())))
        return sum(count for what, count in did.items() if what not in {"notes", "workers"})

    async def drain(self) -> None:
        """A round leaves nothing behind."""

    async def stop(self, grace: float) -> None:  # noqa: ARG002  (a batch is never long)
        """Begin no other batch."""
        self._stopped = True

    async def _reap(self, look: Callable[[int, Duration, Record | None], Flow[Page]], age: Duration) -> bool:
        """Page by page; False if the clocks do not agree, so that nothing more may be ended."""
        after: Record | None = None
        while not self._stopped:
            began, batch = self._clock(), self._batch
            try:
                page = await adrive(look(batch, age, after), self._run)
                if not self._watch.look(page.now):
                    self.failed += 1
                    log.error("reaper: stopped, because %s", self._watch.why)
                    return False
                self._count(await adrive(self._reaped(page), self._run))
            except StoreError:
                if batch <= SMALLEST:
                    raise
                self._batch = max(SMALLEST, batch // 2)
                await self._rest(began)
                continue
            self._batch = min(self._policy.reap_batch, batch * 2)
            if len(page.records) < batch:
                return True
            after = page.records[-1]
            await self._rest(began)
        return True

    def _reaped(self, page: Page) -> Flow[Reaped]:
        trusted_for = self._watch.trusted_for
        return upkeep.reap(self._store, page, self._policy, self._retention, self._mover, trusted_for=trusted_for)

    async def _forget(self, audit: Audit) -> None:
        age = micros(self._policy.audit_ttl)
        while not self._stopped:
            began = self._clock()
            gone = await adrive(audit.forget(age, self._policy.reap_batch), self._run)
            self.counts["notes"] += gone
            if gone < self._policy.reap_batch:
                return
            await self._rest(began)

    async def _rest(self, began: Instant) -> None:
        """As long as the batch took: whoever serves requests has at least half of the store."""
        await self._sleep((self._clock() - began) / SECOND)

    def _count(self, reaped: Reaped) -> None:
        self.counts.update(
            purged=reaped.purged,
            marked=reaped.marked,
            parked=len(reaped.parked),
            abandoned=len(reaped.abandoned),
        )
        for record in reaped.parked:
            log.error("reaper: begun and never ended, so it is unknown now: %s (%s)", *_named(record))
        for record in reaped.abandoned:
            log.warning("reaper: its parcel was never taken, so it has timed out: %s (%s)", *_named(record))


def _named(record: Record) -> tuple[str, str]:
    return record.operation, f"digest {key_digest(record.id.key)}"
