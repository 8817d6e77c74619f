"""The messages to MariaDB and the meaning of its replies and errors: everything both drivers share except I/O.

One operation may be several SQL statements (see `spelling.sql`). They are sent in one message; the server stops at the
first that fails. A conversation is a generator that yields messages and receives their results, or has the error thrown
in; a driver only sends the messages, blocking or not.

PyMySQL and aiomysql raise the same errors. Numbers from 2000 on are the client's: the connection is lost. All others
are the server's reply to a statement, none of whose changes remain. Some of them end the whole transaction (a deadlock,
or a timeout if the server is configured so), and no list of numbers is complete. So the first message of a business
transaction sets a savepoint, and its COMMIT follows the release of that savepoint: the server rejects both in any other
transaction. Sessions have `autocommit = 0`, so statements after such an end are never committed. oncekey's messages
never repeat a bound value.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import pymysql

from oncekey.core import errors
from oncekey.core.flow import Body, Mode, Row, Rows, Statement, Transaction, Value
from oncekey.core.sqltext import Dialect, split
from oncekey.databases.handler_sql import ENDED
from oncekey.databases.placeholders import parted
from oncekey.databases.retries import ConflictError, lost, lost_commit
from oncekey.databases.slots import IdleStack

T = TypeVar("T")

RESET: Final = 0x1F
"""COM_RESET_CONNECTION: resets the session to its initial state."""

GRACE: Final = 1.0
"""Extra seconds for the reply to a statement, so that the server's own timeout comes first."""

MIGRATE: Final = "migrate"
"""The migration: it may take long, and its lock belongs to the session."""

WHAT: Final = "the business transaction"
HALF_A_PAIR: Final = "half of a surrogate pair cannot be stored"
BEGIN: Final = b"START TRANSACTION"
MARK: Final = b"SAVEPOINT oncekey"
PROVE: Final = b"RELEASE SAVEPOINT oncekey"
COMMIT: Final = b"COMMIT"
ROLLBACK: Final = b"ROLLBACK"
IN_TRANSACTION: Final = 1
"""The transaction bit of the server's status (SERVER_STATUS_IN_TRANS)."""
_BYTES: Final = frozenset({"seed", "response_body", "request"})
"""Columns that hold bytes. Others hold text with binary collation; MySQL reports some of those as BLOB in a UNION."""

_SPECIAL: Final = re.compile(rb"['\\\x00\x1a\x80-\xff]")
"""Bytes that can end or change a quoted literal."""

log = logging.getLogger("oncekey")


@dataclass(frozen=True, slots=True)
class Result:
    """The reply to one statement: its columns and rows; no columns if it returns no rows."""

    columns: Sequence[Sequence[Any]] | None
    rows: Sequence[Sequence[Any]]


def result_of(raw: Any) -> Result:  # noqa: ANN401  (a connection of either library)
    """The last reply; a cursor would hide the reply to each single statement."""
    result = raw._result  # noqa: SLF001
    return Result(result.description, result.rows or ())


Talk: TypeAlias = Generator[bytes, list[Result], T]
"""A sequence of messages on one connection."""


THEIRS: Final = b"SET TRANSACTION ISOLATION LEVEL READ COMMITTED;" + BEGIN
"""Begins a transaction in an application's session without changing it; oncekey's own session needs only `BEGIN`."""


def running(transaction: Transaction[T], begin: bytes = BEGIN) -> Talk[T]:
    """One of oncekey's transactions."""
    mode, body = transaction.mode, transaction.body()
    if mode is not Mode.ATOMIC:
        return (yield from _running_body(body, mode, begin))
    try:
        yield from _executed_text(begin, mode, transaction.name)
        result = yield from _running_body(body, mode, begin)
    except Exception:  # an interrupted driver closes the connection
        body.close()
        yield from undoing()
        raise
    try:
        yield COMMIT
    except FAILURES as error:
        if number_of(error) is not None:
            yield from undoing()
        raise commit_error(error, transaction.name) from cause(error)
    return result


def begun(begin: bytes = BEGIN) -> Talk[None]:
    """Begin a business transaction, and set its mark."""
    yield from _executed_text(begin + b";" + MARK, Mode.ATOMIC, WHAT)


def only_reading(begin: bytes = BEGIN) -> Talk[None]:
    """Begin a read-only transaction, enforced by the server."""
    yield from _executed_text(begin + b" READ ONLY;" + MARK, Mode.ATOMIC, WHAT)


def running_body(body: Body[T], begin: bytes = BEGIN) -> Talk[T]:
    """Run oncekey's statements in a business transaction."""
    return _running_body(body, Mode.ATOMIC, begin)


def asking() -> Talk[None]:
    """Read the server's status flags only: the reply to a failed statement lacks them."""
    yield from _executed_text(b"DO 0", Mode.ATOMIC, WHAT)


def proving() -> Talk[None]:
    """Raise unless the session is still in the transaction that `begun` marked."""
    try:
        yield PROVE
    except FAILURES as error:
        raise _unproven(error) or statement_error(error, Mode.ATOMIC, WHAT) from cause(error)


