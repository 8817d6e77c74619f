"""What LOCAL and OUTBOX in one commit say to the simulated database: as `locks.sql` says it to PostgreSQL.

A lock is tried, never waited for, and ends with its transaction. `locks` is whoever holds which number, `tx` the
transaction that speaks, both given by the database.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from oncekey.core.flow import Fold, Statement
from oncekey.core.model import Completed
from oncekey.core.onecommit import Locked, WriteKind
from oncekey.stores.locks import WRITTEN, LockStore
from oncekey.stores.memory import claim as reserve
from oncekey.stores.memory import find
from oncekey.stores.moves import MOVES
from oncekey.stores.rows import snapshot_of

if TYPE_CHECKING:
    from oncekey.core.flow import Body, Command, Rows, Value
    from oncekey.core.model import Claim, Deferred, Instant, Parcel
    from oncekey.core.onecommit import Lock, Stored, WriteTarget
    from proof.sim.steps import OpenTransaction


Columns: TypeAlias = Any
"""Columns of any kind, as a statement's parameters."""
Cell: TypeAlias = dict[str, Any]
Table: TypeAlias = dict[tuple[str, str], Cell]
Held: TypeAlias = "dict[int, tuple[OpenTransaction, int]]"
"""Number of a lock -> who holds it, and the mark of its request."""

ASKED: Final = ("lock", "held", "holder")
LOCKING: Final = frozenset((*ASKED, *WRITTEN))
PUT: Final = "put_parcel"
_ANSWERED: Final = {"state": "completed", "recovery_point": "finished", "owner": None, "lease_until": None}
_DEFERRED: Final = {"state": "pending", "recovery_point": "started", "owner": None, "lease_until": None}


def lock(
    table: Table,
    *,
    locks: Held,
    tx: OpenTransaction,
    lock: int,
    mark: int,
    scope: str,
    key: str,
    now: Instant,
    **_: Columns,
) -> Rows:
    """Try the lock, then look."""
    holder, other = locks.setdefault(lock, (tx, mark))
    row = find(table, scope=scope, key=key, now=now)[0]
    return [{**row, "locked": holder is tx, "other": holder is not tx and other != mark, "begun": tx.begun}]


def held(_: Table, *, locks: Held, lock: int, **__: Columns) -> Rows:
    """Whether somebody has it."""
    return [{"held": lock in locks}]


def holder(_: Table, *, locks: Held, lock: int, mark: int, **__: Columns) -> Rows:
    """Whose request has it."""
    if lock not in locks:
        return [{"holder": "nobody"}]
    return [{"holder": "somebody" if locks[lock][1] == mark else "other"}]


def commit_new(table: Table, *, now: Instant, tx: OpenTransaction, outcome: str, **columns: Columns) -> Rows:
    """A finished record where none was; a row that is there stays, and nothing is returned."""
    return _inserted(table, now, tx, columns, {**_ANSWERED, "outcome": outcome, "finished_at": now})


def defer_new(table: Table, *, now: Instant, tx: OpenTransaction, **columns: Columns) -> Rows:
    """A record that waits for its worker, where none was."""
    return _inserted(table, now, tx, columns, _DEFERRED)


def commit_retryable(table: Table, *, now: Instant, tx: OpenTransaction, outcome: str, **columns: Columns) -> Rows:
    """The answer of a record that had failed, in the same life."""
    cell = _seen(table, columns)
    if cell is None or cell["state"] != "failed_retryable" or cell["effects"] != "local" or cell["expires_at"] <= now:
        return []
    if cell["memo"] or cell["intent"]:
        return []
    cell.update(
        _ANSWERED,
        **_response(columns),
        outcome=outcome,
        fence=cell["fence"] + 1,
        version=cell["version"] + 1,
        attempts=cell["attempts"] + 1,
        last_error=None,
        reconcile_after=None,
        last_run_at=now,
        finished_at=now,
        expires_at=max(cell["expires_at"], now + cell["ttl"]),
    )
    return [{**cell, "begun": tx.begun}]


