"""The messages to MariaDB and the meaning of its replies: everything of both drivers except the waiting.

A statement may be several sentences (see `stores/mariadb/spelling.sql`). They are sent in one message; the server stops
at the first that fails. A conversation is a generator that yields messages and is sent their results, or has the error
thrown in; a driver only sends the messages, blocking or not.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

from oncekey.core.errors import StoreError, TransactionControlError
from oncekey.core.sqltext import Dialect, sentences
from oncekey.drivers.guard import ENDED_EARLY, UNDONE
from oncekey.drivers.mariadb.errors import DEADLOCK, FAILURES, commit_error, is_answer, number_of, statement_error
from oncekey.drivers.placeholders import parted
from oncekey.drivers.slots import Shelf
from oncekey.flow import Mode

if TYPE_CHECKING:
    from oncekey.flow import Row, Rows, Statement, Steps, Transaction, Value

T = TypeVar("T")

RESET: Final = 0x1F
"""COM_RESET_CONNECTION: resets the session to how it was when it was opened."""

GRACE: Final = 1.0
"""Seconds more that the reply to a statement may take, so that the server's own time-out comes first."""

MIGRATE: Final = "migrate"
"""The transaction that may take long, and whose lock belongs to its session."""

WHAT: Final = "the business transaction"
HALF_A_PAIR: Final = "half of a surrogate pair cannot be stored"
BEGIN: Final = b"START TRANSACTION"
COMMIT: Final = b"COMMIT"
ROLLBACK: Final = b"ROLLBACK"
IN_TRANSACTION: Final = 1
"""The bit of the server's status (SERVER_STATUS_IN_TRANS)."""
_BYTES: Final = frozenset({"seed", "response_body", "request"})
"""Columns that hold bytes. All others hold text, compared byte by byte; MySQL calls some of those a BLOB in a UNION."""

_SPECIAL: Final = re.compile(rb"['\\\x00\x1a\x80-\xff]")
"""Bytes that may end or change a quoted literal."""

log = logging.getLogger("oncekey")


@dataclass(frozen=True, slots=True)
class Result:
    """The reply to one sentence: its columns and its rows; no columns if it returns none."""

    columns: Sequence[Sequence[Any]] | None
    rows: Sequence[Sequence[Any]]


def result_of(raw: Any) -> Result:  # noqa: ANN401  (a connection of either library)
    """The reply that was read last; a cursor would hide what was answered to each sentence."""
    result = raw._result  # noqa: SLF001
    return Result(result.description, result.rows or ())


Talk: TypeAlias = Generator[bytes, list[Result], T]
"""A conversation on one connection."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How transactions are begun in a session, and whether it commits by itself what is said outside of one."""

    begin: bytes
    commits: bool


OURS: Final = Manner(BEGIN, commits=True)
"""Of sessions that were greeted."""

THEIRS: Final = Manner(b"SET TRANSACTION ISOLATION LEVEL READ COMMITTED;" + BEGIN, commits=False)
"""Of an application's sessions, which are left as they are: whatever is said there ends what it has begun."""


def running(transaction: Transaction[T], manner: Manner = OURS) -> Talk[T]:
    """One transaction of ours."""
    mode, steps = transaction.mode, transaction.body()
    if mode is not Mode.ATOMIC:
        return (yield from _stepping(steps, mode, manner))
    try:
        yield from _executed_text(manner.begin, mode, transaction.name)
        result = yield from _stepping(steps, mode, manner)
    except Exception:  # a driver that is interrupted closes the connection
        steps.close()
        yield from undoing()
        raise
    try:
        yield COMMIT
    except FAILURES as error:
        if number_of(error) is not None:
            yield from undoing()
        raise commit_error(error, transaction.name) from cause(error)
    return result


def begun(manner: Manner = OURS) -> Talk[None]:
    """Begin a business transaction."""
    yield from _executed_text(manner.begin, Mode.ATOMIC, WHAT)


def only_reading(manner: Manner = OURS) -> Talk[None]:
    """Begin one in which the server itself refuses to write."""
    yield from _executed_text(manner.begin + b" READ ONLY", Mode.ATOMIC, WHAT)


