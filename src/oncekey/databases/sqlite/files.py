"""SQLite files: opened durably, their connections lent to one borrower at a time, and one writer at a time.

SQLite has one writer at a time, so its transaction is the lock of the key that it writes. SQLite does not say which key
that is. So all threads and event loops of this process that write to a file share one `Writer`: they queue for its
turn, and a transaction notes there which key it locks. So a duplicate is recognised at once, and does not have to queue
behind its own first request. Writers of other processes are known to SQLite alone.

A connection stays on the file that it has opened. If that file was deleted or replaced since, by a restore for example,
SQLite goes on writing to the unlinked one as long as it has a write-ahead log, and every commit is lost. So each
connection remembers the device and the inode of its file. They are compared when it is borrowed and after each commit:
a commit into an unlinked file is never acknowledged, a file that was replaced is opened anew, and one that was deleted
is not created again.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Self, TypeAlias, cast
from weakref import WeakValueDictionary

from oncekey.core.errors import ConfigurationError, StoreBusyError, StoreUnavailableError
from oncekey.core.onecommit import Holder, Lock
from oncekey.databases.sqlite.execute import store_error

_log = logging.getLogger("oncekey")
POLL: Final = 0.005
"""Seconds between two tries on a file that other processes use."""

LOOK_AFTER: Final = 0.25
"""Seconds of waiting for the turn to write after which a request looks whether its answer is stored already."""

LONGEST_JOURNAL: Final = 1024 * 1024
"""Bytes of a journal that are kept for the next transaction; a longer one is truncated."""

GONE: Final = "the SQLite file was deleted or moved away: put it back, or restart this process to create a new one"
REPLACED: Final = "the SQLite file was replaced while it was in use: nothing was stored in the new one"
REOPENED: Final = "the SQLite file was replaced, or became writable: it is opened anew"
READ_ONLY: Final = "the SQLite file is read-only for this process"

Version: TypeAlias = tuple[int, int, int]

FIXED: Version = (3, 51, 3)
BACKPORTS: dict[tuple[int, int], int] = {(3, 44): 6, (3, 50): 7}
"""The older branches that were repaired, and the first patch of each that is."""

_warned: set[str] = set()
_inherited: list[sqlite3.Connection] = []
"""Connections of a parent process: SQLite forbids using them here, and closing them, too."""


def wal_is_safe(version: Version) -> bool:
    """Whether the write-ahead log of this SQLite keeps what was committed.

    From 3.7.0 to 3.51.2 two connections that write and checkpoint at the same moment can lose a committed
    transaction (SQLite calls it the WAL-reset bug). A lost claim is a second execution, so those versions use no WAL.
    """
    major, minor, patch = version
    repaired = BACKPORTS.get((major, minor))
    return version >= FIXED or (repaired is not None and patch >= repaired)


def repaired_module() -> ModuleType:
    """`pysqlite3`, whose SQLite keeps what was committed in a write-ahead log.

    It is used only where it is asked for. Two copies of SQLite in one process do not see each other's locks, and an
    application that opened the file with the standard library's would lose acknowledged commits (ADR 0005).
    """
    try:
        import pysqlite3.dbapi2 as repaired  # noqa: PLC0415  (an optional package)
    except ImportError:
        raise ConfigurationError("sqlite+pysqlite3:// needs a package: pip install 'oncekey[sqlite]'") from None
    if not wal_is_safe(repaired.sqlite_version_info):
        raise ConfigurationError(
            f"pysqlite3 has SQLite {repaired.sqlite_version}, which is not repaired: pip install -U 'oncekey[sqlite]'"
        )
    return cast("ModuleType", repaired)


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """The file that a connection has opened, which need not be the one that is at its path by now."""

    path: str
    device: int
    inode: int
    writable: bool
    """Whether this process may write to it: if not, SQLite opens it for reading only, and reports no error."""

    @classmethod
    def at(cls, path: str) -> Self | None:
        """The file that is at a path; None if there is none."""
        found = _stat(path)
        if found is None:
            return None
        writable = os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)
        return cls(path, found.st_dev, found.st_ino, writable)

    @property
    def is_gone(self) -> bool:
        """Whether nothing is at its path."""
        return _stat(self.path) is None

    @property
    def is_there(self) -> bool:
        """Whether it is still the file at its path."""
        found = _stat(self.path)
        return found is not None and (found.st_dev, found.st_ino) == (self.device, self.inode)

    @property
    def is_outdated(self) -> bool:
        """Whether a connection that is opened now would open another file, or this one for writing at last."""
        if self.writable:
            return not self.is_there
        return type(self).at(self.path) != self

    def check(self) -> None:
        """Raise if it was deleted or replaced: what is committed to it is lost."""
        if not self.is_there:
            raise StoreUnavailableError(GONE if self.is_gone else REPLACED)


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)  # noqa: PTH116  (for each transaction, and a Path takes longer)
    except OSError:
        return None


@cache
def _connection_class(module: ModuleType) -> type[sqlite3.Connection]:
    """The module's own class, with room for the file that it has opened."""
    return type("FileConnection", (module.Connection,), {"opened": None})