def committing() -> Talk[None]:
    """Commit the transaction that `begun` marked, and no other: the message fails where the mark is missing."""
    try:
        yield PROVE + b";" + COMMIT
    except FAILURES as error:
        raise _unproven(error) or commit_error(error, WHAT) from cause(error)


def _unproven(error: BaseException) -> errors.TransactionControlError | None:
    return errors.TransactionControlError(ENDED) if number_of(error) == NO_SAVEPOINT else None


def undoing() -> Talk[None]:
    """Roll back if still possible; otherwise the pool closes the connection."""
    with suppress(*FAILURES):
        yield ROLLBACK


def _running_body(body: Body[T], mode: Mode, begin: bytes) -> Talk[T]:
    try:
        statement = next(body)
        while True:
            statement = body.send((yield from _executed(statement, mode, begin)))
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # a generator's return value is untyped here
    finally:
        body.close()


def _executed(statement: Statement, mode: Mode, begin: bytes) -> Talk[Rows]:
    """Send one statement. Outside a transaction the message ends what it began: no session is in autocommit mode."""
    texts = [rendered(sentence, statement.params) for sentence in split(_text(statement), Dialect.MARIADB)]
    alone = mode is not Mode.ATOMIC
    if alone:
        texts = [*texts, ROLLBACK] if mode is Mode.READ else [begin, *texts, COMMIT]
    try:
        results = yield b"\n;\n".join(texts)  # a statement may end with a comment
    except FAILURES as error:
        number = number_of(error)
        if alone and number is not None:
            yield from undoing()
        if is_answer(number, _text(statement), at_once=statement.at_once):
            return []
        if number == DEADLOCK and statement.at_once and mode is Mode.ATOMIC:
            # Deadlock: another session wants the same lock. The server has rolled this transaction back; begin it
            # again.
            yield from _executed_text(begin, mode, statement.name)
            return []
        raise statement_error(error, mode, statement.name) from cause(error)
    with_columns = [result for result in results if result.columns is not None]
    return named(with_columns[-1]) if with_columns else []


def _executed_text(message: bytes, mode: Mode, what: str) -> Talk[None]:
    try:
        yield message
    except FAILURES as error:
        raise statement_error(error, mode, what) from cause(error)


def cause(error: BaseException) -> BaseException | None:
    """The original error if it is safe to chain: the server's error about a value repeats the value."""
    number = number_of(error)
    return error if number is None or number not in {1062, 1264, 1265, 1366, 1406} else None


def named(result: Result) -> list[Row]:
    """The rows as dicts by column name."""
    columns = result.columns or ()
    names = [str(column[0]) for column in columns]
    texts = [index for index, name in enumerate(names) if name not in _BYTES]
    found: list[Row] = []
    for row in result.rows:
        values = list(row)
        for index in texts:
            if isinstance(values[index], bytes):
                values[index] = values[index].decode("utf-8")
        found.append(dict(zip(names, values, strict=True)))
    return found


def rendered(sentence: str, params: Mapping[str, Value]) -> bytes:
    """The statement with its values inlined, as both client libraries send it."""
    first, rest = parted(sentence)
    pieces = [first.encode()]
    for name, text in rest:
        pieces += (_literal(params[name]), text.encode())
    return b"".join(pieces)


def _literal(value: Value) -> bytes:
    match value:
        case None:
            return b"NULL"
        case bool():
            return b"1" if value else b"0"
        case int():
            return b"%d" % value
        case str():
            try:
                return _quoted(b"_utf8mb4", value.encode())
            except UnicodeEncodeError:
                raise errors.StoreError(HALF_A_PAIR) from None
        case bytes():
            return _quoted(b"_binary", value)


def _quoted(kind: bytes, value: bytes) -> bytes:
    """A literal that is valid in every sql_mode and character set that a handler may have set."""
    return kind + (b" X'" + value.hex().encode() + b"'" if _SPECIAL.search(value) else b"'" + value + b"'")


def _text(statement: Statement) -> str:
    assert isinstance(statement.command, str)
    return statement.command


class Idle(Protocol):
    """The interface of a pooled session, of either library."""

    @property
    def is_usable(self) -> bool:
        """Whether the next borrower may use it."""

    def sever(self) -> None:
        """Close it at once."""

    def close(self) -> None:
        """Close it; no statement is running."""


S = TypeVar("S", bound=Idle)


class IdleSessions(IdleStack[S]):
    """The idle sessions of a pool, for threads and tasks."""

    def pop(self) -> S | None:
        """An idle session that the server has not closed, if there is one."""
        while True:
            with self._lock:
                self._forget_parents()
                session = self._idle.pop() if self._idle else None
            if session is None or session.is_usable:
                return session
            session.sever()

    def put(self, session: S) -> None:
        """Keep a session for the next borrower, or close it."""
        with self._lock:
            keep = not self._closed and session.is_usable
            if keep:
                self._idle.append(session)
        if not keep:
            session.sever()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._forget_parents()
            idle, self._idle = self._idle, []
        for session in idle:
            session.close()


