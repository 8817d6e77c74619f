"""The state of one operation on its way through the lifecycle, and what all operations of one installation share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from oncekey.core.model import Effects
from oncekey.engine.parcels import Parcels
from oncekey.engine.phases import Course
from oncekey.engine.recent import Hints
from oncekey.engine.telling import Teller

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from oncekey.core.locks import Lock
    from oncekey.core.model import Claim, Instant, Lease, Proceed, Record, Refuse
    from oncekey.core.policy import Policy
    from oncekey.engine.breaker import Breaker
    from oncekey.engine.effects import Life, Pulse, Tx
    from oncekey.engine.enrolment import Enrolment
    from oncekey.engine.fronts import Beside, Fronts
    from oncekey.engine.local import Go
    from oncekey.observe.events import Tell
    from oncekey.ports import Store


@dataclass(slots=True)
class Site:
    """What the operations of one installation share, on one event loop or in one set of threads."""

    store: Store
    breaker: Breaker
    clock: Callable[[], float]
    """Seconds for patience, from any start."""
    boot: Callable[[], float]
    """Seconds that go on while the machine sleeps, from any start."""
    stopping: Callable[[], bool] = bool
    """Whether the process is being stopped: then phased handlers begin no further step."""
    crowded: Callable[[bool], bool] = bool
    """Whether the business transaction of an `async def` (False) or `def` handler (True) would have to wait for one."""
    wake: Callable[[], None] = field(default=lambda: None)
    """Tells the workers of this process, if it has such, that parcels were committed."""
    inline_calls: Callable[[], Mapping[str, str]] = dict
    """By operation, the call of INLINE handlers whose provider is asked or reports by webhook."""
    hints: Hints = field(default_factory=Hints)
    tell: Tell | None = None
    """Tells those who observe; None: nobody does."""
    fronts: Fronts | None = None
    """What stands in front of the store; routes ask for it by `Policy.replay_cache` and `Policy.lock_hint`."""


class Asker(Protocol):
    """The request that is to be answered: asked only for what a refusal or a replay needs."""

    @property
    def echo(self) -> bytes | None:
        """The line of the key as the client wrote it."""

    @property
    def status_url(self) -> str | None:
        """Where the key's state can be read."""


class Run:
    """What is known of one operation. The flow writes it; the adapter, the handler and its steps read it."""

    __slots__ = (
        "_lock",
        "asked_at",
        "asker",
        "borrowed",
        "claim",
        "claiming",
        "course",
        "enrolment",
        "expires_at",
        "front",
        "go",
        "held",
        "lease",
        "lends",
        "limits",
        "now",
        "parcels",
        "policy",
        "pulse",
        "record",
        "resumed",
        "seed",
        "site",
        "spent",
        "store",
        "teller",
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
        """A completer asks, in the client's stead."""
        self.limits = limits
        """What says whether there are too many like it; None where the route has no limits."""
        self.tx: Tx = tx
        """The business transaction, once there is one."""
        self.borrowed = tx is not None
        """A dependency was lent the transaction before the claim, so it cannot be opened anew."""
        self.lends = lends
        """A dependency was lent something, the transaction or only a session to read through."""
        self.spent = False
        """What a dependency was lent is rolled back: the handler cannot write through it any more."""
        self.claiming = False
        """A claim was sent: interrupted now, it may have been made."""
        self.go: Go | None = None
        """Set: LOCAL in one commit. Unset: the record was claimed first."""
        self.lease: Lease | None = None
        self.record: Record | None = None
        """As it was when it was claimed; there is none of a new key in one commit."""
        self.now: Instant = 0
        self.asked_at = 0.0
        """When the store was asked, where something stands in front of it."""
        self.front: Beside | None = None
        """What is asked before the store."""
        self.held: bytes | None = None
        """Under which name duplicates are told of it without the store, if they are."""
        self.expires_at: Instant | None = None
        """Until when the answer is kept; None while it is not."""
        self.pulse: Pulse | None = None
        self.seed = claim.seed
        """What downstream keys are derived from: the first claim's, over all attempts."""
        self.parcels: Parcels
        """What the handler hands to the outbox; there is none before it may run."""
        self.course: Course | None = None
        """The steps of the handler, if it has such."""
        self._lock: Lock | None = None
        self.teller: Teller | None = None
        """Tells what becomes of it, where somebody observes."""
        if enrolment.fronted and not resumed and site.fronts is not None:
            self.front = site.fronts.of(enrolment)
        if site.tell is not None:
            self.teller = Teller(site.tell, claim, site.clock, resumed=resumed)

    @property
    def lock(self) -> Lock:
        """What LOCAL in one commit locks."""
        if self._lock is None:
            self._lock = self.enrolment.locks.of(self.claim.id, self.claim.fingerprint)
        return self._lock

    def proceeds(self, verdict: Proceed) -> None:
        """The handler may run: what is known of it from now on."""
        record = verdict.record
        self.lease = lease = verdict.lease
        self.record, self.now = record, verdict.now
        if self.go is None:
            self.expires_at = lease.expires_at
        if record is None:
            self.parcels = Parcels(lease, self.seed)
            return
        self.seed = record.seed
        self.parcels = Parcels(lease, record.seed)
        # What was begun under other effects goes on with steps, too.
        if self.enrolment.effects is Effects.PHASED or record.memo or record.intent is not None:
            site = self.site
            self.course = Course.of(record, lease, self.policy, verdict.now, site.boot, stopping=site.stopping)
            self.course.teller = self.teller

    def lost(self) -> bool:
        """Whether somebody else owns the key by now."""
        return self.pulse is not None and self.pulse.lost
