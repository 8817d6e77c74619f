"""`oncekey routes`: every state-changing route of an application, and how it is protected."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from types import CodeType
from typing import TYPE_CHECKING, Annotated, Final

import typer

from oncekey.cli.printing import as_list, table
from oncekey.cli.worker import load
from oncekey.core.errors import ConfigurationError
from oncekey.core.model import Effects

if TYPE_CHECKING:
    from oncekey.engine.enrolment import Enrolment
    from oncekey.frameworks.routes import Routed
    from oncekey.once import Once

IDEMPOTENT: Final = frozenset({"PUT", "DELETE"})
"""Methods whose repetition is harmless by definition (RFC 9110, 9.2.2), unless the handler breaks that."""
STAGING: Final = frozenset({"emit", "defer"})
NO_APPLICATION: Final = (
    "--app {app}: this Once is not installed in any application: import the module that calls install"
)


class Verdict(StrEnum):
    """What is to be said of a route."""

    PROTECTED = "protected"
    IDEMPOTENT = "idempotent"
    """PUT or DELETE without a key: sent again it does the same."""
    DECLARED = "declared open"
    OPEN = "open"
    """POST or PATCH without protection: sent again it happens again."""
    PUBLISHES = "publishes"
    """PUT or DELETE that writes parcels: sent again it publishes again, so it is not idempotent."""

    @property
    def is_finding(self) -> bool:
        """Whether somebody has to do something about it."""
        return self in {Verdict.OPEN, Verdict.PUBLISHES}


TODO: Final = {
    Verdict.OPEN: "protect it: @once.protect(effects=...) above the handler; or say --open",
    Verdict.PUBLISHES: "serve it by POST or PATCH with a key: each PUT or DELETE publishes once more",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One method of one route."""

    method: str
    path: str
    verdict: Verdict
    operation: str | None = None
    effects: str | None = None
    key: str | None = None

    @property
    def named(self) -> str:
        """As `--open` names it."""
        return f"{self.method} {self.path}"


def register(app: typer.Typer) -> None:
    """Add the command `routes`."""
    app.command("routes")(routes)


def routes(
    app: Annotated[str, typer.Option("--app", metavar="MODULE:NAME", help="Where the application's Once object is.")],
    *,
    declared: Annotated[
        list[str] | None,
        typer.Option("--open", metavar="'POST /login'", help="Leave this route open on purpose; may be repeated."),
    ] = None,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the routes that change something, and which of them a key protects.

    Every step of a flow has to be protected, and a PUT or DELETE that publishes messages is not idempotent.
    JSON: {"now", "items": [{"method", "path", "verdict", "operation", "effects", "key"}], "next"}.
    Exit code: 0 nothing to do; 1 a POST or PATCH is open, or a PUT or DELETE publishes; 2 a mistake.
    """
    once = load(app)
    if not once.apps:
        raise ConfigurationError(NO_APPLICATION.format(app=app))
    lines = survey(once, frozenset(declared or ()))
    if json_wanted:
        as_list([asdict(line) for line in lines])
    else:
        rows = [(line.method, line.path, line.verdict, line.operation, line.effects, line.key) for line in lines]
        head = ("method", "path", "verdict", "operation", "effects", "key")
        table(head, rows, empty="no route changes anything", first=("path", "method", "verdict"))
        for line in lines:
            if line.verdict.is_finding:
                typer.echo(f"{line.named}: {TODO[line.verdict]}")
    if any(line.verdict.is_finding for line in lines):
        raise typer.Exit(1)


def survey(once: Once, declared: frozenset[str] = frozenset()) -> list[Line]:
    """Every method of every route that may change something, in the order of their paths."""
    from oncekey.engine.enrolment import SAFE
    from oncekey.frameworks.routes import routed

    found = {
        (route.path, method): _line(route, method, declared)
        for app in once.apps
        for route in routed(app)
        for method in route.methods - SAFE
        if not _is_ours(route)
    }
    unknown = declared - {line.named for line in found.values()}
    if unknown:
        raise ConfigurationError(f"--open {min(unknown)!r}: no route is served there")
    return [found[place] for place in sorted(found)]


def _line(route: Routed, method: str, declared: frozenset[str]) -> Line:
    enrolment = route.enrolment or _by_path(route, method)
    publishes = method in IDEMPOTENT and _stages_parcels(route, enrolment)
    if enrolment is None:
        verdict = Verdict.IDEMPOTENT if method in IDEMPOTENT else Verdict.OPEN
        if verdict is Verdict.OPEN and f"{method} {route.path}" in declared:
            verdict = Verdict.DECLARED
        return Line(method, route.path, Verdict.PUBLISHES if publishes else verdict)
    return Line(
        method,
        route.path,
        Verdict.PUBLISHES if publishes else Verdict.PROTECTED,
        enrolment.operation,
        enrolment.effects.value,
        "required" if enrolment.policy.require_key else "optional",
    )


def _by_path(route: Routed, method: str) -> Enrolment | None:
    found = (installation.patterns.find(method, route.path) for installation in reversed(route.passed))
    return next((enrolment for enrolment in found if enrolment is not None), None)


def _is_ours(route: Routed) -> bool:
    """Webhooks are recognised by their event's name, and need no key."""
    return type(route.endpoint).__module__.startswith("oncekey.")


def _stages_parcels(route: Routed, enrolment: Enrolment | None) -> bool:
    """Whether a handler writes parcels, as far as its own code shows: a function that it calls is not followed."""
    if enrolment is not None and enrolment.effects is Effects.OUTBOX:
        return True
    code = getattr(inspect.unwrap(route.endpoint), "__code__", None)
    return enrolment is not None and code is not None and any(STAGING & set(one.co_names) for one in _codes(code))


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
