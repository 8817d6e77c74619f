"""The fronts of an application: how they are made, and how an answer is removed from them."""

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
    """Nothing yet; what a policy names is connected to when it is first needed."""
    return Fronts(boottime, _line)


async def forget(here: Fronts, policies: Iterable[Policy], engine: AsyncEngine, record_id: RecordId) -> bool:
    """Let no front give a stored answer any more, before an operator takes it away; whether that is certain."""
    if here.identity is None:
        here.identity = engine.identity
    return await AsyncRuntime(engine, RunningWork()).drive(here.forget(policies, record_id))


def _line(front: Front, breaker: Breaker) -> FrontConnection:
    from oncekey.databases.redis.line import RedisLine  # noqa: PLC0415  (an optional package)

    return RedisLine(front.place, front.patience, breaker)
