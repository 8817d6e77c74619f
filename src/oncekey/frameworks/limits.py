"""Limits: how many keys a tenant may create, how often a caller may query, how old a request may be.

Only requests that would execute are ever rejected. The response for a known key comes from its record, so a client that
retries is served however busy its tenant is. The `limits` package does the counting, in its storages.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from oncekey.core.errors import ConfigurationError, MalformedError, StoreError
from oncekey.core.first_sent import FIRST_SENT, is_too_old
from oncekey.core.headers import field_name
from oncekey.core.model import Claim, Code, Headers, Instant, Refuse
from oncekey.core.policy import Policy, micros
from oncekey.core.rulings import Situation, situate
from oncekey.engine.actions import Call, Life
from oncekey.runtimes import boottime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import timedelta

    from oncekey.ports.store import Store

log = logging.getLogger("oncekey")

IN_MEMORY: Final = "memory://"
ASYNC: Final = "async+"
"""The prefix of a storage's URL for use in an event loop."""
NOT_INSTALLED: Final = (
    "max_new_keys_per_second and max_lookups_per_second need the package limits: pip install 'oncekey[limits]'"
)
COUNT_KEPT: Final = 1.0
"""Seconds for which a count of live keys is cached: counting costs the store more than claiming."""
MOST_COUNTS: Final = 10_000
FULL_WAIT: Final = 60
"""The `Retry-After`, in seconds, for a tenant with too many live keys: some will expire."""
_FREE: Final = (Situation.ABSENT, Situation.EXPIRED)
_FIRST_SENT: Final = field_name(FIRST_SENT)


def wall() -> Instant:
    """The host's clock."""
    return time.time_ns() // 1000


def check(policies: Iterable[Policy], *, blocking: bool = False) -> None:
    """Raise at start-up if a package for the limits is missing."""
    for policy in policies:
        if policy.max_new_keys_per_second is None and policy.max_lookups_per_second is None:
            continue
        if find_spec("limits") is None:
            raise ConfigurationError(NOT_INSTALLED)
        _storage(policy.limits_storage, blocking=blocking)


