"""An operator's reads and moves as flows over named statements.

A move is decided in its own transaction, on the locked record and its locked parcels. It still proves the version,
moves the parcel with the record, and writes the audit line: all of it, or nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from uuid import UUID

from oncekey.core.envelopes import key_of_text
from oncekey.core.errors import StoreError
from oncekey.core.flow import Body, Flow, Mode, Row, Transaction, Value
from oncekey.core.memo import is_rejection, was_not_sent
from oncekey.core.model import DeadLetter, Effects, Instant, MemoEntry, ParcelKind, Record, RecordId, Snapshot, State
from oncekey.core.operate import Forbidden, Move, Moved, ParcelLocation, Search, recovery_point_after
from oncekey.core.upkeep import Page
from oncekey.ops.stats import Backlog, Group, Letters, Queue, StoreStats, Waiting
from oncekey.stores.rows import memo_of, memo_text, response_params, snapshot_of, version_proof
from oncekey.stores.statements import PART_STATEMENTS, Statements, execute, locked_row
from oncekey.stores.worker_rows import page_of

if TYPE_CHECKING:
    from oncekey.core.transitions import Note
    from oncekey.ports.store import Audit
    from oncekey.stores.sealed_content import SealedContent

FINDS: tuple[str, ...] = ("find_key", "find_open_keys", "find_done_keys")
"""The order of searches for a key: the whole key, then as the beginning of unfinished ones, then of finished ones."""

STATEMENTS = PART_STATEMENTS["operate"]

Deciding: TypeAlias = Callable[[Snapshot, tuple[ParcelLocation, ...]], Move | Forbidden]
"""Decides what to do with the current record."""

STANDING: Final = ("pending", "in_progress", "failed_retryable", "unknown", "finished")
WAITING: Final = ("unknown", "stale", "resumable", "expired", "parcels_due", "dead_letters")
_LAST: Final = 2**63 - 1
_LOOKED_AT: Final = 1000
_FEW: Final = 20
_SURROGATES: Final = range(0xD800, 0xE000)


class OperateStore:
    """The statements for operators, in any store that has them."""

    def __init__(self, statements: Statements, audit: Audit, *, diagnostics: Mapping[str, tuple[str, ...]]) -> None:
        statements.require((*STATEMENTS, *diagnostics))
        self._statements = statements
        self._audit = audit
        self._diagnostics = diagnostics

    def search(self, wanted: Search, limit: int, before: tuple[Instant, str, str] | None = None) -> Flow[Page]:
        at, scope, key = before or (_LAST, "", "")
        params: dict[str, Value] = {
            "within": wanted.scope,
            "state": None if wanted.state is None else wanted.state.value,
            "operation": wanted.operation,
            "effects": None if wanted.effects is None else wanted.effects.value,
            "age": wanted.older_than,
            "stale": wanted.stale,
            "limit": limit,
            "before_at": at,
            "before_scope": scope,
            "before_key": key,
        }
        rows = yield from self._statements.read("list_records", params)
        return page_of(rows, self._statements.content)

    def named(self, beginning: str, scope: str | None, limit: int) -> Flow[Page]:
        body = partial(first_found, self._statements, FINDS, beginning, scope, limit)
        return (yield from execute(Transaction("find_keys", Mode.READ, body)))

    def last_result(self, operation: str, phase: str) -> Flow[MemoEntry | None]:
        params: dict[str, Value] = {"operation": operation, "phase": phase, "looked_at": _LOOKED_AT, "limit": _FEW}
        rows = yield from self._statements.read("last_results", params)
        entries = (entry for row in rows for entry in memo_of(row["memo"]))
        return next((entry for entry in entries if entry.name == phase and _is_answer(entry)), None)

    def parcels(self, incarnation: UUID) -> Flow[tuple[ParcelLocation, ...]]:
        rows = yield from self._statements.read("parcels_of", {"incarnation": str(incarnation)})
        return tuple(_parcel_location(row) for row in rows)

    def move(self, record_id: RecordId, deciding: Deciding, noting: Callable[[Move], Note]) -> Flow[Moved | Forbidden]:
        """Make the move that `deciding` returns for the current record, with its audit line, or nothing."""

        def body() -> Body[Moved | Forbidden]:
            rows = yield self._statements.statement("hold_record", {"scope": record_id.scope, "key": record_id.key})
            seen = snapshot_of(rows[0], self._statements.content) if rows else Snapshot(None, 0)
            parcels = () if seen.record is None else (yield from self._holding(seen.record))
            decided = deciding(seen, parcels)
            if isinstance(decided, Forbidden):
                return decided
            written = yield from self._writing(decided)
            yield from self._audit.noting((noting(decided),))
            return Moved(decided, written)

        return (yield from execute(Transaction("operate", Mode.ATOMIC, body)))

    def revive(self, letter: DeadLetter, note: Note) -> Flow[bool]:
        """Make a dead message due again, from its first attempt. False: it is gone, or is dead again since then."""
        return (yield from self._letter(letter, note, back=True))

    def discard(self, letter: DeadLetter, note: Note) -> Flow[bool]:
        return (yield from self._letter(letter, note, back=False))

    def stats(self) -> Flow[StoreStats]:
        def body() -> Body[StoreStats]:
            groups = yield self._statements.statement("stats", {})
            queues = yield self._statements.statement("outbox_census", {})
            letters = yield self._statements.statement("letter_census", {})
            waiting = yield self._statements.statement("unresolved", {})
            return StoreStats(
                now=int(waiting[0]["now"]),
                groups=tuple(_group(row) for row in groups if _is_known(row)),
                queues=tuple(_queue(row) for row in queues),
                letters=tuple(_letters(row) for row in letters),
                waiting=tuple(Waiting(row["what"], int(row["records"]), row["oldest"]) for row in waiting),
            )

        return (yield from execute(Transaction("stats", Mode.READ, body)))

    def backlog(self) -> Flow[Backlog]:
        (row,) = yield from self._statements.read("standing", {})
        waiting = tuple(Waiting(what, int(row[what]), row[f"{what}_oldest"]) for what in WAITING)
        return Backlog(int(row["now"]), {one: int(row[one]) for one in STANDING}, waiting)

    def diagnostics(self, *names: str) -> Flow[Mapping[str, tuple[Mapping[str, Any], ...]]]:
        """The database's reports about its health, all or some; those that this user may not read are left out."""
        found: dict[str, tuple[Mapping[str, Any], ...]] = {}
        for name, columns in self._diagnostics.items():
            if names and name not in names:
                continue
            try:
                rows = yield from self._statements.read(name, {})
            except StoreError:
                continue
            found[name] = tuple({column: row[column] for column in columns} for row in rows)
        return found

    def _holding(self, record: Record) -> Body[tuple[ParcelLocation, ...]]:
        incarnation: dict[str, Value] = {"incarnation": str(record.incarnation)}
        parcels = yield self._statements.statement("hold_parcels_of", incarnation)
        letters = yield self._statements.statement("letters_of", incarnation)
        return tuple(_parcel_location(row) for row in (*parcels, *letters))

    def _writing(self, move: Move) -> Body[Snapshot]:
        proof = version_proof(move.seen)
        name, params = _statement(move, self._statements.content)
        written = locked_row((yield self._statements.statement(name, {**proof, **params})))
        if "parcel" in move.row.sets and move.seen.effects is Effects.OUTBOX:
            yield from self._with_parcel(move, proof)
        return snapshot_of(written, self._statements.content)

    def _with_parcel(self, move: Move, proof: dict[str, Value]) -> Body[None]:
        """Move the parcel with its record: remove it if the record is completed, put it back if it is tried again."""
        if move.row.to is State.COMPLETED:
            yield self._statements.statement("drop_deferred", proof)
        if move.letter is None:
            return
        defer = ParcelKind.DEFER.value
        letter: dict[str, Value] = {"id": str(move.letter), "kind": defer, "attempts": 0, "died_at": None}
        if move.row.to is State.PENDING:
            locked_row((yield self._statements.statement("bring_back", letter)))
        locked_row((yield self._statements.statement("drop_dead_letter", letter)))

    def _letter(self, letter: DeadLetter, note: Note, *, back: bool) -> Flow[bool]:
        params: dict[str, Value] = {
            "id": str(letter.parcel.id),
            "kind": letter.parcel.kind.value,
            "attempts": 0,
            "died_at": letter.died_at,
        }

        def body() -> Body[bool]:
            if back:
                yield self._statements.statement("bring_back", params)
            if not (yield self._statements.statement("drop_dead_letter", params)):
                return False
            yield from self._audit.noting((note,))
            return True

        return (yield from execute(Transaction("dead_letter", Mode.ATOMIC, body)))


