"""The fronts of an application (caches before the store): their creation, and the removal of a response."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncekey.engine.fronts import Fronts
from oncekey.runtimes import boottime
from oncekey.runtimes.aio import AsyncRuntime, RunningWork

if TYPE_CHECKING:
    from collections.abc import Iterable

    from oncekey.core.checks import Front
    from oncekey.core.model import RecordId
    from oncekey.core.policy import Policy
    from oncekey.engine.run import Breaker
    from oncekey.engine.shell import AsyncEngine
    from oncekey.ports.store import FrontConnection


def fronts_here() -> Fronts:
    """The fronts of an application, still empty: a policy's front is connected on first use."""
    return Fronts(boottime, _line)


async def forget(here: Fronts, policies: Iterable[Policy], engine: AsyncEngine, record_id: RecordId) -> bool:
    """Remove a stored response from all fronts before an operator deletes it; returns whether that is certain."""
    if here.identity is None:
        here.identity = engine.identity
    return await AsyncRuntime(engine, RunningWork()).drive(here.forget(policies, record_id))


def _line(front: Front, breaker: Breaker) -> FrontConnection:
    from oncekey.databases.redis.line import RedisLine  # noqa: PLC0415  (an optional package)

    return RedisLine(front.place, front.patience, breaker)
