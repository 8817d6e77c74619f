"""Every setting: its default, its check, who may set it, and what it does. A policy is checked when it is made.

`python -m docs.generator` writes the page of the settings and `oncekey/options.py` from the fields of `Policy`.

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


# Who may set it. Elsewhere a type checker refuses it, and oncekey itself if it is strict.
_APP: Final = checks.scope()
_WHOLE: Final = checks.scope(strict=True)  # workers and the status resource never read it from a route's policy
_EVERY: Final = checks.scope(*Effects)
_ROUTE: Final = checks.scope(*Effects, functions=False)
_FOR_INLINE: Final = checks.scope(Effects.INLINE)
_INLINE_ONLY: Final = checks.scope(Effects.INLINE, functions=False, strict=True)
_OUTSIDE: Final = checks.scope(Effects.INLINE, Effects.PHASED, strict=True)
_FOR_PHASED: Final = checks.scope(Effects.PHASED)
_PHASED_ONLY: Final = checks.scope(Effects.PHASED, strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How keys are read, how long they are kept, and what a duplicate, a crash or an outage means.

    A duration may be given as a number of seconds and a choice by its name; both are kept in their own type.
    """

    key_header: ClassVar[str] = KEY_HEADER

    # The key
    header_syntax: HeaderSyntax = field(default=HeaderSyntax.COMPAT, metadata=checks.choice(HeaderSyntax) | _ROUTE)
    """Which spellings of the header are taken: `strict` only the quoted String of RFC 9651, `bare` only the plain
    value, `compat` both; both spellings of one value are one key."""
    key_format: KeyFormat = field(default=KeyFormat.OPAQUE, metadata=checks.choice(KeyFormat) | _ROUTE)
    """`uuid` takes only 8-4-4-4-12 hexadecimal digits, of any UUID version or none; `opaque` takes any text."""
    min_key_length: int | None = field(default=None, metadata=checks.optional(checks.whole(1, 255)) | _APP)
    """Shorter keys are refused with 400; None is 16, and 1 in the `stripe` flavour. Spaces around a quoted key do not
    count. It guards against keys that collide by accident and proves no entropy."""
    max_key_length: int = field(default=255, metadata=checks.whole(1, 255) | _APP)
    """Longer keys are refused with 400."""
    require_key: bool = field(default=True, metadata=checks.flag() | _ROUTE)
    """A request without the header gets 400."""
    pii_check: KeyCheck = field(default=KeyCheck.WARN, metadata=checks.choice(KeyCheck) | _APP)
    """What is done about a key that looks like an e-mail address, a telephone or a social security number: nothing, a
    line in the log (with the key's digest only), or 400."""
    guessable_check: KeyCheck = field(default=KeyCheck.WARN, metadata=checks.choice(KeyCheck) | _APP)
    """What is done about a key that is obviously not random (one unit repeated, a counter, a row of letters): nothing,
    a warning of the logger `oncekey.security` (with the key's digest only), or 400."""

    # Whose key it is, and which request it stands for
    namespace: str = field(default="", metadata=checks.text(100) | _APP)
    """One more part of the scope, for several applications that share one store."""
    bind_to: BindTo = field(default=BindTo.TENANT, metadata=checks.choice(BindTo) | _APP)
    """Who shares a key: all of a tenant, one principal in it, or one `Authorization` header."""
    separate_operations: bool = field(default=False, metadata=checks.flag() | _WHOLE)
    """Each operation has its own keys: one key on two routes is two independent requests instead of 422, and the status
    resource takes `?operation=`."""
    selection: Selection = field(default_factory=Selection, metadata=checks.a(Selection) | _ROUTE)
    """The fields of the body that count, `Selection(include=…)`, or those that do not, `Selection(exclude=…)`."""
    secret: bytes | None = field(
        default=None, repr=False, metadata=checks.optional(checks.secret_bytes(at_least=16)) | _APP
    )
    """Makes the fingerprint an HMAC, and the keys for outside calls unguessable."""
    big_ints: BigInts = field(default=BigInts.EXACT, metadata=checks.choice(BigInts) | _APP)
    """A JSON number that a double cannot hold: `exact` compares its exact value, `reject` answers 400."""
    max_json_depth: int = field(default=100, metadata=checks.whole(1, 500) | _APP)
    """JSON that is nested deeper gets 400."""
    max_request_bytes: int = field(default=_MIB, metadata=checks.whole(1) | _EVERY)
    """A keyed request with a larger body gets 413."""
    body_timeout: timedelta = field(default=timedelta(seconds=60), metadata=checks.span() | _ROUTE)
    """How long the server waits for the body, in all; then the request gets 408. A handler's connection is not taken
    before the body is there. Raise it with `max_request_bytes`."""

    # What a duplicate gets
    on_in_progress: InProgress = field(default=InProgress.CONFLICT, metadata=checks.choice(InProgress) | _EVERY)
    """While the first request runs: `conflict` is 409 with `Retry-After`, `accepted` is 202 with `Retry-After` and the
    `Location` of the status resource, `wait` waits for the first one's answer. An OUTBOX route takes `accepted` for
    `conflict`: its 202 means that the request is committed."""
    wait_max: timedelta = field(default=timedelta(seconds=10), metadata=checks.span() | _EVERY)
    """How long `wait` waits; then it is 409."""
    replay_cache: Front | None = field(
        default=None, metadata=checks.optional(checks.front(timedelta(seconds=60), memory=True)) | _EVERY
    )
    """Keep answers that were read from the store and give them again without asking it: `"memory"` in this process (a
    span alone is the same, for so long), `redis://…` for all processes. `Front(place, life=…)` says for how long at
    most, else it is 60 s; a `keys bust` in another process is noticed after that time. None asks every time. The
    guide to Redis has a section on it."""
    lock_hint: Front | None = field(
        default=None, metadata=checks.optional(checks.front(timedelta(seconds=2), memory=False)) | _EVERY
    )
    """`redis://…`: remember keys that are being worked on, so that a duplicate gets 409 without asking the store. It is
    believed for `life` after the claim, 2 s if nothing is said, and removed at the end."""
    on_unknown: int = field(default=409, metadata=checks.one_of(409, 202, 503) | _ROUTE)
    """The status of the answer while the outcome is unknown."""
    reconcile_interval: timedelta = field(default=timedelta(seconds=30), metadata=checks.span() | _APP)
    """The `Retry-After` of an unknown outcome that no resolver will look at sooner."""

    # What a crash, an error or an outage means
    lease: timedelta = field(default=timedelta(seconds=300), metadata=checks.span() | _EVERY)
    """How long a claim holds without a sign of life. The owner renews it at a third of this."""
    deadline: timedelta = field(default=timedelta(hours=1), metadata=checks.span() | _EVERY)
    """Renewals end this long after the claim: a handler that hangs cannot hold a key for ever."""
    call_timeout: timedelta = field(default=timedelta(seconds=30), metadata=checks.span() | _FOR_PHASED)
    """PHASED, OUTBOX: how long one outside call may take; then it is uncertain. Stored with the claim, because the next
    owner has to wait for it."""
    on_lease_expired: Recovery | None = field(default=None, metadata=checks.optional(checks.choice(Recovery)) | _EVERY)
    """What a lease that ran out means. Without it the effects decide; it may only be stricter than they are. `fail`
    makes the record unknown, too, but no resolver is asked: it is in the operators' queue (`oncekey unknown list
    --given-up`) at once, and counts for the alert `OncekeyGivenUp`."""
    naturally_idempotent: bool = field(default=False, metadata=checks.flag() | _FOR_INLINE)
    """The promise that running this handler twice does no harm; some looser settings ask for it."""
    on_5xx: On5xx = field(default=On5xx.CLASSIFY, metadata=checks.choice(On5xx) | _FOR_INLINE)
    """INLINE only. `classify`: a 5xx is unknown, unless it is proven that nothing was sent. `store`: it is the key's
    answer. `retry_fresh`: the next retry runs."""
    is_definitely_not_executed: Callable[[BaseException], bool] = field(
        default=never_proven, metadata=checks.function("Callable[[BaseException], bool]") | _OUTSIDE
    )
    """Says of an exception of an outside call whether it proves that nothing was sent."""
    not_executed_statuses: frozenset[int] = field(
        default=frozenset(), metadata=checks.statuses(400, 599) | _INLINE_ONLY
    )
    """INLINE: statuses that the handler sends only if it executed nothing."""
    on_store_error: StoreErrorPolicy = field(
        default=StoreErrorPolicy.FAIL_CLOSED, metadata=checks.choice(StoreErrorPolicy) | _FOR_INLINE
    )
    """The store cannot be asked: `fail_closed` answers 503 and runs nothing, `fail_open` runs the handler without
    protection."""
    max_attempts: int = field(default=10, metadata=checks.whole(1) | _FOR_PHASED)
    """PHASED: how often the handler may be begun; then its record is unknown."""
    send_window: timedelta = field(default=timedelta(seconds=5), metadata=checks.span() | _PHASED_ONLY)
    """PHASED: how long after its announcement a call may be begun."""
    max_result_bytes: int = field(default=256 * 1024, metadata=checks.whole(1) | _FOR_PHASED)
    """PHASED: the largest result of a step that is stored."""
    complete: bool = field(default=True, metadata=checks.flag() | _PHASED_ONLY)
    """PHASED: whether the request is kept, so that a worker may go on without the client."""

    # How long a key is remembered
    ttl: timedelta = field(default=_DAY, metadata=checks.span() | _EVERY)
    """How long an answer is replayed, counted from the claim and again from the answer."""
    min_ttl: timedelta = field(default=_DAY, metadata=checks.span() | _APP)
    """The shortest `ttl` that is accepted."""
    allow_short_ttl: bool = field(default=False, metadata=checks.flag() | _EVERY)
    """Accept less than 24 hours, for clients that certainly do not retry the next day."""
    on_expired: OnExpired = field(default=OnExpired.NEW, metadata=checks.choice(OnExpired) | _APP)
    """A request with an expired key: `new` runs as a new one, `gone` gets 410 for as long as the row is there."""
    expiry_mode: ExpiryMode = field(default=ExpiryMode.HARD, metadata=checks.choice(ExpiryMode) | _WHOLE)
    """The reaper deletes expired records (`hard`), or marks them and deletes them `audit_ttl` later (`soft`)."""
    abandoned_status: int = field(default=408, metadata=checks.one_of(408, 410) | _WHOLE)
    """OUTBOX: the status of a call that no worker began before it expired."""
    abandoned_ttl: timedelta = field(default=_DAY, metadata=checks.span() | _WHOLE)
    """OUTBOX: how long that answer stays."""

    # The work behind the scenes
    outbox_max_attempts: int = field(default=10, metadata=checks.whole(1) | _WHOLE)
    """How often a parcel is tried before it is a dead letter."""
    outbox_lease: timedelta = field(default=timedelta(seconds=60), metadata=checks.span() | _WHOLE)
    """How long a worker holds a parcel at least; longer where `send_window` and `call_timeout` ask for it."""
    complete_interval: timedelta = field(default=timedelta(seconds=5), metadata=checks.span() | _APP)
    """How often a worker looks for phased requests that stopped half way, and how long it leaves one alone that
    failed."""
    reconcile_max_tries: int = field(default=10, metadata=checks.whole(1) | _WHOLE)
    """How often a resolver is asked about an unknown outcome before a person has to look."""
    provider_lag: timedelta = field(default=timedelta(seconds=60), metadata=checks.span() | _APP)
    """How long a provider may take to show what it did: a resolver's `not executed` is believed only after it."""
    sweep_interval: timedelta = field(default=timedelta(seconds=60), metadata=checks.span() | _WHOLE)
    """How often the sweeper looks for leases that ran out. It leaves each to its owner for 5 more seconds, so a stuck
    key is moved within `lease` + 5 s + `sweep_interval` of the owner's last sign of life."""
    reap_interval: timedelta = field(default=timedelta(minutes=5), metadata=checks.span() | _WHOLE)
    """How often the reaper looks for expired records."""
    reap_batch: int = field(default=5000, metadata=checks.whole(1) | _WHOLE)
    """How many records the reaper removes at once, at most: a batch has as many as take a moment."""
    audit: bool = field(default=True, metadata=checks.flag() | _APP)
    """Whether moves that no request made are written to the audit."""
    audit_ttl: timedelta = field(default=timedelta(days=90), metadata=checks.span() | _WHOLE)
    """How long lines of the audit are kept."""

    # How much one caller may ask for
    max_request_age: timedelta | None = field(default=None, metadata=checks.optional(checks.span()) | _APP)
    """A request whose `Idempotency-First-Sent` is older is not executed: 412. A key that is known is replayed all the
    same."""
    max_new_keys_per_second: int | None = field(default=None, metadata=checks.optional(checks.whole(1)) | _APP)
    """New keys of a tenant in a second; more get 429 and `Retry-After`. Needs the extra `limits`."""
    max_live_keys: int | None = field(default=None, metadata=checks.optional(checks.whole(1)) | _APP)
    """Keys of a tenant that are remembered at once; a new one past it gets 429."""
    max_lookups_per_second: int | None = field(default=None, metadata=checks.optional(checks.whole(1)) | _WHOLE)
    """Requests of a caller to the status resource in a second. Needs the extra `limits`."""
    limits_storage: str | None = field(
        default=None,
        repr=False,
        metadata=checks.optional(checks.secret_text("the URL of a storage of `limits`")) | _APP,
    )
    """Where the package `limits` counts, as the URL of one of its storages; without one, in the memory of each
    process."""

    # What answers look like
    flavor: Flavor = field(default=Flavor.IETF, metadata=checks.choice(Flavor) | _APP)
    """Whose status codes: `ietf` says 422 to another request under a used key, `stripe` says 400 and adds an `error`
    member."""
    error_format: ErrorFormat = field(default=ErrorFormat.PROBLEM, metadata=checks.choice(ErrorFormat) | _APP)
    """The bodies of refusals: problem details (RFC 9457), a `fault` envelope, or only `code`."""
    problem_types: str = field(default="urn:oncekey:problem:", metadata=checks.url() | _APP)
    """What a problem's `type` begins with; the name of the problem follows."""
    docs_url: str = field(default="/idempotency", metadata=checks.url() | _APP)
    """Where `Link: rel="describedby"` leads. A path is served by oncekey, from this policy."""
    replay_headers: tuple[str, ...] = field(
        default=("location", "content-type", "content-language", "etag"),
        metadata=checks.field_names(never=NEVER_KEPT) | _ROUTE,
    )
    """Response headers that are stored and replayed, besides `Content-Type`, `Content-Encoding` and `Location`, which
    always are."""
    replayed_header: str = field(default="Idempotent-Replayed", metadata=checks.own_field(never=NEVER_KEPT) | _APP)
    """The header that marks a replay."""
    expires_header: str = field(default="Idempotency-Key-Expires", metadata=checks.own_field(never=NEVER_KEPT) | _APP)
    """The header that says until when an answer is replayed."""
    max_response_bytes: int = field(default=_MIB, metadata=checks.whole(0) | _EVERY)
    """A larger body is sent to the first caller and not stored: a retry gets 409 `idempotency_response_not_stored` and
    where to look."""
    max_spool_bytes: int = field(default=64 * _MIB, metadata=checks.whole(0) | _APP)
    """The largest response that is captured at all; past it a LOCAL handler is rolled back and an INLINE one is
    unknown."""

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
