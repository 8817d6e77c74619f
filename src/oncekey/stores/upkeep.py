"""Sweeping and reaping as flows over named statements: pages of what may be due, and the moves that the core decided.

Each move proves the version that was read (V). Its line of the audit is written in the same transaction, if it is
wanted: both are there, or neither is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from oncekey.core.census import Roll, Worker
from oncekey.core.errors import StoreUnavailableError
from oncekey.core.model import RecordId, State
from oncekey.core.upkeep import Page, Run
from oncekey.flow import Mode, Transaction
from oncekey.stores.rows import records_of, response_params, version_proof
from oncekey.stores.saying import repeated, said

if TYPE_CHECKING:
    from oncekey.core.audit import Note
    from oncekey.core.model import Completed, Duration, Instant, Record
    from oncekey.flow import Flow, Row, Rows, Steps, Value
    from oncekey.ports import Audit
    from oncekey.stores.statements import Statements

STATEMENTS: tuple[str, ...] = (
    "stale",
    "runs",
    "sweep_retryable",
    "doubt",
    "expiring",
    "kept_expired",
    "purge_expired",
    "mark_expired",
    "drop_unclaimed",
    "abandon",
    "live_keys",
    "beat",
    "leave",
    "workers",
    "forget_workers",
)

Noting: TypeAlias = "Callable[[Record], Note] | None"
"""Makes the line of the audit about a record; None: there is to be none."""

_NO_CALLS: Mapping[str, Sequence[str]] = MappingProxyType({})
_MOVED = "what was about to be abandoned has moved: the transaction is undone"


class UpkeepStore:
    """What sweepers and reapers say, in whatever understands the named statements."""

    def __init__(self, statements: Statements, audit: Audit) -> None:
        statements.require(STATEMENTS)
        self._statements = statements
        self._audit = audit

    def stale(self, limit: int, after: Record | None = None) -> Flow[Page]:
        """Records in progress whose lease is over, from the oldest, after the one that was looked at last."""
        created = None if after is None else after.created_at
        return (yield from self._page("stale", {"limit": limit}, created, after))

    def sweep(self, seen: Record, to: State, last_error: str, noting: Noting = None) -> Flow[bool]:
        """Move `seen` where the core said (rows 14, 15, 18). False: somebody else moved it."""
        name = "doubt" if to is State.UNKNOWN else "sweep_retryable"

        def body() -> Steps[bool]:
            rows = yield self._statements.say(name, {**version_proof(seen), "last_error": last_error})
            if rows and noting is not None:
                yield from self._audit.noting((noting(seen),))
            return bool(rows)

        return (yield from said(Transaction("sweep", _mode(noting), body)))

    def runs(self, limit: int) -> Flow[tuple[Run, ...]]:
        """How long the operations took that were finished last."""

        def body() -> Steps[tuple[Run, ...]]:
            rows = yield self._statements.say("runs", {"limit": limit})
            return tuple(Run(row["operation"], int(row["took"])) for row in rows)

        return (yield from said(Transaction("runs", Mode.READ, body)))

    def expiring(self, limit: int, age: Duration, after: Record | None = None) -> Flow[Page]:
        """Records that expired at least `age` ago and are not marked, longest ago first; without their answers."""
        expires = None if after is None else after.expires_at
        return (yield from self._page("expiring", {"limit": limit, "age": age}, expires, after))

    def kept_expired(self, limit: int, age: Duration, after: Record | None = None) -> Flow[Page]:
        """Records that are marked as expired since at least `age`, longest ago first; without their answers."""
        expires = None if after is None else after.expires_at
        return (yield from self._page("kept_expired", {"limit": limit, "age": age}, expires, after))

    def purge(self, seen: Sequence[Record], grace: Duration, noting: Noting = None) -> Flow[int]:
        """Delete what is still as it was read, finished and expired for `grace` (row 30); how many that were."""
        return (yield from self._batch("purge_expired", seen, grace, noting))

    def mark(self, seen: Sequence[Record], grace: Duration, noting: Noting = None) -> Flow[int]:
        """Mark the same as EXPIRED (row 29); how many that were."""
        return (yield from self._batch("mark_expired", seen, grace, noting))

    def abandon(self, seen: Record, answer: Completed, kept: Duration, noting: Noting = None) -> Flow[bool]:
        """End a pending record whose parcel nobody ever took, and delete that parcel (row 28, O4).

        False: the parcel was taken, or the record moved. Nobody who holds the record waits for a parcel that was never
        taken, so the parcel may be locked first.
        """
        params: dict[str, Value] = {"outcome": answer.outcome.value, **response_params(answer.response), "kept": kept}

        def body() -> Steps[bool]:
            if not (yield self._statements.say("drop_unclaimed", version_proof(seen))):
                return False
            if not (yield self._statements.say("abandon", {**params, **version_proof(seen)})):
                raise StoreUnavailableError(_MOVED)
            if noting is not None:
                yield from self._audit.noting((noting(seen),))
            return True

        return (yield from said(Transaction("abandon", Mode.ATOMIC, body)))

    def live_keys(self, scope: str, limit: int) -> Flow[int]:
        """How many keys of a scope are remembered now, counted up to `limit`."""

        def body() -> Steps[int]:
            rows = yield self._statements.say("live_keys", {"scope": scope, "limit": limit})
            return int(rows[0]["live"])

        return (yield from said(Transaction("live_keys", Mode.READ, body)))

    def beat(
        self, name: str, tasks: Sequence[str], every: Duration, calls: Mapping[str, Sequence[str]] = _NO_CALLS
    ) -> Flow[Instant]:
        """Write down that a worker is alive, after how long it will be seen again, and what its application calls."""
        named = {operation: list(names) for operation, names in calls.items()}
        params: dict[str, Value] = {
            "name": name,
            "tasks": json.dumps(list(tasks)),
            "every": every,
            "calls": json.dumps(named),
        }

        def body() -> Steps[Instant]:
            rows = yield self._statements.say("beat", params)
            return int(rows[0]["seen_at"])

        return (yield from repeated(Transaction("beat", Mode.SINGLE, body)))

    def leave(self, name: str) -> Flow[None]:
        """Take a worker off the roll: it stops on purpose."""

        def body() -> Steps[None]:
            yield self._statements.say("leave", {"name": name})

        yield from repeated(Transaction("leave", Mode.SINGLE, body))

    def workers(self) -> Flow[Roll]:
        """Who is on the roll, the longest there first."""

        def body() -> Steps[Roll]:
            rows = yield self._statements.say("workers", {})
            return Roll(int(rows[0]["now"]), tuple(_worker(row) for row in rows if row["name"] is not None))

        return (yield from said(Transaction("workers", Mode.READ, body)))

    def forget_workers(self, age: Duration) -> Flow[int]:
        """Delete those who were to be seen longer than `age` ago; how many that were."""

        def body() -> Steps[int]:
            return len((yield self._statements.say("forget_workers", {"age": age})))

        return (yield from repeated(Transaction("forget_workers", Mode.SINGLE, body)))

    def _batch(self, name: str, seen: Sequence[Record], grace: Duration, noting: Noting) -> Flow[int]:
        proofs = [
            {"scope": one.id.scope, "key": one.id.key, "incarnation": str(one.incarnation), "version": one.version}
            for one in seen
        ]
        by_id = {one.id: one for one in seen}

        def body() -> Steps[int]:
            rows: Rows = yield self._statements.say(name, {"seen": json.dumps(proofs), "grace": grace})
            if noting is not None:
                moved = [by_id[RecordId(row["scope"], row["key"])] for row in rows]
                yield from self._audit.noting([noting(one) for one in moved])
            return len(rows)

        return (yield from said(Transaction(name, _mode(noting), body)))

    def _page(self, name: str, params: dict[str, Value], at: Instant | None, after: Record | None) -> Flow[Page]:
        since: dict[str, Value] = {
            "after_at": -1 if at is None else at,
            "after_scope": "" if after is None else after.id.scope,
            "after_key": "" if after is None else after.id.key,
        }

        def body() -> Steps[Page]:
            rows = yield self._statements.say(name, {**params, **since})
            return Page(int(rows[0]["now"]), records_of(rows))

        return (yield from said(Transaction(name, Mode.READ, body)))


def _worker(row: Row) -> Worker:
    tasks = tuple(str(name) for name in json.loads(row["tasks"]))
    calls = {operation: tuple(names) for operation, names in json.loads(row["calls"]).items()}
    return Worker(row["name"], tasks, int(row["started_at"]), int(row["seen_at"]), int(row["every"]), calls)


def _mode(noting: Noting) -> Mode:
    """One statement commits by itself; with its line of the audit there are two."""
    return Mode.SINGLE if noting is None else Mode.ATOMIC
