"""The history of a run as plain data: the clients' responses, the effects, and the store's writes.

A simulated run and a crash test against real servers both produce a `History`. Its effects come from the provider's
ledger and the business tables, not from the handlers' reports.

`at`, `invoked` and `ended` are positions in one total order of events (a counter, or a monotonic clock). `incarnation`
identifies a life of a key; None means the only one, if the source has no incarnations. A field that the source of a
write cannot provide is None, and the checks that need it are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise


class ClientSaw(StrEnum):
    """How an operation ended for its client."""

    OK = "ok"
    """With the key's response."""
    FAIL = "fail"
    """Refused or rolled back: by the response, this operation changed nothing."""
    INFO = "info"
    """Without a response that shows whether it was executed."""


@dataclass(frozen=True, slots=True)
class ClientOperation:
    """One request of a client, and its response."""

    id: str
    scope: str
    key: str
    fingerprint: str
    invoked: int
    ended: int | None
    kind: ClientSaw
    status: int | None = None
    body: bytes | None = None
    replayed: bool = False
    code: str | None = None
    incarnation: str | None = None
    client: str = ""
    latest: int | None = None
    """The latest instant of the store's clock during the request."""
    promises: tuple[str, ...] = ()
    """The kinds of effects that a success implies; if empty, one effect of any kind."""


@dataclass(frozen=True, slots=True)
class Effect:
    """One effect: a row of a provider's ledger, or a business row. `undone` if it was reversed.

    A request may have several effects, each once: `kind` distinguishes them.
    """

    id: str
    scope: str
    key: str
    fingerprint: str
    at: int
    operation: str | None = None
    incarnation: str | None = None
    undone: bool = False
    kind: str = ""


class Proof(StrEnum):
    """The columns that a write compared before it wrote."""

    NO_ROW = "no row"
    OWNER = "incarnation and fence"
    VERSION = "incarnation and version"


@dataclass(frozen=True, slots=True)
class Write:
    """One committed write to a record, in the order of the commits. `state` is None when the row was deleted.

    `now` is the store's clock and `elapsed` a monotonic clock. `seen_at` is the latest instant, by the store's clock,
    at which the row was read as it was before: a decision based on that read stays correct, even if the clock was set
    back afterwards. `clock` is the store's clock just before the statement, and `steps` the number of finished steps in
    the row.
    """

    at: int
    scope: str
    key: str
    state: str | None
    incarnation: str
    fence: int
    version: int
    name: str = ""
    operation: str | None = None
    fingerprint: str | None = None
    now: int | None = None
    seen_at: int | None = None
    elapsed: int | None = None
    lease_until: int | None = None
    expires_at: int | None = None
    ttl: int | None = None
    proof: Proof | None = None
    proven_incarnation: str | None = None
    proven_fence: int | None = None
    proven_version: int | None = None
    clock: int | None = None
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class Final:
    """A record at the end of a run. `ticket`: a resolver or an operator is due to check it."""

    scope: str
    key: str
    incarnation: str
    state: str
    fingerprint: str | None = None
    status: int | None = None
    body: bytes | None = None
    ticket: bool = False
    begun: bool = False
    """It has finished steps or an open call, so the next owner resumes it."""


class Lapse(StrEnum):
    """A fault that can be observed only while it happens: no record and no row shows it afterwards."""

    OVERLAP = "two handlers of a key ran at once, although the first one's transaction, and with it the lock, was open"
    HELD = "a request waited while it held a transaction"


@dataclass(frozen=True, slots=True)
class LapseSighting:
    """An observed lapse of one operation."""

    lapse: Lapse
    scope: str
    key: str
    operation: str
    at: int


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One message of the outbox, by its downstream key, and its state at the end of the run."""

    id: str
    scope: str
    key: str
    committed: bool
    delivered: int = 0
    waiting: bool = False
    dead: bool = False


@dataclass(frozen=True, slots=True)
class History:
    """The checker's input. `healed`: the faults had ended, and the workers had time to finish."""

    operations: tuple[ClientOperation, ...] = ()
    ledger: tuple[Effect, ...] = ()
    business: tuple[Effect, ...] = ()
    writes: tuple[Write, ...] = ()
    records: tuple[Final, ...] = ()
    outbox: tuple[Dispatch, ...] = ()
    sightings: tuple[LapseSighting, ...] = ()
    healed: bool = False


