"""The state-changing routes, functions and consumers of an application, and how each is protected.

`oncekey routes` lists them, `oncekey audit` reports the unprotected ones, and a log line counts them at start-up.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import CodeType, MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from oncekey.core.errors import ConfigurationError
from oncekey.core.model import Effects
from oncekey.frameworks.listing import Served, listed
from oncekey.frameworks.taking import writes_apart

if TYPE_CHECKING:
    from oncekey.core.policy import Policy
    from oncekey.engine.enrolment import Enrolment
    from oncekey.once import Once

IDEMPOTENT: Final = frozenset({"PUT", "DELETE"})
"""Methods whose repetition is harmless by definition (RFC 9110, 9.2.2), unless the handler breaks that."""
STAGING: Final = frozenset({"emit", "defer"})
SENDING: Final = STAGING | {
    *("post", "publish", "send", "produce", "enqueue", "delay", "apply_async", "urlopen"),
    *("send_message", "send_messages", "send_email", "send_mail", "sendmail"),
}
"""Names of functions and methods that publish a message or call another service."""
CALL: Final = "CALL"
"""Stands for the method of a protected function or a consumer of messages."""


class Protection(StrEnum):
    """How a route is protected."""

    PROTECTED = "protected"
    IDEMPOTENT = "idempotent"
    """PUT or DELETE without a key: repeating it has no further effect."""
    DECLARED = "declared open"
    OPEN = "open"
    """POST or PATCH without protection: a retry executes it again."""
    APART = "writes apart"
    """It has a key but takes no transaction: rows that it writes do not commit with the key."""
    PUBLISHES = "publishes"
    """PUT or DELETE that publishes or calls another service, and does so again when it is repeated."""

    @property
    def is_finding(self) -> bool:
        """Whether the application has to be changed."""
        return self in {Protection.OPEN, Protection.APART, Protection.PUBLISHES}


TODO: Final[Mapping[Protection, str]] = MappingProxyType(
    {
        Protection.OPEN: "protect it: @once.protect(effects=...) above the handler; or pass --open",
        Protection.APART: (
            "write through op.connection or once.session, so that its rows commit with its key; if it writes nothing, "
            "add the parameter op: Operation (SyncOperation for a def)"
        ),
        Protection.PUBLISHES: "serve it by POST or PATCH with a key: a repeated PUT or DELETE publishes again",
    }
)


@dataclass(frozen=True, slots=True)
class RouteLine:
    """One method of a route, or a function."""

    method: str
    path: str
    verdict: Protection
    operation: str | None = None
    effects: str | None = None
    key: str | None = None
    front: str | None = None
    """The caches that are read before the store."""

    @property
    def named(self) -> str:
        """Its name for `--open`."""
        return f"{self.method} {self.path}"


def route_lines(onces: Iterable[Once], apps: Iterable[Any], declared: frozenset[str] = frozenset()) -> list[RouteLine]:
    """Every state-changing method of every route, ordered by path; then the functions."""
    onces = list(onces)
    found: dict[tuple[str, str], RouteLine] = {}
    for app in apps:
        for line in _of_app(app, onces, declared):
            found[line.path, line.method] = line
    for once in onces:
        for operation, function in once.functions.items():
            enrolment = once.enrolment_of(operation)
            if enrolment is not None:
                verdict = Protection.APART if writes_apart(function, enrolment) else Protection.PROTECTED
                line = RouteLine(CALL, operation, verdict, operation, enrolment.effects.value, "required")
                found["~" + operation, CALL] = line  # after all paths
    unknown = declared - {line.named for line in found.values()}
    if unknown:
        raise ConfigurationError(f"--open {min(unknown)!r}: no such route is served")
    return [found[place] for place in sorted(found)]


def summary(lines: Iterable[RouteLine]) -> str:
    """One line for a log."""
    lines = list(lines)
    counts = Counter(line.verdict for line in lines)
    counted = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Protection if counts[verdict])
    wrong = [line.named for line in lines if line.verdict.is_finding]
    named = f": {', '.join(wrong[:_NAMED])}{' and others' if len(wrong) > _NAMED else ''}" if wrong else ""
    return f"{len(lines)} state-changing routes and functions: {counted or 'none'}{named}"


_NAMED: Final = 5


def _of_app(app: Any, onces: list[Once], declared: frozenset[str]) -> Iterator[RouteLine]:  # noqa: ANN401
    routes = listed(app)
    if routes is not None:
        for route in routes:
            if not route.is_ours:
                yield from (_line_of(route, method, declared) for method in route.changing)
        return
    # Its routes cannot be listed; the enrolments by path can.
    for once in onces:
        shared = once.served.get(app)
        if shared is None:
            continue
        for pattern in shared.patterns.patterns:
            enrolment = shared.patterns.find(pattern.method, pattern.sample)
            if enrolment is not None:
                yield _protected(pattern.method, pattern.text.partition(" ")[2], enrolment)


def _line_of(route: Served, method: str, declared: frozenset[str]) -> RouteLine:
    enrolment = route.enrolment(method)
    publishes = method in IDEMPOTENT and _publishes(route.endpoint, enrolment)
    if enrolment is not None:
        verdict = Protection.PUBLISHES if publishes else Protection.PROTECTED
        if not publishes and writes_apart(route.endpoint, enrolment, route.dependencies):
            verdict = Protection.APART
        return _protected(method, route.path, enrolment, verdict)
    verdict = Protection.OPEN
    if method in IDEMPOTENT:
        verdict = Protection.PUBLISHES if publishes else Protection.IDEMPOTENT
    if verdict.is_finding and f"{method} {route.path}" in declared:
        verdict = Protection.DECLARED
    return RouteLine(method, route.path, verdict)


def _protected(method: str, path: str, enrolment: Enrolment, verdict: Protection = Protection.PROTECTED) -> RouteLine:
    key = "required" if enrolment.policy.require_key else "optional"
    return RouteLine(method, path, verdict, enrolment.operation, enrolment.effects.value, key, _front(enrolment.policy))


def _front(policy: Policy) -> str | None:
    fronts = {"replay_cache": policy.replay_cache, "lock_hint": policy.lock_hint}
    shown = [f"{name}={one.shown} ({one.life})" for name, one in fronts.items() if one is not None]
    return ", ".join(shown) or None


def _publishes(endpoint: Callable[..., Any], enrolment: Enrolment | None) -> bool:
    """Whether a handler publishes or, without a key, calls another service: judged by the names in its own code."""
    if enrolment is not None and enrolment.effects is Effects.OUTBOX:
        return True
    names = SENDING if enrolment is None else STAGING
    code = getattr(inspect.unwrap(endpoint), "__code__", None)
    return code is not None and any(names & set(one.co_names) for one in _codes(code))


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and the code of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
