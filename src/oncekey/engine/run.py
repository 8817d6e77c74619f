"""The state of one operation, its parcels, and the state that all operations of one installation share."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Final
from uuid import uuid5

from oncekey.canonical.digests import downstream_key
from oncekey.core.errors import ConfigurationError
from oncekey.core.lazy import Lazy
from oncekey.core.model import LONGEST_NAME, Effects, Parcel, ParcelKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from oncekey.core.model import Claim, Instant, Lease, Proceed, Record, RecordId, Refuse
    from oncekey.core.onecommit import Lock as KeyLock
    from oncekey.core.policy import Policy
    from oncekey.engine import notifying, phases
    from oncekey.engine.actions import Life, Tx
    from oncekey.engine.enrolment import Enrolment
    from oncekey.engine.fronts import Fronts, RouteFronts
    from oncekey.engine.local import LockHeld
    from oncekey.observe.events import Notify
    from oncekey.ports.store import Asker, Pulse, Store
else:
    notifying = Lazy("oncekey.engine.notifying")
    phases = Lazy("oncekey.engine.phases")

FAILURES = 5
"""How many outages in a row open the breaker."""

PAUSE = 1.0
"""How many seconds the breaker stays open before one request may try."""


class Breaker:
    """A circuit breaker: while the store is down, requests are refused without a query, except one probe per pause."""

    __slots__ = ("_clock", "_tries_at", "failures")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.failures = 0
        """The number of outages in a row; nearly always 0."""
        self._tries_at = 0.0

    @property
    def closed(self) -> bool:
        """Whether fewer than `FAILURES` outages occurred in a row."""
        return self.failures < FAILURES

    def allows(self) -> bool:
        """Whether a request may query the store; an open breaker lets one through per pause."""
        if self.failures < FAILURES:
            return True
        if self._clock() < self._tries_at:
            return False
        self._tries_at = self._clock() + PAUSE
        return True

    def failed(self) -> None:
        """Note that the store could not be reached."""
        self.failures += 1
        if self.failures >= FAILURES:
            self._tries_at = self._clock() + PAUSE

    def worked(self) -> None:
        """Note that the store replied."""
        self.failures = 0


MOST_KEYS: Final = 10_000


class SettledKeys:
    """The keys that this process settled recently, for which a stored response is likely.

    A key here proves nothing: it only decides which query comes first. Several threads may add at once, and removing
    the oldest key takes three steps, so `add` takes a lock; a reader needs none.
    """

    __slots__ = ("_adding", "_most", "known")

    def __init__(self, most: int = MOST_KEYS) -> None:
        self.known: OrderedDict[RecordId, None] = OrderedDict()  # a dict scans removed entries to find its oldest
        self._most = most
        self._adding = Lock()

    def add(self, record_id: RecordId) -> None:
        """Note that the key's response is stored; if there are too many keys, the oldest one is removed."""
        known = self.known
        with self._adding:
            if len(known) >= self._most and record_id not in known:
                known.popitem(last=False)
            known[record_id] = None


@dataclass(slots=True)
class Site:
    """State shared by the operations of one installation, on one event loop or in one set of threads."""

    store: Store
    breaker: Breaker
    clock: Callable[[], float]
    """Seconds since an arbitrary start, for time limits."""
    boot: Callable[[], float]
    """Seconds since an arbitrary start, by a clock that continues while the machine sleeps."""
    stopping: Callable[[], bool] = bool
    """Whether the process is stopping: then phased handlers begin no further step."""
    is_full: Callable[[bool], bool] = bool
    """Whether a new business transaction of an `async def` (False) or `def` handler (True) would have to wait."""
    wake: Callable[[], None] = field(default=lambda: None)
    """Wakes the relay of this process, if it has one, after parcels were committed."""
    inline_calls: Callable[[], Mapping[str, str]] = dict
    """The calls of INLINE handlers by operation, if their provider has a resolver or sends webhooks."""
    settled_keys: SettledKeys = field(default_factory=SettledKeys)
    notify: Notify | None = None
    """Reports events to the observers; None: there are none."""
    fronts: Callable[[], Fronts | None] = field(default=lambda: None)
    """The fronts before the store; only a route with `Policy.replay_cache` or `Policy.lock_hint` uses them."""


