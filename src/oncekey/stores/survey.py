"""Listings for operators and for `oncekey doctor`, as flows over named statements: lists by index, and bounded counts.

Each state has its own statement, because the indexes are partial: with the state as a parameter no plan could use
them. Several states are walked in parallel and merged here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final
from uuid import UUID

from oncekey.core.flow import Body, Flow, Mode, Row, Rows, Transaction, Value
from oncekey.core.model import Instant, Outcome, ParcelKind, Record, State
from oncekey.core.upkeep import Page
from oncekey.ops.stats import (
    FINISHED,
    FIRST,
    FIRST_LETTER,
    LOOKED,
    MOST,
    START,
    Count,
    End,
    LetterPosition,
    LetterStretch,
    Lines,
    ParcelView,
    Stretch,
    Tally,
    Walk,
    WalkPosition,
)
from oncekey.stores.audit import entry_of
from oncekey.stores.operate import first_found
from oncekey.stores.reconcile import call_of, evidence_of
from oncekey.stores.statements import PART_STATEMENTS, Statements, execute
from oncekey.stores.worker_rows import dead_letter_of, records_of

if TYPE_CHECKING:
    from oncekey.core.resolution import AnnouncedCall, Evidence
    from oncekey.core.transitions import Actor
    from oncekey.ops.stats import LetterWalk
    from oncekey.stores.sealed_content import SealedContent


FINDS: tuple[str, ...] = ("find_key", "find_open_keys")
"""The order of searches for a key by an index: the whole key, then as the beginning of unfinished ones."""

STATEMENTS = PART_STATEMENTS["survey"]

_LAST: Final = 2**63 - 1
_MANY: Final = 200
"""How many calls, parcels or lines of one record are shown at most."""


class SurveyStore:
    """Lists and counts, in any store that has the named statements."""

    def __init__(self, statements: Statements) -> None:
        statements.require(STATEMENTS)
        self._statements = statements

    def walk(
        self, wanted: Walk, limit: int, before: Mapping[State, WalkPosition] | None = None, looked: int = LOOKED
    ) -> Flow[Stretch]:
        """Records of these states, the newest first; without responses. `before` is where the last page ended."""
        places = dict.fromkeys(wanted.states, START) if before is None else before

        def body() -> Body[Stretch]:
            now, paths = 0, {}
            for state, place in places.items():
                rows = yield self._statements.statement(f"walk_{state}", _walking(wanted, limit, place, looked))
                now, paths[state] = int(rows[0]["now"]), _path(rows, state, place, limit, self._statements.content)
            return _merged(now, paths, limit)

        return (yield from execute(Transaction("walk", Mode.READ, body)))

    def unknown(self, limit: int, after: WalkPosition = FIRST) -> Flow[Stretch]:
        state = State.UNKNOWN

        def body() -> Body[Stretch]:
            params = _walking(Walk(states=(state,)), limit, after, LOOKED)
            rows = yield self._statements.statement("walk_unknown_oldest", params)
            path = _path(rows, state, after, limit, self._statements.content)
            return _merged(int(rows[0]["now"]), {state: path}, limit)

        return (yield from execute(Transaction("unknown", Mode.READ, body)))

    def letters(
        self, wanted: LetterWalk, limit: int, after: LetterPosition = FIRST_LETTER, looked: int = LOOKED
    ) -> Flow[LetterStretch]:
        at, last = after
        params: dict[str, Value] = {
            "within": wanted.scope,
            "topic": wanted.topic,
            "kind": None if wanted.kind is None else wanted.kind.value,
            "error": wanted.error,
            "older": wanted.older,
            "younger": wanted.younger,
            "limit": limit,
            "looked": looked,
            "skipped": looked - 1,
            "place_at": at,
            "id": str(last),
        }

        def body() -> Body[LetterStretch]:
            rows = yield self._statements.statement("walk_letters", params)
            found = tuple(dead_letter_of(row, self._statements.content) for row in rows if row["id"] is not None)
            now, edge = int(rows[0]["now"]), rows[0]["edge_at"]
            if len(found) == limit:
                return LetterStretch(now, found, (found[-1].died_at, found[-1].parcel.id), broken_off=False)
            further = None if edge is None else (int(edge), UUID(str(rows[0]["edge_id"])))
            return LetterStretch(now, found, further, broken_off=further is not None)

        return (yield from execute(Transaction("walk_letters", Mode.READ, body)))

    def named(self, beginning: str, scope: str | None, limit: int) -> Flow[Page]:
        body = partial(first_found, self._statements, FINDS, beginning, scope, limit)
        return (yield from execute(Transaction("named", Mode.READ, body)))

    def tally(self) -> Flow[Tally]:
        rows = yield from self._statements.read("tally", {"most": MOST})
        return Tally(int(rows[0]["now"]), {row["what"]: Count(int(row["found"]), row["oldest"]) for row in rows})

    def ended(self, limit: int) -> Flow[tuple[End, ...]]:
        rows = yield from self._statements.read("ended", {"limit": limit})
        return tuple(_end(row) for row in rows if row["at"] is not None)

    def calls(self, incarnation: UUID) -> Flow[tuple[AnnouncedCall, ...]]:
        rows = yield from self._statements.read("calls_of_record", {"incarnation": str(incarnation), "limit": _MANY})
        return tuple(call_of(row) for row in rows)

    def reports_about(
        self, downstream_keys: tuple[str, ...], provider_ids: tuple[str, ...]
    ) -> Flow[tuple[Evidence, ...]]:
        def body() -> Body[tuple[Evidence, ...]]:
            found: dict[int, Evidence] = {}
            content = self._statements.content
            for name, column, names in (
                ("evidence_of_key", "downstream_key", downstream_keys),
                ("evidence_of_provider", "provider_id", provider_ids),
            ):
                for one in names:
                    rows = yield self._statements.statement(name, {column: one, "limit": _MANY})
                    # Another account may use the same id: evidence with a key concerns the call with that key.
                    found |= {
                        evidence.id: evidence
                        for evidence in (evidence_of(row, content) for row in rows)
                        if evidence.report.downstream_key in {None, *downstream_keys}
                    }
            return tuple(found[number] for number in sorted(found))

        return (yield from execute(Transaction("evidence", Mode.READ, body)))

    def parcels(self, incarnation: UUID) -> Flow[tuple[ParcelView, ...]]:
        rows = yield from self._statements.read("parcels_in_full", {"incarnation": str(incarnation), "limit": _MANY})
        return tuple(_parcel(row, incarnation, self._statements.content) for row in rows)

    def notes(
        self, limit: int, before: int | None = None, actor: Actor | None = None, looked: int = LOOKED
    ) -> Flow[Lines]:
        params: dict[str, Value] = {
            "before": _LAST if before is None else before,
            "actor": None if actor is None else actor.value,
            "limit": limit,
            "looked": looked,
        }

        def body() -> Body[Lines]:
            rows = yield self._statements.statement("latest_notes", params)
            entries = tuple(entry_of(row) for row in rows)
            if len(rows) >= limit:
                return Lines(entries, int(rows[-1]["id"]))
            place: dict[str, Value] = {"before": params["before"], "looked": looked, "skipped": looked - 1}
            edge = yield self._statements.statement("notes_edge", place)
            return Lines(entries, int(edge[0]["id"]) if edge else None)

        return (yield from execute(Transaction("latest_notes", Mode.READ, body)))


@dataclass(slots=True)
class _Path:
    """The records that one read of one state found, and which of them were already used."""

    found: deque[Record]
    place: WalkPosition
    """The last record that was taken."""
    edge: WalkPosition | None
    """Where the read ended, if there may be more after it."""


def _walking(wanted: Walk, limit: int, place: WalkPosition, looked: int) -> dict[str, Value]:
    at, scope, key = place
    return {
        "within": wanted.scope,
        "beginning": wanted.beginning,
        "operation": wanted.operation,
        "effects": None if wanted.effects is None else wanted.effects.value,
        "error": wanted.error,
        "older": wanted.older,
        "younger": wanted.younger,
        "stale": wanted.stale,
        "incarnation": None if wanted.incarnation is None else str(wanted.incarnation),
        "limit": limit,
        "looked": looked,
        "skipped": looked - 1,
        "place_at": at,
        "place_scope": scope,
        "place_key": key,
    }


def _path(rows: Rows, state: State, place: WalkPosition, limit: int, content: SealedContent | None) -> _Path:
    found = [row for row in rows if row["scope"] is not None]
    edge, first = None, rows[0]
    if len(found) == limit:
        # From the row: a record that cannot be decoded is left out, and must not be read again.
        last = found[-1]
        edge = (int(last["expires_at" if state in FINISHED else "created_at"]), last["scope"], last["key"])
    elif first["edge_at"] is not None:
        edge = (int(first["edge_at"]), first["edge_scope"], first["edge_key"])
    return _Path(deque(records_of(found, content)), place, edge)


def _merged(now: Instant, paths: dict[State, _Path], limit: int) -> Stretch:
    """The paths of several states as one, the newest first.

    Each state has its own position: texts are in the database's order, so only the database can decide which of two
    records of the same instant comes first.
    """
    taken: list[Record] = []
    while len(taken) < limit:
        ahead = {state: _place(path.found[0], state) for state, path in paths.items() if path.found}
        # After the end of a read that was cut off there may be newer records, so no other state goes beyond that place.
        ends = [path.edge[0] for path in paths.values() if not path.found and path.edge is not None]
        state = max(ahead, key=lambda one: ahead[one][0], default=None)
        if state is None or ahead[state][0] < max(ends, default=ahead[state][0]):
            break
        taken.append(paths[state].found.popleft())
        paths[state].place = ahead[state]
    further = {}
    for state, path in paths.items():
        if path.found:
            further[state] = path.place
        elif path.edge is not None:
            further[state] = path.edge
    return Stretch(now, tuple(taken), further, broken_off=len(taken) < limit and bool(further))


def _place(record: Record, state: State) -> WalkPosition:
    return record.expires_at if state in FINISHED else record.created_at, record.id.scope, record.id.key


def _end(row: Row) -> End:
    outcome = row["outcome"]
    return End(
        State(row["state"]), None if outcome is None else Outcome(outcome), row["operation"], row["at"], row["took"]
    )


def _parcel(row: Row, incarnation: UUID, content: SealedContent | None) -> ParcelView:
    view = ParcelView(
        id=UUID(str(row["id"])),
        kind=ParcelKind(row["kind"]),
        topic=row["topic"],
        payload=row["payload"],
        downstream_key=row["downstream_key"],
        attempts=row["attempts"],
        created_at=row["created_at"],
        due_at=row["due_at"],
        held_until=row["lease_until"],
        first_error=row["first_error"],
        last_error=row["last_error"],
        died_at=row["died_at"],
    )
    return view if content is None else content.view(view, incarnation)
