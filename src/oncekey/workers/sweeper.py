"""The sweeper: finds records whose lease is over, and moves them where their own effects say.

It runs no handler. A record that may run again becomes retryable, for its client or the completer; one that may not
becomes unknown, for a resolver. A live owner renews its lease, so the sweeper never finds its record.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Final

from oncekey.core.audit import Mover
from oncekey.core.errors import StoreError
from oncekey.core.keys import key_digest
from oncekey.core.model import SECOND, State
from oncekey.core.policy import micros
from oncekey.core.rulings import LOCK_EXPIRED
from oncekey.core.transitions import Actor
from oncekey.core.upkeep import short_leases
from oncekey.engine import upkeep
from oncekey.engine.notifying import of_sweep
from oncekey.flow import adrive
from oncekey.observe.events import ShortLease
from oncekey.workers.service import ClockWatch, Pace, this_process

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from oncekey.core.model import Instant
    from oncekey.core.policy import Policy
    from oncekey.flow import Transaction
    from oncekey.observe.events import Notify
    from oncekey.ports import Upkeep

log = logging.getLogger("oncekey.worker")

PAGE: Final = 100
RUNS: Final = 1000
"""Among how many of the last runs the slowest are looked for."""
LEASES_EVERY: Final = 10
"""After how many rounds leases are compared with how long operations take."""


class Sweeper:
    """The task that sweeps. Several may run side by side: each record is moved by one of them."""

    name: Final = "sweeper"

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
        """Looks that were ended early, because a clock or this process's own leases are wrong."""
        self.counts: Counter[tuple[str, State]] = Counter()
        """Records that were moved, by operation and new state: each of them is a crash."""
        seconds = policy.sweep_interval.total_seconds()
        self.pace = Pace(shortest=seconds, longest=seconds)

    async def run_once(self) -> int:
        """Look once for everything that is stale; how many records were moved.

        After an error, or if this process cannot renew its own leases, the sweeper moves nothing. It goes on only when
        every live owner has had the time of one lease to renew.
        """
        if not self._healthy():
            self.failed += 1
            log.error("sweeper: this process cannot renew its own leases, so it judges no others")
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
                log.error("sweeper: stopped, because %s", self._watch.why)
                return moved
            trusted_for = self._watch.trusted_for
            if trusted_for is not None and trusted_for < micros(self._policy.lease):
                return moved  # a live owner has not had the time to renew yet
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
            for event in of_sweep(record, swept.to, Actor.SWEEPER, now, LOCK_EXPIRED):
                self._observed(event)
        self.counts[record.operation, swept.to] += 1
        log.warning(
            "sweeper: the owner of a key did not come back: %s is %s now (digest %s, attempt %d)",
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
                "sweeper: a lease of %g s is short for %s, of which 1 in 100 takes %g s or more: make it at least "
                "twice as long, or live ones look dead when they miss a heartbeat",
                lease / SECOND,
                operation,
                p99 / SECOND,
            )
