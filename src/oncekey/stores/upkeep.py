"""Upkeep as flows over named statements: sweeping and reaping.

Each move of a record that was read proves the version that was read. Finished and expired records are moved without
being read: the statement contains the core's conditions. If the audit is enabled, its line is written in the same
transaction as the move: both are stored, or neither.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias
from uuid import UUID

from oncekey.core.flow import Body, Flow, Mode, Row, Rows, Transaction, Value
from oncekey.core.keys import key_digest
from oncekey.core.model import Completed, Duration, Instant, Record, State
from oncekey.core.transitions import Mover, Note, Trigger
from oncekey.core.upkeep import EXPIRED, START, Expired, Gone, Page, ReapPosition, Run, expired_batch
from oncekey.stores.rows import response_params, version_proof
from oncekey.stores.statements import PART_STATEMENTS, Statements, execute, locked_row
from oncekey.stores.worker_list import WorkerList
from oncekey.stores.worker_rows import behind, page_of

if TYPE_CHECKING:
    from oncekey.ports.store import Audit


UPKEEP = PART_STATEMENTS["upkeep"]

Noting: TypeAlias = "Callable[[Record], Note] | None"
"""Creates the audit line about a record; None: write none."""


@dataclass(frozen=True, slots=True)
class _Ending:
    """The audit of finished records that end; without a mover there are no lines."""

    trigger: Trigger
    to: State | None
    mover: Mover | None
    each: bool
    """A line per record instead of per scope and state."""

    def notes(self, rows: Rows, mover: Mover) -> list[Note]:
        """The lines about a batch."""
        batches: dict[tuple[str, ...], list[Row]] = {}
        for row in rows:
            group = (row["scope"], row["state"], row["key"]) if self.each else (row["scope"], row["state"])
            batches.setdefault(group, []).append(row)
        return [self._note(batch, mover) for batch in batches.values()]

    def _note(self, batch: Sequence[Row], mover: Mover) -> Note:
        """The line about the records of a scope and a state; a single one is named."""
        row, single = batch[0], len(batch) == 1
        return Note(
            scope=row["scope"],
            key_digest=key_digest(row["key"]) if single else "",
            incarnation=UUID(str(row["incarnation"])) if single else UUID(int=0),
            operation=row["operation"] if single else "",
            fence=row["fence"] if single else 0,
            source=State(row["state"]),
            to=self.to,
            trigger=self.trigger,
            actor=mover.actor,
            who=mover.who,
            why=EXPIRED if single else expired_batch([one["expires_at"] for one in batch]),
        )


class UpkeepStore(WorkerList):
    """The statements of the sweeper and the reaper, in any store that has them."""

    def __init__(self, statements: Statements, audit: Audit | None) -> None:
        statements.require(UPKEEP)
        super().__init__(statements)
        self._audit = audit

    def stale(self, limit: int, after: Record | None = None) -> Flow[Page]:
        created = None if after is None else after.created_at
        return (yield from self._page("stale", {"limit": limit}, created, after))

    def sweep(self, seen: Record, to: State, last_error: str, noting: Noting = None) -> Flow[bool]:
        """Move `seen` to the state that the core decided (rows 14, 15, 18). False: another actor moved it first."""
        name = _sweeping(seen, to)

        def body() -> Body[bool]:
            rows = yield self._statements.statement(name, {**version_proof(seen), "last_error": last_error})
            if rows:
                yield from self._noting(seen, noting)
            return bool(rows)

        mode = Mode.SINGLE if noting is None else Mode.ATOMIC
        return (yield from execute(Transaction("sweep", mode, body)))

    def runs(self, limit: int) -> Flow[tuple[Run, ...]]:
        rows = yield from self._statements.read("runs", {"limit": limit})
        return tuple(Run(row["operation"], int(row["took"])) for row in rows)

    def expiring(self, limit: int, age: Duration, after: Record | None = None) -> Flow[Page]:
        expires = None if after is None else after.expires_at
        return (yield from self._page("expiring", {"limit": limit, "age": age}, expires, after))

    def kept_expired(self, limit: int, age: Duration, after: Record | None = None) -> Flow[Page]:
        expires = None if after is None else after.expires_at
        return (yield from self._page("kept_expired", {"limit": limit, "age": age}, expires, after))

    def purge(
        self, due: Expired, limit: int, after: ReapPosition = START, mover: Mover | None = None, *, each: bool = False
    ) -> Flow[Gone]:
        """Delete finished and expired records, the oldest first, after a position (row 30)."""
        return (yield from self._ended("purge_expired", due, limit, after, _Ending(Trigger.PURGE, None, mover, each)))

    def purge_kept(
        self, due: Expired, limit: int, after: ReapPosition = START, mover: Mover | None = None, *, each: bool = False
    ) -> Flow[Gone]:
        return (yield from self._ended("purge_kept", due, limit, after, _Ending(Trigger.PURGE, None, mover, each)))

    def mark(
        self, due: Expired, limit: int, after: ReapPosition = START, mover: Mover | None = None, *, each: bool = False
    ) -> Flow[Gone]:
        ending = _Ending(Trigger.EXPIRE, State.EXPIRED, mover, each)
        return (yield from self._ended("mark_expired", due, limit, after, ending))

    def abandon(self, seen: Record, answer: Completed, kept: Duration, noting: Noting = None) -> Flow[bool]:
        """End a pending record whose parcel no worker ever claimed, and delete that parcel (row 28, O4).

        False: the parcel was claimed, or the record moved. The parcel may be locked before the record: a transaction
        that holds the record never waits for a parcel that was never claimed.
        """
        response = response_params(answer.response, seen, self._statements.content)
        params: dict[str, Value] = {"outcome": answer.outcome.value, **response, "kept": kept}

        def body() -> Body[bool]:
            if not (yield self._statements.statement("drop_unclaimed", version_proof(seen))):
                return False
            locked_row((yield self._statements.statement("abandon", {**params, **version_proof(seen)})))
            yield from self._noting(seen, noting)
            return True

        return (yield from execute(Transaction("abandon", Mode.ATOMIC, body)))

    def live_keys(self, scope: str, limit: int) -> Flow[int]:
        rows = yield from self._statements.read("live_keys", {"scope": scope, "limit": limit})
        return int(rows[0]["live"])

    def _noting(self, seen: Record, noting: Noting) -> Body[None]:
        """Write the line about a move, if there is one and the store has an audit."""
        if noting is not None and self._audit is not None:
            yield from self._audit.noting((noting(seen),))

    def _ended(self, name: str, due: Expired, limit: int, after: ReapPosition, ending: _Ending) -> Flow[Gone]:
        """Run one statement, and another one for the audit lines.

        If a statement cannot move rows and return them, it only finds and locks them, and a second one moves them.
        """
        mover, moves = ending.mover, f"{name}_found"
        apart = self._statements.has(moves)

        def body() -> Body[Gone]:
            rows = yield self._statements.statement(name, _due_params(due, limit, after))
            if rows and apart:
                found = [{"scope": row["scope"], "key": row["key"]} for row in rows]
                yield self._statements.statement(moves, {"found": json.dumps(found)})
            if mover is not None and self._audit is not None:
                yield from self._audit.noting(ending.notes(rows, mover))
            if not rows:
                return Gone(0, full=False)
            last = max((row["expires_at"], row["scope"], row["key"]) for row in rows)
            return Gone(len(rows), len(rows) >= limit, ReapPosition(*last), int(rows[0]["now"]))

        mode = Mode.SINGLE if mover is None and not apart else Mode.ATOMIC
        return (yield from execute(Transaction(name, mode, body)))

    def _page(self, name: str, params: dict[str, Value], at: Instant | None, after: Record | None) -> Flow[Page]:
        since: dict[str, Value] = {"after_at": -1 if at is None else at, **behind(after)}
        rows = yield from self._statements.read(name, {**params, **since})
        return page_of(rows, self._statements.content)


def _sweeping(seen: Record, to: State) -> str:
    """The statement for a move: after the end of a lease (rows 14, 15), or after the expiry of a begun record (18)."""
    if to is not State.UNKNOWN:
        return "sweep_retryable"
    return "expire_begun" if seen.state is State.FAILED_RETRYABLE else "mark_unknown"


def _due_params(due: Expired, limit: int, after: ReapPosition) -> dict[str, Value]:
    return {
        "limit": limit,
        "age": due.age,
        "until": due.until,
        "soft": due.soft,
        "trusted_for": due.trusted_for,
        "after_at": after.expires_at,
        "after_scope": after.scope,
        "after_key": after.key,
    }


class NotingUpkeepStore(UpkeepStore):
    """`UpkeepStore` for a store whose statement that moves finished records also writes their audit lines."""

    def _ended(self, name: str, due: Expired, limit: int, after: ReapPosition, ending: _Ending) -> Flow[Gone]:
        mover = ending.mover
        params: dict[str, Value] = {
            **_due_params(due, limit, after),
            "noted": mover is not None,
            "each": ending.each,
            "trigger": ending.trigger.value,
            "actor": "" if mover is None else mover.actor.value,
            "who": "" if mover is None else mover.who,
            "why": EXPIRED,
        }
        [row] = yield from execute(self._statements.alone(name, params))
        last = None if row["scope"] is None else ReapPosition(row["expires_at"], row["scope"], row["key"])
        return Gone(int(row["moved"]), int(row["looked"]) >= limit, last, int(row["now"]))
