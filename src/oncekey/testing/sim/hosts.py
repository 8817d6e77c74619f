"""Hosts: the processes that crash, stand still and wake up."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oncekey.core.model import Duration, Instant
    from oncekey.testing.sim.steps import Mailbox


class Doom(StrEnum):
    """What a fate does."""

    CRASH = "crash"
    PAUSE = "pause"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class Fate:
    """At its n-th step, this happens to a host."""

    doom: Doom
    step: int


@dataclass(slots=True, eq=False)
class Host:
    """A process that serves one request, or a worker: what it runs dies, stands still and forgets together."""

    name: str
    fate: Fate | None = None
    skew: Duration = 0
    steps: int = 0
    alive: bool = True
    paused_until: Instant = 0
    cut_off: bool = False
    """Interrupted, and not told yet."""
    done: bool = False
    locks: bool = False
    """Whether it knows the store's locks: an older version claims first."""
    folds: bool = False
    """Whether its driver sends the last statement with the COMMIT."""
    callers: tuple[Mailbox, ...] = ()
