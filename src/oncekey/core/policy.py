"""Every setting, with its default and its check: a policy is checked when it is made.

Some settings are a choice between named ways, and a handler's effects do not allow each of them. A setting may forbid a
second run that the effects allow, and never allow one that they forbid (P2, F7): `UNKNOWN` and `FAIL` are the strict
ends and always allowed. Whatever would let a retry run again what may have happened is refused, or needs the promise
`naturally_idempotent=True`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Any, ClassVar, Final, Self, TypeAlias, cast

from oncekey.canonical.fingerprint import Selection
from oncekey.canonical.jcs import BigInts
from oncekey.core import checks
from oncekey.core.checks import Front
from oncekey.core.errors import ConfigurationError
from oncekey.core.headers import KEY_HEADER, NEVER_KEPT
from oncekey.core.keys import HeaderSyntax, KeyFormat
from oncekey.core.model import Duration, Effects, Recovery
from oncekey.core.scope import BindTo


class Flavor(StrEnum):
    """Whose status codes the answers use."""

    IETF = "ietf"
    STRIPE = "stripe"


class InProgress(StrEnum):
    """What a duplicate is answered while the first request is still running."""

    CONFLICT = "conflict"
    ACCEPTED = "accepted"
    WAIT = "wait"


class On5xx(StrEnum):
    """What a server error of an inline handler means for its key."""

    CLASSIFY = "classify"
    RETRY_FRESH = "retry_fresh"
    STORE = "store"


class StoreErrorPolicy(StrEnum):
    """What happens to a request when its key cannot be claimed."""

    FAIL_CLOSED = "fail_closed"
    FAIL_OPEN = "fail_open"


class ExpiryMode(StrEnum):
    """Whether an expired record is deleted, or kept and marked."""

    HARD = "hard"
    SOFT = "soft"


class OnExpired(StrEnum):
    """What a key means once its record has expired."""

    NEW = "new"
    GONE = "gone"


class ErrorFormat(StrEnum):
    """The shape of the bodies of our own refusals."""

    PROBLEM = "problem"
    FAULT = "fault"
    CODE = "code"


class KeyCheck(StrEnum):
    """What is done about a key that looks personal or guessable."""

    OFF = "off"
    WARN = "warn"
    REJECT = "reject"


_MIB: Final = 1024 * 1024
_DAY: Final = timedelta(hours=24)


@lru_cache(maxsize=256)
def micros(span: timedelta) -> Duration:
    """A span in microseconds."""
    return span // timedelta(microseconds=1)


def never_proven(error: BaseException) -> bool:  # noqa: ARG001  (the default of a hook takes what the hook takes)
    """The default of the hook: no error proves by itself that nothing was sent."""
    return False


def lifetime(*, retries: timedelta, recovery: timedelta, audit: timedelta = timedelta()) -> timedelta:
    """The `ttl` that an API needs: `Policy(ttl=lifetime(retries=..., recovery=...))`.

    `retries` is the longest time over which a client sends again, `recovery` the longest outage that clients wait for,
    and `audit` how long you want to look records up. Less than a day is rounded up to one, the shortest default `ttl`.
    """
    for name, span in (("retries", retries), ("recovery", recovery), ("audit", audit)):
        if span < timedelta():
            raise ConfigurationError(f"{name}={span!r} is negative: give the longest time that you expect")
    return max(retries + recovery + audit, _DAY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How keys are read, how long they are kept, and what a duplicate, a crash or an outage means.

    A duration may be given as a number of seconds and a choice by its name; both are kept in their own type.
    """

    key_header: ClassVar[str] = KEY_HEADER

    # The key
    header_syntax: HeaderSyntax = field(default=HeaderSyntax.COMPAT, metadata=checks.choice(HeaderSyntax))
    key_format: KeyFormat = field(default=KeyFormat.OPAQUE, metadata=checks.choice(KeyFormat))
    min_key_length: int | None = field(default=None, metadata=checks.optional(checks.whole(1, 255)))
    max_key_length: int = field(default=255, metadata=checks.whole(1, 255))
    require_key: bool = field(default=True, metadata=checks.flag())
    pii_check: KeyCheck = field(default=KeyCheck.WARN, metadata=checks.choice(KeyCheck))
    guessable_check: KeyCheck = field(default=KeyCheck.WARN, metadata=checks.choice(KeyCheck))
    max_request_age: timedelta | None = field(default=None, metadata=checks.optional(checks.span()))

    # Whose key it is, and which request it stands for
    namespace: str = field(default="", metadata=checks.text(100))
    bind_to: BindTo = field(default=BindTo.TENANT, metadata=checks.choice(BindTo))
    separate_operations: bool = field(default=False, metadata=checks.flag())
    selection: Selection = field(default_factory=Selection, metadata=checks.a(Selection))
    secret: bytes | None = field(default=None, repr=False, metadata=checks.optional(checks.secret_bytes(at_least=16)))
    big_ints: BigInts = field(default=BigInts.EXACT, metadata=checks.choice(BigInts))
    max_json_depth: int = field(default=100, metadata=checks.whole(1, 500))
    max_request_bytes: int = field(default=_MIB, metadata=checks.whole(1))
    body_timeout: timedelta = field(default=timedelta(seconds=60), metadata=checks.span())

    # What a duplicate is answered
    on_in_progress: InProgress = field(default=InProgress.CONFLICT, metadata=checks.choice(InProgress))
    wait_max: timedelta = field(default=timedelta(seconds=10), metadata=checks.span())
    replay_cache: Front | None = field(
        default=None, metadata=checks.optional(checks.front(timedelta(seconds=60), memory=True))
    )
    lock_hint: Front | None = field(
        default=None, metadata=checks.optional(checks.front(timedelta(seconds=2), memory=False))
    )
    on_unknown: int = field(default=409, metadata=checks.one_of(409, 202, 503))

    # What a crash, an error or an outage means
    lease: timedelta = field(default=timedelta(seconds=300), metadata=checks.span())
    deadline: timedelta = field(default=timedelta(hours=1), metadata=checks.span())
    call_timeout: timedelta = field(default=timedelta(seconds=30), metadata=checks.span())
    on_lease_expired: Recovery | None = field(default=None, metadata=checks.optional(checks.choice(Recovery)))
    naturally_idempotent: bool = field(default=False, metadata=checks.flag())
    on_5xx: On5xx = field(default=On5xx.CLASSIFY, metadata=checks.choice(On5xx))
    is_definitely_not_executed: Callable[[BaseException], bool] = field(
        default=never_proven, metadata=checks.function()
    )
    not_executed_statuses: frozenset[int] = field(default=frozenset(), metadata=checks.statuses(400, 599))
    on_store_error: StoreErrorPolicy = field(
        default=StoreErrorPolicy.FAIL_CLOSED, metadata=checks.choice(StoreErrorPolicy)
    )
    max_attempts: int = field(default=10, metadata=checks.whole(1))
    send_window: timedelta = field(default=timedelta(seconds=5), metadata=checks.span())
    max_result_bytes: int = field(default=256 * 1024, metadata=checks.whole(1))
    complete: bool = field(default=True, metadata=checks.flag())

    # How long a key is remembered
    ttl: timedelta = field(default=_DAY, metadata=checks.span())
    min_ttl: timedelta = field(default=_DAY, metadata=checks.span())
    allow_short_ttl: bool = field(default=False, metadata=checks.flag())
    expiry_mode: ExpiryMode = field(default=ExpiryMode.HARD, metadata=checks.choice(ExpiryMode))
    on_expired: OnExpired = field(default=OnExpired.NEW, metadata=checks.choice(OnExpired))
    abandoned_status: int = field(default=408, metadata=checks.one_of(408, 410))
    abandoned_ttl: timedelta = field(default=_DAY, metadata=checks.span())

    # The work behind the scenes
    sweep_interval: timedelta = field(default=timedelta(seconds=60), metadata=checks.span())
    reap_interval: timedelta = field(default=timedelta(minutes=5), metadata=checks.span())
    reap_batch: int = field(default=5000, metadata=checks.whole(1))
    reconcile_interval: timedelta = field(default=timedelta(seconds=30), metadata=checks.span())
    reconcile_max_tries: int = field(default=10, metadata=checks.whole(1))
    provider_lag: timedelta = field(default=timedelta(seconds=60), metadata=checks.span())
    outbox_max_attempts: int = field(default=10, metadata=checks.whole(1))
    outbox_lease: timedelta = field(default=timedelta(seconds=60), metadata=checks.span())
    complete_interval: timedelta = field(default=timedelta(seconds=5), metadata=checks.span())
    audit: bool = field(default=True, metadata=checks.flag())
    audit_ttl: timedelta = field(default=timedelta(days=90), metadata=checks.span())

    # How much one caller may ask for; None is without a limit
    max_new_keys_per_second: int | None = field(default=None, metadata=checks.optional(checks.whole(1)))
    max_live_keys: int | None = field(default=None, metadata=checks.optional(checks.whole(1)))
    max_lookups_per_second: int | None = field(default=None, metadata=checks.optional(checks.whole(1)))
    limits_storage: str | None = field(
        default=None, repr=False, metadata=checks.optional(checks.secret_text("the URL of a storage of `limits`"))
    )

    # What answers look like
    flavor: Flavor = field(default=Flavor.IETF, metadata=checks.choice(Flavor))
    error_format: ErrorFormat = field(default=ErrorFormat.PROBLEM, metadata=checks.choice(ErrorFormat))
    # The default names no host, because it would not be ours: an API that has a page gives its own.
    problem_types: str = field(default="urn:oncekey:problem:", metadata=checks.url())
    docs_url: str = field(default="/idempotency", metadata=checks.url())
    replay_headers: tuple[str, ...] = field(
        default=("location", "content-type", "content-language", "etag"),
        metadata=checks.field_names(never=NEVER_KEPT),
    )
    replayed_header: str = field(default="Idempotent-Replayed", metadata=checks.own_field(never=NEVER_KEPT))
    expires_header: str = field(default="Idempotency-Key-Expires", metadata=checks.own_field(never=NEVER_KEPT))
    max_response_bytes: int = field(default=_MIB, metadata=checks.whole(0))
    max_spool_bytes: int = field(default=64 * _MIB, metadata=checks.whole(0))

    def __new__(cls, **given: object) -> Self:
        """Refuse an unknown setting with a message that names it, before Python raises a less helpful one."""
        _check_names(given, cls)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = checks.check_of(setting.metadata)(setting.name, getattr(self, setting.name))
            # A frozen class has no other way to convert its own values.
            object.__setattr__(self, setting.name, value)
        for agreement in _TOGETHER:
            if not agreement.holds(self):
                raise ConfigurationError(agreement.sentence.format(policy=self))

    @property
    def shortest_key(self) -> int:
        """The smallest length of a key: 16, but 1 for Stripe's flavor, whose clients send keys of any length."""
        if self.min_key_length is not None:
            return self.min_key_length
        return 1 if self.flavor is Flavor.STRIPE else 16

    @property
    def heartbeat(self) -> timedelta:
        """How often a live owner renews its lease: two renewals may fail before the lease is over."""
        return self.lease / 3

    def override(self, **changes: object) -> Policy:
        """This policy with some settings changed; the result is checked as a whole."""
        _check_names(changes, type(self))
        return replace(self, **cast("dict[str, Any]", changes))

    def recovery_for(self, effects: Effects) -> Recovery:
        """What a lease that ran out means for a handler with these effects; stored with its claim (P2)."""
        self.check(effects)
        return self.on_lease_expired or BY_EFFECTS[effects]

    def check(self, effects: Effects) -> None:
        """Refuse to enrol a handler whose settings are looser than its effects (F7)."""
        for choice in (self.on_lease_expired, self.on_5xx, self.on_store_error):
            if choice is None:
                continue
            why = objection(effects, choice, naturally_idempotent=self.naturally_idempotent)
            if why is not None:
                raise ConfigurationError(why)