def _statement(move: Move, content: SealedContent | None) -> tuple[str, dict[str, Value]]:
    """The statement that writes a row of the table, and its parameters."""
    match move.row.number:
        case 14:
            return "sweep_retryable", {"last_error": move.last_error}
        case 15:
            return "mark_unknown", {"last_error": move.last_error}
        case 19:
            assert move.answer is not None
            answer = response_params(move.answer.response, move.seen, content)
            return "operator_answer", {"outcome": move.answer.outcome.value, **answer}
        case 20:
            return "operator_result", {
                "memo": memo_text(move.memo, move.seen, content),
                "recovery_point": recovery_point_after(move),
            }
        case 34:
            return "operator_replace", {
                "memo": memo_text(move.memo, move.seen, content),
                "recovery_point": recovery_point_after(move),
            }
        case 21:
            return "operator_unexecuted", {}
        case 22:
            return "operator_pend", {"forget": move.forget}
        case 32:
            return "operator_bust", {"last_error": move.last_error, "recovery_point": recovery_point_after(move)}
        case 35:
            return "operator_extend", {"expires_at": move.expires_at}
        case number:
            raise AssertionError(f"row {number} is not an operator's")


def first_found(
    statements: Statements, finds: tuple[str, ...], beginning: str, scope: str | None, limit: int
) -> Body[Page]:
    """The result of the first of these statements that finds anything."""
    params: dict[str, Value] = {"first": beginning, "last": after(beginning), "limit": limit}
    exact, *others = finds
    tries = [(exact, {"scope": scope, "within": None})] if scope is not None else []
    tries += [(exact, {"scope": None, "within": scope}), *((name, {"within": scope}) for name in others)]
    page = Page(0, ())
    for name, scopes in tries:
        rows = yield statements.statement(name, params | scopes)
        page = page_of(rows, statements.content)
        if page.records:
            break
    return page


