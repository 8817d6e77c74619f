"""The journal: a SQLite file with all operations; each is on disk before its first byte is sent.

An entry is `open` until there is a response. A process that finds open entries after a crash sends them again, with the
same keys; two processes may do so at the same time, because the key makes one of them wait. Responses stay until
`forget` or `prune`, so a program that died before it processed a response can still read it.

Headers are not stored, except `KEPT_FIELDS` and those that the journal is configured to store: credentials do not
belong in a file. The program that resumes passes them again. Bodies are stored in clear text, readable by the file's
owner.
"""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from oncekey_client.exchange import Call, Fields, JournalError, Reply, RequestKeyReusedError, fields

KEPT_FIELDS: Final = frozenset({"accept", "accept-language", "content-encoding", "content-language", "content-type"})
_KEPT_OF_ANSWERS: Final = KEPT_FIELDS | {"location", "etag"}

_TABLE: Final = """
CREATE TABLE IF NOT EXISTS operations (
    key TEXT PRIMARY KEY,
    name TEXT UNIQUE,
    state TEXT NOT NULL CHECK (state IN ('open', 'answered', 'unknown')),
    digest TEXT NOT NULL,
    profile TEXT NOT NULL,
    method TEXT NOT NULL,
    url TEXT NOT NULL,
    headers TEXT NOT NULL,
    body BLOB NOT NULL,
    begun_at REAL NOT NULL,
    note TEXT NOT NULL DEFAULT '',
    status INTEGER,
    answer_headers TEXT,
    answer_body BLOB,
    CHECK ((state = 'answered') = (status IS NOT NULL))
) WITHOUT ROWID
"""
_INSERT: Final = """
INSERT INTO operations (key, name, state, digest, profile, method, url, headers, body, begun_at)
VALUES (:key, :name, 'open', :digest, :profile, :method, :url, :headers, :body, :begun_at)
"""
_ANSWER: Final = """
UPDATE operations SET state = 'answered', headers = '[]', body = x'', note = '',
    status = :status, answer_headers = :headers, answer_body = :body
WHERE key = :key AND state <> 'answered'
"""
_DOUBT: Final = "UPDATE operations SET state = 'unknown', note = :note WHERE key = :key AND state <> 'answered'"
_FIND: Final = "SELECT * FROM operations WHERE key = :key"
_NAMED: Final = "SELECT * FROM operations WHERE name = :name"
_ALL: Final = "SELECT * FROM operations ORDER BY begun_at, key"
_FORGET: Final = "DELETE FROM operations WHERE key = :key"
_PRUNE: Final = "DELETE FROM operations WHERE state = 'answered' AND begun_at < :before"
_PATIENCE: Final = 30.0