@dataclass(frozen=True, slots=True)
class _Agreement:
    """A rule that several settings keep together, and the message if they do not."""

    holds: Callable[[Policy], bool]
    sentence: str


_TOGETHER: Final = (
    _Agreement(
        lambda policy: policy.shortest_key <= policy.max_key_length,
        "min_key_length={policy.shortest_key} is more than max_key_length={policy.max_key_length}: "
        "no key could be right",
    ),
    _Agreement(
        lambda policy: policy.deadline >= policy.lease,
        "deadline={policy.deadline} is shorter than lease={policy.lease}: make the lease shorter or the "
        "deadline longer, a handler may run for at least one lease",
    ),
    _Agreement(
        lambda policy: policy.call_timeout <= policy.deadline,
        "call_timeout={policy.call_timeout} is longer than deadline={policy.deadline}: no call could use it",
    ),
    _Agreement(
        lambda policy: policy.allow_short_ttl or policy.min_ttl >= _DAY,
        "min_ttl={policy.min_ttl} is below 24 h: clients that retry the next day would execute twice; "
        "set allow_short_ttl=True if they never do",
    ),
    _Agreement(
        lambda policy: policy.allow_short_ttl or policy.ttl >= policy.min_ttl,
        "ttl={policy.ttl} is shorter than min_ttl={policy.min_ttl}: a retry after that executes again; "
        "set allow_short_ttl=True if that is meant",
    ),
    _Agreement(
        lambda policy: policy.max_spool_bytes >= policy.max_response_bytes,
        "max_spool_bytes={policy.max_spool_bytes} is less than "
        "max_response_bytes={policy.max_response_bytes}: what can be stored must fit into the spool",
    ),
    _Agreement(
        lambda policy: policy.secret is not None or not _shares(policy),
        "replay_cache and lock_hint at a Redis need secret=...: what is kept there is sealed with it, so that a Redis "
        "that was tampered with, or serves another application, is not believed",
    ),
    _Agreement(
        lambda policy: policy.lock_hint is None or policy.lock_hint.span <= micros(policy.lease),
        "lock_hint={policy.lock_hint} is believed for longer than lease={policy.lease}: no owner holds a key for "
        "longer without a sign of life",
    ),
    _Agreement(
        lambda policy: policy.replayed_header.lower() != policy.expires_header.lower(),
        "replayed_header and expires_header are both {policy.expires_header!r}: give each its own name",
    ),
)


