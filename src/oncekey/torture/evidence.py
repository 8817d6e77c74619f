"""What is left when a run is over: the clients' history, the provider's own ledger, and the database."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING
from typing import Final as FinalName

from oncekey.core.model import State
from oncekey.demo.outbound import ask
from oncekey.testing.history import Effect, Final, History, Kind, Operation, Write
from oncekey.torture.books import Books

if TYPE_CHECKING:
    from oncekey.flow import Row
    from oncekey.torture.cell_books import CellBooks
    from oncekey.torture.clients import Clients, Wish

ROW: FinalName = "business row"
CHARGE: FinalName = "charge"
PROMISES: FinalName[Mapping[str, tuple[str, ...]]] = {
    "/orders": (ROW,),
    "/bookings": (ROW,),
    "/payments": (ROW, CHARGE),
    "/transfers": (ROW, CHARGE),
    "/notifications": (CHARGE,),
}
"""What a success of each route means."""


@dataclass(frozen=True, slots=True)
class Charge:
    """One line of the provider's ledger."""

    id: str
    key: str
    cents: int
    at: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A record as it stands at the end."""

    key: str
    incarnation: str
    effects: str
    state: State
    fingerprint: str
    attempts: int
    resumable: bool
    status: int | None
    body: bytes | None
    last_error: str | None
    ticket: bool


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that the checker may look at. Nothing in it was said by a handler about itself."""

    scope: str
    wishes: Mapping[str, Wish]
    answered: frozenset[str]
    operations: Sequence[Operation]
    charges: Mapping[str, Sequence[Charge]]
    rows: Sequence[Effect]
    records: Mapping[str, Kept]
    writes: Sequence[Write]
    deliveries: Mapping[str, Mapping[str, int]]
    """Key -> downstream key -> how often it was delivered."""
    parcels: Sequence[Row]
    dead_letters: Sequence[Row]
    shares: bool = True
    """Whether the store shares the application's transactions: else there are neither rows nor messages."""

    def history(self) -> History:
        """As the checker reads it. A life that has an answer is the last one of its key: nothing expires in a run."""
        charges = (
            Effect(one.id, self.scope, one.key, f"{one.cents} cents", one.at, incarnation=self._life(key), kind=CHARGE)
            for key, lines in self.charges.items()
            for one in lines
        )
        return History(
            operations=tuple(self._operation(op) for op in self.operations),
            ledger=tuple(charges),
            business=tuple(replace(row, incarnation=self._life(row.key)) for row in self.rows),
            writes=tuple(self.writes),
            records=tuple(self._final(one) for one in self.records.values()),
            healed=True,
        )

    def _operation(self, op: Operation) -> Operation:
        if op.kind is not Kind.OK:
            return op
        meant = PROMISES[self.wishes[op.key].route]
        promises = meant if self.shares else tuple(one for one in meant if one != ROW)
        return replace(op, incarnation=self._life(op.key), promises=promises)

    def _final(self, one: Kept) -> Final:
        place = (self.scope, one.key, one.incarnation)
        return Final(*place, one.state, one.fingerprint, one.status, one.body, ticket=one.ticket)

    def _life(self, key: str) -> str | None:
        return self.records[key].incarnation if key in self.records else None


async def gather(clients: Clients, books: Books | CellBooks, provider: str) -> Evidence:
    """Read everything."""
    labels, scope = clients.labels, clients.scope
    charges: dict[str, list[Charge]] = defaultdict(list)
    for line in (await ask("GET", f"{provider}/charges")).json()["charges"]:
        at = int(datetime.fromisoformat(line["at"]).timestamp() * 1_000_000)
        charges[line["customer_id"]].append(Charge(line["id"], line["customer_id"], line["amount_cents"], at))
    rows = [
        Effect(row["id"], scope, row["key"], row["wanted"], int(row["at"]), kind=ROW)
        for row in await books.read("rows")
    ]
    deliveries: dict[str, dict[str, int]] = defaultdict(dict)
    for row in await books.read("deliveries"):
        deliveries[row["key"]][row["downstream_key"]] = int(row["times"])
    return Evidence(
        scope=scope,
        wishes=clients.wishes,
        answered=frozenset(clients.answered),
        operations=clients.operations,
        charges=charges,
        rows=rows,
        records={row["key"]: _kept(row, labels) for row in await books.read("records", scope=scope)},
        writes=[_write(row, labels) for row in await books.read("log", scope=scope)],
        deliveries=deliveries,
        parcels=await books.read("parcels", scope=scope),
        dead_letters=await books.read("dead_letters", scope=scope),
        shares=isinstance(books, Books),
    )


def _kept(row: Row, labels: Mapping[str, str]) -> Kept:
    body = row["response_body"]
    return Kept(
        key=row["key"],
        incarnation=row["incarnation"],
        effects=row["effects"],
        state=State(row["state"]),
        fingerprint=labels.get(row["fingerprint"], row["fingerprint"]),
        attempts=int(row["attempts"]),
        resumable=row["recovery_point"] != "started",
        status=row["response_status"],
        body=None if body is None else bytes(body),
        last_error=row["last_error"],
        ticket=row["reconcile_after"] is not None,
    )


def _write(row: Row, labels: Mapping[str, str]) -> Write:
    return Write(
        at=int(row["at"]),
        scope=row["scope"],
        key=row["key"],
        state=row["state"],
        incarnation=row["incarnation"],
        fence=int(row["fence"]),
        version=int(row["version"]),
        name=f"write {row['place']}",
        fingerprint=labels.get(row["fingerprint"], row["fingerprint"]),
    )
