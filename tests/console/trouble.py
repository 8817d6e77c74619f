"""A store with believable trouble of every kind, as of now."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from oncekey import wire
from oncekey.core.flow import Mode, Transaction
from oncekey.core.model import (
    HOUR,
    MINUTE,
    SECOND,
    Effects,
    EntryKind,
    Intent,
    MemoEntry,
    Outcome,
    ParcelKind,
    Record,
    RecordId,
    State,
    StoredResponse,
)
from oncekey.core.policy import Policy
from oncekey.core.resolution import AnnouncedCall, CallReport, Undecided
from oncekey.core.resolvers import to_text
from oncekey.core.scope import scope_of
from oncekey.core.transitions import Actor, Mover, Note, Trigger
from oncekey.databases.address import Kind
from oncekey.databases.mariadb.generated.pymysql import PymysqlDriver
from oncekey.databases.mariadb.store import MariadbStore
from oncekey.databases.postgres.generated.psycopg import PsycopgDriver
from oncekey.databases.postgres.store import PostgresStore
from oncekey.databases.sqlite.blocking import SqliteDriver
from oncekey.databases.sqlite.store import SqliteStore
from oncekey_contract.world import World, blocking
from operate.rows import a_parcel, a_row, write

ACME, ZETA = scope_of("-", "acme"), scope_of("-", "zeta")
INLINE_KEY = "5b0e1c9a-7a7e-4d1c-9c35-000000000001"
PHASED_KEY = "5b0e1c9a-7a7e-4d1c-9c35-000000000002"
OUTBOX_KEY = "5b0e1c9a-7a7e-4d1c-9c35-000000000003"
DONE_KEY = "order-2026-11-0001"
DECLINED = {"outcome": Outcome.FAILURE, "response": StoredResponse(402, (), b'{"error": "declined"}')}
NASTY = "<img src=x onerror=\"document.title='owned'\">'\"&"


@contextmanager
def opened(url: str) -> Iterator[World]:
    """The store of a URL with its tables, by the clock of now."""
    engine = wire.connect(url)
    engine.migrate()
    engine.close()
    address = wire.understand(url)
    match address.kind:
        case Kind.SQLITE:
            opening = blocking(SqliteStore, SqliteDriver(address.place))
        case Kind.MARIADB:
            opening = blocking(MariadbStore, PymysqlDriver(address.place))
        case _:
            opening = blocking(PostgresStore, PsycopgDriver(address.place))
    with opening as world:
        world.clock.now = time.time_ns() // 1000
        yield world


def put(world: World, state: State, effects: Effects, key: str, **changes: Any) -> Record:
    """A record of now, in a store of now."""
    now = world.clock.now
    at = changes.pop("at", 2 * MINUTE)
    took = changes.pop("took", 80_000)
    done = state in {State.COMPLETED, State.EXPIRED}
    usual = {
        "id": RecordId(changes.pop("scope", ACME), key),
        "created_at": now - at,
        "last_run_at": now - at,
        "finished_at": now - at + took if done else None,
        "expires_at": now - at + 24 * HOUR,
        "deadline": now + HOUR,
        "lease_until": now + MINUTE if state is State.IN_PROGRESS else None,
        "reconcile_after": now + MINUTE if state is State.UNKNOWN else None,
        "operation": "create_payment",
    }
    parcels = changes.pop("parcels", ())
    record = a_row(state, effects, **{**usual, **changes})
    return write(world, record, *(parcel(record) for parcel in parcels))


def fill(world: World, *, finished: int = 400) -> None:
    """Everything that an operator may meet."""
    now = world.clock.now
    put(world, State.UNKNOWN, Effects.INLINE, INLINE_KEY, last_error="handler_raised", at=38 * MINUTE)
    intent = Intent("charge_created", f"dk-{uuid.uuid4()}", "digest", 1, now - HOUR, now - HOUR + 5 * SECOND, None)
    steps = (
        MemoEntry("order_created", EntryKind.PHASE, '{"order": "o_1017", "total_cents": 4200}'),
        MemoEntry("stock_reserved", EntryKind.PHASE, '{"reservation": "r_77"}'),
    )
    phased = put(
        world, State.UNKNOWN, Effects.PHASED, PHASED_KEY, last_error="call_uncertain", memo=steps, intent=intent,
        recovery_point="stock_reserved", at=61 * MINUTE, operation="create_order", reconcile_tries=3, path="/orders",
    )  # fmt: skip
    call = AnnouncedCall(
        phased.id, phased.incarnation, "create_order", "charge_created", intent.downstream_key, None, 0
    )
    world.go(world.store.reconcile.add_call(call))
    world.go(world.store.reconcile.name(call, "ch_3Pq8"))
    world.go(
        world.store.reconcile.add(
            CallReport(
                "webhook:/hooks/pay",
                "evt_1",
                to_text(Undecided("charge.pending of card 4242"), Policy()),
                intent.downstream_key,
            )
        )
    )
    for number, why in enumerate(("the provider answered 503", "the provider answered 503", "no answer in 10 s")):
        note = Note.of(phased, State.UNKNOWN, Trigger.STILL_UNKNOWN, Mover(Actor.RESOLVER, "worker-a:211"), why)
        world.clock.now = now - (40 - 10 * number) * MINUTE
        noted(world, note)
    world.clock.now = now
    sent = Intent("send_refund", "dk-refund-1", "digest", 5, now - 20 * MINUTE, now - 19 * MINUTE, now + 20 * HOUR)
    put(
        world, State.UNKNOWN, Effects.OUTBOX, OUTBOX_KEY, scope=ZETA, last_error="dead_letter", intent=sent,
        operation="create_refund", path="/refunds", at=25 * MINUTE, parcels=[a_parcel], reconcile_after=None,
        reconcile_tries=8,
    )  # fmt: skip
    for number in range(3):
        put(
            world, State.COMPLETED, Effects.LOCAL, f"order-2026-11-1{number:03}", operation="create_order",
            parcels=[lambda record: a_parcel(record, ParcelKind.EMIT)],
        )  # fmt: skip
    put(world, State.IN_PROGRESS, Effects.PHASED, "checkout-7731", owner="web-2:88:f1c0", at=9 * SECOND)
    put(
        world, State.IN_PROGRESS, Effects.PHASED, "checkout-7701", owner="web-1:34:77aa", lease_until=now - 3 * MINUTE,
        at=6 * MINUTE,
    )  # fmt: skip
    put(world, State.PENDING, Effects.OUTBOX, "refund-881", operation="create_refund", at=3 * SECOND)
    for number in range(7):
        put(
            world, State.FAILED_RETRYABLE, Effects.LOCAL, f"cart-{number:05}", last_error="status_503",
            at=(number + 1) * 4 * MINUTE, attempts=number % 3 + 1, scope=ZETA if number % 2 else ACME,
        )  # fmt: skip
    for number in range(finished):
        refused = number % 23 == 7
        put(
            world, State.COMPLETED, Effects.INLINE, f"order-2026-11-{number:04}", operation="create_order",
            at=number * 9 * SECOND + 1, took=60_000 + (number * 7919) % 240_000, scope=ZETA if number % 3 else ACME,
            **(DECLINED if refused else {}),
        )  # fmt: skip
    world.go(world.store.upkeep.beat("worker-a:211", ["relay", "sweeper", "reaper", "reconciler"], 10 * SECOND))
    world.go(world.store.upkeep.beat("worker-b:98", ["completer"], 10 * SECOND, {"create_payment": ["charge"]}))


def noted(world: World, note: Note) -> None:
    """One line of the audit."""

    def alone() -> Any:
        yield Transaction("note", Mode.ATOMIC, lambda: world.store.audit.noting((note,)))

    world.go(alone())
