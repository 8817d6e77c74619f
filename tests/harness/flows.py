"""The flows of a request, performed one by one on an engine, where a test plays the owner of a key itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncekey.core.flow import adrive, drive
from oncekey.engine import request
from oncekey.stores.worker_rows import held_of

if TYPE_CHECKING:
    from uuid import UUID

    from oncekey.core.flow import Flow
    from oncekey.core.model import (
        Claim,
        Duration,
        HeldParcel,
        Instant,
        Lease,
        RecordId,
        Settled,
        Settlement,
        Snapshot,
        Verdict,
    )
    from oncekey.core.policy import Policy
    from oncekey.engine.shell import AsyncEngine, Engine
    from oncekey.ports.store import AsyncOpenTransaction, OpenTransaction
    from oncekey.stores.outbox import OutboxStore


def find_parcel(outbox: OutboxStore, parcel_id: UUID) -> Flow[HeldParcel | None]:
    """A parcel as it is in the outbox; one without a holder has no lease."""
    rows = yield from outbox._statements.read("find_parcel", {"id": str(parcel_id)})
    return held_of(rows[0], None) if rows else None


def begin(engine: Engine, claim: Claim, policy: Policy) -> Verdict:
    """Claim a key."""
    return drive(request.begin(engine.store, claim, policy), engine.driver.run)


def renew(engine: Engine, lease: Lease, span: Duration) -> Instant | None:
    """The lease's new end, or None if it is lost."""
    return drive(request.renew(engine.store, lease, span), engine.driver.run)


def settle(engine: Engine, lease: Lease, settlement: Settlement) -> Settled:
    """Write the outcome in a separate transaction."""
    return drive(request.settle(engine.store, lease, settlement), engine.driver.run)


def settle_within(engine: Engine, tx: OpenTransaction, lease: Lease, settlement: Settlement) -> Settled:
    """Write the outcome in the business transaction."""
    return tx.run(request.settling(engine.store, lease, settlement, ()))


def settle_lost_commit(engine: Engine, lease: Lease) -> Settled:
    """Find out whether a COMMIT without a reply was executed."""
    return drive(request.settle_lost_commit(engine.store, lease), engine.driver.run)


def find(engine: Engine, record_id: RecordId) -> Snapshot:
    """Read a record."""
    return drive(engine.store.find(record_id), engine.driver.run)


async def abegin(engine: AsyncEngine, claim: Claim, policy: Policy) -> Verdict:
    """Claim a key, under asyncio."""
    return await adrive(request.begin(engine.store, claim, policy), engine.driver.run)


async def asettle(engine: AsyncEngine, lease: Lease, settlement: Settlement) -> Settled:
    """Write the outcome in a separate transaction, under asyncio."""
    return await adrive(request.settle(engine.store, lease, settlement), engine.driver.run)


async def asettle_within(
    engine: AsyncEngine, tx: AsyncOpenTransaction, lease: Lease, settlement: Settlement
) -> Settled:
    """Write the outcome in the business transaction, under asyncio."""
    return await tx.run(request.settling(engine.store, lease, settlement, ()))


async def asettle_lost_commit(engine: AsyncEngine, lease: Lease) -> Settled:
    """Find out whether a COMMIT without a reply was executed, under asyncio."""
    return await adrive(request.settle_lost_commit(engine.store, lease), engine.driver.run)
