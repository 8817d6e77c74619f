"""The writer of a SQLite file, as one process knows it: whose turn it is, and which keys are locked or asked for.

SQLite has one writer at a time, so its transaction is the lock of whatever key it is about. What SQLite does not say is
which key that is. So everybody in this process who writes to a file shares one `Writer`: threads and event loops queue
for its turn, and whoever locks a key says so here. A duplicate then hears that it is one at once, and does not have to
queue up behind its own first request. Another process's writer is known to SQLite alone.
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
    from oncekey.core.locks import Lock

TORN: Final = 1000
"""How many transactions that their handlers ended are remembered: each is asked after before the next request's."""


class Writer:
    """One file's writer. Who has the turn may begin a transaction that writes; nobody else of this process does."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._turn = threading.Lock()
        self._begun = 0
        self._torn: deque[int] = deque(maxlen=TORN)
        self._locked: Lock | None = None
        self._asking: dict[object, int] = {}

    @property
    def busy(self) -> bool:
        """Whether somebody of this process has the turn."""
        return self._turn.locked()

    def take(self, patience: float) -> None:
        """Wait for the turn, but not for ever."""
        if not self._turn.acquire(timeout=patience):
            raise StoreBusyError("another writer of this process held the SQLite file for too long")

    def leave(self) -> None:
        """Let the next one have the turn; what was locked is over with it."""
        self._locked = None
        self._turn.release()

    def begins(self) -> None:
        """Whoever has the turn began a transaction."""
        self._begun += 1

    def tears(self) -> None:
        """A handler ended its transaction by itself, and those who have the turn must begin another one."""
        self._torn.append(self._begun)

    def was_torn(self, begun: int) -> bool:
        """Whether that happened to a transaction, by what `lock` called it."""
        return begun in self._torn

    def asks(self, lock: Lock) -> object:
        """A request queues for the turn: until `asked`, its duplicates need not queue behind it."""
        asker = object()
        self._asking[asker] = lock.number
        return asker

    def asked(self, asker: object) -> None:
        """It has the turn, or waits for it no longer."""
        self._asking.pop(asker, None)  # a forked child has forgotten it

    def lock(self, lock: Lock) -> int:
        """The transaction of whoever has the turn locks a key; which transaction that is."""
        self._locked = lock
        return self._begun

    def holder(self, lock: Lock) -> Holder:
        """Which request has the key. Who only asks for it proves nothing: it may never run."""
        locked = self._locked
        if locked is not None and locked.number == lock.number:
            return Holder.SOMEBODY if locked.mark == lock.mark else Holder.OTHER
        return Holder.SOMEBODY if lock.number in list(self._asking.values()) else Holder.NOBODY

    def holds(self, number: int) -> bool:
        """Whether a key is locked or asked for, by whatever request."""
        locked = self._locked
        return (locked is not None and locked.number == number) or number in list(self._asking.values())

    def forget(self) -> None:
        """In a forked child nobody has the turn: whoever had it lives on in the parent."""
        self._turn = threading.Lock()
        self._locked = None
        self._asking.clear()


_writers: WeakValueDictionary[str, Writer] = WeakValueDictionary()
_guard = threading.Lock()


def writer_of(path: str) -> Writer:
    """The writer of a file, whatever name it goes by; all drivers of this process share it."""
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
