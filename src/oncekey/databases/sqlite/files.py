"""SQLite files: durable settings, connections for one borrower at a time, and the queue of writers.

SQLite has one writer at a time, so its transaction is the lock of the key that it writes. SQLite does not report which
key that is. So all threads and event loops of this process that write to a file share one `Writer`: they queue for its
turn, and a transaction notes there which key it locks. So a duplicate is recognised at once, and does not have to queue
behind its own first request. Writers in other processes are visible only to SQLite.

A connection stays on the file that it has opened. If that file is deleted or replaced, by a restore for example, SQLite
continues to write to the unlinked file while it has a write-ahead log, and every commit is lost. So each connection
stores the device and the inode of its file. They are compared when it is borrowed and after each commit: a commit to an
unlinked file is never acknowledged, a file that was replaced is opened again, and one that was deleted is not
recreated.
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
"""Seconds between two attempts on a file that other processes use."""

LOOK_AFTER: Final = 0.25
"""Seconds of waiting for the turn to write after which a request checks whether its response is already stored."""

LONGEST_JOURNAL: Final = 1024 * 1024
"""The length in bytes to which a journal is truncated for the next transaction."""

GONE: Final = "the SQLite file was deleted or moved away: put it back, or restart this process to create a new one"
REPLACED: Final = "the SQLite file was replaced while it was in use: nothing was stored in the new one"
REOPENED: Final = "the SQLite file was replaced, or became writable: it is opened again"
READ_ONLY: Final = "the SQLite file is read-only for this process"

Version: TypeAlias = tuple[int, int, int]

FIXED: Version = (3, 51, 3)
BACKPORTS: dict[tuple[int, int], int] = {(3, 44): 6, (3, 50): 7}
"""The older branches that were repaired, and the first repaired patch of each."""

_warned: set[str] = set()
_inherited: list[sqlite3.Connection] = []
"""Connections of a parent process: SQLite forbids using or closing them here."""


def wal_is_safe(version: Version) -> bool:
    """Whether the write-ahead log of this SQLite keeps every commit.

    From 3.7.0 to 3.51.2 two connections that write and checkpoint at the same moment can lose a committed
    transaction (SQLite calls it the WAL-reset bug). A lost claim is a second execution, so those versions use no WAL.
    """
    major, minor, patch = version
    repaired = BACKPORTS.get((major, minor))
    return version >= FIXED or (repaired is not None and patch >= repaired)


def repaired_module() -> ModuleType:
    """`pysqlite3`, whose SQLite keeps every commit in a write-ahead log.

    It is used only if the URL selects it. Two copies of SQLite in one process do not see each other's locks, and an
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
    """The file that a connection has opened, which may no longer be the one at its path."""

    path: str
    device: int
    inode: int
    writable: bool
    """Whether this process may write to it: if not, SQLite opens it read-only, and reports no error."""

    @classmethod
    def at(cls, path: str) -> Self | None:
        """The file at a path; None if there is none."""
        found = _stat(path)
        if found is None:
            return None
        writable = os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)
        return cls(path, found.st_dev, found.st_ino, writable)

    @property
    def is_gone(self) -> bool:
        """Whether there is no file at its path."""
        return _stat(self.path) is None

    @property
    def is_there(self) -> bool:
        """Whether it is still the file at its path."""
        found = _stat(self.path)
        return found is not None and (found.st_dev, found.st_ino) == (self.device, self.inode)

    @property
    def is_outdated(self) -> bool:
        """Whether a new connection would open another file, or this one, now writable."""
        if self.writable:
            return not self.is_there
        return type(self).at(self.path) != self

    def check(self) -> None:
        """Raise if it was deleted or replaced: commits to it are lost."""
        if not self.is_there:
            raise StoreUnavailableError(GONE if self.is_gone else REPLACED)


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)  # noqa: PTH116  (for each transaction, and a Path takes longer)
    except OSError:
        return None


@cache
def _connection_class(module: ModuleType) -> type[sqlite3.Connection]:
    """The module's own class, with an attribute for the file that it has opened."""
    return type("FileConnection", (module.Connection,), {"opened": None})


