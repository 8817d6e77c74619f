"""Shared by all drivers for PostgreSQL: timeouts, read-only transactions, folded statements and the meaning of errors.

A statement may be folded into the message of a BEGIN or a COMMIT, which can only be text: a message of several
statements has no parameters, so the values are inlined, with safe characters only: a number in quotes, bytes in
hexadecimal, `true`, `false` and `NULL`. No value contains a quote or a backslash, so none can end its literal,
whatever `standard_conforming_strings` and `client_encoding` are; texts are bytes here, and the statement's own function
decodes them. asyncpg does not return rows of such a message, so the statement sends its row in a notice.

No error message repeats a bound value. The meaning of a lost connection depends on what was running: a read may be
repeated, a write that commits by itself may or may not have happened, and a transaction whose COMMIT was never sent
did not happen.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from oncekey.core.errors import CommitAmbiguousError, RolledBackError, SchemaError, StoreError, StoreUnavailableError
from oncekey.core.flow import Body, Statement
from oncekey.databases.handler_sql import AS_HANDLER, AS_OPENED
from oncekey.databases.placeholders import parted
from oncekey.databases.retries import ConflictError

if TYPE_CHECKING:
    from collections.abc import Mapping


POOL_SIZE: Final = 10
TIMEOUT: Final = 2.0
"""Seconds to wait for a connection."""

STATEMENT_TIMEOUT: Final = 10.0
"""Timeout in seconds for one of oncekey's own statements: a row may be locked by a commit that hangs."""

IDLE_TIMEOUT: Final = 300.0
"""Idle seconds after which the server ends a business transaction whose process or host is gone (L4)."""

WHAT: Final = "the business transaction"
BEGIN: Final = "BEGIN ISOLATION LEVEL READ COMMITTED"

_NO_WORK: Final = {"memo": None, "intent": None, "request": None, "reconcile_after": None, "reconcile_tries": 0}
"""The columns of a record that has no row in `work`, or whose row does not count because it is completed."""

_DECODED: Final = json.JSONDecoder().decode  # the part of `json.loads` after the check of its argument

NOTICE: Final = "OK001"
"""The SQLSTATE of a notice that contains a row."""

FOUND: Final = "SELECT 1"
"""The command tag of a message whose last statement has a row."""

TAKEN: Final = "23505"
"""The SQLSTATE if the record already exists."""

NOT_OURS: Final = "OK002"
"""The SQLSTATE if the record of a step has another owner."""

RECORD: Final = ("oncekey", "record")
"""The table of the record, to tell its errors from a business row that violates its own constraint."""


def folds_as_text(statement: Statement) -> bool:
    """Whether the statement can be sent in a message that is text."""
    return statement.folds and statement.text is not None


def as_text(statement: Statement) -> str:
    """The statement with its values inlined."""
    assert statement.text is not None
    params = statement.params
    text, rest = parted(statement.text)
    pieces = [text]
    for name, after in rest:  # a record has two dozen values, so no function is called for each
        value = params[name]
        if type(value) is int:
            pieces.append(f"'{value}'{after}")
        elif type(value) is bytes:
            # E, because its backslash has the same meaning under every setting of the server.
            pieces.append(f"E'\\\\x{value.hex()}'{after}")
        elif value is None:
            pieces.append(f"NULL{after}")
        elif type(value) is bool:
            pieces.append(f"{'true' if value else 'false'}{after}")
        elif isinstance(value, int):  # a member of an enumeration, such as a status
            pieces.append(f"'{int(value)}'{after}")
        else:
            raise TypeError("a text does not travel in a message of several statements: its bytes do")
    return "".join(pieces)


def row_from_notice(text: str) -> Mapping[str, Any]:
    """The row in a notice, in which a completed record is an object with its bytes in hexadecimal."""
    row: dict[str, Any] = _DECODED(text)
    record = row.get("record")
    if record is not None:
        row.update(record, **_NO_WORK)
        row["seed"] = bytes.fromhex(record["seed"][2:])
        if record["response_body"] is not None:
            row["response_body"] = bytes.fromhex(record["response_body"][2:])
    return row


