"""The state of one operation on its way through the lifecycle, and what all operations of one installation share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from oncekey.core.locks import lock_of
from oncekey.core.model import Effects
from oncekey.engine.parcels import Parcels
from oncekey.engine.phases import Course
from oncekey.engine.recent import Answers, Hints

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from oncekey.core.locks import Lock
    from oncekey.core.model import Claim, Instant, Lease, Record, Refuse
    from oncekey.core.policy import Policy
    from oncekey.engine.breaker import Breaker
    from oncekey.engine.effects import Life, Pulse, Tx
    from oncekey.engine.enrolment import Enrolment
    from oncekey.engine.local import Go
    from oncekey.ports import Store

SCHEMA: Final = "oncekey"


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
    answers: Answers | None = None
    """Finished answers in memory; routes ask for them by `Policy.replay_cache`."""


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
        "_course",
        "_lock",
        "_parcels",
        "asker",
        "borrowed",
        "claim",
        "claiming",
        "enrolment",
        "expires_at",
        "go",
        "lease",
        "lends",
        "limits",
        "now",
        "policy",
        "pulse",
        "record",
        "resumed",
        "site",
        "spent",
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
        self.now: Instant = 0
        self.expires_at: Instant = 0
        self.pulse: Pulse | None = None
        self._course: Course | None = None
        self._parcels: Parcels | None = None
        self._lock: Lock | None = None

    @property
    def lock(self) -> Lock:
        """What LOCAL in one commit locks."""
        if self._lock is None:
            self._lock = lock_of(SCHEMA, self.claim.id, self.claim.fingerprint, self.policy.secret)
        return self._lock

    @property
    def parcels(self) -> Parcels:
        """What the handler hands to the outbox."""
        if self._parcels is None:
            assert self.lease is not None
            self._parcels = Parcels(self.lease, self.seed)
        return self._parcels

    @property
    def emits(self) -> Parcels | None:
        """The parcels, if the handler has asked for them."""
        return self._parcels

    @property
    def seed(self) -> bytes:
        """What downstream keys are derived from: the first claim's, over all attempts."""
        return self.claim.seed if self.record is None else self.record.seed

    @property
    def course(self) -> Course | None:
        """The steps of the handler. What was begun under other effects goes on with steps, too."""
        record = self.record
        if self._course is None and record is not None and self.lease is not None:
            phased = self.enrolment.effects is Effects.PHASED
            if phased or record.memo or record.intent is not None:
                site = self.site
                self._course = Course.of(record, self.lease, self.policy, self.now, site.boot, stopping=site.stopping)
        return self._course

    def lost(self) -> bool:
        """Whether somebody else owns the key by now."""
        return self.pulse is not None and self.pulse.lost
