"""Counts per tenant with bounded memory: the most frequent tenants have a line of their own, the others share one."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Final

from oncekey.core.model import Code
from oncekey.observe.events import Refused, Replayed

if TYPE_CHECKING:
    from oncekey.observe.events import Event

OTHERS: Final = "other"
"""The line of all tenants without one; a tenant of this name is counted there, too."""


class Tenants:
    """A limited number of tenants by name. Another one replaces the least frequent of them when it is seen more often.

    A tenant that is replaced leaves its count to the shared line, so the sum is always right. As many tenants without a
    line are counted, too: with each further newcomer all of their counts go down by one, and at 0 one is dropped (Misra
    and Gries). So a tenant with a real part of all events is never missed, however many others come.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._named: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        self._others = 0
        self._lock = threading.Lock()

    def add(self, tenant: str) -> None:
        """Count one event of a tenant."""
        with self._lock:
            if tenant in self._named or (len(self._named) < self._most and tenant != OTHERS):
                self._named[tenant] += 1
                return
            self._others += 1
            if self._most and tenant != OTHERS:
                self._wait(tenant)

    def _wait(self, tenant: str) -> None:
        waiting = self._waiting
        if tenant not in waiting and len(waiting) >= self._most:
            waiting.subtract(dict.fromkeys(waiting, 1))
            self._waiting = +waiting
            return
        waiting[tenant] += 1
        least = min(self._named, key=lambda name: self._named[name])
        if waiting[tenant] > self._named[least]:
            self._others += self._named.pop(least) - waiting[tenant]
            self._named[tenant] = waiting.pop(tenant)

    def counts(self) -> dict[str, int]:
        """Events by tenant, and those of all others."""
        with self._lock:
            return {**self._named, OTHERS: self._others} if self._others else dict(self._named)


class PerTenant:
    """The counts for each tenant: keys that came with another payload, and requests that came again."""

    def __init__(self, most: int) -> None:
        self.misuse, self.duplicates = Tenants(most), Tenants(most)

    def __call__(self, event: Event) -> None:
        """Count an event, if it is one of those."""
        if isinstance(event, Replayed) or (isinstance(event, Refused) and event.code is Code.IN_PROGRESS):
            self.duplicates.add(event.about.tenant)
        elif isinstance(event, Refused) and event.code is Code.KEY_REUSED:
            self.misuse.add(event.about.tenant)