def _shares(policy: Policy) -> bool:
    return policy.lock_hint is not None or (policy.replay_cache is not None and policy.replay_cache.shared)


def _check_names(given: Iterable[str], policy: type[Policy]) -> None:
    known = [setting.name for setting in fields(policy)]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ConfigurationError(f"{name} is not a setting; the closest one is {close[0]}")


BY_EFFECTS: Final[Mapping[Effects, Recovery]] = MappingProxyType(
    {
        Effects.LOCAL: Recovery.RETRY,
        Effects.PHASED: Recovery.RESUME,
        # Up to its defer an outbox request is one transaction; after it the parcel decides (O1).
        Effects.OUTBOX: Recovery.RETRY,
        Effects.INLINE: Recovery.UNKNOWN,
    }
)
"""What a lease that ran out means if the policy does not say."""


class Stance(StrEnum):
    """Whether a setting may go with a handler's effects."""

    ALLOWED = "allowed"
    PROMISED = "promised"
    REFUSED = "refused"


Choice: TypeAlias = Recovery | On5xx | StoreErrorPolicy

_OK, _PROMISE, _NO = Stance.ALLOWED, Stance.PROMISED, Stance.REFUSED
_LOCAL, _PHASED, _OUTBOX, _INLINE = Effects.LOCAL, Effects.PHASED, Effects.OUTBOX, Effects.INLINE