def after(beginning: str) -> str:
    """The first text, by its bytes, that does not begin with this and comes after everything that does."""
    for place in range(len(beginning) - 1, -1, -1):
        following = ord(beginning[place]) + 1
        if following in _SURROGATES:
            following = _SURROGATES.stop
        if following <= sys.maxunicode:
            return beginning[:place] + chr(following)
    return chr(sys.maxunicode) * (len(beginning) + 1)


def _is_answer(entry: MemoEntry) -> bool:
    """Whether it can be an example for an operator. A sealed result cannot be opened without its record."""
    return not (entry.by_hand or is_rejection(entry) or was_not_sent(entry) or key_of_text(entry.result) is not None)


def _parcel_location(row: Row) -> ParcelLocation:
    return ParcelLocation(UUID(str(row["id"])), ParcelKind(row["kind"]), bool(row["dead"]), row["lease_until"])


def _is_known(row: Row) -> bool:
    """Whether a group can be named; `oncekey doctor` reports rows that no version wrote."""
    return row["state"] in set(State) and row["effects"] in set(Effects)


def _group(row: Row) -> Group:
    return Group(
        state=State(row["state"]),
        effects=Effects(row["effects"]),
        operation=row["operation"],
        records=int(row["records"]),
        stale=int(row["stale"]),
        resumable=int(row["resumable"]),
        expired=int(row["expired"]),
        oldest=int(row["oldest"]),
        newest=int(row["newest"]),
    )


def _queue(row: Row) -> Queue:
    kind = ParcelKind(row["kind"])
    return Queue(row["topic"], kind, int(row["parcels"]), int(row["held"]), int(row["oldest_due"]))


def _letters(row: Row) -> Letters:
    return Letters(row["topic"], ParcelKind(row["kind"]), int(row["letters"]), int(row["oldest"]))