class Progress(StrEnum):
    """The progress of an operation, as observed by its client."""

    OPEN = "open"
    ANSWERED = "answered"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One operation. `call` has only the stored headers, and no body once there is a response."""

    key: str
    name: str | None
    progress: Progress
    digest: str
    profile: str
    call: Call
    begun_at: float
    note: str
    reply: Reply | None

    def completed(self, headers: Mapping[str, str]) -> Call:
        """The call, completed with the headers that the journal does not store."""
        call = self.call
        for name, value in headers.items():
            call = call.with_field(name, value)
        return call


class Journal:
    """The file. Many threads and processes may use it at once; each step is a transaction on disk."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep_fields: Collection[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = Path(path)
        self._kept = KEPT_FIELDS | {name.lower() for name in keep_fields}
        self._clock = clock

    def begin(self, call: Call, key: str, *, name: str | None, profile: str) -> JournalEntry:
        """Store an operation, or find the existing entry with this name or key.

        `name` is the caller's own name for the operation, such as an invoice number: a program that starts it again
        after a crash gets the same entry, and so the same key.

        Raises:
            RequestKeyReusedError: The name or the key belongs to another request.
        """
        with self._transaction() as connection:
            row = None if name is None else connection.execute(_NAMED, {"name": name}).fetchone()
            row = row or connection.execute(_FIND, {"key": key}).fetchone()
            if row is None:
                connection.execute(_INSERT, self._columns(call, key, name, profile))
                row = connection.execute(_FIND, {"key": key}).fetchone()
        entry = _entry(row)
        if entry.digest != _without_user(call).digest:
            raise RequestKeyReusedError("the journal has another request under this name or key", key=entry.key)
        return entry

    def answer(self, key: str, reply: Reply) -> None:
        """Store the operation's response; the request is no longer needed."""
        kept = [pair for pair in reply.headers if pair[0].lower() in _KEPT_OF_ANSWERS - {"content-encoding"}]
        columns = {"key": key, "status": reply.status, "headers": json.dumps(kept), "body": reply.body}
        with self._transaction() as connection:
            connection.execute(_ANSWER, columns)

    def mark_unknown(self, key: str, note: str) -> None:
        """Record that the outcome is unknown; a response that another process received stays."""
        with self._transaction() as connection:
            connection.execute(_DOUBT, {"key": key, "note": note})

    def entry(self, key: str) -> JournalEntry | None:
        """The operation with this key."""
        with self._transaction() as connection:
            row = connection.execute(_FIND, {"key": key}).fetchone()
        return None if row is None else _entry(row)

    def named(self, name: str) -> JournalEntry | None:
        """The operation with this name."""
        with self._transaction() as connection:
            row = connection.execute(_NAMED, {"name": name}).fetchone()
        return None if row is None else _entry(row)

    def entries(self) -> list[JournalEntry]:
        """All operations, oldest first."""
        with self._transaction() as connection:
            return [_entry(row) for row in connection.execute(_ALL)]

    def unfinished(self) -> list[JournalEntry]:
        """The operations without a response."""
        return [entry for entry in self.entries() if entry.progress is not Progress.ANSWERED]

    def forget(self, key: str) -> None:
        """Remove an operation, whatever its outcome."""
        with self._transaction() as connection:
            connection.execute(_FORGET, {"key": key})

    def prune(self, older_than: float) -> int:
        """Remove operations with a response that began more than that many seconds ago; returns how many."""
        with self._transaction() as connection:
            return connection.execute(_PRUNE, {"before": self._clock() - older_than}).rowcount

    def age(self, entry: JournalEntry) -> float:
        """Seconds since an operation was begun."""
        return max(0.0, self._clock() - entry.begun_at)

    def _columns(self, call: Call, key: str, name: str | None, profile: str) -> dict[str, str | bytes | float | None]:
        bare = _without_user(call)
        kept = [pair for pair in call.headers if pair[0].lower() in self._kept]
        return {
            "key": key,
            "name": name,
            "digest": bare.digest,
            "profile": profile,
            "method": call.method,
            "url": bare.url,
            "headers": json.dumps(kept),
            "body": call.body,
            "begun_at": self._clock(),
        }

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """One transaction on its own connection, so that no thread, process or fork shares one."""
        try:
            with closing(self._connect()) as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute(_TABLE)
                yield connection
                connection.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            raise JournalError(f"the journal {self.path.name} cannot be used: {error}") from error

    def _connect(self) -> sqlite3.Connection:
        if not self.path.exists():
            _make(self.path)
        connection = sqlite3.connect(self.path, timeout=_PATIENCE, isolation_level=None)
        connection.row_factory = sqlite3.Row
        # No WAL: some SQLite versions can lose a commit when two processes write at once, and writes are rare here.
        connection.execute("PRAGMA journal_mode = TRUNCATE")
        connection.execute("PRAGMA synchronous = FULL")
        return connection


def _make(path: Path) -> None:
    """Create the file, readable by its owner only, because it contains bodies.

    It gets its name after it was closed: closing a file that SQLite has open elsewhere in the process would drop the
    locks that keep writers apart.
    """
    handle, draft = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    os.close(handle)
    try:
        os.link(draft, path)
    except FileExistsError:
        pass  # another process or thread was faster
    finally:
        Path(draft).unlink()


def _without_user(call: Call) -> Call:
    """The call without a user name and password in its URL."""
    parts = urlsplit(call.url)
    return Call(call.method, parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl(), call.headers, call.body)


def _entry(row: sqlite3.Row) -> JournalEntry:
    answered = row["status"] is not None
    return JournalEntry(
        key=row["key"],
        name=row["name"],
        progress=Progress(row["state"]),
        digest=row["digest"],
        profile=row["profile"],
        call=Call(row["method"], row["url"], _fields(row["headers"]), row["body"]),
        begun_at=row["begun_at"],
        note=row["note"],
        reply=Reply(row["status"], _fields(row["answer_headers"]), row["answer_body"]) if answered else None,
    )


def _fields(text: str) -> Fields:
    return fields((name, value) for name, value in json.loads(text))
