"""The writer of a SQLite file in one process: who has the turn to write, and which keys are locked or asked for.

SQLite has one writer at a time, so its transaction is the lock of the key that it writes. SQLite does not say which key
that is. So all threads and event loops of this process that write to a file share one `Writer`: they queue for its
turn, and a transaction notes here which key it locks. So a duplicate is recognised at once, and does not have to queue
behind its own first request. Writers of other processes are known to SQLite alone.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from oncekey.core.errors import StoreBusyError
from oncekey.core.onecommit import Holder

if TYPE_CHECKING:
    from oncekey.core.onecommit import Lock

TORN: Final = 1000
"""How many transactions that their handlers ended are remembered: each is looked up before the next request's."""


class Writer:
    """One file's writer. Only the holder of the turn begins a transaction that writes in this process."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._turn = threading.Lock()
        self._begun = 0
        self._torn: deque[int] = deque(maxlen=TORN)
        self._locked: Lock | None = None
        self._asking: dict[object, int] = {}

    @property
    def busy(self) -> bool:
        """Whether a transaction of this process has the turn."""
        return self._turn.locked()

    def take(self, patience: float) -> None:
        """Wait for the turn, at most so long."""
        if not self._turn.acquire(timeout=patience):
            raise StoreBusyError("another writer of this process held the SQLite file for too long")

    def leave(self) -> None:
        """Pass the turn on; the lock ends with it."""
        self._locked = None
        self._turn.release()

    def begins(self) -> None:
        """Note that the holder of the turn began a transaction."""
        self._begun += 1

    def tears(self) -> None:
        """Note that a handler ended its transaction by itself, and the holder of the turn must begin another one."""
        self._torn.append(self._begun)

    def was_torn(self, begun: int) -> bool:
        """Whether that happened to the transaction with this number from `lock`."""
        return begun in self._torn

    def asks(self, lock: Lock) -> object:
        """Note that a request queues for the turn: until `asked`, its duplicates need not queue behind it."""
        asker = object()
        self._asking[asker] = lock.number
        return asker

    def asked(self, asker: object) -> None:
        """Note that it has the turn, or waits no longer."""
        self._asking.pop(asker, None)  # a forked child has forgotten it

    def lock(self, lock: Lock) -> int:
        """Note which key the holder's transaction locks; returns the number of the transaction."""
        self._locked = lock
        return self._begun

    def holder(self, lock: Lock) -> Holder:
        """Which request has the key. A request that only queues for it proves nothing: it may never run."""
        locked = self._locked
        if locked is not None and locked.number == lock.number:
            return Holder.SOMEBODY if locked.mark == lock.mark else Holder.OTHER
        return Holder.SOMEBODY if lock.number in list(self._asking.values()) else Holder.NOBODY

    def holds(self, number: int) -> bool:
        """Whether any request has locked a key or asked for it."""
        locked = self._locked
        return (locked is not None and locked.number == number) or number in list(self._asking.values())

    def forget(self) -> None:
        """Release the turn in a forked child: its holder lives on in the parent."""
        self._turn = threading.Lock()
        self._locked = None
        self._asking.clear()


_writers: WeakValueDictionary[str, Writer] = WeakValueDictionary()
_guard = threading.Lock()


def writer_of(path: str) -> Writer:
    """The writer of a file, under whatever name; all drivers of this process share it."""
    real = os.path.realpath(path)
    with _guard:
        writer = _writers.get(real)
        if writer is None:
            writer = _writers[real] = Writer(real)
        return writer


def _forget_the_parent() -> None:
    global _guard  # noqa: PLW0603  (it may have been held while the process was forked)
    _guard = threading.Lock()
    for writer in list(_writers.values()):
        writer.forget()


if hasattr(os, "register_at_fork"):  # where processes are forked
    os.register_at_fork(after_in_child=_forget_the_parent)