def commit_anew(table: Table, *, now: Instant, tx: OpenTransaction, outcome: str, **columns: Columns) -> Rows:
    """A finished record in the place of one whose time is over."""
    return _anew(table, now, tx, columns, {**_ANSWERED, "outcome": outcome, "finished_at": now})


def defer_anew(table: Table, *, now: Instant, tx: OpenTransaction, **columns: Columns) -> Rows:
    """A record that waits for its worker, in the place of one whose time is over."""
    return _anew(table, now, tx, columns, _DEFERRED)


def put_parcel(_: Table, **__: Columns) -> Rows:
    """The database itself keeps parcels: they are no part of the record."""
    return []


class Outbox:
    """The one thing that a request does to an outbox."""

    @staticmethod
    def putting(parcels: tuple[Parcel, ...]) -> Body[None]:
        """Write parcels as part of an open transaction."""
        for one in parcels:
            said: dict[str, Value] = {
                "scope": one.record_id.scope,
                "key": one.record_id.key,
                "parcel": str(one.incarnation),
                "now": None,
            }
            yield Statement(PUT, put_parcel, said)


class Locks(LockStore):
    """The locks of the simulated database; what is folded there is a statement like any other."""

    asked = ASKED

    def locking(self, lock: Lock, claim: Claim) -> Body[Locked]:
        """Try the lock, then look."""
        params: dict[str, Value] = {
            "lock": lock.number,
            "mark": lock.mark,
            "scope": claim.id.scope,
            "key": claim.id.key,
        }
        row = (yield self._statements.statement("lock", params))[0]
        return Locked(
            got=bool(row["locked"]), snapshot=snapshot_of(row), begun=int(row["begun"]), other=bool(row["other"])
        )

    def completing_at_commit(
        self, claim: Claim, target: WriteTarget, settlement: Completed | Deferred, begun: int
    ) -> Fold[Stored] | None:
        """The finished record of a new key, for a host whose driver sends it with the COMMIT."""
        if target.kind is not WriteKind.NEW or not isinstance(settlement, Completed):
            return None
        return Fold(self._finished(claim, target, settlement), lambda rows: self._stored(rows[0], begun))


ONE_COMMIT: Mapping[str, Command] = MappingProxyType(
    {
        "lock": lock,
        "held": held,
        "holder": holder,
        "commit_new": commit_new,
        "commit_retryable": commit_retryable,
        "commit_anew": commit_anew,
        "defer_new": defer_new,
        "defer_anew": defer_anew,
    }
)


def _inserted(table: Table, now: Instant, tx: OpenTransaction, columns: Cell, ended: Cell) -> Rows:
    where = (columns["scope"], columns["key"])
    if where in table:
        return []
    reserve(table, now=now, **columns)
    table[where].update(ended, **_response(columns))
    return [{**table[where], "begun": tx.begun}]


def _anew(table: Table, now: Instant, tx: OpenTransaction, columns: Cell, ended: Cell) -> Rows:
    cell = _seen(table, columns)
    free = cell is not None and (cell["state"] in {"completed", "expired"} or _plain_failure(cell))
    if cell is None or not free or cell["expires_at"] > now:
        return []
    moved = MOVES["supersede"].apply(cell, now, columns)
    assert moved is not None
    assert moved.cell is not None
    cell.update(moved.cell)
    cell.update(ended, **_response(columns))
    return [{**cell, "begun": tx.begun}]


def _plain_failure(cell: Cell) -> bool:
    return cell["state"] == "failed_retryable" and not cell["memo"] and not cell["intent"]


def _seen(table: Table, proof: Cell) -> Cell | None:
    cell = table.get((proof["scope"], proof["key"]))
    if cell and (cell["incarnation"], cell["version"]) == (proof["seen_incarnation"], proof["seen_version"]):
        return cell
    return None


def _response(columns: Cell) -> Cell:
    return {name: value for name, value in columns.items() if name.startswith("response_")}
