"""The parts a world is made of: the real ones by default, and a mutant by replacing one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from oncekey.core.seed import seed_of
from oncekey.stores.memory import COMMANDS
from oncekey.testing.sim.onecommit import ONE_COMMIT
from oncekey.testing.sim.runtime import Serving
from oncekey.testing.sim.timing import POLICY
from oncekey.testing.sim.upkeep import UPKEEP
from oncekey.testing.sim.workers import Operator, Reaper, Relay, Resolver, Sweeper, Worker

if TYPE_CHECKING:
    from uuid import UUID

    from oncekey.core.model import RecordId
    from oncekey.flow import Command


def real_seed(record_id: RecordId, fingerprint: str, incarnation: UUID) -> bytes:  # noqa: ARG001  (for mutants)
    """The seed of a request's downstream keys (D1)."""
    return seed_of(record_id, fingerprint, POLICY.secret)


@dataclass(frozen=True, slots=True)
class Parts:
    """What is under test: statements, the lifecycle, and what a server and its workers do with them."""

    commands: Mapping[str, Command] = field(default_factory=lambda: {**COMMANDS, **ONE_COMMIT, **UPKEEP})
    hosts_clock: bool = False
    """Stamp records with the wall clock of whoever writes, not with the store's."""
    patched: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Functions of the lifecycle itself, replaced while the world runs."""
    seed: Callable[[RecordId, str, UUID], bytes] = real_seed
    serving: type[Serving] = Serving
    workers: tuple[type[Worker], ...] = (Sweeper, Resolver, Reaper, Operator, Relay)


REAL: Parts = Parts()