STANCES: Final[Mapping[Choice, Mapping[Effects, Stance]]] = MappingProxyType(
    {
        Recovery.UNKNOWN: {_LOCAL: _OK, _PHASED: _OK, _OUTBOX: _OK, _INLINE: _OK},
        Recovery.FAIL: {_LOCAL: _OK, _PHASED: _OK, _OUTBOX: _OK, _INLINE: _OK},
        Recovery.RETRY: {_LOCAL: _OK, _PHASED: _NO, _OUTBOX: _OK, _INLINE: _PROMISE},
        Recovery.RESUME: {_LOCAL: _NO, _PHASED: _OK, _OUTBOX: _NO, _INLINE: _NO},
        On5xx.CLASSIFY: {_LOCAL: _OK, _PHASED: _OK, _OUTBOX: _OK, _INLINE: _OK},
        On5xx.RETRY_FRESH: {_LOCAL: _NO, _PHASED: _NO, _OUTBOX: _NO, _INLINE: _PROMISE},
        On5xx.STORE: {_LOCAL: _NO, _PHASED: _NO, _OUTBOX: _NO, _INLINE: _OK},
        StoreErrorPolicy.FAIL_CLOSED: {_LOCAL: _OK, _PHASED: _OK, _OUTBOX: _OK, _INLINE: _OK},
        StoreErrorPolicy.FAIL_OPEN: {_LOCAL: _NO, _PHASED: _NO, _OUTBOX: _NO, _INLINE: _PROMISE},
    }
)
"""The whole matrix: every choice with every kind of effects."""