class Limits:
    """The limits of one installation. Each event loop counts over its own connection; all threads share one."""

    def __init__(
        self, *, blocking: bool = False, now: Callable[[], Instant] = wall, boot: Callable[[], float] = boottime
    ) -> None:
        self._blocking = blocking
        self._now = now
        self._boot = boot
        self._limiters: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str | None, Any]] = WeakKeyDictionary()
        self._threads: dict[str | None, Any] = {}
        self._live: dict[str, tuple[float, int]] = {}

    def anew(self) -> Limits:
        """The same limits for a forked process; the parent's connections are not touched."""
        return Limits(blocking=self._blocking, now=self._now, boot=self._boot)

    def of(self, store: Store, headers: Headers, claim: Claim, policy: Policy) -> Life[Refuse | None] | None:
        """The flow that refuses a request beyond the limits; None if its route has no limits."""
        too_old = None if policy.max_request_age is None else self._age(headers, policy.max_request_age)
        if too_old is None and policy.max_new_keys_per_second is None and policy.max_live_keys is None:
            return None
        return self._admits(store, claim, policy, too_old)

    def _admits(self, store: Store, claim: Claim, policy: Policy, too_old: Refuse | None) -> Life[Refuse | None]:
        try:
            snapshot = yield from store.find(claim.id)
            if situate(snapshot.record, snapshot.now) not in _FREE:
                return None
            return too_old or (yield from self._new_key(store, claim.id.scope, policy))
        except StoreError:
            return too_old  # the claim fails in the same way, and reports it

    def looks_up(self, caller: str, policy: Policy) -> Life[Refuse | None]:
        """The refusal of a caller who queries too often; None if the caller may query a key's state now."""
        if policy.max_lookups_per_second is None:
            return None
        return (yield from self._hit("lookups", caller, policy.max_lookups_per_second, policy))

    def _age(self, headers: Headers, most: timedelta) -> Refuse | None:
        lines = [bytes(value) for name, value in headers if name == _FIRST_SENT]
        try:
            old = is_too_old(lines, micros(most), self._now())
        except MalformedError as error:
            return Refuse(Code.REQUEST_TOO_OLD, detail=str(error))
        return Refuse(Code.REQUEST_TOO_OLD) if old else None

    def _new_key(self, store: Store, scope: str, policy: Policy) -> Life[Refuse | None]:
        if policy.max_live_keys is not None and (yield from self._is_full(store, scope, policy.max_live_keys)):
            return Refuse(Code.RATE_LIMITED, retry_after=FULL_WAIT)
        if policy.max_new_keys_per_second is None:
            return None
        return (yield from self._hit("new keys", scope, policy.max_new_keys_per_second, policy))

    def _is_full(self, store: Store, scope: str, most: int) -> Life[bool]:
        upkeep = store.upkeep
        if upkeep is None:
            return False
        at, live = self._live.get(scope, (-math.inf, 0))
        if self._boot() - at >= COUNT_KEPT:
            at, live = self._boot(), (yield from upkeep.live_keys(scope, most))
        if len(self._live) >= MOST_COUNTS:
            self._live.clear()
        # Requests that are admitted now are counted here until the store is read again.
        self._live[scope] = (at, min(most, live + 1))
        return live >= most

    def _hit(self, what: str, who: str, per_second: int, policy: Policy) -> Life[Refuse | None]:
        from limits import RateLimitItemPerSecond  # noqa: PLC0415  (an optional package)
        from limits.errors import StorageError  # noqa: PLC0415

        item, limiter = RateLimitItemPerSecond(per_second, namespace="oncekey"), self._limiter(policy.limits_storage)
        try:
            if (yield Call(limiter.hit, (item, what, who))):
                return None
            resets_at: float = (yield Call(limiter.get_window_stats, (item, what, who))).reset_time
        except StorageError as error:
            # A limit protects against floods, not against duplicates: without its counter the request continues.
            log.error("oncekey: the rate limit is not enforced: its storage failed: %s", type(error).__name__)
            return None
        return Refuse(Code.RATE_LIMITED, retry_after=max(1, math.ceil(resets_at - self._now() / 1_000_000)))

    def _limiter(self, url: str | None) -> Any:  # noqa: ANN401  (of an optional package)
        limiters = self._threads if self._blocking else self._limiters.setdefault(asyncio.get_running_loop(), {})
        if url not in limiters:
            # If two threads are first at the same time, both use the same counter.
            limiters.setdefault(url, _strategy(_storage(url, blocking=self._blocking), blocking=self._blocking))
        return limiters[url]


def _storage(url: str | None, *, blocking: bool) -> Any:  # noqa: ANN401
    from limits.errors import ConfigurationError as Unusable  # noqa: PLC0415  (an optional package)
    from limits.storage import storage_from_string  # noqa: PLC0415

    place = (url or IN_MEMORY).removeprefix(ASYNC)
    if not blocking:
        place = f"{ASYNC}{place}"
    try:
        return storage_from_string(place, wrap_exceptions=True)
    except Unusable as error:
        # Its text names the scheme or the missing package, but never the whole URL, which may contain a password.
        text = str(error).replace(place, f"{place.partition('://')[0]}://...")
        raise ConfigurationError(f"limits_storage cannot be used: {text}") from None


def _strategy(storage: Any, *, blocking: bool) -> Any:  # noqa: ANN401
    place = "limits" if blocking else "limits.aio"  # an optional package
    moves = isinstance(storage, import_module(f"{place}.storage").MovingWindowSupport)
    strategies = import_module(f"{place}.strategies")
    return (strategies.MovingWindowRateLimiter if moves else strategies.FixedWindowRateLimiter)(storage)