class SqliteFile:
    """One database file. Connections are opened when there is none to lend, and kept for the next."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        busy_timeout: float,
        module: ModuleType,
        look_after: float = LOOK_AFTER,
    ) -> None:
        if os.fspath(path) in {"", ":memory:"}:
            raise ConfigurationError("SQLite needs a file that all connections share; `memory:` needs none")
        self.path = str(Path(path).absolute())
        self.module = module
        self.busy_timeout = busy_timeout
        self.look_after = min(look_after, busy_timeout)
        self._keep = 8
        self._idle: list[sqlite3.Connection] = []
        self._business: list[sqlite3.Connection] = []
        self._opened: OpenedFile | None = None
        """The file that the kept connections have opened, once there was any."""
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._closed = False

    @contextmanager
    def lent(self, *, writes: bool = False) -> Iterator[sqlite3.Connection]:
        """A connection for one piece of work; whatever goes wrong with it, the next borrower gets another."""
        connection = self.take(writes=writes)
        try:
            yield connection
            if writes:
                self.check(connection)
        except BaseException:
            self.discard(connection)
            raise
        self.give_back(connection)

    def take(self, *, business: bool = False, writes: bool = False) -> sqlite3.Connection:
        """A connection for the caller alone, until it is given back.

        If it `writes`, or is for business, the file must be writable: nothing is executed that could not be stored.

        One for business transactions waits for other processes for `look_after` only; a caller with more patience tries
        again. It is never used for reads alone: what it has cached of the file is still true when it writes next.
        """
        with self._guard:
            if self._pid != os.getpid():
                _inherited.extend((*self._idle, *self._business))
                self._idle, self._business, self._pid = [], [], os.getpid()
            if self._closed:
                raise StoreUnavailableError("the driver of the SQLite file was closed")
            self._notice_replacement()
            idle = self._business if business else self._idle
            if idle:
                return idle.pop()
        connection = self._open(self.look_after if business else self.busy_timeout)
        if (business or writes) and not _opened_by(connection).writable:
            connection.close()
            raise StoreUnavailableError(READ_ONLY)
        return connection

    def check(self, connection: sqlite3.Connection) -> None:
        """Raise if the file was deleted or replaced: what the connection has committed is in no file then."""
        _opened_by(connection).check()

    def give_back(self, connection: sqlite3.Connection, *, business: bool = False) -> None:
        """Keep it for the next borrower, unless there are enough."""
        with self._guard:
            idle = self._business if business else self._idle
            kept = _opened_by(connection).writable and _opened_by(connection) == self._opened
            if kept and not self._closed and len(idle) < self._keep:
                idle.append(connection)
                return
        connection.close()

    def discard(self, connection: sqlite3.Connection) -> None:
        """Throw it away: what it had begun is rolled back."""
        with suppress(self.module.Error):
            connection.close()

    def close(self) -> None:
        """Close what is not lent; what is lent is closed when it comes back."""
        with self._guard:
            self._closed, idle = True, [*self._idle, *self._business]
            self._idle, self._business = [], []
        for connection in idle:
            connection.close()

    def _notice_replacement(self) -> None:
        """Close what was kept of a file that is no longer there; if there is none in its place, refuse to go on."""
        if self._opened is None or self._opened.is_there:
            return
        for connection in (*self._idle, *self._business):
            self.discard(connection)
        self._idle, self._business = [], []
        if self._opened.is_gone:
            raise StoreUnavailableError(GONE)
        _log.error("oncekey: %s was replaced by another file, which is used from now on", self.path)
        self._opened = None

    def _open(self, timeout: float) -> sqlite3.Connection:
        connection: Any = None  # of a class of the module in use
        before = OpenedFile.at(self.path)
        if before is None and self._opened is not None:
            raise StoreUnavailableError(GONE)
        try:
            connection = self.module.connect(
                self.path,
                timeout=timeout,
                isolation_level=None,
                check_same_thread=False,
                factory=_connection_class(self.module),
            )
            connection.row_factory = self.module.Row
            self._make_durable(connection)
            connection.opened = self._identified(before)
        except (self.module.Error, StoreUnavailableError) as error:
            if connection is not None:
                connection.close()
            if isinstance(error, StoreUnavailableError):
                raise
            raise store_error(error, "opening the store") from error
        ours: sqlite3.Connection = connection
        return ours

    def _identified(self, before: OpenedFile | None) -> OpenedFile:
        """The file that was opened just now. If another one is there than before, it may be either."""
        found = OpenedFile.at(self.path)
        if found is None or before not in {None, found}:
            raise StoreUnavailableError(REPLACED)
        with self._guard:
            self._opened = found
        return found

    def _make_durable(self, connection: sqlite3.Connection) -> None:
        """Set the journal mode so that an acknowledged commit survives a power cut, with or without a WAL.

        Without a write-ahead log the journal is not deleted but its head is overwritten: only then SQLite syncs the end
        of a transaction, and a journal cannot come back to undo it. Truncating it does the same, but then the file
        system has to allocate its blocks anew in every transaction.
        """
        if wal_is_safe(self.module.sqlite_version_info):
            mode = self._patiently(connection, "PRAGMA journal_mode = WAL")
            if mode != "wal":  # some file systems cannot share the memory it needs
                self._keep_journal(connection)
        else:
            self._tell_once()
            self._leave_wal(connection)
        connection.execute("PRAGMA synchronous = FULL")

    def _keep_journal(self, connection: sqlite3.Connection) -> None:
        self._patiently(connection, "PRAGMA journal_mode = PERSIST")
        connection.execute(f"PRAGMA journal_size_limit = {LONGEST_JOURNAL}")

    def _leave_wal(self, connection: sqlite3.Connection) -> None:
        try:
            self._keep_journal(connection)
        except self.module.OperationalError as error:
            if not _is_busy(error):
                raise
            raise StoreUnavailableError(
                "the SQLite file is in write-ahead mode and in use by others, and this SQLite "
                f"({self.module.sqlite_version}) can lose commits there: pip install 'oncekey[sqlite]' and use "
                "sqlite+pysqlite3:// here too"
            ) from error

    def _patiently(self, connection: sqlite3.Connection, pragma: str) -> str:
        """The mode that the file is in afterwards; SQLite itself does not wait when others are using it."""
        deadline = time.monotonic() + self.busy_timeout
        while True:
            try:
                return str(connection.execute(pragma).fetchone()[0])
            except self.module.OperationalError as error:
                if not _is_busy(error) or time.monotonic() > deadline:
                    raise
            time.sleep(POLL)

    def _tell_once(self) -> None:
        version = self.module.sqlite_version
        if version in _warned:
            return
        _warned.add(version)
        _log.info(
            "SQLite %s can lose commits in write-ahead mode, so a rollback journal is used, which is slower; "
            "sqlite+pysqlite3:// with pip install 'oncekey[sqlite]' uses a repaired SQLite",
            version,
        )


def _opened_by(connection: Any) -> OpenedFile:  # noqa: ANN401  (of a class of the module in use)
    opened: OpenedFile = connection.opened
    return opened


def _is_busy(error: Exception) -> bool:
    return str(getattr(error, "sqlite_errorname", "")).startswith("SQLITE_BUSY")


class Writer:
    """One file's writer. Only the holder of the turn begins a transaction that writes in this process."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._turn = threading.Lock()
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

    def asks(self, lock: Lock) -> object:
        """Note that a request queues for the turn: until `asked`, its duplicates need not queue behind it."""
        asker = object()
        self._asking[asker] = lock.number
        return asker

    def asked(self, asker: object) -> None:
        """Note that it has the turn, or waits no longer."""
        self._asking.pop(asker, None)  # a forked child has forgotten it

    def lock(self, lock: Lock) -> None:
        """Note which key the holder's transaction locks."""
        self._locked = lock

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