_SETTING: Final[Mapping[type[Choice], str]] = MappingProxyType(
    {Recovery: "on_lease_expired", On5xx: "on_5xx", StoreErrorPolicy: "on_store_error"}
)

_REFUSALS: Final[Mapping[Choice, str]] = MappingProxyType(
    {
        Recovery.RETRY: "it would do finished phases again; use 'resume', or leave it out",
        Recovery.RESUME: "only effects='phased' has phases to resume after; leave it out",
        On5xx.RETRY_FRESH: "only effects='inline' needs it: these effects already run again whatever "
        "left nothing behind; use 'classify'",
        On5xx.STORE: "only effects='inline' needs it: these effects roll back or go on where they "
        "stopped; use 'classify'",
        StoreErrorPolicy.FAIL_OPEN: "such a handler works through the store and cannot run without it; "
        "use 'fail_closed'",
    }
)

_PROMISES: Final[Mapping[Choice, str]] = MappingProxyType(
    {
        Recovery.RETRY: "a crash may come after the outside call was made",
        On5xx.RETRY_FRESH: "a server error may come after the outside call was made",
        StoreErrorPolicy.FAIL_OPEN: "without the store a duplicate is not noticed",
    }
)


def objection(effects: Effects, choice: Choice, *, naturally_idempotent: bool) -> str | None:
    """Why `choice` may not go with `effects`, with the sentence that fixes it; None if it may."""
    stance = STANCES[choice][effects]
    named = f"{_SETTING[type(choice)]}={choice.value!r} with effects={effects.value!r}"
    if stance is Stance.REFUSED:
        return f"{named} is refused: {_REFUSALS[choice]}"
    if stance is Stance.PROMISED and not naturally_idempotent:
        return (
            f"{named} lets the handler run twice, because {_PROMISES[choice]}: set naturally_idempotent=True "
            f"if that does no harm, else leave {_SETTING[type(choice)]} at its default"
        )
    return None