def opening(idle: float) -> str:
    """The settings sent with BEGIN: the idle timeout, and a mark that no other transaction has."""
    limit = f"SET LOCAL idle_in_transaction_session_timeout = {int(idle * 1000):d}"
    return f"{limit};SET LOCAL oncekey.begun = 0"


BEGUN: Final = Statement(
    "commit",
    "",
    folds=True,
    text="SELECT 1 / length(COALESCE(current_setting('oncekey.begun', true), ''))",
)
"""Sent with COMMIT: it fails in any transaction other than the one that was begun (L5)."""


class Begun(Protocol):
    """A transaction that was begun."""

    async def run(self, body: Body[Any]) -> Any:  # noqa: ANN401  (the result of the statements)
        """Run statements inside it."""

    async def rollback(self) -> None:
        """Roll back."""


Tx = TypeVar("Tx", bound=Begun)


async def only_reading(tx: Tx) -> Tx:
    """Make the transaction read-only, enforced by the server, and return it."""
    try:
        await tx.run(_read_only())
    except BaseException:
        await tx.rollback()
        raise
    return tx


def _read_only() -> Body[None]:
    yield Statement("read_only", "SET LOCAL transaction_read_only = on")


_WARNING: Final = "01000"
_WAITS_FOR_STANDBY: Final = "SyncRepWaitForLSN"


def stopped_waiting(notice: Any) -> bool:  # noqa: ANN401  (asyncpg's message, or psycopg's)
    """Whether a commit stopped waiting for its standby: it is on this server, and possibly on no other.

    Its warning has the SQLSTATE of every warning, including RAISE WARNING; the name of the server's function differs.
    """
    if notice.sqlstate != _WARNING:
        return False
    function = getattr(notice, "server_source_function", None) or getattr(notice, "source_function", None)
    return function is None or function == _WAITS_FOR_STANDBY


READS_ONLY: Final = "25006"
"""The SQLSTATE of a read-only server. Another server may accept writes now, so its connections are closed."""

ONLY_READS: Final = "the server is read-only: it is a standby, or was demoted to one"

_HANDLERS_DOING: Final = {
    READS_ONLY: "the handler made its transaction read-only, so nothing can be stored in it",
    "42501": (
        "the handler's role may not write to oncekey's tables: set it with SET LOCAL ROLE in the handler's "
        "own text, not in a function, or grant the role the rights of oncekey's user"
    ),
}

_CONFLICTS: Final = {"40001": "a serialisation failure", "40P01": "a deadlock"}
_OTHER_SCHEMA: Final = frozenset({"42P01", "42703", "3F000", "42883"})
_ENDED: Final = frozenset({"57P01", "57P02", "57P03", "57P05"})
_TOO_SLOW: Final = {
    "25P03": "the handler sent nothing for longer than its lease, so the server ended its transaction",
    "25P04": "the handler took longer than its deadline, so the server ended its transaction",
}
_ABORTED: Final = "25P02"
_NOT_BEGUN_HERE: Final = "22012"
"""Division by zero: only the last statement divides, by a mark that only the transaction that was begun has."""
_UNPREPARED: Final = "behind a pooler the address needs ?pgbouncer=1 (=prepared is for PgBouncer from 1.21 on)"
_SICK: Final = {
    READS_ONLY: ONLY_READS,
    "55P03": "a lock was not available in time",
    "57014": "the statement was cancelled",
    "58030": "the server could not read or write its files",
    "0A000": "the schema changed while the statement was prepared",
    "26000": f"a prepared statement is gone: {_UNPREPARED}",
    "42P05": f"a prepared statement belongs to another client: {_UNPREPARED}",
}
_SICK_CLASSES: Final = {
    "28": "the server refused the login",
    "3D": "the database does not exist",
    "53": "the server has run out of disk space, memory or connections",
    "XX": "internal error of the server",
}
_OF_CONNECTING: Final = frozenset({"28", "3D"})
"""Classes of errors while connecting; in an open transaction only the handler's own triggers raise these."""