class Run:
    """The state of one operation. The flow writes it; the adapter, the handler and its steps read it."""

    __slots__ = (
        "_lock",
        "asked_at",
        "asker",
        "claim",
        "claiming",
        "dependencies_hold_connections",
        "early_tx_rolled_back",
        "enrolment",
        "expires_at",
        "front",
        "front_note",
        "has_early_tx",
        "lease",
        "limits",
        "notifier",
        "now",
        "one_commit",
        "parcels",
        "phased_run",
        "policy",
        "pulse",
        "record",
        "resumed",
        "seed",
        "site",
        "store",
        "tx",
    )

    def __init__(
        self,
        site: Site,
        claim: Claim,
        enrolment: Enrolment,
        asker: Asker,
        *,
        resumed: bool = False,
        limits: Life[Refuse | None] | None = None,
        tx: Tx = None,
        dependencies_hold_connections: bool = False,
    ) -> None:
        self.site = site
        self.store: Store = site.store
        self.claim = claim
        self.enrolment = enrolment
        self.policy: Policy = enrolment.policy
        self.asker = asker
        self.resumed = resumed
        """A completer resumes the operation, without the client."""
        self.limits = limits
        """The flow that refuses a request if there are too many; None if the route has no limits."""
        self.tx: Tx = tx
        """The business transaction, once it is open."""
        self.has_early_tx = tx is not None
        """The transaction was opened before the claim, for a dependency or by the framework; no other replaces it."""
        self.dependencies_hold_connections = dependencies_hold_connections
        """Dependencies hold the transaction, or a read-only session or connection, since before the claim."""
        self.early_tx_rolled_back = False
        """The early transaction was rolled back: the handler cannot write through it any more."""
        self.claiming = False
        """A claim was sent: after an interruption it may be stored."""
        self.one_commit: LockHeld | None = None
        """Set for LOCAL in one commit. None: the record was claimed first."""
        self.lease: Lease | None = None
        self.record: Record | None = None
        """The record at the claim; None for a new key in one commit."""
        self.now: Instant = 0
        self.asked_at = 0.0
        """When the store was queried, if there is a front."""
        self.front_note: bytes | None = None
        """The name of the front's note that this key is in progress, if there is one."""
        self.expires_at: Instant | None = None
        """When the stored response expires; None before it is stored."""
        self.pulse: Pulse | None = None
        self.seed = claim.seed
        """The seed of downstream keys: the first claim's, for all attempts."""
        self.parcels: Parcels
        """The handler's parcels; set when the handler may run."""
        self.phased_run: phases.PhasedRun | None = None
        """The steps of a phased handler."""
        self._lock: KeyLock | None = None
        self.notifier: notifying.Notifier | None = None
        """Reports this operation to the observers, if there are any."""
        fronts = site.fronts() if enrolment.fronted and not resumed else None
        self.front: RouteFronts | None = None if fronts is None else fronts.of(enrolment)
        """The front that is read before the store."""
        if site.notify is not None:
            self.notifier = notifying.Notifier(site.notify, claim, site.clock, resumed=resumed)

    @property
    def lock(self) -> KeyLock:
        """The lock of LOCAL in one commit."""
        if self._lock is None:
            self._lock = self.enrolment.locks.of(self.claim.id, self.claim.fingerprint)
        return self._lock

    def proceeds(self, verdict: Proceed) -> None:
        """Note that the handler may run."""
        record = verdict.record
        self.lease = lease = verdict.lease
        self.record, self.now = record, verdict.now
        if self.one_commit is None:
            self.expires_at = lease.expires_at
        if record is None:
            self.parcels = Parcels(lease, self.seed)
            return
        self.seed = record.seed
        self.parcels = Parcels(lease, record.seed)
        # A record that was begun under other effects continues with its steps, too.
        if self.enrolment.effects is Effects.PHASED or record.memo or record.intent is not None:
            site = self.site
            self.phased_run = phases.PhasedRun.of(
                record, lease, self.policy, verdict.now, site.boot, stopping=site.stopping
            )
            self.phased_run.notifier = self.notifier

    def lost(self) -> bool:
        """Whether another owner has the key by now."""
        return self.pulse is not None and self.pulse.lost


LONGEST_TOPIC: Final = LONGEST_NAME
"""A deferred call is the only step of its record, and is named after its topic."""
DEFERRED_TWICE: Final = "op.defer was called twice: one parcel is the request's own call, use op.emit for others"


class Parcels:
    """The parcels of one operation. Their ids and downstream keys are derived: every attempt creates the same ones."""

    __slots__ = ("_lease", "_made", "_seed", "deferred", "emitted", "used")

    def __init__(self, lease: Lease, seed: bytes) -> None:
        self._lease = lease
        self._seed = seed
        self._made = 0
        self.deferred: tuple[Parcel, ...] = ()
        self.emitted: tuple[Parcel, ...] = ()
        self.used = False
        """Whether any parcel was created: then the relay is woken."""

    def emit(self, topic: str, payload: object, order_by: str | None, phase: str = "") -> None:
        """Add a message."""
        self.emitted += (self._parcel(ParcelKind.EMIT, topic, payload, order_by, phase),)

    def defer(self, topic: str, payload: object) -> None:
        """Add the request's deferred call."""
        if self.deferred:
            raise ConfigurationError(DEFERRED_TWICE)
        self.deferred = (self._parcel(ParcelKind.DEFER, topic, payload, None, ""),)

    def take(self) -> tuple[Parcel, ...]:
        """Take the new parcels. Each phase numbers its own from zero, so a phase that is resumed creates the same."""
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
            # A deferred call is named after its topic, wherever in the handler it was deferred.
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
    """Whether every store can store it: PostgreSQL's text has no NUL, and UTF-8 has no lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return "\0" not in text
