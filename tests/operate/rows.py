"""Rows of every kind in a real store, and a look at them that leaves nothing out."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from itertools import product
from typing import Any

from oncekey.core.flow import Mode, Statement, Transaction
from oncekey.core.model import (
    HOUR,
    MINUTE,
    SECOND,
    Effects,
    EntryKind,
    HeldParcel,
    Intent,
    MemoEntry,
    Outcome,
    Parcel,
    ParcelKind,
    Record,
    RecordId,
    Recovery,
    State,
    StoredResponse,
)
from oncekey.databases.postgres.store import PostgresStore
from oncekey.stores.rows import COLUMNS, WORK, headers_text, memo_text
from oncekey.testing.claims import START
from oncekey_contract.world import World

NOW = START
MEMO = (MemoEntry("order_created", EntryKind.PHASE, '"o_1"'),)
GIVEN = (MemoEntry("charge", EntryKind.CALL, '"ch_0"', by_hand=True),)
"""A result that an operator gave before."""
RESULT = (MemoEntry("charge", EntryKind.CALL, '"ch_1"'),)
RECOVERIES = {
    Effects.LOCAL: Recovery.RETRY,
    Effects.OUTBOX: Recovery.RETRY,
    Effects.PHASED: Recovery.RESUME,
    Effects.INLINE: Recovery.UNKNOWN,
}


def an_intent(*, sent: int = NOW - MINUTE, window: int | None = None) -> Intent:
    """A call that was announced, and repeatable for `window` from then on."""
    until = None if window is None else sent + window
    return Intent("charge", "dk-1", "digest", 1, sent, sent + 5 * SECOND, until)


def a_row(state: State, effects: Effects = Effects.LOCAL, **changes: Any) -> Record:
    """A record as the schema allows it, of a key of its own."""
    done = state in {State.COMPLETED, State.EXPIRED}
    running = state is State.IN_PROGRESS
    made = Record(
        id=RecordId("1:-8:tenant-1", f"key-{uuid.uuid4().hex}"),
        incarnation=uuid.uuid4(),
        operation="pay",
        effects=effects,
        recovery=RECOVERIES[effects],
        method="POST",
        path="/payments",
        fingerprint="same",
        seed=bytes(range(32)),
        state=state,
        outcome=Outcome.SUCCESS if done else None,
        entered=True,
        fence=3,
        version=7,
        owner="host:1:abc" if running else None,
        lease_until=NOW + MINUTE if running else None,
        deadline=NOW + HOUR,
        call_timeout=30 * SECOND,
        ttl=24 * HOUR,
        attempts=1,
        recovery_point="finished" if done else "started",
        memo=(),
        intent=None,
        response=StoredResponse(201, ((b"location", b"/payments/1"),), b'{"id":1}') if done else None,
        last_error="some_code" if state is State.UNKNOWN else None,
        reconcile_after=NOW - MINUTE if state is State.UNKNOWN else None,
        reconcile_tries=0,
        created_at=NOW - 2 * MINUTE,
        last_run_at=NOW - 2 * MINUTE,
        finished_at=NOW - SECOND if done else None,
        expires_at=NOW + HOUR,
    )
    return replace(made, **changes)


INTENTS = (None, an_intent(), an_intent(window=20 * HOUR), an_intent(sent=NOW - 30 * HOUR, window=20 * HOUR))


# Where no row of an operator looks at the call, one is enough; the schema allows none beside an answer.
_INTENTS = {
    State.COMPLETED: (None,),
    State.EXPIRED: (None,),
    State.PENDING: INTENTS[:2],
    State.FAILED_RETRYABLE: INTENTS[:2],
}


def every_row() -> Iterator[Record]:
    """Every combination that matters to an operator and that the schema allows."""
    for state in (State.FAILED_RETRYABLE, State.UNKNOWN, State.COMPLETED):
        yield a_row(state, Effects.PHASED, memo=(*MEMO, *GIVEN))
    for state, effects, memo in product(State, Effects, ((), MEMO)):
        for intent in _INTENTS.get(state, INTENTS):
            row = a_row(state, effects, memo=memo, intent=intent)
            yield row
            if state is State.IN_PROGRESS:
                yield replace(row, id=_another(row), incarnation=uuid.uuid4(), lease_until=NOW)
                if effects is Effects.OUTBOX:
                    yield replace(row, id=_another(row), incarnation=uuid.uuid4(), lease_until=None)
                if effects is Effects.LOCAL:
                    strict = replace(row, recovery=Recovery.UNKNOWN, lease_until=NOW)
                    yield replace(strict, id=_another(row), incarnation=uuid.uuid4())
            if state is State.COMPLETED:
                failed = replace(row, outcome=Outcome.FAILURE, response=StoredResponse(402, (), b"no"))
                yield replace(failed, id=_another(row), incarnation=uuid.uuid4())


def _another(row: Record) -> RecordId:
    return RecordId(row.id.scope, f"key-{uuid.uuid4().hex}")


def copy_of(row: Record) -> Record:
    """The same row once more, under another key."""
    return replace(row, id=_another(row), incarnation=uuid.uuid4())


def write(
    world: World,
    row: Record,
    *parcels: Parcel,
    dead: bool = True,
    held_until: int | None = None,
    error: str = "call_uncertain",
) -> Record:
    """Put a row into the store as it is, with parcels in the outbox or among the dead letters."""
    _say(world, _insert(world), {**_columns(row), "now": None})
    if parcels:
        world.go(_alone(Transaction("put", Mode.ATOMIC, lambda: world.store.outbox.putting(parcels))))
    for parcel in parcels:
        if held_until is not None:
            _say(world, _hold(world), {"id": str(parcel.id), "until": held_until, "now": None})
        elif dead:
            bury(world, parcel, error)
    return row


def bury(world: World, parcel: Parcel, error: str = "call_uncertain") -> None:
    """Make a parcel of the outbox a dead letter."""
    _say(world, _hold(world), {"id": str(parcel.id), "until": NOW, "now": None})
    assert world.go(world.store.outbox.bury(HeldParcel(parcel, 1, 1, NOW, NOW), error))


def a_parcel(row: Record, kind: ParcelKind = ParcelKind.DEFER) -> Parcel:
    """The parcel of a record."""
    return Parcel(
        id=uuid.uuid4(),
        kind=kind,
        record_id=row.id,
        incarnation=row.incarnation,
        topic=f"topic-{uuid.uuid4().hex}",
        payload='{"amount": 7}',
        downstream_key="dk-1",
    )


def look(world: World, row: Record) -> dict[str, Any]:
    """Every column of a row, and on PostgreSQL the version of the tuple that holds it."""
    postgres = _is_postgres(world)
    tuple_of = "(SELECT xmin::text FROM oncekey.record WHERE scope = :scope AND key = :key) AS xmin"
    columns = [*COLUMNS, tuple_of] if postgres else list(COLUMNS)
    table = "oncekey.whole" if postgres else "oncekey_record"
    text = f"SELECT {', '.join(columns)} FROM {table} WHERE scope = :scope AND key = :key"
    text = text if postgres else text.replace(" key", " `key`")
    (found,) = _say(world, text, {"scope": row.id.scope, "key": row.id.key, "now": None})
    names = [*COLUMNS, "xmin"] if postgres else list(COLUMNS)
    return {name: _plain(found[name]) for name in names}


def _plain(value: Any) -> Any:
    return bytes(value) if isinstance(value, bytes | bytearray | memoryview) else value


def _columns(row: Record) -> dict[str, Any]:
    response = row.response
    return {
        "scope": row.id.scope,
        "key": row.id.key,
        **{
            name: getattr(row, name)
            for name in COLUMNS
            if name not in {"scope", "key", "memo", "intent"} and not name.startswith("response_")
        },
        "incarnation": str(row.incarnation),
        "effects": row.effects.value,
        "recovery": row.recovery.value,
        "state": row.state.value,
        "outcome": None if row.outcome is None else row.outcome.value,
        "memo": memo_text(row.memo, None, None),
        "intent": None if row.intent is None else json.dumps(asdict(row.intent)),
        "response_status": None if response is None else response.status,
        "response_headers": None if response is None else headers_text(response.headers),
        "response_body": None if response is None else response.body,
        "response_schema": None if response is None else response.schema_version,
    }


_TYPES = {"incarnation": "uuid", "seed": "bytea", "response_body": "bytea", "request": "bytea", "entered": "boolean"}
_NUMBERS = {
    "fence", "version", "lease_until", "deadline", "call_timeout", "ttl", "attempts", "response_status",
    "response_schema", "reconcile_after", "reconcile_tries", "created_at", "last_run_at", "finished_at", "expires_at",
}  # fmt: skip


def _insert(world: World) -> str:
    if not _is_postgres(world):
        columns = ", ".join(f"`{name}`" for name in COLUMNS)
        return f"INSERT INTO oncekey_record ({columns}) VALUES ({', '.join(f':{c}' for c in COLUMNS)})"
    kinds = dict.fromkeys(_NUMBERS, "bigint") | _TYPES
    hot = [name for name in COLUMNS if name not in WORK]

    def values(names: Iterable[str]) -> str:
        return ", ".join(f":{name}::{kinds.get(name, 'text')}" for name in names)

    begun = "CASE WHEN :memo::text IS NULL AND :intent::text IS NULL THEN 0 ELSE :version::bigint END"
    beside = ("incarnation", "scope", "key", *sorted(WORK))
    return (
        f"WITH hot AS (INSERT INTO oncekey.record ({', '.join(hot)}, memo_version) VALUES ({values(hot)}, {begun})) "
        f"INSERT INTO oncekey.work ({', '.join(beside)}, memo_version) VALUES ({values(beside)}, {begun})"
    )


def _hold(world: World) -> str:
    if _is_postgres(world):
        return (
            "UPDATE oncekey.outbox SET state = 'held', owner = 'worker', fence = 1, attempts = 1, "
            "lease_until = :until::bigint WHERE id = :id::uuid"
        )
    return (
        "UPDATE oncekey_outbox SET state = 'held', owner = 'worker', fence = 1, attempts = 1, "
        "lease_until = :until WHERE id = :id"
    )


def _is_postgres(world: World) -> bool:
    return isinstance(world.store, PostgresStore)


def _say(world: World, text: str, params: dict[str, Any]) -> Any:
    def body() -> Any:
        return (yield Statement("test", text, params))

    return world.go(_alone(Transaction("test", Mode.SINGLE, body)))


def _alone(transaction: Transaction[Any]) -> Any:
    return (yield transaction)
