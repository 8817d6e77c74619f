"""The statements that a handler may not execute through its connection (L5).

oncekey ends the transaction, together with the key's record: a handler that ends it itself commits its rows
without the record, and the client's retry executes them again (F16).

A handler may change settings for its transaction (`SET LOCAL`), including its role, as row-level security by roles
does. The key's record is still written as the session's own user, and the handler's role is set again before the
COMMIT, because deferred triggers are the handler's (`AS_OPENED`, `AS_HANDLER`). Both are sent only after a text that
may have set something, in messages that are sent anyway. If only a function set the role, record and request fail.

A handler must not leave anything in the session, which the next request uses. A function can change a setting or a
role, take a session lock, or open a cursor or a temporary table, and the handler's text does not show it. `RESET` is
sent to the server after the end of every transaction that a handler used, and only the connection's next borrower
waits for its reply.

The writes of a LOCAL or OUTBOX handler through a connection that it opens itself do not commit with its key. Nothing
prevents such a connection, and only a test that kills a process would notice, so the first one of each operation is
logged (`opened`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

from oncekey.core.errors import TransactionControlError
from oncekey.core.sqltext import Dialect, Sentence, sentences

OVER: Final = "the transaction of this operation is over: write before the handler returns"
ENDED: Final = (
    "the transaction of this operation ended before oncekey could commit it: the database rolled it back (a deadlock, "
    "a timeout, ON CONFLICT ROLLBACK), or the handler ended it (COMMIT, ROLLBACK, a procedure that commits). It takes "
    "no further statement, and a success is not stored. Let the handler raise the database's error: the request can "
    "be retried"
)
LEFT_BEHIND: Final = (
    "a task, a thread or an open stream that the handler left behind is using op.connection when its transaction "
    "should end: wait for everything that you started, and close what you opened, before you return"
)

RESET: Final = (
    "SET SESSION AUTHORIZATION DEFAULT; RESET ROLE; RESET ALL; SELECT pg_advisory_unlock_all(); CLOSE ALL; UNLISTEN *; "
    "DISCARD TEMP"
)
"""Resets the session to its initial state.

DISCARD ALL would be one statement, but it also drops every prepared statement, which the drivers rely on, and every
plan, which would slow the next request down more than this message does. RESET ROLE comes after the session's user,
because resetting the user also removes a role from the address.
"""

LEFT_OPEN: Final = (
    "the handler left a COPY or a pipeline open on op.connection, so its transaction cannot be ended: use it in a "
    "`with` block"
)

AS_OPENED: Final = (
    "SET LOCAL statement_timeout TO DEFAULT",
    "SET LOCAL lock_timeout TO DEFAULT",
    "SELECT set_config('oncekey.acting', current_setting('role'), true)",
    "SET LOCAL role TO DEFAULT",
)
"""Sent before the record is written, if the handler may have set another role or a timeout for its transaction."""

AS_HANDLER: Final = "SELECT set_config('role', current_setting('oncekey.acting'), true)"
"""Sent after the record is written: deferred triggers run with the role that is set at COMMIT."""

_ENDED_BY_US: Final = (
    "{what} is refused here: this transaction is ended by oncekey, together with the key's record. "
    "Return a response to commit it, raise to roll it back; SAVEPOINT, RELEASE and ROLLBACK TO are allowed"
)
_LONGEST_REMEMBERED: Final = 4096
"""The longest text whose verdict is cached: a thousand of them take at most four megabytes."""

# Searching for the words first avoids the lexer for texts that only read and insert.
_SUSPECT: Final = re.compile(
    r"\b(?:begin|start|commit|end|rollback|abort|prepare|set|reset|discard|listen|attach|detach|pragma)\b",
    re.IGNORECASE,
)
_MARIADB_SUSPECT: Final = re.compile(
    r"\b(?:begin|start|commit|rollback|set|create|alter|drop|truncate|rename|grant|revoke|lock|unlock|xa|analyze"
    r"|optimize|repair|install|uninstall|flush|reset)\b",
    re.IGNORECASE,
)
_MARIADB_UNFIT: Final = re.compile(
    r"(?:\bSET\s+|,\s*)(?:SESSION\s+|LOCAL\s+|@@(?:SESSION\.|LOCAL\.)?)?"
    r"(timestamp|sql_select_limit|max_statement_time)\s*:?=",
    re.IGNORECASE,
)
"""Settings with which the record would be stored with another time, could not be read, or could not be stored."""

_ALWAYS: Final = frozenset({"BEGIN", "COMMIT", "END", "ABORT", "ATTACH", "DETACH"})
_FIRST_TWO: Final = frozenset({"START TRANSACTION", "PREPARE TRANSACTION", "SET TRANSACTION"})
_FIRST_THREE: Final = "SET SESSION CHARACTERISTICS"
_SESSION: Final = frozenset({"RESET", "DISCARD", "LISTEN", "PREPARE"})
_INSTEAD: Final = {
    "LISTEN": "Listen on a separate connection",
    "PREPARE": "The driver prepares frequent statements itself",
}
_IN_TRANSACTION: Final = frozenset({"LOCAL", "CONSTRAINTS"})
_SETS: Final = re.compile(
    r"\blocal\s+(?:role|\w*_timeout)\b|\bset_config\s*\(\s*(?:'(?:role|\w*_timeout)'|[^'\s])", re.IGNORECASE
)
"""Texts that set the role or a timeout; a bound name may be one of these."""
_IMPLICIT: Final = frozenset(
    {
        "CREATE",
        "ALTER",
        "DROP",
        "TRUNCATE",
        "RENAME",
        "GRANT",
        "REVOKE",
        "LOCK",
        "UNLOCK",
        "XA",
        "ANALYZE",
        "OPTIMIZE",
        "REPAIR",
        "INSTALL",
        "UNINSTALL",
        "FLUSH",
        "RESET",
    }
)
"""Statements that commit a transaction implicitly in MariaDB and MySQL."""
_PRAGMAS: Final = frozenset(
    {
        "DATA_STORE_DIRECTORY",
        "HARD_HEAP_LIMIT",
        "JOURNAL_MODE",
        "LOCKING_MODE",
        "MAX_PAGE_COUNT",
        "QUERY_ONLY",
        "SOFT_HEAP_LIMIT",
        "SYNCHRONOUS",
        "TEMP_STORE_DIRECTORY",
    }
)
"""Settings of SQLite with which the record could not be stored durably, or which affect the whole file or process.

