"""Parcels and records to test the outbox with."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from harness import flows
from oncekey.core.flow import Mode, Transaction
from oncekey.core.model import (
    HOUR,
    SECOND,
    Announcement,
    Deferred,
    Effects,
    HeldParcel,
    Parcel,
    ParcelKind,
    Record,
    RecordId,
    Recovery,
    State,
)
from oncekey.testing.claims import a_claim
from oncekey_contract.world import World

LEASE = 60 * SECOND
DIGEST = "d1"


@dataclass
class Post:
    """One topic of one test on one store."""

    world: World
    topic: str = field(default_factory=lambda: f"topic-{uuid.uuid4().hex}")

    @property
    def box(self) -> Any:
        """The store's outbox."""
        return self.world.store.outbox

    def go(self, flow: Any) -> Any:
        """Run a flow."""
        return self.world.go(flow)

    def parcel(self, **changes: Any) -> Parcel:
        """A message that nobody else wrote."""
        given: dict[str, Any] = {
            "id": uuid.uuid4(),
            "kind": ParcelKind.EMIT,
            "record_id": RecordId("shop|tenant-1", uuid.uuid4().hex),
            "incarnation": uuid.uuid4(),
            "topic": self.topic,
            "payload": '{"amount": 7}',
            "downstream_key": str(uuid.uuid4()),
        }
        return Parcel(**{**given, **changes})

    def line(self, name: str) -> str:
        """A line of parcels that no other test stands in."""
        return f"{self.topic}:{name}"

    def put(self, *parcels: Parcel) -> tuple[Parcel, ...]:
        """Write parcels in one transaction."""
        self.go(alone(Transaction("put", Mode.ATOMIC, lambda: self.box.putting(parcels))))
        return parcels

    def claim(self, limit: int = 10, owner: str | None = None, lease: int = LEASE) -> tuple[HeldParcel, ...]:
        """What a worker gets."""
        return self.go(self.box.due(owner or uuid.uuid4().hex, (self.topic,), limit, lease))

    def deferred(self, **changes: Any) -> Parcel:
        """A request that was claimed, and deferred its call: its record is pending, its parcel due."""
        claim = a_claim(effects=Effects.OUTBOX, recovery=Recovery.RETRY)
        lease = self.world.owned(claim)
        parcel = self.parcel(
            kind=ParcelKind.DEFER, record_id=claim.id, incarnation=lease.incarnation, downstream_key="k-1", **changes
        )
        settled = self.world.settle(lease, Deferred(parcel))
        assert settled.ours
        assert self.record(parcel).state is State.PENDING
        return parcel

    def record(self, parcel: Parcel) -> Record:
        """The parcel's record as it stands."""
        return self.world.record(parcel.record_id)

    def in_outbox(self, parcel: Parcel) -> HeldParcel | None:
        """The parcel as it stands."""
        return self.go(flows.find_parcel(self.box, parcel.id))

    def dead(self, parcel: Parcel) -> Any:
        """The dead letter that it became."""
        return self.go(self.box.find_dead_letter(parcel.id))

    def take_up(self, held: HeldParcel, *, repeatable: int | None = None, owner: str | None = None) -> Any:
        """What a worker does before it calls."""
        return self.go(self.box.take_up(held, owner or uuid.uuid4().hex, announcement(self.topic, repeatable), LEASE))


def announcement(topic: str, repeatable: int | None = None) -> Announcement:
    """A call that is about to be made."""
    return Announcement(topic, "k-1", DIGEST, 1, repeatable, 5 * SECOND, 30 * SECOND)


WINDOW = 20 * HOUR


def alone(transaction: Transaction[Any]) -> Any:
    return (yield transaction)
