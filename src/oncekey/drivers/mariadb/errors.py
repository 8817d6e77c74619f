"""The meaning of MariaDB's and MySQL's errors. No message repeats a bound value.

PyMySQL and aiomysql raise the same classes. Numbers from 2000 on are the client's: the connection is lost. All others
are the server's reply to a statement, after which nothing of that statement is there; a deadlock (1213) rolls the
transaction back, too.
"""

from __future__ import annotations

import asyncio
from typing import Final

import pymysql

from oncekey.core.errors import CommitAmbiguousError, RolledBackError, SchemaError, StoreError, StoreUnavailableError
from oncekey.drivers.retries import ConflictError, lost, lost_commit
from oncekey.flow import Mode


class DemotedError(StoreUnavailableError):
    """The server takes no writes: nothing happened, and another one may take them, so this connection is given up."""


FAILURES: Final = (pymysql.MySQLError, OSError, asyncio.IncompleteReadError, RuntimeError)
"""What sending can raise. A time-out is an `OSError`; a closed connection is reported by one of the others."""

UNLESS_TAKEN: Final = "/* unless taken */"
RELEASE: Final = "RELEASE SAVEPOINT"
DEADLOCK: Final = 1213
_HELD: Final = frozenset({1205, 3572})
_LAST_WORDS: Final = frozenset({1053, 1152, 1153, 1158, 1159, 1160, 1161, 1927, 3169, 4031})
_CLIENT: Final = range(2000, 3000)
_CONFLICTS: Final = {
    1020: "somebody changed the row",
    DEADLOCK: "a deadlock, or another node of the cluster was first",
}
_OTHER_SCHEMA: Final = frozenset({1146, 1054, 1305, 1091})
_DEMOTED: Final = frozenset({1290, 1836})
_UNSURE: Final = frozenset({1047, 1180})
_SICK: Final = {
    1021: "the disk is full",
    1037: "the server has run out of memory",
    1040: "the server has too many connections",
    1041: "the server has run out of memory",
    1044: "the server did not let us in",
    1045: "the server did not let us in",
    1047: "the node is not part of its cluster",
    1049: "there is no such database",
    1105: "the server failed inside",
    1114: "the table is full",
    1180: "the server could not commit",
    1203: "the server has too many connections",
    1205: "a lock was not to be had in time",
    1206: "the server has too many locks",
    1226: "the user has used up its resources",
    1290: "the server only reads: it is a replica, or was demoted to one",
    1317: "the statement was cancelled",
    1792: "the transaction only reads",
    1836: "the server only reads: it is a replica, or was demoted to one",
    1969: "the statement took too long",
    3024: "the statement took too long",
    3572: "a lock was not to be had in time",
}
_OTHER_VERSION: Final = "the tables are missing or of another version: run `oncekey migrate up --store URL`"


def number_of(error: BaseException) -> int | None:
    """The server's number of an error; None: the connection is lost."""
    code = error.args[0] if isinstance(error, pymysql.MySQLError) and error.args else None
    if not isinstance(code, int) or code == 0 or code in _CLIENT or code in _LAST_WORDS:
        return None
    return code


def is_answer(number: int | None, text: str, *, at_once: bool) -> bool:
    """Whether the error only means no rows: the place is taken, the savepoint is gone, or another has the lock."""
    match number:
        case 1062:
            return UNLESS_TAKEN in text
        case 1305:
            return RELEASE in text
        case _:
            return at_once and number in _HELD


def statement_error(error: BaseException, mode: Mode, what: str) -> StoreError:
    """The store's error for a statement."""
    number = number_of(error)
    if number is None:
        return lost(mode, what)
    # A statement that commits by itself may have been refused by its COMMIT.
    return _unsure(number, what) if mode is Mode.SINGLE and number in _UNSURE else refused(number, what)


def refused(number: int, what: str) -> StoreError:
    """The meaning of an error after which the connection is still usable: definite, nothing happened."""
    if number in _CONFLICTS:
        return ConflictError(f"{what}: {_CONFLICTS[number]} ({number})")
    if number in _OTHER_SCHEMA:
        return SchemaError(f"{what}: {_OTHER_VERSION}")
    if number in _SICK:
        kind = DemotedError if number in _DEMOTED else StoreUnavailableError
        return kind(f"{what}: {_SICK[number]} ({number})")
    return StoreError(f"{what}: MariaDB refused it ({number})")


def commit_error(error: BaseException, what: str) -> StoreError:
    """The store's error for a COMMIT: a missing reply is ambiguous, and so is that of a node that lost its cluster."""
    number = number_of(error)
    if number is None:
        return lost_commit(what)
    if number in _UNSURE:
        return _unsure(number, what)
    found = refused(number, what)
    if isinstance(found, StoreUnavailableError):
        return found
    return RolledBackError(f"{what}: MariaDB refused the commit, so it was rolled back ({number})")


def _unsure(number: int, what: str) -> CommitAmbiguousError:
    return CommitAmbiguousError(f"{what}: {_SICK[number]} during the commit ({number})")


def unreachable(error: BaseException) -> StoreUnavailableError:
    """The meaning of a connection that could not be made: nothing was sent."""
    number = error.args[0] if error.args and isinstance(error.args[0], int) else None
    why = _SICK.get(number) if number is not None else None
    return StoreUnavailableError(
        f"no connection to MariaDB: {why or 'it does not answer'} ({number or type(error).__name__})"
    )
