"""The simulated database: the memory store's own statements, with commits, row locks and a log of every write.

A statement runs on a copy of its row; what it changed is published at once, or, inside a transaction, when
that commits. A row that an open transaction has changed is locked: another writer waits for the outcome and
then looks at the row that is there, as under READ COMMITTED. Next to them, it has PostgreSQL's try-locks, which nobody
waits for and which end with their transaction.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from oncekey.core.errors import StoreUnavailableError
from oncekey_demo.history import Proof, Write
from proof.sim.onecommit import LOCKING, PUT
from proof.sim.steps import OpenTransaction, Saying

if TYPE_CHECKING:
    from oncekey.core.flow import Rows, Statement, Value
    from oncekey.core.model import Duration, Instant
    from oncekey_demo.history import Effect
    from proof.sim.onecommit import Held
    from proof.sim.scheduler import Clock


Where: TypeAlias = tuple[str, str]
Cell: TypeAlias = dict[str, Any]
ASKING: Final = frozenset({"held", "holder"})
"""Statements about locks alone."""


class Database:
    """Committed rows, open transactions, and what was written when and by whom."""

    def __init__(self, clock: Clock, idle_limit: Duration) -> None:
        self.table: dict[Where, Cell] = {}
        self.business: list[Effect] = []
        self.log: list[Write] = []
        self.locks: dict[Where, OpenTransaction] = {}
        self.held: Held = {}
        """Locks that end with their transaction, by number."""
        self.parcels: dict[str, Instant] = {}
        """Incarnation -> until when a worker has its parcel; 0 if nobody has."""
        self._clock = clock
        self._idle_limit = idle_limit
        self._open: list[OpenTransaction] = []
        self._looked: dict[Where, Instant] = {}

    def begin(self, host: str) -> OpenTransaction:
        """Open a business transaction."""
        tx = OpenTransaction(host, self._clock.boot, self._clock.store)
        self._open.append(tx)
        return tx

    def execute(self, statement: Statement, by: str, at: int, tx: OpenTransaction | None = None) -> Rows | None:
        """Run one statement; None means that it waits for somebody's lock."""
        if tx is not None:
            self._use(tx)
        if statement.name == PUT:
            assert tx is not None
            tx.parcels.append(str(statement.params["parcel"]))
            return []
        if statement.name in ASKING:
            return self._run(statement, {}, tx)
        where = (str(statement.params["scope"]), str(statement.params["key"]))
        seen = tx.rows[where] if tx is not None and where in tx.rows else self.table.get(where)
        self._looked[where] = max(self._clock.store, self._looked.get(where, 0))
        scratch = {} if seen is None else {where: dict(seen)}
        rows = self._run(statement, scratch, tx)
        after = scratch.get(where)
        if after == seen:
            return rows
        holder = self.locks.get(where)
        if holder is not None and holder is not tx:
            return None
        saying = Saying(by, statement, self._clock.store, self._clock.elapsed)
        if tx is None:
            self._publish(where, after, saying, at)
        else:
            self.locks[where] = tx
            tx.rows[where] = after
            tx.said[where] = saying
        return rows

    def insert(self, tx: OpenTransaction, effect: Effect) -> None:
        """Write a business row."""
        self._use(tx)
        tx.effects.append(effect)

    def commit(self, tx: OpenTransaction, at: int) -> None:
        """Make it all visible, the record and the business rows in one."""
        self._use(tx)
        for where, cell in tx.rows.items():
            self._publish(where, cell, tx.said[where], at)
        self.business += [_dated(effect, at) for effect in tx.effects]
        self.parcels |= dict.fromkeys(tx.parcels, 0)
        self._end(tx)

    def rollback(self, tx: OpenTransaction) -> None:
        """Undo it; a transaction that is gone already is gone."""
        if tx.open:
            self._end(tx)

    def abandon(self, host: str) -> None:
        """Its connection is gone: the server rolls its transaction back."""
        for tx in [tx for tx in self._open if tx.host == host]:
            self._end(tx)

    def opened_by(self, host: str) -> bool:
        """Whether a host has a transaction open."""
        return any(tx.host == host for tx in self._open)

    def drop_idle(self) -> None:
        """The server ends what has been idle in a transaction for too long (L4)."""
        for tx in [tx for tx in self._open if self.dropped_at(tx) <= self._clock.boot]:
            self._end(tx)

    def dropped_at(self, tx: OpenTransaction) -> Instant:
        """When the server's patience with it ends."""
        return tx.used_at + self._idle_limit

    def _use(self, tx: OpenTransaction) -> None:
        if not tx.open:
            raise StoreUnavailableError("the server has ended the transaction")
        tx.used_at = self._clock.boot

    def _end(self, tx: OpenTransaction) -> None:
        tx.open = False
        self._open.remove(tx)
        for where in tx.rows:
            del self.locks[where]
        for number in [number for number, (holder, _) in self.held.items() if holder is tx]:
            del self.held[number]

    def _run(self, statement: Statement, scratch: dict[Where, Cell], tx: OpenTransaction | None) -> Rows:
        now = statement.params["now"]
        params: dict[str, Any] = {**statement.params, "now": self._clock.store if now is None else now}
        if statement.name in LOCKING:
            params |= {"locks": self.held, "tx": tx}
        assert callable(statement.command)
        return statement.command(scratch, **params)

    def _publish(self, where: Where, cell: Cell | None, saying: Saying, at: int) -> None:
        before = self.table.get(where)
        if cell is None:
            del self.table[where]
        else:
            self.table[where] = cell
        shown = cell or before
        assert shown is not None
        self.log.append(
            Write(
                at=at,
                scope=where[0],
                key=where[1],
                state=None if cell is None else cell["state"],
                incarnation=shown["incarnation"],
                fence=shown["fence"],
                version=shown["version"],
                name=saying.statement.name,
                operation=saying.by,
                fingerprint=shown["fingerprint"],
                now=saying.now,
                seen_at=self._looked.pop(where, saying.now),
                elapsed=saying.elapsed,
                lease_until=shown["lease_until"],
                expires_at=shown["expires_at"],
                ttl=shown["ttl"],
                **_proven(saying.statement.params),
            )
        )


def _proven(params: dict[str, Value]) -> dict[str, Any]:
    """What the statement was given to compare, whatever it then did with it."""
    if "seen_version" in params:
        return {
            "proof": Proof.VERSION,
            "proven_incarnation": params["seen_incarnation"],
            "proven_version": params["seen_version"],
        }
    if "fence" in params:
        return {
            "proof": Proof.OWNER,
            "proven_incarnation": params["incarnation"],
            "proven_fence": params["fence"],
        }
    return {"proof": Proof.NO_ROW}


def _dated(effect: Effect, at: int) -> Effect:
    return replace(effect, at=at)
