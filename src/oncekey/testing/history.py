"""What happened, as plain data: what clients saw, what was done to the world, and what the store wrote.

A simulated run and a crash test against real servers both end as a `History`. Nothing in it is believed: the
effects come from the provider's own ledger and the business tables, not from what a handler said it did.

`at`, `invoked` and `ended` are places in one total order of events (a counter, or a monotonic clock). A life
of a key is its `incarnation`; where a test cannot know it, `None` stands for the only life the key had.
What a source of writes does not know stays `None`, and the checks that need it are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """How an operation ended for its client."""

    OK = "ok"
    """With the key's answer."""
    FAIL = "fail"
    """Refused or undone: the server said that this operation changed nothing."""
    INFO = "info"
    """Nobody told the client whether it happened."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One request of a client and what it heard."""

    id: str
    scope: str
    key: str
    fingerprint: str
    invoked: int
    ended: int | None
    kind: Kind
    status: int | None = None
    body: bytes | None = None
    replayed: bool = False
    code: str | None = None
    incarnation: str | None = None
    client: str = ""
    latest: int | None = None
    """The latest that the store's clock said while it was under way."""
    promises: tuple[str, ...] = ()
    """The kinds of effects that a success of it means; without any, one of whatever kind will do."""


@dataclass(frozen=True, slots=True)
class Effect:
    """One thing that was done: a line of a provider's ledger, or a business row. `undone` if it was reversed.

    A request may do several things, each once: `kind` tells them apart.
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
    """What a write compared before it wrote."""

    NO_ROW = "no row"
    OWNER = "incarnation and fence"
    VERSION = "incarnation and version"


@dataclass(frozen=True, slots=True)
class Write:
    """One committed write to a record, in the order of the commits. `state` is None when the row was deleted.

    `now` is the store's clock and `elapsed` a clock that nobody can set. `seen_at` is the latest instant, by
    the store's clock, at which anybody looked at the row as it was before: a clock that was then set back
    does not make wrong what was decided at that look. `clock` is what the store's clock said just before the
    statement was said, and `steps` how many finished steps the row remembers.
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
    """A record as it stands at the end. `ticket`: somebody is due to look at it."""

    scope: str
    key: str
    incarnation: str
    state: str
    fingerprint: str | None = None
    status: int | None = None
    body: bytes | None = None
    ticket: bool = False
    begun: bool = False
    """It has finished steps or an open call, so whoever comes next goes on with it."""


class Lapse(StrEnum):
    """What can be seen only while it happens: no record and no row tells of it afterwards."""

    OVERLAP = "two handlers of a key ran at once, though the first one's transaction, and with it the lock, was open"
    HELD = "a request waited with a transaction in its hands"


@dataclass(frozen=True, slots=True)
class Sighting:
    """A lapse that was seen, of one operation."""

    lapse: Lapse
    scope: str
    key: str
    operation: str
    at: int


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One message of the outbox by its downstream key, and where it was seen."""

    id: str
    scope: str
    key: str
    committed: bool
    delivered: int = 0
    waiting: bool = False
    dead: bool = False


@dataclass(frozen=True, slots=True)
class History:
    """Everything there is to check. `healed`: faults had stopped and workers had time to finish."""

    operations: tuple[Operation, ...] = ()
    ledger: tuple[Effect, ...] = ()
    business: tuple[Effect, ...] = ()
    writes: tuple[Write, ...] = ()
    records: tuple[Final, ...] = ()
    outbox: tuple[Dispatch, ...] = ()
    sightings: tuple[Sighting, ...] = ()
    healed: bool = False
