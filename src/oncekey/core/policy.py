"""Every setting: its default, its check, its scope and its meaning. A policy is checked when it is created.

`python -m docs.generator` writes the page of the settings, `oncekey/options.py` and `core/settings.py` from the fields
of `Policy`.

A handler's effects do not allow every value of some settings. A setting may forbid a second run that the effects
allow, and never allow one that they forbid (P2, F7): `UNKNOWN` and `FAIL` are the strictest values and always allowed.
A value that lets a retry repeat an operation that may have been executed is rejected, or needs
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
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self, TypeAlias, cast

from oncekey.canonical.fingerprint import Selection
from oncekey.canonical.jcs import BigInts
from oncekey.core import checks
from oncekey.core.checks import Front
from oncekey.core.errors import ConfigurationError
from oncekey.core.headers import KEY_HEADER, NEVER_KEPT
from oncekey.core.keys import HeaderSyntax, KeyFormat
from oncekey.core.model import Duration, Effects, Recovery
from oncekey.core.scope import BindTo

if TYPE_CHECKING:
    from typing import Unpack

    from oncekey.core.settings import Settings


class Flavor(StrEnum):
    """The API whose status codes the responses use."""

    IETF = "ietf"
    STRIPE = "stripe"


class InProgress(StrEnum):
    """What a duplicate receives while the first request is still running."""

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
    """The format of the bodies of refusals."""

    PROBLEM = "problem"
    FAULT = "fault"
    CODE = "code"


class KeyCheck(StrEnum):
    """What happens to a request whose key looks personal or guessable."""

    OFF = "off"
    WARN = "warn"
    REJECT = "reject"


EACH: Final = "each"
"""The reaper writes an audit entry for every record."""
_MIB: Final = 1024 * 1024
_DAY: Final = timedelta(hours=24)


@lru_cache(maxsize=256)
def micros(span: timedelta) -> Duration:
    """A span in microseconds."""
    return span // timedelta(microseconds=1)


def never_proven(error: BaseException) -> bool:  # noqa: ARG001  (the default of a hook takes what the hook takes)
    """The default of the hook: no exception proves that nothing was sent."""
    return False


# Where a setting is allowed. Elsewhere a type checker rejects it, and oncekey too if it is strict.
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
    """How keys are read, how long they are kept, and what happens on a duplicate, a crash or an outage.

    A duration may be a number of seconds and a choice its name; both are converted to their own type.
    """

    key_header: ClassVar[str] = KEY_HEADER

    # Which keys are accepted?
    require_key: bool = field(default=True, metadata=checks.flag() | _ROUTE)
    """A request without the header receives 400."""
    header_syntax: HeaderSyntax = field(default=HeaderSyntax.COMPAT, metadata=checks.choice(HeaderSyntax) | _ROUTE)
    """Which forms of the header are accepted: `strict` only the quoted String of RFC 9651, `bare` only the plain
    value, `compat` both; both forms of one value are one key."""
    key_format: KeyFormat = field(default=KeyFormat.OPAQUE, metadata=checks.choice(KeyFormat) | _ROUTE)
    """`uuid` accepts only 8-4-4-4-12 hexadecimal digits, of any UUID version or none; `opaque` accepts any text."""
    min_key_length: int | None = field(default=None, metadata=checks.optional(checks.whole(1, 255)) | _APP)
    """Shorter keys receive 400; None is 16, and 1 in the `stripe` flavour. Spaces around a quoted key do not count. It
    guards against keys that collide by accident, and does not prove entropy."""
    max_key_length: int = field(default=255, metadata=checks.whole(1, 255) | _APP)
    """Longer keys receive 400."""
    pii_check: KeyCheck = field(default=KeyCheck.WARN, metadata=checks.choice(KeyCheck) | _APP)
    """What happens to a key that looks like an e-mail address, a telephone or a social security number: nothing, a log
    line (with the key's digest only), or 400."""
    guessable_check: KeyCheck = field(default=KeyCheck.WARN, metadata=checks.choice(KeyCheck) | _APP)
    """What happens to a key that is obviously not random (one unit repeated, a counter, a row of letters): nothing, a
    warning of the logger `oncekey.security` (with the key's digest only), or 400."""

    # Who is the caller?
    bind_to: BindTo = field(default=BindTo.TENANT, metadata=checks.choice(BindTo) | _APP)
    """The owner of a key: tenant, a principal in it, or one `Authorization` header. A change makes every key new."""
    namespace: str = field(default="", metadata=checks.text(100) | _APP)
    """One more part of the scope, for several applications that share one store. A change makes every key new."""
    separate_operations: bool = field(default=False, metadata=checks.flag() | _WHOLE)
    """Each operation has its own keys: one key on two routes is two independent requests instead of 422, and the status
    resource takes `?operation=`."""

    # When are two requests the same?
    selection: Selection = field(default_factory=Selection, metadata=checks.a(Selection) | _ROUTE)
    """The fields of the body that are compared, `Selection(include=…)`, or ignored, `Selection(exclude=…)`."""
    secret: bytes | None = field(
        default=None, repr=False, metadata=checks.optional(checks.secret_bytes(at_least=16)) | _APP
    )
    """Makes the fingerprint an HMAC, and the keys of external calls unguessable."""
    big_ints: BigInts = field(default=BigInts.EXACT, metadata=checks.choice(BigInts) | _APP)
    """A JSON number that a double cannot hold: `exact` compares its exact value, `reject` returns 400."""
    max_request_bytes: int = field(default=_MIB, metadata=checks.whole(1) | _EVERY)
    """A request with a key and a larger body receives 413."""
    body_timeout: timedelta = field(default=timedelta(seconds=60), metadata=checks.span() | _ROUTE)
    """How long the server waits for the whole body; then the request receives 408. No connection is taken before the
    body has arrived. Raise it with `max_request_bytes`."""

    # What does a duplicate receive?
    on_in_progress: InProgress = field(default=InProgress.CONFLICT, metadata=checks.choice(InProgress) | _EVERY)
    """While the first request runs: `conflict` is 409 with `Retry-After`, `accepted` is 202 with `Retry-After` and the
    `Location` of the status resource, `wait` waits for the response to the first one. On an OUTBOX route `conflict`
    means `accepted`: its 202 means that the request is committed."""
    wait_max: timedelta = field(default=timedelta(seconds=10), metadata=checks.span() | _EVERY)
    """How long `wait` waits; then the duplicate receives 409."""
    replay_cache: Front | None = field(
        default=None, metadata=checks.optional(checks.front(timedelta(seconds=60), memory=True)) | _EVERY
    )
    """Cache responses that were read from the store: `"memory"` in this process (a duration means the same, with that
    lifetime), `redis://…` for all processes. `Front(place, life=…)` sets the lifetime, otherwise it is 60 s; a
    `keys bust` in another process takes effect after that time. None reads the store every time. See the guide to
    Redis."""
    lock_hint: Front | None = field(
        default=None, metadata=checks.optional(checks.front(timedelta(seconds=2), memory=False)) | _EVERY
    )
    """`redis://…`: caches the keys in progress, so that a duplicate receives 409 without a query to the store. An entry
    is valid for `life` after the claim, 2 s by default, and removed at the end."""

    # How long is a key remembered?
    ttl: timedelta = field(default=_DAY, metadata=checks.span() | _EVERY)
    """How long a response is replayed, counted from the claim and again from the response."""
    min_ttl: timedelta = field(default=_DAY, metadata=checks.span() | _APP)
    """The shortest `ttl` that is accepted."""
    allow_short_ttl: bool = field(default=False, metadata=checks.flag() | _EVERY)
    """Accept less than 24 hours, for clients that never retry the next day."""
    on_expired: OnExpired = field(default=OnExpired.NEW, metadata=checks.choice(OnExpired) | _APP)
    """A request with an expired key: `new` runs as a new one, `gone` receives 410 as long as the row exists."""
    expiry_mode: ExpiryMode = field(default=ExpiryMode.HARD, metadata=checks.choice(ExpiryMode) | _WHOLE)
    """The reaper deletes expired records (`hard`), or marks them and deletes them `audit_ttl` later (`soft`)."""
    reap_interval: timedelta = field(default=timedelta(minutes=5), metadata=checks.span() | _WHOLE)
    """How often the reaper looks for expired records."""
    reap_batch: int = field(default=5000, metadata=checks.whole(1) | _WHOLE)
    """How many records the reaper removes at once, at most; it chooses the size of a batch by its duration."""

    # What happens after a crash?
    lease: timedelta = field(default=timedelta(seconds=300), metadata=checks.span() | _EVERY)
    """How long a claim is valid without a heartbeat. The owner renews it at a third of this."""
    deadline: timedelta = field(default=timedelta(hours=1), metadata=checks.span() | _EVERY)
    """Renewals end this long after the claim: a handler that hangs cannot hold a key forever."""
    on_lease_expired: Recovery | None = field(default=None, metadata=checks.optional(checks.choice(Recovery)) | _EVERY)
    """What happens when a lease expires. None: the effects decide; another value may only be stricter than they are.
    `fail` also makes the record unknown, but calls no resolver: it is in the operators' queue (`oncekey unknown list
    --given-up`) at once, and counts for the alert `OncekeyGivenUp`."""
    max_attempts: int = field(default=10, metadata=checks.whole(1) | _FOR_PHASED)
    """PHASED: how often the handler may start; then its record is unknown."""
    complete: bool = field(default=True, metadata=checks.flag() | _PHASED_ONLY)
    """PHASED: whether the request is stored, so that a worker can resume it without the client."""
    complete_interval: timedelta = field(default=timedelta(seconds=5), metadata=checks.span() | _APP)
    """How often a worker looks for interrupted PHASED requests, and how long it waits before it retries a failed one:
    twice as long after each further failure."""
    sweep_interval: timedelta = field(default=timedelta(seconds=60), metadata=checks.span() | _WHOLE)
    """How often the sweeper looks for expired leases. It waits 5 s more for the owner of each, so a stuck key is moved
    within `lease` + 5 s + `sweep_interval` of the owner's last heartbeat."""

    # What happens when the database is unavailable?
    on_store_error: StoreErrorPolicy = field(
        default=StoreErrorPolicy.FAIL_CLOSED, metadata=checks.choice(StoreErrorPolicy) | _FOR_INLINE
    )
    """If the store is unavailable, `fail_closed` returns 503 and runs nothing; `fail_open` runs the handler without
    protection."""

    # What does an error of an external call mean?
    call_timeout: timedelta = field(default=timedelta(seconds=30), metadata=checks.span() | _FOR_PHASED)
    """PHASED, OUTBOX: how long one external call may take; then its outcome is unknown. Stored with the claim, because
    the next owner has to wait for it."""
    send_window: timedelta = field(default=timedelta(seconds=5), metadata=checks.span() | _PHASED_ONLY)
    """PHASED: how long after its announcement a call may start."""
    max_result_bytes: int = field(default=256 * 1024, metadata=checks.whole(1) | _FOR_PHASED)
    """PHASED: the largest result of a step that is stored."""
    naturally_idempotent: bool = field(default=False, metadata=checks.flag() | _FOR_INLINE)
    """Declares that running this handler twice does no harm; some looser settings require it."""
    on_5xx: On5xx = field(default=On5xx.CLASSIFY, metadata=checks.choice(On5xx) | _FOR_INLINE)
    """INLINE only. `classify`: the outcome of a 5xx is unknown, unless it is proven that nothing was sent. `store`: the
    5xx is stored and replayed. `retry_fresh`: the next retry runs."""
    is_definitely_not_executed: Callable[[BaseException], bool] = field(
        default=never_proven, metadata=checks.function("Callable[[BaseException], bool]") | _OUTSIDE
    )
    """Returns whether an exception of an external call proves that nothing was sent."""
    not_executed_statuses: frozenset[int] = field(
        default=frozenset(), metadata=checks.statuses(400, 599) | _INLINE_ONLY
    )
    """INLINE: statuses that the handler sends only if it executed nothing."""
    outbox_max_attempts: int = field(default=10, metadata=checks.whole(1) | _WHOLE)
    """How many attempts a parcel has before it becomes a dead letter."""
    outbox_lease: timedelta = field(default=timedelta(seconds=60), metadata=checks.span() | _WHOLE)
    """How long a worker holds a parcel at least; longer if `send_window` and `call_timeout` require it."""
    abandoned_status: int = field(default=408, metadata=checks.one_of(408, 410) | _WHOLE)
    """OUTBOX: the status of a call that no worker started before it expired."""

    # What happens to an unknown outcome?
    on_unknown: int = field(default=409, metadata=checks.one_of(409, 202, 503) | _ROUTE)
    """The status of the response while the outcome is unknown."""
    reconcile_interval: timedelta = field(default=timedelta(seconds=30), metadata=checks.span() | _APP)
    """The `Retry-After` of an unknown outcome that no resolver will check sooner."""
    reconcile_max_tries: int = field(default=10, metadata=checks.whole(1) | _WHOLE)
    """How often a resolver checks an unknown outcome before an operator has to."""
    provider_lag: timedelta = field(default=timedelta(seconds=60), metadata=checks.span() | _APP)
    """How long a provider may take to list a call: a resolver's `not executed` counts only after that time."""

    # How much may one caller send?
    max_request_age: timedelta | None = field(default=None, metadata=checks.optional(checks.span()) | _APP)
    """A request whose `Idempotency-First-Sent` is older is not executed: 412. The response of a stored key is still
    replayed."""
    max_new_keys_per_second: int | None = field(default=None, metadata=checks.optional(checks.whole(1)) | _APP)
    """New keys of a tenant per second; more receive 429 and `Retry-After`. Needs the extra `limits`."""
    max_live_keys: int | None = field(default=None, metadata=checks.optional(checks.whole(1)) | _APP)
    """Stored keys of a tenant; a new one beyond it receives 429."""
    max_lookups_per_second: int | None = field(default=None, metadata=checks.optional(checks.whole(1)) | _WHOLE)
    """Requests of a caller to the status resource per second. Needs the extra `limits`."""
    limits_storage: str | None = field(
        default=None,
        repr=False,
        metadata=checks.optional(checks.secret_text("the URL of a storage of `limits`")) | _APP,
    )
    """The URL of the storage of the package `limits`; without one, each process counts in its own memory."""

    # What do responses look like?
    flavor: Flavor = field(default=Flavor.IETF, metadata=checks.choice(Flavor) | _APP)
    """The status codes: if a key is reused for another request, `ietf` returns 422, and `stripe` returns 400 with an
    `error` member."""
    error_format: ErrorFormat = field(default=ErrorFormat.PROBLEM, metadata=checks.choice(ErrorFormat) | _APP)
    """The bodies of refusals: problem details (RFC 9457), a `fault` envelope, or only `code`."""
    problem_types: str = field(default="urn:oncekey:problem:", metadata=checks.url() | _APP)
    """The prefix of a problem's `type`; the name of the problem follows."""
    docs_url: str = field(default="/idempotency", metadata=checks.url() | _APP)
    """The target of `Link: rel="describedby"`. oncekey serves a path itself, from this policy."""
    replay_headers: tuple[str, ...] = field(
        default=("location", "content-type", "content-language", "etag"),
        metadata=checks.field_names(never=NEVER_KEPT) | _ROUTE,
    )
    """Response headers that are stored and replayed, in addition to `Content-Type`, `Content-Encoding` and `Location`,
    which always are."""
    replayed_header: str = field(default="Idempotent-Replayed", metadata=checks.own_field(never=NEVER_KEPT) | _APP)
    """The header that marks a replay."""
    expires_header: str = field(default="Idempotency-Key-Expires", metadata=checks.own_field(never=NEVER_KEPT) | _APP)
    """The header with the time until which the response is replayed."""
    max_response_bytes: int = field(default=_MIB, metadata=checks.whole(0) | _EVERY)
    """A larger body is sent to the first caller and not stored: a retry receives 409 `idempotency_response_not_stored`
    with the `Location` of the result."""
    max_spool_bytes: int = field(default=64 * _MIB, metadata=checks.whole(0) | _APP)
    """The largest response that is captured at all; beyond it a LOCAL handler is rolled back, and the outcome of an
    INLINE one is unknown."""

    # What is written to the audit?
    audit: bool | Literal["each"] = field(default=True, metadata=checks.flag(EACH) | _APP)
    """Whether transitions outside requests are written to the audit trail. The reaper writes one entry per batch and
    tenant; with `each`, one per record."""
    audit_ttl: timedelta = field(default=timedelta(days=90), metadata=checks.span() | _WHOLE)
    """How long audit entries are kept."""

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[Settings]) -> None:
            """Take settings as users write them; the dataclass has each field in its own type."""

    def __new__(cls, **given: object) -> Self:
        """Reject an unknown setting with a message that names it, before Python raises a less helpful one."""
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
        """How often a live owner renews its lease: two renewals may fail before the lease expires."""
        return self.lease / 3

    def override(self, **changes: object) -> Policy:
        """This policy with some settings changed; the result is checked as a whole."""
        _check_names(changes, type(self))
        return replace(self, **cast("dict[str, Any]", changes))

    def recovery_for(self, effects: Effects) -> Recovery:
        """What happens when the lease of a handler with these effects expires; stored with its claim (P2)."""
        self.check(effects)
        return self.on_lease_expired or BY_EFFECTS[effects]

    def check(self, effects: Effects) -> None:
        """Raise if a setting is looser than a handler's effects allow (F7)."""
        for choice in (self.on_lease_expired, self.on_5xx, self.on_store_error):
            if choice is None:
                continue
            why = objection(effects, choice, naturally_idempotent=self.naturally_idempotent)
            if why is not None:
                raise ConfigurationError(why)