def stepping(steps: Steps[T], *, ended: bool, undone: bool, manner: Manner = OURS) -> Talk[T]:
    """Statements of ours in a business transaction, which a handler may have ended, or the server itself."""
    if undone:  # which its last answer did not tell: an error comes without the server's status
        steps.close()
        raise TransactionControlError(UNDONE)
    if ended:
        # The handler has committed its rows already, so the record has to follow them.
        log.error(ENDED_EARLY)
        yield from begun(manner)
    return (yield from _stepping(steps, Mode.ATOMIC, manner))


def committing() -> Talk[None]:
    """The end of a business transaction."""
    try:
        yield COMMIT
    except FAILURES as error:
        raise commit_error(error, WHAT) from cause(error)


def undoing() -> Talk[None]:
    """Roll back if that is still possible; if not, the pool closes the connection."""
    with suppress(*FAILURES):
        yield ROLLBACK


def within(statement: Statement) -> Talk[Rows]:
    """One statement in the caller's own transaction, sentence by sentence: its connection may take one at a time."""
    rows: Rows = []
    try:
        for sentence in _sentences(_text(statement)):
            for result in (yield rendered(sentence, statement.params)):
                rows = rows if result.columns is None else named(result)
    except FAILURES as error:
        if is_answer(number_of(error), _text(statement), at_once=statement.at_once):
            return []
        raise statement_error(error, Mode.ATOMIC, statement.name) from cause(error)
    return rows


def _stepping(steps: Steps[T], mode: Mode, manner: Manner) -> Talk[T]:
    try:
        statement = next(steps)
        while True:
            statement = steps.send((yield from _executed(statement, mode, manner)))
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # a generator's return value is untyped here
    finally:
        steps.close()


def _executed(statement: Statement, mode: Mode, manner: Manner) -> Talk[Rows]:
    """One statement. Several sentences that commit by themselves are one transaction."""
    texts = [rendered(sentence, statement.params) for sentence in _sentences(_text(statement))]
    alone = mode is not Mode.ATOMIC and not (manner.commits and (mode is Mode.READ or len(texts) == 1))
    if alone:
        texts = [*texts, ROLLBACK] if mode is Mode.READ else [manner.begin, *texts, COMMIT]
    try:
        results = yield b"\n;\n".join(texts)  # a sentence may end with a comment
    except FAILURES as error:
        number = number_of(error)
        if alone and number is not None:
            yield from undoing()
        if is_answer(number, _text(statement), at_once=statement.at_once):
            return []
        if number == DEADLOCK and statement.at_once and mode is Mode.ATOMIC:
            # The other side wants the same lock. The server has rolled this transaction back, so it is begun again.
            yield from _executed_text(manner.begin, mode, statement.name)
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
    """The original error, if it may be shown with ours: the server's error about a value repeats the value."""
    number = number_of(error)
    return error if number is None or number not in {1062, 1264, 1265, 1366, 1406} else None


def named(result: Result) -> list[Row]:
    """The rows by their columns' names."""
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
    """The sentence with its values in it, as both client libraries send them."""
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
                raise StoreError(HALF_A_PAIR) from None
        case bytes():
            return _quoted(b"_binary", value)


def _quoted(kind: bytes, value: bytes) -> bytes:
    """A literal that means the same in every sql_mode and character set that a handler may have chosen."""
    return kind + (b" X'" + value.hex().encode() + b"'" if _SPECIAL.search(value) else b"'" + value + b"'")


def _text(statement: Statement) -> str:
    assert isinstance(statement.command, str)
    return statement.command


@lru_cache(maxsize=512)
def _sentences(text: str) -> tuple[str, ...]:
    return tuple(sentence.text for sentence in sentences(text, Dialect.MARIADB))


class Idle(Protocol):
    """What a pool keeps: a session of either library."""

    @property
    def is_usable(self) -> bool:
        """Whether the next borrower may have it."""

    def sever(self) -> None:
        """Close it at once."""

    def close(self) -> None:
        """Close it while nothing is under way."""


S = TypeVar("S", bound=Idle)


class IdleSessions(Shelf[S]):
    """The idle sessions of a pool, for threads and for tasks."""

    def pop(self) -> S | None:
        """A session that the server has not closed, if there is one."""
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
        """Close the idle sessions now, and the others when they come back."""
        with self._lock:
            self._closed = True
            self._forget_parents()
            idle, self._idle = self._idle, []
        for session in idle:
            session.close()
