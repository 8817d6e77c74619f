"""The clocks of a host, and the watch that compares the store's with them (A3, F41)."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

from oncekey.boottime import boottime
from oncekey.core.model import SECOND
from oncekey.core.upkeep import Trust

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.core.model import Duration, Instant


def wall() -> Instant:
    """The host's own clock."""
    return time.time_ns() // 1000


def boot() -> Instant:
    """A clock that cannot be set and that goes on while the machine sleeps."""
    return round(boottime() * SECOND)


def this_process() -> str:
    """The name of this process in the audit."""
    return f"{socket.gethostname()}:{os.getpid()}"


class ClockWatch:
    """Compares the store's clock, whenever it comes with a page, with the host's, and notes when it was last wrong.

    The instant of the page decides what is due, so that instant is compared: a worker that read a clock first and then
    stood still would decide by another one.
    """

    def __init__(self, *, wall: Callable[[], Instant] = wall, boot: Callable[[], Instant] = boot) -> None:
        self._wall = wall
        self._boot = boot
        self._trust = Trust()

    def look(self, store: Instant) -> bool:
        """Whether the clocks agree."""
        self._trust = self._trust.looked(store, self._wall(), self._boot())
        return not self._trust.wrong

    def disturbed(self) -> None:
        """Note that the store failed: owners could not renew their leases either."""
        self._trust = self._trust.disturbed(self._boot())

    @property
    def why(self) -> str:
        """What is wrong, in a sentence; empty if nothing is."""
        return self._trust.why

    @property
    def trusted_for(self) -> Duration | None:
        """How long the clocks have agreed; None: always."""
        return self._trust.trusted_for(self._boot())
