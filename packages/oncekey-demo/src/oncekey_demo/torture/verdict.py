"""The verdict on a run, from the clients' history, the provider's own ledger, and the database.

`oncekey_demo.checker` checks each kind of effects; this module adds checks that need the data of a whole run.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Final

from oncekey.core.model import State
from oncekey_demo.charging import ask
from oncekey_demo.checker import Rule, check
from oncekey_demo.history import ClientOperation, ClientSaw, Effect, History, Write, stories
from oncekey_demo.history import Final as LastRecord
from oncekey_demo.torture.shop import Books, CellBooks

if TYPE_CHECKING:
    from oncekey.core.flow import Row
    from oncekey_demo.torture.clients import Clients, IntendedRequest


ROW: Final = "business row"
CHARGE: Final = "charge"
PROMISES: Final[Mapping[str, tuple[str, ...]]] = {
    "/orders": (ROW,),
    "/bookings": (ROW,),
    "/payments": (ROW, CHARGE),
    "/transfers": (ROW, CHARGE),
    "/notifications": (CHARGE,),
}
"""The kinds of effects that a success of each route promises."""


@dataclass(frozen=True, slots=True)
class Charge:
    """One line of the provider's ledger."""

    id: str
    key: str
    cents: int
    at: int


@dataclass(frozen=True, slots=True)
class FinalRecord:
    """A record at the end of the run."""

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
class RunEvidence:
    """All evidence of a run. Nothing in it was reported by a handler."""

    scope: str
    intended_requests: Mapping[str, IntendedRequest]
    answered: frozenset[str]
    operations: Sequence[ClientOperation]
    charges: Mapping[str, Sequence[Charge]]
    rows: Sequence[Effect]
    records: Mapping[str, FinalRecord]
    writes: Sequence[Write]
    deliveries: Mapping[str, Mapping[str, int]]
    """Key -> downstream key -> how often it was delivered."""
    parcels: Sequence[Row]
    dead_letters: Sequence[Row]
    shares: bool = True
    """Whether the store shares the application's transactions; otherwise there are neither rows nor messages."""

    def history(self) -> History:
        """The history for the checker. A life with a response is the last one of its key: nothing expires in a run."""
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

    def _operation(self, op: ClientOperation) -> ClientOperation:
        if op.kind is not ClientSaw.OK:
            return op
        meant = PROMISES[self.intended_requests[op.key].route]
        promises = meant if self.shares else tuple(one for one in meant if one != ROW)
        return replace(op, incarnation=self._life(op.key), promises=promises)

    def _final(self, one: FinalRecord) -> LastRecord:
        place = (self.scope, one.key, one.incarnation)
        return LastRecord(*place, one.state, one.fingerprint, one.status, one.body, ticket=one.ticket)

    def _life(self, key: str) -> str | None:
        return self.records[key].incarnation if key in self.records else None


