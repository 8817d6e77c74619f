"""`settings.md`: every setting of `Policy`; defaults and allowed values come from the code, sentences from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from datetime import timedelta
from enum import Enum
from typing import Any, Final

from oncekey.canonical.fingerprint import Selection
from oncekey.core.checks import check_of
from oncekey.core.headers import NEVER_KEPT
from oncekey.core.model import Effects, Recovery
from oncekey.core.policy import BY_EFFECTS, STANCES, On5xx, Policy, Stance, StoreErrorPolicy, never_proven
from oncekey.route_options import OFFERED, Options

from .markdown import code, table, title
from .markdown import page as put_together

GROUPS: Final[Mapping[str, Mapping[str, str]]] = {
    "The key": {
        "header_syntax": "Which spellings of the header are taken: `strict` only the quoted String of RFC 9651, `bare` "
        "only the plain value, `compat` both; both spellings of one value are one key.",
        "key_format": "`uuid` takes only 8-4-4-4-12 hexadecimal digits, of any UUID version or none; `opaque` takes "
        "any text.",
        "min_key_length": "Shorter keys are refused with 400; None is 16, and 1 in the `stripe` flavour. Spaces around "
        "a quoted key do not count. It guards against keys that collide by accident and proves no entropy.",
        "max_key_length": "Longer keys are refused with 400.",
        "require_key": "A request without the header gets 400.",
        "pii_check": "What is done about a key that looks like an e-mail address, a telephone or a social security "
        "number: nothing, a line in the log (with the key's digest only), or 400.",
        "guessable_check": "What is done about a key that is obviously not random (one unit repeated, a counter, a row "
        "of letters): nothing, a warning of the logger `oncekey.security` (with the key's digest only), or 400.",
    },
    "Whose key it is, and which request it stands for": {
        "namespace": "One more part of the scope, for several applications that share one store.",
        "bind_to": "Who shares a key: all of a tenant, one principal in it, or one `Authorization` header.",
        "separate_operations": "Each operation has its own keys: one key on two routes is two independent requests "
        "instead of 422, and the status resource takes `?operation=`.",
        "selection": "The fields of the body that count, `Selection(include=…)`, or those that do not, "
        "`Selection(exclude=…)`.",
        "secret": "Makes the fingerprint an HMAC, and the keys for outside calls unguessable.",
        "big_ints": "A JSON number that a double cannot hold: `exact` compares its exact value, `reject` answers 400.",
        "max_json_depth": "JSON that is nested deeper gets 400.",
        "max_request_bytes": "A keyed request with a larger body gets 413.",
        "body_timeout": "How long the server waits for the body, in all; then the request gets 408. A handler's "
        "connection is not taken before the body is there. Raise it with `max_request_bytes`.",
    },
    "What a duplicate gets": {
        "on_in_progress": "While the first request runs: `conflict` is 409 with `Retry-After`, `accepted` is 202 with "
        "`Retry-After` and the `Location` of the status resource, `wait` waits for the first one's answer. An OUTBOX "
        "route takes `accepted` for `conflict`: its 202 means that the request is committed.",
        "wait_max": "How long `wait` waits; then it is 409.",
        "replay_cache": "Keep answers that were read from the store and give them again without asking it: "
        '`"memory"` in this process (a span alone is the same, for so long), `redis://…` for all processes. '
        "`Front(place, life=…)` says for how long at most, else it is 60 s; a `keys bust` in another process is "
        "noticed after that time. None asks every time. See "
        "[the guide](../howto/redis.md#redis-as-a-cache-in-front-of-another-store).",
        "lock_hint": "`redis://…`: remember keys that are being worked on, so that a duplicate gets 409 without "
        "asking the store. It is believed for `life` after the claim, 2 s if nothing is said, and removed at the end.",
        "on_unknown": "The status of the answer while the outcome is unknown.",
        "reconcile_interval": "The `Retry-After` of an unknown outcome that no resolver will look at sooner.",
    },
    "What a crash, an error or an outage means": {
        "lease": "How long a claim holds without a sign of life. The owner renews it at a third of this.",
        "deadline": "Renewals end this long after the claim: a handler that hangs cannot hold a key for ever.",
        "call_timeout": "PHASED, OUTBOX: how long one outside call may take; then it is uncertain. Stored with the "
        "claim, because the next owner has to wait for it.",
        "on_lease_expired": "What a lease that ran out means. Without it the effects decide; it may only be stricter "
        "than they are. `fail` makes the record unknown, too, but no resolver is asked: it is in the operators' queue "
        "(`oncekey unknown list --given-up`) at once, and counts for the alert `OncekeyGivenUp`.",
        "naturally_idempotent": "The promise that running this handler twice does no harm; some looser settings ask "
        "for it.",
        "on_5xx": "INLINE only. `classify`: a 5xx is unknown, unless it is proven that nothing was sent. "
        "`store`: it is the key's answer. `retry_fresh`: the next retry runs.",
        "is_definitely_not_executed": "Says of an exception of an outside call whether it proves that nothing was "
        "sent.",
        "not_executed_statuses": "INLINE: statuses that the handler sends only if it executed nothing.",
        "on_store_error": "The store cannot be asked: `fail_closed` answers 503 and runs nothing, `fail_open` runs the "
        "handler without protection.",
        "max_attempts": "PHASED: how often the handler may be begun; then its record is unknown.",
        "send_window": "PHASED: how long after its announcement a call may be begun.",
        "max_result_bytes": "PHASED: the largest result of a step that is stored.",
        "complete": "PHASED: whether the request is kept, so that a worker may go on without the client.",
    },
    "How long a key is remembered": {
        "ttl": "How long an answer is replayed, counted from the claim and again from the answer.",
        "min_ttl": "The shortest `ttl` that is accepted.",
        "allow_short_ttl": "Accept less than 24 hours, for clients that certainly do not retry the next day.",
        "on_expired": "A request with an expired key: `new` runs as a new one, `gone` gets 410 for as long as the row "
        "is there.",
        "expiry_mode": "The reaper deletes expired records (`hard`), or marks them and deletes them `audit_ttl` later "
        "(`soft`).",
        "abandoned_status": "OUTBOX: the status of a call that no worker began before it expired.",
        "abandoned_ttl": "OUTBOX: how long that answer stays.",
    },
    "The work behind the scenes": {
        "outbox_max_attempts": "How often a parcel is tried before it is a dead letter.",
        "outbox_lease": "How long a worker holds a parcel at least; longer where `send_window` and `call_timeout` ask "
        "for it.",
        "complete_interval": "How often a worker looks for phased requests that stopped half way, and how long it "
        "leaves one alone that failed.",
        "reconcile_max_tries": "How often a resolver is asked about an unknown outcome before a person has to look.",
        "provider_lag": "How long a provider may take to show what it did: a resolver's `not executed` is believed "
        "only after it.",
        "sweep_interval": "How often the sweeper looks for leases that ran out. It leaves each to its owner for 5 more "
        "seconds, so a stuck key is moved within `lease` + 5 s + `sweep_interval` of the owner's last sign of life.",
        "reap_interval": "How often the reaper looks for expired records.",
        "reap_batch": "How many records the reaper removes at once, at most: a batch has as many as take a moment.",
        "audit": "Whether moves that no request made are written to the audit.",
        "audit_ttl": "How long lines of the audit are kept.",
    },
    "How much one caller may ask for": {
        "max_request_age": "A request whose `Idempotency-First-Sent` is older is not executed: 412. A key that is "
        "known is replayed all the same.",
        "max_new_keys_per_second": "New keys of a tenant in a second; more get 429 and `Retry-After`. Needs the extra "
        "`limits`.",
        "max_live_keys": "Keys of a tenant that are remembered at once; a new one past it gets 429.",
        "max_lookups_per_second": "Requests of a caller to the status resource in a second. Needs the extra `limits`.",
        "limits_storage": "Where the package `limits` counts, as the URL of one of its storages; without one, in the "
        "memory of each process.",
    },
    "What answers look like": {
        "flavor": "Whose status codes: `ietf` says 422 to another request under a used key, `stripe` says 400 and adds "
        "an `error` member.",
        "error_format": "The bodies of refusals: problem details (RFC 9457), a `fault` envelope, or only `code`.",
        "problem_types": "What a problem's `type` begins with; the name of the problem follows.",
        "docs_url": 'Where `Link: rel="describedby"` leads. A path is served by oncekey, from this policy.',
        "replay_headers": "Response headers that are stored and replayed, besides `Content-Type`, `Content-Encoding` "
        "and `Location`, which always are.",
        "replayed_header": "The header that marks a replay.",
        "expires_header": "The header that says until when an answer is replayed.",
        "max_response_bytes": "A larger body is sent to the first caller and not stored: a retry gets 409 "
        "`idempotency_response_not_stored` and where to look.",
        "max_spool_bytes": "The largest response that is captured at all; past it a LOCAL handler is rolled back and "
        "an INLINE one is unknown.",
    },
}
"""Groups of settings and a sentence for each. A test fails when a setting is missing here."""

INTRODUCTION: Final = (
    "A `Policy` holds every setting. It is checked when it is made: the error names the setting and what is allowed.",
    """```python
from oncekey import Once, Policy

once = Once("sqlite:///shop.db", policy=Policy(lease=60, ttl=48 * 3600, flavor="stripe"))
```""",
    (
        "A duration is a `timedelta` or a number of seconds. A choice may be given by its name. "
        "`policy.override(lease=30)` is a copy with a change, checked as a whole."
    ),
    (
        "**Route** says how a route sets it for itself, as an option of `@once.protect(…)`. The header's name, "
        f"`{Policy.key_header}`, and the heartbeat, a third of the lease, are no settings."
    ),
)

_CHOICES: Final = {Recovery: "on_lease_expired", On5xx: "on_5xx", StoreErrorPolicy: "on_store_error"}
_STANCES: Final = {Stance.ALLOWED: "yes", Stance.PROMISED: "with `naturally_idempotent`", Stance.REFUSED: "no"}
_ALL: Final = (Effects.LOCAL, Effects.PHASED, Effects.OUTBOX, Effects.INLINE)
_MIB: Final = 1024 * 1024


def page() -> str:
    """The page."""
    by_name = {setting.name: setting for setting in fields(Policy)}
    for_routes = _route_options()
    parts = [
        title("Settings"),
        *INTRODUCTION,
    ]
    for group, sentences in GROUPS.items():
        parts.append(f"## {group}")
        rows = [
            (
                f"`{name}`",
                _default(by_name[name]),
                _allowed(by_name[name]),
                _route(name, for_routes),
                sentence,
            )
            for name, sentence in sentences.items()
        ]
        parts.append(table(("Setting", "Default", "Allowed", "Route", "What it does"), rows))
    return put_together(*parts, *_more(for_routes), *_strictness())


def _more(for_routes: Mapping[str, tuple[str, ...]]) -> list[str]:
    extra = sorted(set(for_routes) - {setting.name for setting in fields(Policy)})
    says = {
        "operation": "The name under which records of this handler are kept. Default: the function's qualified name. "
        "Two handlers need two names.",
        "fingerprint": "A function that takes the request and returns what counts, a mapping or bytes, instead of the "
        "body. See [what is fingerprinted](../explanation/fingerprint.md).",
        "low_stakes": "A second execution would do little harm. Only then its keys may lie in a "
        "[store that can forget them](stores.md#for-low-stakes-only).",
    }
    return [
        "## Options of a route that are no settings",
        table(("Option", "What it does"), [(f"`{name}`", says[name]) for name in extra]),
    ]


def _strictness() -> list[str]:
    rows = [
        (f"`{_CHOICES[type(choice)]}={choice.value}`", *(_STANCES[stances[effects]] for effects in _ALL))
        for choice, stances in STANCES.items()
    ]
    defaults = ", ".join(f"`{effects.name}` means `{BY_EFFECTS[effects].value}`" for effects in _ALL)
    return [
        "## Which settings go with which effects",
        (
            "A setting may forbid a second run that the effects allow, and never allow one that they forbid. "
            f"Enrolling refuses the rest with the sentence that fixes it. Without `on_lease_expired`, {defaults}."
        ),
        table(("Setting", *(f"`{effects.name}`" for effects in _ALL)), rows),
    ]


def _route_options() -> dict[str, tuple[str, ...]]:
    """The options that `@once.protect` offers, and the effects that have them; none named: all have."""
    offered = {effects: options.__annotations__ for effects, options in OFFERED.items()}
    found: dict[str, tuple[str, ...]] = dict.fromkeys(Options.__annotations__, ())
    for effects in _ALL:
        for name in offered[effects]:
            if name not in Options.__annotations__:
                found[name] = (*found.get(name, ()), effects.name)
    return found


def _route(name: str, for_routes: Mapping[str, tuple[str, ...]]) -> str:
    option = name
    if option not in for_routes:
        return ""
    return ", ".join([code(f"{option}="), *for_routes[option]])


def _allowed(setting: Field[Any]) -> str:
    """What the check says, without the long list that stands on a page of its own."""
    never = ", ".join(sorted(name.decode("ascii") for name in NEVER_KEPT))
    return check_of(setting.metadata).allowed.replace(never, "[one that is never stored](headers.md#never-stored)")


def _default(setting: Field[Any]) -> str:
    value = setting.default if setting.default_factory is MISSING else setting.default_factory()
    match value:
        case timedelta():
            return _span(value)
        case Enum() | str():
            return f"`{value}`" if str(value) else "empty"
        case frozenset() | tuple():
            return code(*(str(item) for item in (sorted(value) if isinstance(value, frozenset) else value))) or "none"
        case Selection():
            return "everything counts"
        case bool() | None:
            return f"`{value}`"
        case int() if value >= _MIB:
            return f"{value // _MIB} MiB"
        case _ if value is never_proven:
            return "no exception proves it"
        case _:
            return str(value)


def _span(span: timedelta) -> str:
    seconds = span.total_seconds()
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds % length == 0:
            return f"{seconds / length:g} {unit}"
    return f"{seconds:g} s"