@dataclass(frozen=True, slots=True)
class Life:
    """One incarnation of a key: from the write that began it to the one that deleted or replaced it."""

    incarnation: str
    fingerprint: str | None
    began: int
    ended: int | None
    expires_at: int | None = None
    """From its last write: after this time the key may be used for a new request, even if the row still exists."""

    def binds(self, operation: ClientOperation) -> bool:
        """Whether the life had not expired during an operation, as far as the history shows."""
        return self.expires_at is None or operation.latest is None or operation.latest < self.expires_at

    def spans(self, begin: int, end: int) -> bool:
        """Whether the record existed in this life during the whole time between two events."""
        return self.began < begin and self.lasts(end)

    def lasts(self, until: int) -> bool:
        """Whether the record still existed in this life at an event."""
        return self.ended is None or self.ended > until


@dataclass(frozen=True)
class Story:
    """The history of one key."""

    scope: str
    key: str
    healed: bool
    operations: list[ClientOperation] = field(default_factory=list)
    ledger: list[Effect] = field(default_factory=list)
    business: list[Effect] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    records: list[Final] = field(default_factory=list)
    outbox: list[Dispatch] = field(default_factory=list)
    sightings: list[LapseSighting] = field(default_factory=list)

    @cached_property
    def effects(self) -> list[Effect]:
        """The effects that were not undone."""
        return [effect for effect in (*self.ledger, *self.business) if not effect.undone]

    @cached_property
    def lives(self) -> dict[str, Life]:
        """The lives that the writes show, by incarnation."""
        lives: dict[str, Life] = {}
        current: Life | None = None
        for write in self.writes:
            if current is not None and (write.state is None or write.incarnation != current.incarnation):
                lives[current.incarnation] = replace(current, ended=write.at)
                current = None
            if write.state is None:
                continue
            if current is None:
                current = Life(write.incarnation, write.fingerprint, write.at, None)
            lives[write.incarnation] = current = replace(current, expires_at=write.expires_at)
        return lives

    def life_of(self, item: ClientOperation | Effect) -> str:
        """The life of a response or an effect; "" is the only one."""
        if item.incarnation is not None:
            return item.incarnation
        return self._only_life

    @cached_property
    def _only_life(self) -> str:
        known: dict[str | None, None] = {}
        for items in (self.writes, self.records, self.operations, self.ledger, self.business):
            known |= dict.fromkeys(item.incarnation for item in items)
        known.pop(None, None)
        return next(iter(known)) or "" if len(known) == 1 else ""

    def changes(self) -> Iterator[tuple[Write | None, Write]]:
        """Each write with the row before it; None if there was no row."""
        for before, after in pairwise((None, *self.writes)):
            assert after is not None
            yield (None if before is None or before.state is None else before), after

    def lines(self) -> tuple[str, ...]:
        """The story as text, in the order of events."""
        lines = [(op.invoked, f"{op.id} sent with {op.fingerprint}") for op in self.operations]
        lines += [(op.ended, _answer_line(op)) for op in self.operations if op.ended is not None]
        lines += [(one.at, f"charged at the provider: {_done(one)}") for one in self.ledger]
        lines += [(one.at, f"business row committed: {_done(one)}") for one in self.business]
        lines += [(write.at, _wrote(write)) for write in self.writes]
        lines.sort(key=lambda line: line[0])
        return tuple(f"{at:>5}  {text}" for at, text in lines)


def stories(history: History) -> list[Story]:
    """The stories of a history, one for each key: keys do not affect each other."""
    found: dict[tuple[str, str], Story] = {}

    def of(scope: str, key: str) -> Story:
        return found.setdefault((scope, key), Story(scope, key, history.healed))

    for operation in history.operations:
        of(operation.scope, operation.key).operations.append(operation)
    for effect in history.ledger:
        of(effect.scope, effect.key).ledger.append(effect)
    for effect in history.business:
        of(effect.scope, effect.key).business.append(effect)
    for write in sorted(history.writes, key=lambda write: write.at):
        of(write.scope, write.key).writes.append(write)
    for record in history.records:
        of(record.scope, record.key).records.append(record)
    for dispatch in history.outbox:
        of(dispatch.scope, dispatch.key).outbox.append(dispatch)
    for sighting in history.sightings:
        of(sighting.scope, sighting.key).sightings.append(sighting)
    return list(found.values())


def _answer_line(op: ClientOperation) -> str:
    what = op.code or f"{op.status} {op.body!r}"
    return f"{op.id} got {op.kind}: {what}{' (replayed)' if op.replayed else ''}"


def _done(effect: Effect) -> str:
    by = f" by {effect.operation}" if effect.operation else ""
    return f"{effect.id} for {effect.fingerprint}{by}"


def _wrote(write: Write) -> str:
    row = f"incarnation {write.incarnation[:8]} fence {write.fence} version {write.version}"
    by = f" by {write.operation}" if write.operation else ""
    return f"{write.name or 'write'}{by}: {write.state or 'row deleted'}, {row}"
