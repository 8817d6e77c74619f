"""The outbox: parcels that are written with the business rows, and that workers claim with a lease.

Moves of a parcel alone are here; a parcel that is a request's own call moves together with its record (see
`deferred`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from uuid import UUID

from oncekey.core.errors import CommitAmbiguousError
from oncekey.core.flow import Body, Flow, Mode, Transaction, Value
from oncekey.stores.deferred import DeferredCalls
from oncekey.stores.keystore import ParcelStore
from oncekey.stores.statements import PART_STATEMENTS, Statements, execute, execute_until_acknowledged
from oncekey.stores.worker_rows import dead_letter_of, held_of, held_text, ids_of, parcel_proof

if TYPE_CHECKING:
    from oncekey.core.model import DeadLetter, Duration, HeldParcel
    from oncekey.ports.store import Audit

STATEMENTS = PART_STATEMENTS["outbox"]

_FIRST = UUID(int=0)


class OutboxStore(ParcelStore, DeferredCalls):
    """Parcels, in any store that has the named statements."""

    def __init__(self, statements: Statements, audit: Audit | None = None) -> None:
        DeferredCalls.__init__(self, statements, audit)
        statements.require(STATEMENTS)

    def due(
        self,
        owner: str,
        topics: tuple[str, ...],
        limit: int,
        lease: Duration,
        *,
        careful: int | None = None,
        beginning: str = "",
    ) -> Flow[tuple[HeldParcel, ...]]:
        """Claim due parcels, those that wait longest first; by `owner` this call finds its claims after a lost reply.

        `beginning` is that of the scopes of one namespace; other namespaces have their own workers. At most `careful`
        parcels are claimed that are requests' own calls or were tried before; without it, as many as others.
        """
        params: dict[str, Value] = {
            "owner": owner,
            "topics": json.dumps(topics),
            "limit": limit,
            "careful": limit if careful is None else careful,
            "lease": lease,
            "beginning": beginning,
        }
        try:
            rows = yield from execute(self._statements.alone("due", params))
        except CommitAmbiguousError:
            rows = yield from self._statements.read("held_by", {"owner": owner})
        return tuple(held_of(row, self._statements.content) for row in sorted(rows, key=lambda row: int(row["place"])))

    def sent(self, *held: HeldParcel) -> Flow[frozenset[UUID]]:
        """Acknowledge delivered messages, many at once; the result excludes those claimed by another worker since."""
        params: dict[str, Value] = {"held": held_text(held)}
        try:
            rows = yield from execute(self._statements.alone("sent", params))
        except CommitAmbiguousError:
            yield from self._statements.write("sent", params)
            # A missing parcel was acknowledged, by the statement whose reply was lost or by another worker.
            left = yield from execute_until_acknowledged(self._statements.alone("remaining", params, Mode.READ))
            return frozenset(one.parcel.id for one in held) - ids_of(left)
        return frozenset(one.parcel.id for one in held) if len(rows) == len(held) else ids_of(rows)

    def again(self, held: HeldParcel, after: Duration, error: str, *, counted: bool = True) -> Flow[bool]:
        params: dict[str, Value] = {**parcel_proof(held), "after": after, "error": error, "spared": 0 if counted else 1}

        def body() -> Body[bool]:
            rows = yield self._say("again", params)
            if rows:
                return True
            there = yield self._say("find_parcel", parcel_proof(held))
            # Due under our fence: an earlier attempt wrote it, and the reply was lost.
            return bool(there) and there[0]["state"] == "ready" and there[0]["fence"] == held.fence

        return (yield from execute_until_acknowledged(Transaction("again", Mode.SINGLE, body)))

    def bury(self, held: HeldParcel, error: str) -> Flow[bool]:
        """Make a message a dead letter, with its first and its last error. False: not ours any more."""

        def body() -> Body[bool]:
            if (yield from self._burying(held, error)):
                return True
            return (yield from self._is_buried(held))

        return (yield from execute_until_acknowledged(Transaction("bury", Mode.ATOMIC, body)))

    def hand_back(self, *held: HeldParcel) -> Flow[frozenset[UUID]]:
        """Release parcels that were claimed but not begun: due at once, and the attempt does not count."""
        return ids_of((yield from self._statements.write("hand_back", {"held": held_text(held)})))

    # The operator's side

    def dead_letters(self, limit: int, after: DeadLetter | None = None) -> Flow[tuple[DeadLetter, ...]]:
        """The dead letters, oldest first, after `after`."""
        died_at, last = (-1, _FIRST) if after is None else (after.died_at, after.parcel.id)
        params: dict[str, Value] = {"limit": limit, "died_at": died_at, "id": str(last)}
        rows = yield from self._statements.read("dead_letters", params)
        return tuple(dead_letter_of(row, self._statements.content) for row in rows)

    def find_dead_letter(self, parcel_id: UUID) -> Flow[DeadLetter | None]:
        rows = yield from self._statements.read("find_dead_letter", {"id": str(parcel_id)})
        return dead_letter_of(rows[0], self._statements.content) if rows else None
