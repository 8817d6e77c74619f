"""The state of one operation during its life, and what all operations of one installation share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from oncekey.core.model import Effects
from oncekey.engine.notifying import Notifier
from oncekey.engine.parcels import Parcels
from oncekey.engine.phases import PhasedRun
from oncekey.engine.recent import Hints

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from oncekey.core.model import Claim, Instant, Lease, Proceed, Record, Refuse
    from oncekey.core.onecommit import Lock
    from oncekey.core.policy import Policy
    from oncekey.engine.admit import Breaker
    from oncekey.engine.effects import Life, Pulse, Tx
    from oncekey.engine.enrolment import Enrolment
    from oncekey.engine.fronts import Beside, Fronts
    from oncekey.engine.local import Entered
    from oncekey.observe.events import Notify
    from oncekey.ports import Store


@dataclass(slots=True)
class Site:
    """What the operations of one installation share, on one event loop or in one set of threads."""

    store: Store
    breaker: Breaker
    clock: Callable[[], float]
    """Seconds from any start, for time limits."""
    boot: Callable[[], float]
    """Seconds from any start, by a clock that goes on while the machine sleeps."""
    stopping: Callable[[], bool] = bool
    """Whether the process is stopping: then phased handlers begin no further step."""
    crowded: Callable[[bool], bool] = bool
    """Whether a new business transaction of an `async def` (False) or `def` handler (True) would have to wait."""
    wake: Callable[[], None] = field(default=lambda: None)
    """Wakes the relay of this process, if it has one, after parcels were committed."""
    inline_calls: Callable[[], Mapping[str, str]] = dict
    """By operation, the call of INLINE handlers whose provider has a resolver or sends webhooks."""
    hints: Hints = field(default_factory=Hints)
    notify: Notify | None = None
    """Reports events to the observers; None: there are none."""
    fronts: Fronts | None = None
    """The fronts before the store; a route uses them by `Policy.replay_cache` and `Policy.lock_hint`."""


class Asker(Protocol):
    """The request that is to be answered, as far as a refusal or a replay needs it."""

    @property
    def echo(self) -> bytes | None:
        """The key's header field as the client wrote it."""

    @property
    def status_url(self) -> str | None:
        """The URL of the key's status resource."""


class Run:
    """The state of one operation. The flow writes it; the adapter, the handler and its steps read it."""

    __slots__ = (
        "_lock",
        "asked_at",
        "asker",
        "borrowed",
        "claim",
        "claiming",
        "enrolment",
        "entered",
        "expires_at",
        "front",
        "held",
        "lease",
        "lends",
        "limits",
        "notifier",
        "now",
        "parcels",
        "phased_run",
        "policy",
        "pulse",
        "record",
        "released",
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
        lends: bool = False,
    ) -> None:
        self.site = site
        self.store: Store = site.store
        self.claim = claim
        self.enrolment = enrolment
        self.policy: Policy = enrolment.policy
        self.asker = asker
        self.resumed = resumed
        """The completer asks, without the client."""
        self.limits = limits
        """The flow that refuses a request if there are too many; None if the route has no limits."""
        self.tx: Tx = tx
        """The business transaction, once it is open."""
        self.borrowed = tx is not None
        """A framework dependency used the transaction before the claim, so it cannot be opened anew."""
        self.lends = lends
        """A framework dependency got something before the claim: the transaction, or a session that only reads."""
        self.released = False
        """The transaction that a dependency used is rolled back: the handler cannot write through it any more."""
        self.claiming = False
        """A claim was sent: if the request is interrupted now, it may have been made."""
        self.entered: Entered | None = None
        """Set for LOCAL in one commit. None: the record was claimed first."""
        self.lease: Lease | None = None
        self.record: Record | None = None
        """The record at the claim; None for a new key in one commit."""
        self.now: Instant = 0
        self.asked_at = 0.0
        """When the store was asked, if there is a front."""
        self.front: Beside | None = None
        """The front that is asked before the store."""
        self.held: bytes | None = None
        """The name of the note in the front which says that this key is in progress, if there is one."""
        self.expires_at: Instant | None = None
        """Until when the answer is kept; None before it is stored."""
        self.pulse: Pulse | None = None
        self.seed = claim.seed
        """The seed of downstream keys: the first claim's, for all attempts."""
        self.parcels: Parcels
        """The handler's parcels; set when the handler may run."""
        self.phased_run: PhasedRun | None = None
        """The steps of a phased handler."""
        self._lock: Lock | None = None
        self.notifier: Notifier | None = None
        """Reports this operation to the observers, if there are any."""
        if enrolment.fronted and not resumed and site.fronts is not None:
            self.front = site.fronts.of(enrolment)
        if site.notify is not None:
            self.notifier = Notifier(site.notify, claim, site.clock, resumed=resumed)

    @property
    def lock(self) -> Lock:
        """The lock of LOCAL in one commit."""
        if self._lock is None:
            self._lock = self.enrolment.locks.of(self.claim.id, self.claim.fingerprint)
        return self._lock

    def proceeds(self, verdict: Proceed) -> None:
        """Take the verdict that the handler may run."""
        record = verdict.record
        self.lease = lease = verdict.lease
        self.record, self.now = record, verdict.now
        if self.entered is None:
            self.expires_at = lease.expires_at
        if record is None:
            self.parcels = Parcels(lease, self.seed)
            return
        self.seed = record.seed
        self.parcels = Parcels(lease, record.seed)
        # A record that was begun under other effects goes on with its steps, too.
        if self.enrolment.effects is Effects.PHASED or record.memo or record.intent is not None:
            site = self.site
            self.phased_run = PhasedRun.of(record, lease, self.policy, verdict.now, site.boot, stopping=site.stopping)
            self.phased_run.notifier = self.notifier

    def lost(self) -> bool:
        """Whether another owner has the key by now."""
        return self.pulse is not None and self.pulse.lost
