"""The writes of the owner of a phased record between its claim and its settlement: steps and external calls.

The memo is written and compared as a whole. The owner's proof alone is not enough: a resolver may add the result
of an open call without raising the fence (row 20), and a late owner must not overwrite it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncekey.core.errors import StoreError
from oncekey.core.flow import Body, Flow, Fold, Mode, Transaction, Value
from oncekey.core.memo import recovery_point
from oncekey.core.model import Announcement, Duration, Lease, MemoEntry, Record, Snapshot, State
from oncekey.stores.rows import HALF_A_PAIR, LONGEST_FOLDED, memo_text, owned, owner_proof, snapshot_of
from oncekey.stores.statements import PART_STATEMENTS, execute_until_acknowledged
from oncekey.stores.worker_rows import behind, records_of

if TYPE_CHECKING:
    from oncekey.stores.statements import Statements

STATEMENTS = PART_STATEMENTS["phases"]

MARGIN: Duration = 5_000_000
"""How much longer than its longest call a lease lasts: the result has to be written too."""


class PhaseStore:
    """Steps of phased records, in any store that has the named statements."""

    def __init__(self, statements: Statements) -> None:
        statements.require(STATEMENTS)
        self._statements = statements

    def checkpointing(
        self, lease: Lease, seen: tuple[MemoEntry, ...], memo: tuple[MemoEntry, ...], span: Duration
    ) -> Body[Snapshot | None]:
        """Write a finished phase, as the last statement of its own transaction (row 5). None: not ours any more."""
        return (yield from self._write("checkpoint", lease, seen, memo, {"lease": span}))

    def keeping(
        self, lease: Lease, seen: tuple[MemoEntry, ...], memo: tuple[MemoEntry, ...], span: Duration
    ) -> Fold[None] | None:
        """`checkpointing` as one statement that fails if the record is not ours, to be sent with the COMMIT."""
        written = memo_text(memo, lease, self._statements.content) if self._statements.has("keep") else None
        if written is None or len(written) > LONGEST_FOLDED:
            return None
        given = folded_row(
            lease.id.scope,
            lease.id.key,
            lease.incarnation.hex,
            lease.fence,
            recovery_point(memo),
            span,
            memo_text(seen, lease, self._statements.content),
            written,
        )
        execute = self._statements.fold("keep", {"given": given}, text_command="keep", proof="was_kept")
        return Fold(execute, lambda _: None)

    def announce(
        self, lease: Lease, seen: tuple[MemoEntry, ...], memo: tuple[MemoEntry, ...], call: Announcement
    ) -> Flow[Snapshot | None]:
        """Write the intent, before the call is made (row 5); the snapshot shows what was stored."""
        params: dict[str, Value] = {
            **announcement_params(call),
            "busy": call.send_window + call.call_timeout + MARGIN,
        }

        def body() -> Body[Snapshot | None]:
            snapshot = yield from self._write("announce", lease, seen, memo, params)
            if snapshot is not None:
                return snapshot
            there = yield from self._find(lease)
            return there if _announced(there.record, lease, call) else None

        return (yield from execute_until_acknowledged(Transaction("announce", Mode.SINGLE, body)))

    def result(
        self, lease: Lease, seen: tuple[MemoEntry, ...], memo: tuple[MemoEntry, ...], span: Duration
    ) -> Flow[Snapshot | None]:
        """Write the result of an open call (row 6), also for a record that was only swept. None: not ours any more."""

        def body() -> Body[Snapshot | None]:
            for _ in range(2):
                snapshot = yield from self._write("result", lease, seen, memo, {"lease": span, "owner": lease.owner})
                if snapshot is not None:
                    return snapshot
                there = yield from self._find(lease)
                if not _has_outcome(
                    there.record, lease, seen
                ):  # else it was only swept while this statement waited for the record
                    break
            return there if _has_outcome(there.record, lease, memo) else None

        return (yield from execute_until_acknowledged(Transaction("result", Mode.SINGLE, body)))

    def withdraw(self, lease: Lease) -> Flow[Snapshot | None]:
        """Remove an announcement that was provably not followed by a call (row 33)."""

        def body() -> Body[Snapshot | None]:
            rows = yield self._statements.statement("withdraw", owner_proof(lease))
            if rows:
                return snapshot_of(rows[0], self._statements.content)
            there = yield from self._find(lease)
            return there if _withdrawn(there.record, lease) else None

        return (yield from execute_until_acknowledged(Transaction("withdraw", Mode.SINGLE, body)))

    def after_lost_commit(self, lease: Lease, memo: tuple[MemoEntry, ...], span: Duration) -> Flow[bool | None]:
        """Whether a phase whose COMMIT received no reply was committed (P7). None: not ours any more.

        The renewal waits for the transaction that wrote the row, so that the read after it sees its result.
        """

        def body() -> Body[bool | None]:
            yield self._statements.statement("renew", {**owner_proof(lease), "lease": span})
            there = yield from self._find(lease)
            if not owned(there.record, lease):
                return None
            return _has_outcome(there.record, lease, memo)

        return (yield from execute_until_acknowledged(Transaction("after_lost_commit", Mode.SINGLE, body)))

    def resumable(self, limit: int, after: Record | None = None) -> Flow[tuple[Snapshot, ...]]:
        created = 0 if after is None else after.created_at
        since: dict[str, Value] = {"after_created": created, **behind(after), "limit": limit}
        rows = yield from self._statements.read("resumable", since)
        return tuple(Snapshot(record, int(rows[0]["now"])) for record in records_of(rows, self._statements.content))

    def _write(
        self,
        name: str,
        lease: Lease,
        seen: tuple[MemoEntry, ...],
        memo: tuple[MemoEntry, ...],
        params: dict[str, Value],
    ) -> Body[Snapshot | None]:
        content = self._statements.content
        text = memo_text(memo, lease, content)
        execute: dict[str, Value] = {
            **owner_proof(lease),
            **params,
            "seen_memo": text if seen is memo else memo_text(seen, lease, content),
            "memo": text,
            "recovery_point": recovery_point(memo),
        }
        rows = yield self._statements.statement(name, execute)
        return snapshot_of(rows[0], content, memo) if rows else None

    def _find(self, lease: Lease) -> Body[Snapshot]:
        rows = yield self._statements.statement("find", {"scope": lease.id.scope, "key": lease.id.key})
        return snapshot_of(rows[0], self._statements.content)


def announcement_params(call: Announcement) -> dict[str, Value]:
    """The parameters that announce a call."""
    return {
        "phase": call.phase,
        "downstream_key": call.downstream_key,
        "digest": call.digest,
        "sends": call.sends,
        "repeatable": call.repeatable,
        "send_window": call.send_window,
    }


def row_text(*values: str | bytes | int | None) -> str:
    """A row in PostgreSQL's text form: backslashes and quotes in a value are doubled."""
    pieces = []
    for value in values:
        if isinstance(value, str):
            pieces.append('"' + value.replace("\\", "\\\\").replace('"', '""') + '"')
        elif isinstance(value, bytes):
            pieces.append('"\\\\x' + value.hex() + '"')
        elif value is None:
            pieces.append("")
        else:  # or a boolean, whose Python name PostgreSQL reads too
            pieces.append(f"{value:d}" if type(value) is int else str(bool(value)))
    return "(" + ",".join(pieces) + ")"


def folded_row(*values: str | bytes | int | None) -> bytes:
    """A row as bytes for the message of a COMMIT: the server parses one value faster than many."""
    try:
        return row_text(*values).encode()
    except UnicodeEncodeError:
        raise StoreError(HALF_A_PAIR) from None


def _has_outcome(record: Record | None, lease: Lease, memo: tuple[MemoEntry, ...]) -> bool:
    """Whether the record already has this memo, because an earlier attempt wrote it."""
    return record is not None and owned(record, lease) and record.memo == memo


def _withdrawn(record: Record | None, lease: Lease) -> bool:
    """Whether there is no announcement to remove: the reply was lost, and the record is still ours."""
    if record is None or not owned(record, lease) or record.intent is not None:
        return False
    return record.state is State.IN_PROGRESS


def _announced(record: Record | None, lease: Lease, call: Announcement) -> bool:
    """Whether this announcement is already stored: its reply was lost, and nothing was sent yet."""
    if record is None or not owned(record, lease) or record.intent is None:
        return False
    if record.state is not State.IN_PROGRESS:
        return False
    intent = record.intent
    return (intent.phase, intent.sends, intent.digest) == (call.phase, call.sends, call.digest)
