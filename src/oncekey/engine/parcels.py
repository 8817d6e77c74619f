"""The parcels of a handler: collected while it runs, written in the transaction of its rows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final
from uuid import uuid5

from oncekey.canonical.digests import downstream_key
from oncekey.core.errors import ConfigurationError
from oncekey.core.memo import LONGEST_NAME
from oncekey.core.model import Parcel, ParcelKind
from oncekey.core.policy import micros
from oncekey.engine.request import NO_OUTBOX

if TYPE_CHECKING:
    from oncekey.core.model import Lease, MemoEntry, Snapshot
    from oncekey.engine.phases import PhasedRun
    from oncekey.flow import Steps
    from oncekey.ports import Store

LONGEST_TOPIC: Final = LONGEST_NAME
"""A deferred call is the one step of its record, and has its topic's name."""
DEFERRED_TWICE: Final = "op.defer was called twice: one parcel is the request's own call, use op.emit for others"


class Parcels:
    """The parcels of one operation. Their ids and downstream keys are derived, so that every attempt makes the same."""

    __slots__ = ("_lease", "_made", "_seed", "deferred", "emitted", "used")

    def __init__(self, lease: Lease, seed: bytes) -> None:
        self._lease = lease
        self._seed = seed
        self._made = 0
        self.deferred: tuple[Parcel, ...] = ()
        self.emitted: tuple[Parcel, ...] = ()
        self.used = False
        """Whether there ever was a parcel: then the relay is woken."""

    def emit(self, topic: str, payload: object, order_by: str | None, phase: str = "") -> None:
        """Add a message to others."""
        self.emitted += (self._parcel(ParcelKind.EMIT, topic, payload, order_by, phase),)

    def defer(self, topic: str, payload: object) -> None:
        """Add the request's own call."""
        if self.deferred:
            raise ConfigurationError(DEFERRED_TWICE)
        self.deferred = (self._parcel(ParcelKind.DEFER, topic, payload, None, ""),)

    def take(self) -> tuple[Parcel, ...]:
        """The parcels since the last call of `take`: each phase writes its own, and numbers them from the beginning.

        So a parcel is the same whether its phase ran after the others or was resumed alone.
        """
        taken, self.emitted, self._made = self.emitted, (), 0
        return taken

    def _parcel(self, kind: ParcelKind, topic: str, payload: object, order_by: str | None, phase: str) -> Parcel:
        if not topic or len(topic) > LONGEST_TOPIC or not topic.isprintable():
            raise ConfigurationError(f"a topic has 1 to {LONGEST_TOPIC} characters, all of them printable")
        if order_by is not None and not _is_storable(order_by):
            raise ConfigurationError("order_by is text without NUL and without half a surrogate pair")
        position, self.used = self._made, True
        self._made += 1
        name = f"{kind}/{phase}/{position}/{topic}"
        return Parcel(
            id=uuid5(self._lease.incarnation, name),
            kind=kind,
            record_id=self._lease.id,
            incarnation=self._lease.incarnation,
            topic=topic,
            payload=_json(payload),
            # The request's own call has its topic's name, wherever in the handler it was deferred.
            downstream_key=downstream_key(self._seed, topic if kind is ParcelKind.DEFER else name),
            position=position,
            order_by=order_by,
        )


def _json(payload: object) -> str:
    try:
        text = json.dumps(payload, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"a parcel's payload is plain JSON: {error}") from None
    if not _is_storable(text):
        raise ConfigurationError("a parcel's payload has a string with half of a surrogate pair, which is not Unicode")
    return text


def _is_storable(text: str) -> bool:
    """Whether every store can keep it: PostgreSQL's text has no NUL, and UTF-8 has no lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def checkpointing(
    store: Store, phased_run: PhasedRun, parcels: Parcels, memo: tuple[MemoEntry, ...]
) -> Steps[Snapshot | None]:
    """Write a finished phase and its parcels, as the last statements of its transaction. None: not ours."""
    snapshot = yield from store.phases.checkpointing(
        phased_run.lease, phased_run.stored, memo, micros(phased_run.policy.lease)
    )
    taken = parcels.take()
    if snapshot is not None and taken:
        if store.outbox is None:
            raise ConfigurationError(NO_OUTBOX)
        yield from store.outbox.putting(taken)
    return snapshot