All others end with the connection, which is closed after a handler that changed one.
"""


class ConnectionUse:
    """Whether a handler may still use its connection, whether it has used it, and whether it set anything."""

    __slots__ = ("_ended", "over", "sets", "used")

    def __init__(self, ended: Callable[[], bool]) -> None:
        self._ended = ended
        self.over = False
        self.used = False
        self.sets = False

    def check(self) -> None:
        """Raise if the operation or its transaction is over: a statement would be committed by itself."""
        if self.over:
            raise TransactionControlError(OVER)
        self.used = True
        if self._ended():
            raise TransactionControlError(ENDED)


class HandlerProxy:
    """A handler's connection or cursor: every call is passed to the driver's own until the operation ends.

    Then another request may use the connection, so every later call is refused.
    """

    __slots__ = ("_raw", "_use")

    def __init__(self, raw: Any, use: ConnectionUse) -> None:  # noqa: ANN401  (a driver's connection or cursor)
        object.__setattr__(self, "_raw", raw)
        object.__setattr__(self, "_use", use)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  (whatever the driver has there)
        self._use.check()
        return getattr(self._raw, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._use.check()
        setattr(self._raw, name, value)

    def __repr__(self) -> str:
        return f"<guarded {self._raw!r}>"


def refuse_transaction_control(sql: str, dialect: Dialect = Dialect.POSTGRES, *, lent: bool = False) -> bool:
    """Raise `TransactionControlError` if any statement of the text would end or change the transaction.

    `lent`: the connection belongs to the application, so changes that outlive the transaction are its own concern.
    Returns whether the text may set something that must not apply to the key's record (`AS_OPENED`).
    """
    why, sets = (_remembered if len(sql) <= _LONGEST_REMEMBERED else _verdict)(sql, dialect, lent)
    if why is not None:
        raise TransactionControlError(why)
    return sets


def refusal(what: str) -> TransactionControlError:
    """The error that explains why a statement or a method is refused."""
    return TransactionControlError(_ENDED_BY_US.format(what=what))


def _objection(sql: str, dialect: Dialect, lent: bool) -> str | None:  # noqa: FBT001  (remembered by its arguments)
    mariadb = dialect is Dialect.MARIADB
    if (_MARIADB_SUSPECT if mariadb else _SUSPECT).search(sql) is None:
        return None
    for sentence in sentences(sql, dialect):
        what = _mariadb_control(sentence) if mariadb else _control(sentence)
        if what is not None:
            return _ENDED_BY_US.format(what=what)
        if dialect is Dialect.POSTGRES and not lent and _outlives(sentence):
            return (
                f"{sentence.tokens[0]} is refused here: it would outlive this transaction on a connection that other "
                "requests use next. " + _INSTEAD.get(sentence.tokens[0], "Use SET LOCAL instead")
            )
    return None


def _verdict(sql: str, dialect: Dialect, lent: bool) -> tuple[str | None, bool]:  # noqa: FBT001  (as above)
    return _objection(sql, dialect, lent), dialect is Dialect.POSTGRES and _SETS.search(sql) is not None


# Every UPDATE contains one of the words. An application executes the same few texts repeatedly, so each is parsed
# once; a text with inlined values stays in the cache until a thousand others have been executed.
_remembered: Final = lru_cache(maxsize=1000)(_verdict)


def _control(sentence: Sentence) -> str | None:
    """The words that control the transaction, if the statement begins with any."""
    first, *rest = sentence.tokens
    if first in _ALWAYS:
        return first
    if first == "ROLLBACK":
        return None if _to_savepoint(rest) else first
    if first == "PRAGMA":
        return _pragma(rest)
    words = " ".join(sentence.tokens[:2])
    if words in _FIRST_TWO or " ".join(sentence.tokens[:3]) == _FIRST_THREE:
        return words
    return None


def _mariadb_control(sentence: Sentence) -> str | None:
    """`_control` for MariaDB and MySQL, where statements that change tables commit too."""
    first, *rest = sentence.tokens
    if first in _IMPLICIT:
        return None if rest[:1] == ["TEMPORARY"] else " ".join(sentence.tokens[:2])
    if first in {"BEGIN", "COMMIT"} or (first == "START" and rest[:1] == ["TRANSACTION"]):
        return first
    if first == "ROLLBACK":
        return None if _to_savepoint(rest) else first
    if first == "SET" and {"AUTOCOMMIT", "TRANSACTION"} & set(sentence.tokens):
        return " ".join(sentence.tokens[:3])
    found = _MARIADB_UNFIT.search(sentence.text) if first == "SET" else None
    return None if found is None else f"SET {found[1].lower()}"


def _outlives(sentence: Sentence) -> bool:
    """Whether the statement changes the session: a role or a search path must not reach the next borrower."""
    first, second = (*sentence.tokens, "")[:2]
    return first in _SESSION or (first == "SET" and second not in _IN_TRANSACTION)


def _to_savepoint(rest: list[str]) -> bool:
    words = rest[1:] if rest[:1] in (["WORK"], ["TRANSACTION"]) else rest
    return words[:1] == ["TO"]


def _pragma(rest: list[str]) -> str | None:
    """The setting, with or without a schema before it; SQLite takes its name in quotes too."""
    names = [token.strip("'\"`[]").upper() for token in rest]
    name = names[2] if names[1:2] == ["."] and len(names) > 2 else (names or [""])[0]  # noqa: PLR2004
    return f"PRAGMA {name.lower()}" if name in _PRAGMAS else None


log = logging.getLogger("oncekey.local")
"""A separate logger, so that an application that reads through other connections on purpose can silence it."""

OPENED_APART: Final = (
    "oncekey: %s opened its own connection while it ran: writes there are not committed with its key, so a retry after "
    "a crash repeats them; write through op.connection, or through the session of once.session"
)


class Handled(Protocol):
    """The part of a protected operation that is needed here."""

    @property
    def operation(self) -> str:
        """Its name."""

    @property
    def owner(self) -> object:
        """The `Once` that protects it."""

    @property
    def transactional(self) -> bool:
        """Whether its handler has the transaction with which its key commits."""


running: Final[ContextVar[Handled | None]] = ContextVar("oncekey_handler", default=None)
"""The operation whose handler is running in this context."""
_logged: Final[WeakKeyDictionary[object, set[str]]] = WeakKeyDictionary()


def opened() -> None:
    """Log that the running handler opened a connection outside its transaction, once for each operation."""
    handler = running.get()
    if handler is None or not handler.transactional:
        return
    logged = _logged.setdefault(handler.owner, set())
    if handler.operation not in logged:
        logged.add(handler.operation)
        log.warning(OPENED_APART, handler.operation)