# The meaning of errors.


class DemotedError(errors.StoreUnavailableError):
    """Errors of a read-only server: nothing happened; the connection is closed, as another server may accept writes."""


FAILURES: Final = (pymysql.MySQLError, OSError, asyncio.IncompleteReadError, RuntimeError)
"""Errors that sending can raise. A timeout is an `OSError`; the others report a closed connection."""

UNLESS_TAKEN: Final = "/* unless taken */"
DEADLOCK: Final = 1213
NO_SAVEPOINT: Final = 1305
_TAKEN: Final = 1062
_HELD: Final = frozenset({1205, 3572})
_FATAL_CODES: Final = frozenset({1053, 1152, 1153, 1158, 1159, 1160, 1161, 1927, 3169, 4031})
_CLIENT: Final = range(2000, 3000)
_CONFLICTS: Final = {
    1020: "another request changed the row",
    DEADLOCK: "a deadlock, or another cluster node committed first",
}
_OTHER_SCHEMA: Final = frozenset({1146, 1054, 1305, 1091})
_DEMOTED: Final = frozenset({1290, 1836})
_UNSURE: Final = frozenset({1047, 1180})
_SICK: Final = {
    1021: "the disk is full",
    1037: "the server has run out of memory",
    1040: "the server has too many connections",
    1041: "the server has run out of memory",
    1044: "the server refused the login",
    1045: "the server refused the login",
    1047: "the node is not part of its cluster",
    1049: "the database does not exist",
    1105: "internal error of the server",
    1114: "the table is full",
    1180: "the server could not commit",
    1203: "the server has too many connections",
    1205: "a lock was not available in time",
    1206: "the server has too many locks",
    1226: "the user has exceeded its resource limits",
    1290: "the server is read-only: it is a replica, or was demoted to one",
    1317: "the statement was cancelled",
    1792: "the transaction is read-only",
    1836: "the server is read-only: it is a replica, or was demoted to one",
    1969: "the statement took too long",
    3024: "the statement took too long",
    3572: "a lock was not available in time",
}
_OTHER_VERSION: Final = "the tables are missing or have another version: run `oncekey migrate up --store URL`"


def number_of(error: BaseException) -> int | None:
    """The server's error number; None if the connection was lost."""
    code = error.args[0] if isinstance(error, pymysql.MySQLError) and error.args else None
    if not isinstance(code, int) or code == 0 or code in _CLIENT or code in _FATAL_CODES:
        return None
    return code


def is_answer(number: int | None, text: str, *, at_once: bool) -> bool:
    """Whether the error only means no rows: the name is taken, or another session has the lock."""
    return UNLESS_TAKEN in text if number == _TAKEN else at_once and number in _HELD


def statement_error(error: BaseException, mode: Mode, what: str) -> errors.StoreError:
    """The store's error for a statement."""
    number = number_of(error)
    if number is None:
        return lost(mode, what)
    # A statement that commits by itself may have failed in its COMMIT.
    return _unsure(number, what) if mode is Mode.SINGLE and number in _UNSURE else refused(number, what)


def refused(number: int, what: str) -> errors.StoreError:
    """The meaning of an error that leaves the connection usable: definite, nothing happened."""
    if number in _CONFLICTS:
        return ConflictError(f"{what}: {_CONFLICTS[number]} ({number})")
    if number in _OTHER_SCHEMA:
        return errors.SchemaError(f"{what}: {_OTHER_VERSION}")
    if number in _SICK:
        kind = DemotedError if number in _DEMOTED else errors.StoreUnavailableError
        return kind(f"{what}: {_SICK[number]} ({number})")
    return errors.StoreError(f"{what}: MariaDB refused it ({number})")


def commit_error(error: BaseException, what: str) -> errors.StoreError:
    """The store's error for a COMMIT: a missing reply is ambiguous, also from a node that lost its cluster."""
    number = number_of(error)
    if number is None:
        return lost_commit(what)
    if number in _UNSURE:
        return _unsure(number, what)
    found = refused(number, what)
    if isinstance(found, errors.StoreUnavailableError):
        return found
    return errors.RolledBackError(f"{what}: MariaDB refused the commit, so it was rolled back ({number})")


def _unsure(number: int, what: str) -> errors.CommitAmbiguousError:
    return errors.CommitAmbiguousError(f"{what}: {_SICK[number]} during the commit ({number})")


def unreachable(error: BaseException) -> errors.StoreUnavailableError:
    """The meaning of a failed connection attempt: nothing was sent."""
    number = error.args[0] if error.args and isinstance(error.args[0], int) else None
    why = _SICK.get(number) if number is not None else None
    return errors.StoreUnavailableError(
        f"no connection to MariaDB: {why or 'no reply'} ({number or type(error).__name__})"
    )
