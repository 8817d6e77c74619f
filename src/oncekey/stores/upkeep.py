"""Upkeep as flows over named statements: sweeping, reaping, and the list of workers.

Each move of a record that was read proves the version that was read. Finished and expired records are moved without
being read: the statement contains the core's conditions. The audit line of a move is written in the same transaction,
if it is wanted: both are there, or neither is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias
from uuid import UUID

from oncekey.core.errors import StoreUnavailableError
from oncekey.core.flow import Body, Flow, Mode, Row, Transaction, Value
from oncekey.core.keys import key_digest
from oncekey.core.model import Completed, Duration, Instant, Record, State
from oncekey.core.transitions import Mover, Note, Trigger
from oncekey.core.upkeep import EXPIRED, START, Expired, Gone, Page, ReapPosition, Run
from oncekey.ops.stats import Roll, Worker
from oncekey.stores.rows import response_params, version_proof
from oncekey.stores.statements import PART_STATEMENTS, Statements, execute, execute_until_acknowledged
from oncekey.stores.worker_rows import records_of

if TYPE_CHECKING:
    from oncekey.ports.store import Audit


UPKEEP = PART_STATEMENTS["upkeep"]

Noting: TypeAlias = "Callable[[Record], Note] | None"
"""Makes the audit line about a record; None: write none."""

_NO_CALLS: Mapping[str, Sequence[str]] = MappingProxyType({})
_MOVED = "what was about to be abandoned has moved: the transaction is undone"


@dataclass(frozen=True, slots=True)
class _Ending:
    """How finished records end, for the audit; without a mover there are no lines."""

    trigger: Trigger
    to: State | None
    mover: Mover | None

    def note(self, row: Row, mover: Mover) -> Note:
        """The line about one record."""
        return Note(
            scope=row["scope"],
            key_digest=key_digest(row["key"]),
            incarnation=UUID(str(row["incarnation"])),
            operation=row["operation"],
            fence=row["fence"],
            source=State(row["state"]),
            to=self.to,
            trigger=self.trigger,
            actor=mover.actor,
            who=mover.who,
            why=EXPIRED,
        )


class UpkeepStore:
    """The statements of the sweeper and the reaper, in any store that has them."""

    def __init__(self, statements: Statements, audit: Audit | None) -> None:
        statements.require(UPKEEP)
        self._statements = statements
        self._audit = audit

    def stale(self, limit: int, after: Record | None = None) -> Flow[Page]:
        created = None if after is None else after.created_at
        return (yield from self._page("stale", {"limit": limit}, created, after))

    def sweep(self, seen: Record, to: State, last_error: str, noting: Noting = None) -> Flow[bool]:
        """Move `seen` where the core says (rows 14, 15, 18). False: another actor moved it first."""
        name = _sweeping(seen, to)

        def body() -> Body[bool]:
            rows = yield self._statements.statement(name, {**version_proof(seen), "last_error": last_error})
            if rows:
                yield from self._noting(seen, noting)
            return bool(rows)

        return (yield from execute(Transaction("sweep", _mode(noting), body)))

    def runs(self, limit: int) -> Flow[tuple[Run, ...]]:
        def body() -> Body[tuple[Run, ...]]:
            rows = yield self._statements.statement("runs", {"limit": limit})
            return tuple(Run(row["operation"], int(row["took"])) for row in rows)

        return (yield from execute(Transaction("runs", Mode.READ, body)))

    def expiring(self, limit: int, age: Duration, after: Record | None = None) -> Flow[Page]:
        expires = None if after is None else after.expires_at
        return (yield from self._page("expiring", {"limit": limit, "age": age}, expires, after))

    def kept_expired(self, limit: int, age: Duration, after: Record | None = None) -> Flow[Page]:
        expires = None if after is None else after.expires_at
        return (yield from self._page("kept_expired", {"limit": limit, "age": age}, expires, after))

    def purge(self, due: Expired, limit: int, after: ReapPosition = START, mover: Mover | None = None) -> Flow[Gone]:
        """Delete finished and expired records, longest ago first, after a place (row 30)."""
        return (yield from self._ended("purge_expired", due, limit, after, _Ending(Trigger.PURGE, None, mover)))

    def purge_kept(
        self, due: Expired, limit: int, after: ReapPosition = START, mover: Mover | None = None
    ) -> Flow[Gone]:
        return (yield from self._ended("purge_kept", due, limit, after, _Ending(Trigger.PURGE, None, mover)))

    def mark(self, due: Expired, limit: int, after: ReapPosition = START, mover: Mover | None = None) -> Flow[Gone]:
        return (
            yield from self._ended("mark_expired", due, limit, after, _Ending(Trigger.EXPIRE, State.EXPIRED, mover))
        )

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
            if not (yield self._statements.statement("abandon", {**params, **version_proof(seen)})):
                raise StoreUnavailableError(_MOVED)
            yield from self._noting(seen, noting)
            return True

        return (yield from execute(Transaction("abandon", Mode.ATOMIC, body)))

    def live_keys(self, scope: str, limit: int) -> Flow[int]:
        def body() -> Body[int]:
            rows = yield self._statements.statement("live_keys", {"scope": scope, "limit": limit})
            return int(rows[0]["live"])

        return (yield from execute(Transaction("live_keys", Mode.READ, body)))

    def beat(
        self, name: str, tasks: Sequence[str], every: Duration, calls: Mapping[str, Sequence[str]] = _NO_CALLS
    ) -> Flow[Instant]:
        named = {operation: list(names) for operation, names in calls.items()}
        params: dict[str, Value] = {
            "name": name,
            "tasks": json.dumps(list(tasks)),
            "every": every,
            "calls": json.dumps(named),
        }

        def body() -> Body[Instant]:
            rows = yield self._statements.statement("beat", params)
            return int(rows[0]["seen_at"])

        return (yield from execute_until_acknowledged(Transaction("beat", Mode.SINGLE, body)))

    def leave(self, name: str) -> Flow[None]:
        def body() -> Body[None]:
            yield self._statements.statement("leave", {"name": name})

        yield from execute_until_acknowledged(Transaction("leave", Mode.SINGLE, body))

    def workers(self) -> Flow[Roll]:
        def body() -> Body[Roll]:
            rows = yield self._statements.statement("workers", {})
            return Roll(int(rows[0]["now"]), tuple(_worker(row) for row in rows if row["name"] is not None))

        return (yield from execute(Transaction("workers", Mode.READ, body)))

    def forget_workers(self, age: Duration) -> Flow[int]:
        def body() -> Body[int]:
            return len((yield self._statements.statement("forget_workers", {"age": age})))

        return (yield from execute_until_acknowledged(Transaction("forget_workers", Mode.SINGLE, body)))

    def _noting(self, seen: Record, noting: Noting) -> Body[None]:
        """Write the line about a move, if it is wanted and there is an audit."""
        if noting is not None and self._audit is not None:
            yield from self._audit.noting((noting(seen),))

    def _ended(self, name: str, due: Expired, limit: int, after: ReapPosition, ending: _Ending) -> Flow[Gone]:
        """Run one statement, and another one for the audit lines.

        Where a statement cannot move rows and return them, it only finds and locks them, and a second one moves those.
        """
        mover, moves = ending.mover, f"{name}_found"
        apart = self._statements.has(moves)

        def body() -> Body[Gone]:
            rows = yield self._statements.statement(name, _due_params(due, limit, after))
            if rows and apart:
                found = [{"scope": row["scope"], "key": row["key"]} for row in rows]
                yield self._statements.statement(moves, {"found": json.dumps(found)})
            if mover is not None and self._audit is not None:
                yield from self._audit.noting([ending.note(row, mover) for row in rows])
            if not rows:
                return Gone(0, full=False)
            last = max((row["expires_at"], row["scope"], row["key"]) for row in rows)
            return Gone(len(rows), len(rows) >= limit, ReapPosition(*last), int(rows[0]["now"]))

        mode = Mode.SINGLE if mover is None and not apart else Mode.ATOMIC
        return (yield from execute(Transaction(name, mode, body)))

    def _page(self, name: str, params: dict[str, Value], at: Instant | None, after: Record | None) -> Flow[Page]:
        since: dict[str, Value] = {
            "after_at": -1 if at is None else at,
            "after_scope": "" if after is None else after.id.scope,
            "after_key": "" if after is None else after.id.key,
        }

        def body() -> Body[Page]:
            rows = yield self._statements.statement(name, {**params, **since})
            return Page(int(rows[0]["now"]), records_of(rows, self._statements.content))

        return (yield from execute(Transaction(name, Mode.READ, body)))


def _worker(row: Row) -> Worker:
    tasks = tuple(str(name) for name in json.loads(row["tasks"]))
    calls = {operation: tuple(names) for operation, names in json.loads(row["calls"]).items()}
    return Worker(row["name"], tasks, int(row["started_at"]), int(row["seen_at"]), int(row["every"]), calls)


def _sweeping(seen: Record, to: State) -> str:
    """The statement for a move: after the end of a lease (rows 14, 15), or after the expiry of a begun record (18)."""
    if to is not State.UNKNOWN:
        return "sweep_retryable"
    return "expire_begun" if seen.state is State.FAILED_RETRYABLE else "doubt"


def _mode(noting: Noting) -> Mode:
    """One statement commits by itself; with its audit line there are two."""
    return Mode.SINGLE if noting is None else Mode.ATOMIC


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
    """The same for a store whose statement that moves finished records also writes their audit lines."""

    def _ended(self, name: str, due: Expired, limit: int, after: ReapPosition, ending: _Ending) -> Flow[Gone]:
        mover = ending.mover
        params: dict[str, Value] = {
            **_due_params(due, limit, after),
            "noted": mover is not None,
            "trigger": ending.trigger.value,
            "actor": "" if mover is None else mover.actor.value,
            "who": "" if mover is None else mover.who,
            "why": EXPIRED,
        }

        def body() -> Body[Gone]:
            [row] = yield self._statements.statement(name, params)
            last = None if row["scope"] is None else ReapPosition(row["expires_at"], row["scope"], row["key"])
            return Gone(int(row["moved"]), int(row["looked"]) >= limit, last, int(row["now"]))

        return (yield from execute(Transaction(name, Mode.SINGLE, body)))
