"""The parts a world is made of: the real ones by default, and a mutant by replacing one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from oncekey.core.seed import seed_of
from oncekey.engine import request
from oncekey.stores.memory import COMMANDS
from oncekey.testing.sim.handlers import InlineRun, LocalRun
from oncekey.testing.sim.serving import Serving, heartbeat
from oncekey.testing.sim.timing import POLICY
from oncekey.testing.sim.upkeep import UPKEEP
from oncekey.testing.sim.workers import Operator, Reaper, Resolver, Sweeper, Worker

if TYPE_CHECKING:
    from uuid import UUID

    from oncekey.core.model import (
        Claim,
        Duration,
        Instant,
        Lease,
        RecordId,
        Settled,
        Settlement,
        Verdict,
    )
    from oncekey.core.policy import Policy
    from oncekey.flow import Command, Flow
    from oncekey.ports import Records
    from oncekey.testing.sim.steps import Process

Begin: TypeAlias = "Callable[[Records, Claim, Policy], Flow[Verdict]]"
Renew: TypeAlias = "Callable[[Records, Lease, Duration], Flow[Instant | None]]"
Settle: TypeAlias = "Callable[[Records, Lease, Settlement], Flow[Settled]]"
Conclude: TypeAlias = "Callable[[Records, Lease], Flow[Settled]]"
Beat: TypeAlias = "Callable[[Serving, Lease, Instant], Process[None]]"


def real_seed(record_id: RecordId, fingerprint: str, incarnation: UUID) -> bytes:  # noqa: ARG001  (for mutants)
    """The seed of a request's downstream keys (D1)."""
    return seed_of(record_id, fingerprint, POLICY.secret)


@dataclass(frozen=True, slots=True)
class Parts:
    """What is under test: statements, flows, and what a server and its workers do with them."""

    commands: Mapping[str, Command] = field(default_factory=lambda: {**COMMANDS, **UPKEEP})
    hosts_clock: bool = False
    """Stamp records with the wall clock of whoever writes, not with the store's."""
    begin: Begin = request.begin
    renew: Renew = request.renew
    settle: Settle = request.settle
    release: Conclude = request.release
    settle_lost_commit: Conclude = request.settle_lost_commit
    seed: Callable[[RecordId, str, UUID], bytes] = real_seed
    heartbeat: Beat = heartbeat
    serving: type[Serving] = Serving
    local: type[LocalRun] = LocalRun
    inline: type[InlineRun] = InlineRun
    workers: tuple[type[Worker], ...] = (Sweeper, Resolver, Reaper, Operator)


REAL: Parts = Parts()
