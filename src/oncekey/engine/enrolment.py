"""Enrolments: protected handlers, with their effects and their policies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from oncekey.canonical.digests import Seeds
from oncekey.canonical.fingerprint import Fingerprints, Request
from oncekey.core.errors import ConfigurationError
from oncekey.core.lazy import Lazy
from oncekey.core.model import Duration, Effects, Recovery
from oncekey.core.onecommit import LockNumbers
from oncekey.core.policy import InProgress, Policy, micros

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from oncekey.engine import patterns
else:
    patterns = Lazy("oncekey.engine.patterns")

WHAT_EFFECTS_MEAN = (
    "declare the handler's side effects: effects=LOCAL (it writes only through op.connection), "
    "effects=PHASED (named phases, each one transaction or one outside call), effects=OUTBOX (a worker makes the "
    "outside call later) or effects=INLINE (it calls the outside directly, so a crash means an unknown outcome)"
)

SAFE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
"""Methods that change nothing: a decorated handler does not require a key for them, and a key has no effect."""

NEEDS_KEY = (
    "{operation}: with effects={effects} a request is resumed by its key, so every request needs one: "
    "set require_key=True, or use effects=LOCAL"
)

SCHEMA = "oncekey"
"""The schema that is hashed into the locks of LOCAL requests."""

NO_NAMESPACE = "-"
"""The first part of a scope if the policy has no namespace."""


@dataclass(frozen=True, slots=True)
class Enrolment:
    """One protected operation."""

    operation: str
    effects: Effects
    policy: Policy
    owner: object = field(repr=False)
    """The `Once` that protects it; the innermost installation of that `Once` claims the request."""
    extract: Callable[[Request], Mapping[str, object] | bytes] | None = None
    """Selects the content of the fingerprint, if it is not the whole body."""
    blocking: bool = False
    """The handler is a plain `def`."""
    recovery: Recovery = field(init=False)
    """How to treat an expired lease; stored with every claim. This and all fields below are computed once."""
    transactional: bool = field(init=False, repr=False, compare=False)
    """Whether the handler gets the transaction that also commits its record."""
    completes: bool = field(init=False, repr=False, compare=False)
    """Whether the completer may resume without the client: then the request is stored."""
    shortest_key: int = field(init=False, repr=False, compare=False)
    namespace: str = field(init=False, repr=False, compare=False)
    """The first part of every scope."""
    body_patience: float = field(init=False, repr=False, compare=False)
    """Seconds that a body may take to arrive."""
    spans: Spans = field(init=False, repr=False, compare=False)
    fingerprints: Fingerprints = field(init=False, repr=False, compare=False)
    seeds: Seeds = field(init=False, repr=False, compare=False)
    locks: LockNumbers = field(init=False, repr=False, compare=False)
    limited: bool = field(init=False, repr=False, compare=False)
    """Whether the route limits the number of new or live keys, or the age of requests."""
    fronted: bool = field(init=False, repr=False, compare=False)
    """Whether a front is read before the store."""
    whole: bool = field(init=False, repr=False, compare=False)
    """Whether the fingerprint covers the whole request: then an equal fingerprint means an equal request."""

    def __post_init__(self) -> None:
        policy, effects = self.policy, self.effects
        if not policy.require_key and effects in (Effects.PHASED, Effects.OUTBOX):
            raise ConfigurationError(NEEDS_KEY.format(operation=self.operation, effects=effects.name))
        if effects is Effects.OUTBOX and policy.on_in_progress is InProgress.ACCEPTED:
            # Its 202 means that the parcel is committed; before that a retry gets 409.
            policy = policy.override(on_in_progress=InProgress.CONFLICT)
            object.__setattr__(self, "policy", policy)
        derived = {
            "recovery": policy.recovery_for(effects),
            "transactional": effects in (Effects.LOCAL, Effects.OUTBOX),
            "completes": effects is Effects.PHASED and policy.complete,
            "shortest_key": policy.shortest_key,
            "namespace": policy.namespace or NO_NAMESPACE,
            "body_patience": policy.body_timeout.total_seconds(),
            "spans": Spans.of(policy),
            "fingerprints": Fingerprints(
                selection=policy.selection,
                secret=policy.secret,
                big_ints=policy.big_ints,
            ),
            "seeds": Seeds(policy.secret),
            "locks": LockNumbers(SCHEMA, policy.secret),
            "fronted": (policy.replay_cache or policy.lock_hint) is not None,
            "whole": self.extract is None and not policy.selection,
            "limited": (policy.max_request_age or policy.max_new_keys_per_second or policy.max_live_keys) is not None,
        }
        for name, value in derived.items():
            # A frozen class has no other way to set its own fields.
            object.__setattr__(self, name, value)


class Spans(NamedTuple):
    """The durations of every claim, in microseconds."""

    lease: Duration
    deadline: Duration
    call_timeout: Duration
    ttl: Duration

    @classmethod
    def of(cls, policy: Policy) -> Spans:
        """The durations of a policy."""
        return cls(micros(policy.lease), micros(policy.deadline), micros(policy.call_timeout), micros(policy.ttl))


def enrol(operation: str, effects: Effects, policy: Policy, owner: object, **options: object) -> Enrolment:
    """An enrolment for code that cannot be decorated; `options` are settings of the policy."""
    if effects is not Effects.INLINE:
        raise ConfigurationError(
            f"{operation}: a handler that is enrolled by its path gets no transaction, so its effects can only be "
            "INLINE: for other effects, decorate it with @once.protect"
        )
    return Enrolment(operation, effects, policy.override(**options), owner)


class Patterns:
    """Enrolments by pattern; the first match wins."""

    def __init__(self, enrolments: Mapping[str, Enrolment]) -> None:
        self._patterns = tuple((patterns.Pattern.parse(text), enrolment) for text, enrolment in enrolments.items())
        self.patterns = tuple(pattern for pattern, _ in self._patterns)
        self.methods = frozenset(pattern.method for pattern in self.patterns)

    def __iter__(self) -> Iterator[Enrolment]:
        return iter([enrolment for _, enrolment in self._patterns])

    def find(self, method: str, path: str) -> Enrolment | None:
        """The enrolment of a route, by its path as the application writes it, such as `/legacy/{id}`."""
        for pattern, enrolment in self._patterns:
            if pattern.matches(method, path):
                return enrolment
        return None

    def find_spelled(self, method: str, *paths: str) -> Enrolment | None:
        """The enrolment of a request by any spelling of its path, for an application whose router cannot be queried.

        An application may serve `//jobs` and `/jobs/` as `/jobs`; requiring a needless key is safer than running twice.
        """
        if method not in self.methods:
            return None
        for path in paths:
            found = self.find(method, path)
            if found is not None:
                return found
        for pattern, enrolment in self._patterns:
            if pattern.method == method and any(pattern.spelled.fullmatch(patterns.plain(path)) for path in paths):
                return enrolment
        return None
