"""The form of records and parcels in rows, for every store.

Rows are encoded and decoded here, so their content is sealed and opened here, if there is a `SealedContent`. With None
values are stored and read as they are: in an application without a seal, and for resealing.
"""

from __future__ import annotations

import json
import logging
from dataclasses import fields
from functools import lru_cache
from importlib.resources import files
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, TypeVar
from uuid import UUID

from oncekey.core.errors import RecordUnreadableError
from oncekey.core.keys import key_digest
from oncekey.core.model import (
    SEALED_SCHEMA,
    Effects,
    EntryKind,
    Finished,
    Glimpse,
    Headers,
    Intent,
    MemoEntry,
    Outcome,
    Parcel,
    Record,
    RecordId,
    Recovery,
    Snapshot,
    State,
    StoredResponse,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.core.flow import Row, Value
    from oncekey.core.model import Claim, Lease
    from oncekey.stores.sealed_content import SealedContent


T = TypeVar("T")
ContentOwner: TypeAlias = "Claim | Lease | Record"
"""A value that identifies the record and the incarnation to which content belongs."""
log = logging.getLogger("oncekey")

UNREADABLE = "the record of a key (digest {digest}) cannot be read: {why}"
NOT_OURS = "its {column} has a value that this version of oncekey does not write"
LATER = "its response was stored by a later version of oncekey (response_schema {found}; this one reads {known})"

LONGEST_KEPT: Final = 100
"""Longer header lines are not cached."""
_TYPE_FIRST: Final = '[["content-type", '

LONGEST_FOLDED: Final = 32 * 1024
"""The longest response or memo that is sent as text in the message of a COMMIT; a longer one is sent separately."""

HALF_A_PAIR: Final = "half of a surrogate pair cannot be stored"


class Column(NamedTuple):
    """A column of a record's row: a line of `columns.txt`, which explains the words."""

    name: str
    type: str
    words: frozenset[str]
    anew: str | None


def _column(name: str, kind: str, *words: str) -> Column:
    return Column(name, kind, frozenset(words), next((word[5:] for word in words if word.startswith("anew=")), None))


_LINES: Final = files(__package__).joinpath("columns.txt").read_text("utf-8").splitlines()
TABLE: Final = tuple(_column(*line.split()) for line in _LINES if line and line[0] != "#")
COLUMNS: Final = tuple(column.name for column in TABLE)
WORK: Final = frozenset(column.name for column in TABLE if "work" in column.words)


def snapshot_of(
    row: Row,
    content: SealedContent | None,
    memo: tuple[MemoEntry, ...] | None = None,
    response: StoredResponse | None = None,
) -> Snapshot:
    """Decode a row that has the store's clock as `now` in addition to the record."""
    record = None if row["scope"] is None else record_of(row, content, memo, response)
    return Snapshot(record, int(row["now"]))


def record_of(
    row: Row,
    content: SealedContent | None,
    memo: tuple[MemoEntry, ...] | None = None,
    response: StoredResponse | None = None,
) -> Record:
    """Decode one row, or raise `RecordUnreadableError`: an unreadable record is neither replayed nor run again.

    `memo` and `response` were just written by the statement, so they are not read back.
    """
    outcome, status = row["outcome"], row["response_status"]
    steps = memo
    if steps is None:
        steps = () if row["memo"] is None else _read(row, "memo", memo_of)
    record = Record(
        id=RecordId(row["scope"], row["key"]),
        incarnation=uuid_of(row["incarnation"]),
        effects=_EFFECTS.get(row["effects"]) or _read(row, "effects", Effects),
        recovery=_RECOVERIES.get(row["recovery"]) or _read(row, "recovery", Recovery),
        seed=bytes(row["seed"]),
        state=_STATES.get(row["state"]) or _read(row, "state", State),
        outcome=None if outcome is None else _OUTCOMES.get(outcome) or _read(row, "outcome", Outcome),
        entered=bool(row["entered"]),
        memo=steps,
        intent=None if row["intent"] is None else _read(row, "intent", _intent),
        response=None if status is None else _response(row),
        request=None if row["request"] is None else bytes(row["request"]),
        **dict(zip(_PLAIN, _plain_of(row), strict=True)),
    )
    return record if content is None else content.record(record, memo, response)


def glimpse_of(row: Row, record_id: RecordId, content: SealedContent | None) -> Glimpse:
    """Decode a row with the columns of `Finished`, the key, and the store's clock as `now`; raises likewise."""
    finished = Finished(
        id=record_id,
        incarnation=uuid_of(row["incarnation"]),
        operation=row["operation"],
        effects=_EFFECTS.get(row["effects"]) or _read(row, "effects", Effects),
        fingerprint=row["fingerprint"],
        response=None if row["response_status"] is None else _response(row),
        expires_at=row["expires_at"],
    )
    return Glimpse(finished if content is None else content.finished(finished), int(row["now"]))


def claim_params(claim: Claim, content: SealedContent | None) -> dict[str, Value]:
    """The parameters of a claim; the store turns durations into instants by its own clock."""
    params: dict[str, Value] = dict(zip(_GIVEN, _given_by(claim), strict=True))
    params |= {
        "scope": claim.id.scope,
        "key": claim.id.key,
        "incarnation": str(claim.incarnation),
        "effects": claim.effects.value,
        "recovery": claim.recovery.value,
    }
    if content is not None:
        params["request"] = content.closed_request(claim)
    return params


def owner_proof(lease: Lease) -> dict[str, Value]:
    """`Proof.OWNER`: incarnation and fence."""
    return {
        "scope": lease.id.scope,
        "key": lease.id.key,
        "incarnation": str(lease.incarnation),
        "fence": lease.fence,
    }


def version_proof(seen: Record) -> dict[str, Value]:
    """`Proof.VERSION`: incarnation and version as read."""
    return {
        "scope": seen.id.scope,
        "key": seen.id.key,
        "seen_incarnation": str(seen.incarnation),
        "seen_version": seen.version,
    }


def response_params(response: StoredResponse, owner: ContentOwner, content: SealedContent | None) -> dict[str, Value]:
    """A stored response as columns."""
    if content is not None:
        response = content.closed_answer(response, owner)
    return {
        "response_status": response.status,
        "response_headers": headers_text(response.headers),
        "response_body": response.body,
        "response_schema": response.schema_version,
    }


def headers_text(headers: Headers) -> str:
    """Header lines in order, including repeated ones; HTTP maps bytes to text by Latin-1."""
    if len(headers) == 1 and headers[0][0] == b"content-type" and len(headers[0][1]) <= LONGEST_KEPT:
        return _type_alone(headers[0])
    return json.dumps([[name.decode("latin-1"), value.decode("latin-1")] for name, value in headers])


@lru_cache(maxsize=64)
def _type_alone(line: tuple[bytes, bytes]) -> str:
    """The text of a content type alone, the only stored header of nearly every response."""
    return json.dumps([[line[0].decode("latin-1"), line[1].decode("latin-1")]])


def _response(row: Row) -> StoredResponse:
    if row["response_schema"] > SEALED_SCHEMA:
        raise _unreadable(row, LATER.format(found=row["response_schema"], known=SEALED_SCHEMA))
    body = row["response_body"]
    return StoredResponse(
        status=row["response_status"],
        headers=_read(row, "response_headers", _headers),
        body=None if body is None else bytes(body),
        schema_version=row["response_schema"],
    )


def _headers(text: str) -> Headers:
    if text.startswith(_TYPE_FIRST) and len(text) <= LONGEST_KEPT and "], [" not in text:
        return _known_headers(text)
    return _known_headers.__wrapped__(text)


@lru_cache(maxsize=64)
def _known_headers(text: str) -> Headers:
    """Decode header lines; the text of a content type alone is cached, because it repeats."""
    return tuple([(name.encode("latin-1"), value.encode("latin-1")) for name, value in json.loads(text)])


def memo_text(memo: tuple[MemoEntry, ...], owner: ContentOwner, content: SealedContent | None) -> str | None:
    """Finished steps in order; NULL without any, which shows statements that a record is plain."""
    if not memo:
        return None
    if content is not None:
        memo = content.closed_memo(memo, owner)
    lists: list[list[str | bool]] = []
    for entry in memo:  # each step writes all entries again, so no function is called for each
        lists.append([entry.name, entry.kind._value_, entry.result])
        if entry.by_hand:
            lists[-1].append(True)
    return _ENCODED(lists)


def memo_of(text: str | None) -> tuple[MemoEntry, ...]:
    """The steps of a stored memo."""
    entries = json.loads(text) if text else []
    return tuple([MemoEntry(name, _ENTRY_KINDS.get(kind) or EntryKind(kind), *rest) for name, kind, *rest in entries])


def _intent(text: str | None) -> Intent | None:
    return Intent(**json.loads(text)) if text else None


def _read(row: Row, column: str, decode: Callable[[str], T]) -> T:
    try:
        return decode(row[column])
    except (ValueError, TypeError, AttributeError):
        # It may be a client's content, so it is not shown.
        raise _unreadable(row, NOT_OURS.format(column=column)) from None


def _unreadable(row: Row, why: str) -> RecordUnreadableError:
    return RecordUnreadableError(UNREADABLE.format(digest=key_digest(row["key"]), why=why))


def uuid_of(value: object) -> UUID:
    """A UUID of Python's own class."""
    # A driver may return its own UUID class. Equal records must have equal values, and not every library that an
    # application uses accepts a driver's class.
    if type(value) is UUID:
        return value
    return UUID(int=value.int) if isinstance(value, UUID) else UUID(str(value))


_AS_IT_IS: Final = {column.name for column in TABLE if "decoded" not in column.words}
_PLAIN: Final = [field.name for field in fields(Record) if field.name in _AS_IT_IS]
_plain_of: Final = itemgetter(*_PLAIN)
_GIVEN: Final = [column.name for column in TABLE if "given" in column.words] + ["owner", "lease", "deadline", "request"]
_given_by: Final = attrgetter(*_GIVEN)

# A lookup in a table costs no call; a value that is not in it takes the slow path.
_EFFECTS: Final = {one.value: one for one in Effects}
_RECOVERIES: Final = {one.value: one for one in Recovery}
_STATES: Final = {one.value: one for one in State}
_OUTCOMES: Final = {one.value: one for one in Outcome}
_ENTRY_KINDS: Final = {one.value: one for one in EntryKind}
_ENCODED: Final = json.JSONEncoder(ensure_ascii=False).encode  # `json.dumps` would create one for every call


def parcels_text(parcels: tuple[Parcel, ...], content: SealedContent | None) -> str:
    """A batch as one parameter, because drivers do not bind lists."""
    if content is not None:
        parcels = tuple([content.closed_parcel(parcel) for parcel in parcels])
    return json.dumps(
        [
            {
                "id": str(parcel.id),
                "topic": parcel.topic,
                "payload": parcel.payload,
                "kind": parcel.kind.value,
                "scope": parcel.record_id.scope,
                "key": parcel.record_id.key,
                "incarnation": str(parcel.incarnation),
                "downstream_key": parcel.downstream_key,
                "position": parcel.position,
                "order_by": parcel.order_by,
            }
            for parcel in parcels
        ]
    )


def owned(record: Record | None, lease: Lease) -> bool:
    """Whether the record is still the owner's."""
    return record is not None and (record.incarnation, record.fence) == (lease.incarnation, lease.fence)