class SqliteFile:
    """One database file. A connection is opened if none is idle, and kept for the next borrower."""

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
        """The file that the kept connections have opened; None before the first one."""
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._closed = False

    @contextmanager
    def lent(self, *, writes: bool = False) -> Iterator[sqlite3.Connection]:
        """A connection for one piece of work; after any error, the next borrower gets another one."""
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
        """A connection for the caller alone, until it is returned.

        If it `writes`, or is for business, the file must be writable: nothing is executed that could not be stored.

        One for business transactions waits only `look_after` for other processes; a caller with more patience tries
        again. It is never used only for reads, so its cache of the file is still valid when it writes next.
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
        """Raise if the file was deleted or replaced: the connection's commits are then lost."""
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
        """Close it; an open transaction is rolled back."""
        with suppress(self.module.Error):
            connection.close()

    def close(self) -> None:
        """Close idle connections; lent ones are closed when they are returned."""
        with self._guard:
            self._closed, idle = True, [*self._idle, *self._business]
            self._idle, self._business = [], []
        for connection in idle:
            connection.close()

    def _notice_replacement(self) -> None:
        """Close the kept connections to a file that is gone; raise if there is no file in its place."""
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
        """The file that was just opened. If the file at the path has changed meanwhile, it may be either."""
        found = OpenedFile.at(self.path)
        if found is None or before not in {None, found}:
            raise StoreUnavailableError(REPLACED)
        with self._guard:
            self._opened = found
        return found

    def _make_durable(self, connection: sqlite3.Connection) -> None:
        """Set the journal mode so that an acknowledged commit survives a power failure, with or without a WAL.

        Without a write-ahead log the journal is not deleted but its head is overwritten: only then SQLite syncs the end
        of a transaction, and a journal cannot reappear and undo it. Truncating has the same effect, but then the file
        system has to allocate its blocks again in every transaction.
        """
        if wal_is_safe(self.module.sqlite_version_info):
            mode = self._patiently(connection, "PRAGMA journal_mode = WAL")
            if mode != "wal":  # some file systems do not support the shared memory that it needs
                self._keep_journal(connection)
        else:
            self._warn_once()
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
        """Set a mode, and return the resulting one; SQLite itself does not wait while others use the file."""
        deadline = time.monotonic() + self.busy_timeout
        while True:
            try:
                return str(connection.execute(pragma).fetchone()[0])
            except self.module.OperationalError as error:
                if not _is_busy(error) or time.monotonic() > deadline:
                    raise
            time.sleep(POLL)

    def _warn_once(self) -> None:
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
    """One file's writer. Only the holder of the turn may begin a writing transaction in this process."""

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
        """Wait for the turn, for at most `patience` seconds."""
        if not self._turn.acquire(timeout=patience):
            raise StoreBusyError("another writer of this process held the SQLite file for too long")

    def leave(self) -> None:
        """Pass on the turn; the lock ends with it."""
        self._locked = None
        self._turn.release()

    def asks(self, lock: Lock) -> object:
        """Note that a request queues for the turn: until `asked`, its duplicates need not queue behind it."""
        asker = object()
        self._asking[asker] = lock.number
        return asker

    def asked(self, asker: object) -> None:
        """Note that the request has the turn, or no longer waits."""
        self._asking.pop(asker, None)  # a forked child does not have it

    def lock(self, lock: Lock) -> None:
        """Note which key the holder's transaction locks."""
        self._locked = lock

    def holder(self, lock: Lock) -> Holder:
        """Which request has the key. A request that only queues for it is no proof: it may never run."""
        locked = self._locked
        if locked is not None and locked.number == lock.number:
            return Holder.UNKNOWN_HOLDER if locked.mark == lock.mark else Holder.OTHER
        return Holder.UNKNOWN_HOLDER if lock.number in list(self._asking.values()) else Holder.NOBODY

    def holds(self, number: int) -> bool:
        """Whether any request has locked a key or queues for it."""
        locked = self._locked
        return (locked is not None and locked.number == number) or number in list(self._asking.values())

    def forget(self) -> None:
        """Release the turn in a forked child: its holder is in the parent."""
        self._turn = threading.Lock()
        self._locked = None
        self._asking.clear()


_writers: WeakValueDictionary[str, Writer] = WeakValueDictionary()
_guard = threading.Lock()


def writer_of(path: str) -> Writer:
    """The writer of a file, by its real path; all drivers of this process share it."""
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


if hasattr(os, "register_at_fork"):  # on platforms that can fork
    os.register_at_fork(after_in_child=_forget_the_parent)