async def gather(clients: Clients, books: Books | CellBooks, provider: str) -> RunEvidence:
    """Read all evidence of a run."""
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
    return RunEvidence(
        scope=scope,
        intended_requests=clients.intended_requests,
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


def _kept(row: Row, labels: Mapping[str, str]) -> FinalRecord:
    body = row["response_body"]
    return FinalRecord(
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


LOOKED_AT: Final = frozenset(Rule) - {Rule.OUTBOX, Rule.EMPTY, Rule.KEPT}
"""The outbox is checked below, against what was delivered; no record is old enough to expire."""
_CREATED: Final = 201
_EMITTING: Final = frozenset({"/orders", "/payments"})


@dataclass(frozen=True, slots=True)
class BrokenPromise:
    """A broken promise, with its key."""

    rule: Rule
    key: str
    sentence: str


def broken_promises(evidence: RunEvidence) -> list[BrokenPromise]:
    """Every broken promise of a run."""
    found: dict[BrokenPromise, None] = {}
    for broken in check(evidence.history(), LOOKED_AT):
        found[BrokenPromise(broken.rule, broken.key, broken.sentence)] = None
    for look in LOOKS:
        for finding in look(evidence):
            found[finding] = None
    return list(found)


def stuck(left: Mapping[str, str]) -> Iterator[BrokenPromise]:
    """Records that only a worker could finish, and that no worker had finished long after the faults ended."""
    for key, what in left.items():
        yield BrokenPromise(Rule.PROGRESS, key, f"{what}: no worker has finished it")


def story_of(evidence: RunEvidence, key: str) -> tuple[str, ...]:
    """Everything recorded about one key, in the order of events."""
    return next((story.lines() for story in stories(evidence.history()) if story.key == key), ())


def _outbox(evidence: RunEvidence) -> Iterator[BrokenPromise]:
    """Every message of a committed request was delivered, and no message of any other request."""
    rule = Rule.OUTBOX
    if not evidence.shares:
        return
    for key, intended in evidence.intended_requests.items():
        record, names = evidence.records.get(key), evidence.deliveries.get(key, {})
        due = intended.route in _EMITTING and record is not None and record.status == _CREATED
        if due and not names:
            yield BrokenPromise(rule, key, "its message was committed, but never delivered")
        if not due and names:
            yield BrokenPromise(rule, key, "a message was delivered that no committed request has sent")
        if len(names) > 1:
            yield BrokenPromise(rule, key, f"one message was delivered under {len(names)} downstream keys")
    for row in evidence.dead_letters:
        if row["kind"] == "emit":
            yield BrokenPromise(rule, row["key"], f"its message was given up: {row['last_error']}")


def _money(evidence: RunEvidence) -> Iterator[BrokenPromise]:
    """The charges equal the acknowledged amounts, to the cent, and an unknown request is charged once at most."""
    rule = Rule.CONSERVED
    for key, intended in evidence.intended_requests.items():
        lines, record = evidence.charges.get(key, ()), evidence.records.get(key)
        cents = [line.cents for line in lines]
        if not intended.charges:
            if lines:
                yield BrokenPromise(rule, key, "it was charged, but no charge was allowed")
        elif record is None or record.state is State.FAILED_RETRYABLE:
            if lines and not (record is not None and record.resumable):
                yield BrokenPromise(rule, key, f"it was charged {cents}, but no record shows it")
        elif record.state is State.COMPLETED:
            expected = [_cents(record)] if record.status == _CREATED else []
            if cents != expected:
                yield BrokenPromise(rule, key, f"it returned {record.status} for {expected}, but charged {cents}")
            elif lines and _charge_of(record) != lines[0].id:
                yield BrokenPromise(rule, key, "its response names another charge than the ledger")
    strangers = set(evidence.charges) - set(evidence.intended_requests)
    for key in sorted(strangers):
        yield BrokenPromise(rule, key, "it was charged, but no client requested it")


def _left(evidence: RunEvidence) -> Iterator[BrokenPromise]:
    """After the faults have ended nothing waits, and every client has a final response."""
    for key in evidence.intended_requests:
        record = evidence.records.get(key)
        if key not in evidence.answered:
            yield BrokenPromise(Rule.PROGRESS, key, "its client never received a final response")
        if record is not None and record.state is State.FAILED_RETRYABLE and record.resumable:
            yield BrokenPromise(Rule.PROGRESS, key, "it can be resumed, but no worker resumed it")
    for row in evidence.parcels:
        yield BrokenPromise(Rule.EMPTY, row["key"], f"a parcel of {row['topic']} is still {row['state']}")


def _unknown(evidence: RunEvidence) -> Iterator[BrokenPromise]:
    """A record is unknown only if its call may not be repeated."""
    rule = Rule.TRUTH
    for key, record in evidence.records.items():
        intended = evidence.intended_requests.get(key)
        if record.state is State.UNKNOWN and intended is not None and not _cannot_be_known(intended):
            yield BrokenPromise(rule, key, f"it is unknown ({record.last_error}), but its call was repeatable")


def _last_owner(evidence: RunEvidence) -> Iterator[BrokenPromise]:
    """The stored response is that of the last owner of the record."""
    for key, record in evidence.records.items():
        attempt = _body(record).get("attempt")
        if record.state is State.COMPLETED and attempt is not None and attempt != record.attempts:
            yield BrokenPromise(
                Rule.FENCED, key, f"attempt {attempt} sent the response, but the record has {record.attempts}"
            )


LOOKS: Final[tuple[Callable[[RunEvidence], Iterator[BrokenPromise]], ...]] = (
    _outbox,
    _money,
    _left,
    _unknown,
    _last_owner,
)


def _cannot_be_known(intended: IntendedRequest) -> bool:
    return intended.charges and not intended.wanted.recognises


def _cents(record: FinalRecord) -> int:
    return int(record.fingerprint.partition(" ")[0])


def _charge_of(record: FinalRecord) -> object:
    return _body(record).get("charge")


def _body(record: FinalRecord) -> dict[str, object]:
    try:
        found = json.loads(record.body or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