_OTHER_VERSION: Final = "the tables are missing or have another version: run `oncekey migrate up --store URL`"


def was_too_slow(sqlstate: str | None) -> bool:
    """Whether the server ended the session because of its handler: the store is available, and nothing is committed."""
    return sqlstate in _TOO_SLOW


def is_the_end(sqlstate: str | None, severity: str | None) -> bool:
    """Whether the server closes the connection with this error, so that the outcome of a statement is unknown."""
    if sqlstate is None or was_too_slow(sqlstate):
        return False
    return severity in {"FATAL", "PANIC"} or sqlstate in _ENDED or sqlstate.startswith("08")


def refused(sqlstate: str | None, what: str, kind: str) -> StoreError:
    """The meaning of an error after which the connection is still usable: definite, nothing happened."""
    code = sqlstate or kind
    if code in _CONFLICTS:
        return ConflictError(f"{what}: {_CONFLICTS[code]} ({code})")
    if code in _TOO_SLOW:
        return RolledBackError(f"{what}: {_TOO_SLOW[code]} ({code})")
    if code == _ABORTED:
        return RolledBackError(f"{what}: a statement had failed before, so the transaction was rolled back ({code})")
    if code == _NOT_BEGUN_HERE:
        return RolledBackError(f"{what}: the handler ended its transaction, so the next one was rolled back ({code})")
    if code in _OTHER_SCHEMA:
        return SchemaError(f"{what}: {_OTHER_VERSION}")
    why = _SICK.get(code) or _SICK_CLASSES.get(code[:2])
    if why is not None:
        return StoreUnavailableError(f"{what}: {why} ({code})")
    return StoreError(f"{what}: PostgreSQL refused it ({code})")


def handlers_doing(sqlstate: str | None, what: str) -> RolledBackError | None:
    """The meaning of an error of our statement in a transaction that a handler used; None: the usual meaning.

    When the transaction began, the same user could write. If that is no longer so, the handler changed it.
    """
    why = _HANDLERS_DOING.get(sqlstate or "")
    return None if why is None else RolledBackError(f"{what}: {why} ({sqlstate})")


def refused_commit(sqlstate: str | None, what: str, kind: str) -> StoreError:
    """The meaning of an error in reply to COMMIT: it concerns the handler's rows, such as a deferred constraint."""
    error = refused(sqlstate, what, kind)
    if isinstance(error, StoreUnavailableError) and (sqlstate or "")[:2] not in _OF_CONNECTING:
        return error
    return RolledBackError(f"{what}: PostgreSQL refused the commit, so it was rolled back ({sqlstate or kind})")


def sealing(last: Statement, *, sets: bool) -> str:
    """A last statement and COMMIT as one text; as the session's own user if the handler may have set another role."""
    if not sets:
        return f"{as_text(last)};COMMIT;"
    return f"{';'.join(AS_OPENED)};{as_text(last)};{AS_HANDLER};COMMIT;"


def unsure_commit(what: str) -> CommitAmbiguousError:
    """The meaning of a commit with the warning that it stopped waiting for its standby."""
    return CommitAmbiguousError(f"{what}: the commit stopped waiting for its standby")


def not_committed(tag: str, what: str) -> RolledBackError:
    """The meaning of a reply to COMMIT other than COMMIT (F20)."""
    return RolledBackError(f"{what}: a statement had failed, so it was rolled back: the reply was {tag or 'empty'}")


def unreachable(why: str) -> StoreUnavailableError:
    """The meaning of a failed connection attempt: nothing was sent."""
    return StoreUnavailableError(f"no connection to PostgreSQL: {why}")
