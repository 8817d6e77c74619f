"""Background work beside requests that run in threads: heartbeats, and settlements to repeat (errands).

A few threads of the process do the chores when they are due. The threads start when there is a chore and end when there
is none left, so an idle process has none, and neither a lease nor an errand has a thread of its own.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from oncekey.core.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.engine.effects import Beat, Later
    from oncekey.flow import Flow

log = logging.getLogger("oncekey")

THREADS: Final = 4
"""How many chores run at once: one that waits for the store does not delay the others."""
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0


class Chores:
    """Chores in the order of their due time, the threads that run them, and what a stop has to wait for."""

    def __init__(self) -> None:
        lock = threading.Lock()
        self._added = threading.Condition(lock)
        self._done = threading.Condition(lock)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._threads = 0
        self._waiting = 0
        self._under_way: set[object] = set()

    def began(self, work: object) -> None:
        """Note that a run or an errand has begun, unless it was noted before."""
        with self._done:
            self._under_way.add(work)

    def ended(self, work: object) -> None:
        """Note that it has ended."""
        with self._done:
            self._under_way.discard(work)
            if not self._under_way:
                self._done.notify_all()

    def shut_down(self, seconds: float) -> bool:
        """Wait for all runs and errands, at most `seconds`; whether they have ended."""
        with self._done:
            if self._done.wait_for(lambda: not self._under_way, seconds):
                return True
            left = len(self._under_way)
        log.error("oncekey: stopped with %d settlements not written; their leases will run out", left)
        return False

    def add(self, seconds: float, chore: Callable[[], None]) -> None:
        """Run a chore after so many seconds."""
        line = (time.monotonic() + seconds, next(self._numbers), chore)
        with self._added:
            heapq.heappush(self._due, line)
            if not self._waiting:
                self._call_for_one_more()
            elif self._due[0] is line:  # the thread that waits, waits for a later chore
                self._added.notify()

    def _call_for_one_more(self) -> None:
        if self._threads < THREADS:
            self._threads += 1
            threading.Thread(target=self._work, name="oncekey-chores", daemon=True).start()

    def _work(self) -> None:
        while (chore := self._next()) is not None:
            try:
                chore()
            except Exception as error:  # noqa: BLE001  (no caller would see it: logged here)
                log.error("oncekey: a chore failed and is not tried again: %s", type(error).__name__)

    def _next(self) -> Callable[[], None] | None:
        """The chore that is due; None: there is none left, and this thread ends."""
        with self._added:
            self._waiting += 1
            while self._due and (wait := self._due[0][0] - time.monotonic()) > 0:
                self._added.wait(wait)
            self._waiting -= 1
            if not self._due:
                self._threads -= 1
                return None
            chore = heapq.heappop(self._due)[2]
            if self._due and not self._waiting:
                self._call_for_one_more()  # another thread takes the other chores while this one works
            return chore


class Heartbeat:
    """Renews a lease. A chore, not a thread: most requests end before its first beat."""

    __slots__ = ("_chores", "_every", "_renew", "_stops_at", "_transact", "lost")

    def __init__(self, chores: Chores, transact: Callable[[Flow[Any]], Any], effect: Beat) -> None:
        self.lost = False
        self._chores = chores
        self._transact = transact
        self._every = effect.every
        self._renew: Callable[[], Flow[Any]] | None = effect.renew
        self._stops_at = time.monotonic() + effect.until
        chores.add(effect.every, self._beat)

    def stop(self) -> None:
        """Stop beating; nothing of the request stays in memory until the next beat."""
        self._renew = None

    def _beat(self) -> None:
        renew, wait = self._renew, self._every
        if renew is None or time.monotonic() >= self._stops_at:
            return
        try:
            until = self._transact(renew())
        except StoreError as error:
            wait /= 3  # two more beats fit into the lease: try sooner
            log.warning("oncekey: a lease could not be renewed: %s", type(error).__name__)
        else:
            if until is None and self._renew is not None:  # after `stop` the record is not lost, but settled
                self.lost = True
                log.warning("oncekey: a lease was lost while its handler was running")
                return
        self._chores.add(wait, self._beat)


class LaterSettlement:
    """A settlement that could not reach the store yet. Between two tries it occupies no thread."""

    __slots__ = ("_chores", "_ends", "_flow", "_pause", "_transact")

    def __init__(self, chores: Chores, transact: Callable[[Flow[Any]], Any], effect: Later) -> None:
        self._chores = chores
        self._transact = transact
        self._flow = effect.flow
        self._pause = FIRST_PAUSE
        self._ends = time.monotonic() + effect.patience

    def begin(self) -> None:
        """Count the errand: a stop waits for it from now on."""
        self._chores.began(self)
        self._chores.add(0, self._try)

    def _try(self) -> None:
        try:
            self._transact(self._flow())
        except StoreError:
            pause, self._pause = self._pause, min(self._pause * 2, LONGEST_PAUSE)
            if time.monotonic() + pause < self._ends:
                self._chores.add(pause, self._try)
                return
            log.error("oncekey: a settlement could not be written; its lease runs out")
        except Exception as error:  # noqa: BLE001  (no caller would see it: logged here)
            log.error("oncekey: a settlement failed and is not tried again: %s", type(error).__name__)
        self._chores.ended(self)
