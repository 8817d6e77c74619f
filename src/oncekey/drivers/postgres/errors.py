"""The meaning of PostgreSQL's errors, for all libraries. No message repeats a bound value.

What a lost connection means depends on what was under way: a read may be repeated, a write that commits by itself may
or may not have happened, and a transaction whose COMMIT was never sent did not happen.
"""

from __future__ import annotations

from typing import Final

from oncekey.core.errors import (
    CommitAmbiguousError,
    RolledBackError,
    SchemaError,
    StoreError,
    StoreUnavailableError,
)
from oncekey.drivers.retries import ConflictError

SYNC_WAIT_CANCELLED: Final = "01000"
"""The warning of a commit that stopped waiting for its standby: it is on this server, and perhaps on no other."""

READS_ONLY: Final = "25006"
"""The error of a server that takes no writes. Another may take them by now, so its connections are not kept."""

ONLY_READS: Final = "the server only reads: it is a standby, or was demoted to one"

_CONFLICTS: Final = {"40001": "a serialisation failure", "40P01": "a deadlock"}
_OTHER_SCHEMA: Final = frozenset({"42P01", "42703", "3F000", "42883"})
_ENDED: Final = frozenset({"57P01", "57P02", "57P03", "57P05", "25P03", "25P04"})
_ABORTED: Final = "25P02"
_UNPREPARED: Final = "behind a pooler the address needs ?pgbouncer=1 (=prepared is for PgBouncer from 1.21 on)"
_SICK: Final = {
    READS_ONLY: ONLY_READS,
    "55P03": "a lock was not to be had in time",
    "57014": "the statement was cancelled",
    "58030": "the server could not read or write its files",
    "0A000": "the schema changed while the statement was prepared",
    "26000": f"a prepared statement is gone: {_UNPREPARED}",
    "42P05": f"a prepared statement is somebody else's: {_UNPREPARED}",
}
_SICK_CLASSES: Final = {
    "28": "the server did not let us in",
    "3D": "there is no such database",
    "53": "the server has run out of room, memory or connections",
    "XX": "the server failed inside",
}
_OTHER_VERSION: Final = "the tables are missing or of another version: run `oncekey migrate up --store URL`"


def is_the_end(sqlstate: str | None, severity: str | None) -> bool:
    """Whether the server closes the connection with this error."""
    if sqlstate is None:
        return False
    return severity in {"FATAL", "PANIC"} or sqlstate in _ENDED or sqlstate.startswith("08")


def refused(sqlstate: str | None, what: str, kind: str) -> StoreError:
    """The meaning of an error after which the connection is still usable: definite, nothing happened."""
    code = sqlstate or kind
    if code in _CONFLICTS:
        return ConflictError(f"{what}: {_CONFLICTS[code]} ({code})")
    if code == _ABORTED:
        return RolledBackError(f"{what}: a statement had failed before, so the transaction was rolled back ({code})")
    if code in _OTHER_SCHEMA:
        return SchemaError(f"{what}: {_OTHER_VERSION}")
    why = _SICK.get(code) or _SICK_CLASSES.get(code[:2])
    if why is not None:
        return StoreUnavailableError(f"{what}: {why} ({code})")
    return StoreError(f"{what}: PostgreSQL refused it ({code})")


def refused_commit(sqlstate: str | None, what: str, kind: str) -> StoreError:
    """The meaning of an error in reply to COMMIT: it is about the handler's rows, as a deferred constraint is."""
    error = refused(sqlstate, what, kind)
    if isinstance(error, StoreUnavailableError):
        return error
    return RolledBackError(f"{what}: PostgreSQL refused the commit, so it was rolled back ({sqlstate or kind})")


def unsure_commit(what: str) -> CommitAmbiguousError:
    """The meaning of a commit with the warning that it stopped waiting for its standby."""
    return CommitAmbiguousError(f"{what}: the commit stopped waiting for its standby")


def not_committed(tag: str, what: str) -> RolledBackError:
    """The meaning of a COMMIT that was answered with something else (F20)."""
    return RolledBackError(f"{what}: a statement had failed, so it was rolled back: {tag or 'nothing'} was the answer")


def unreachable(why: str) -> StoreUnavailableError:
    """The meaning of a connection that could not be made: nothing was sent."""
    return StoreUnavailableError(f"no connection to PostgreSQL: {why}")