@dataclass(frozen=True, slots=True)
class _Agreement:
    """A rule about several settings, and the message if it is broken."""

    holds: Callable[[Policy], bool]
    sentence: str


_TOGETHER: Final = (
    _Agreement(
        lambda policy: policy.shortest_key <= policy.max_key_length,
        "min_key_length={policy.shortest_key} is more than max_key_length={policy.max_key_length}: "
        "no key would be accepted",
    ),
    _Agreement(
        lambda policy: policy.deadline >= policy.lease,
        "deadline={policy.deadline} is shorter than lease={policy.lease}: a handler may run for at least one "
        "lease; make the lease shorter or the deadline longer",
    ),
    _Agreement(
        lambda policy: policy.call_timeout <= policy.deadline,
        "call_timeout={policy.call_timeout} is longer than deadline={policy.deadline}: make it shorter",
    ),
    _Agreement(
        lambda policy: policy.allow_short_ttl or policy.min_ttl >= _DAY,
        "min_ttl={policy.min_ttl} is below 24 h: clients that retry the next day would execute twice; "
        "set allow_short_ttl=True if they never do",
    ),
    _Agreement(
        lambda policy: policy.allow_short_ttl or policy.ttl >= policy.min_ttl,
        "ttl={policy.ttl} is shorter than min_ttl={policy.min_ttl}: a retry after that executes again; "
        "set allow_short_ttl=True if that is intended",
    ),
    _Agreement(
        lambda policy: policy.max_spool_bytes >= policy.max_response_bytes,
        "max_spool_bytes={policy.max_spool_bytes} is less than "
        "max_response_bytes={policy.max_response_bytes}: what can be stored must fit into the spool",
    ),
    _Agreement(
        lambda policy: policy.secret is not None or not _shares(policy),
        "replay_cache and lock_hint in Redis need secret=...: the entries are sealed with it, so that entries of "
        "another application or an attacker are rejected",
    ),
    _Agreement(
        lambda policy: policy.lock_hint is None or policy.lock_hint.span <= micros(policy.lease),
        "lock_hint={policy.lock_hint} is valid for longer than lease={policy.lease}: no owner holds a key for "
        "longer without a heartbeat; make its life shorter",
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
"""What happens when a lease expires, unless the policy sets it."""


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
        Recovery.RETRY: "it would repeat finished phases; use 'resume', or omit it",
        Recovery.RESUME: "only effects='phased' has phases to resume after; omit it",
        On5xx.RETRY_FRESH: "only effects='inline' needs it: with these effects an attempt that "
        "changed nothing is already retried; use 'classify'",
        On5xx.STORE: "only effects='inline' needs it: with these effects a handler is rolled back or "
        "resumed; use 'classify'",
        StoreErrorPolicy.FAIL_OPEN: "such a handler uses the store and cannot run without it; use 'fail_closed'",
    }
)

_PROMISES: Final[Mapping[Choice, str]] = MappingProxyType(
    {
        Recovery.RETRY: "a crash may happen after the external call",
        On5xx.RETRY_FRESH: "a server error may happen after the external call",
        StoreErrorPolicy.FAIL_OPEN: "without the store a duplicate is not detected",
    }
)


def objection(effects: Effects, choice: Choice, *, naturally_idempotent: bool) -> str | None:
    """Why `effects` do not allow `choice`, and what to do; None if they do."""
    stance = STANCES[choice][effects]
    named = f"{_SETTING[type(choice)]}={choice.value!r} with effects={effects.value!r}"
    if stance is Stance.REFUSED:
        return f"{named} is refused: {_REFUSALS[choice]}"
    if stance is Stance.PROMISED and not naturally_idempotent:
        return (
            f"{named} lets the handler run twice, because {_PROMISES[choice]}: set naturally_idempotent=True "
            f"if that does no harm, otherwise leave {_SETTING[type(choice)]} at its default"
        )
    return None
