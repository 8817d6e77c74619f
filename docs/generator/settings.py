"""`settings.md` and `oncekey/options.py`: every setting of `Policy`, as the code declares it.

A setting's description is the docstring below its field; the comment above some fields is the heading of their group.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from datetime import timedelta
from enum import Enum
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final

from oncekey.canonical.fingerprint import Selection
from oncekey.core.checks import Scope, check_of, scope_of
from oncekey.core.headers import NEVER_KEPT
from oncekey.core.model import Effects, Recovery
from oncekey.core.policy import BY_EFFECTS, STANCES, On5xx, Policy, Stance, StoreErrorPolicy, never_proven

from .markdown import code, table, title
from .markdown import page as put_together

INTRODUCTION: Final = (
    "A `Policy` contains every setting. If a value is not allowed, creating it raises an error that names the setting.",
    """```python
from oncekey import Once, Policy

once = Once("sqlite:///shop.db", policy=Policy(lease=60, ttl=48 * 3600, flavor="stripe"))
```""",
    (
        "A duration is a `timedelta` or a number of seconds. A choice may be given by its name. "
        "`policy.override(lease=30)` returns a copy with that change, checked as a whole."
    ),
    (
        "**Scope**: the application's policy has every setting. With `route`, a route can override it, as an option of "
        "`@once.protect(…)`; if effects follow, only a route with those effects can. The name of the header, "
        f"`{Policy.key_header}`, and the interval of the heartbeat, a third of the lease, are not settings."
    ),
)

_CHOICES: Final = {Recovery: "on_lease_expired", On5xx: "on_5xx", StoreErrorPolicy: "on_store_error"}
_STANCES: Final = {Stance.ALLOWED: "yes", Stance.PROMISED: "with `naturally_idempotent`", Stance.REFUSED: "no"}
_ALL: Final = (Effects.LOCAL, Effects.PHASED, Effects.OUTBOX, Effects.INLINE)
_MIB: Final = 1024 * 1024


def page() -> str:
    """The page."""
    by_name = {setting.name: setting for setting in fields(Policy)}
    parts = [
        title("Settings"),
        *INTRODUCTION,
    ]
    for group, sentences in groups().items():
        parts.append(f"## {group}")
        rows = [
            (
                f"`{name}`",
                _default(by_name[name]),
                _allowed(by_name[name]),
                _scope(by_name[name]),
                sentence,
            )
            for name, sentence in sentences.items()
        ]
        parts.append(table(("Setting", "Default", "Allowed", "Scope", "What it does"), rows))
    return put_together(*parts, *_more(), *_strictness())


def groups() -> dict[str, dict[str, str]]:
    """The groups of settings, and the sentence of each setting."""
    source = inspect.getsource(Policy)
    lines = source.splitlines()
    body = ast.parse(source).body[0].body  # type: ignore[attr-defined]  # a class has a body
    found: dict[str, dict[str, str]] = {}
    names = {setting.name for setting in fields(Policy)}
    for node, following in pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in names:
            above = lines[node.lineno - 2].strip()
            if above.startswith("# "):
                found[above.removeprefix("# ")] = {}
            if not isinstance(following, ast.Expr) or not isinstance(following.value, ast.Constant):
                raise LookupError(f"{node.target.id} has no sentence below it")
            found[next(reversed(found))][node.target.id] = " ".join(str(following.value.value).split())
    return found


def _more() -> list[str]:
    says = {
        "operation": "The name under which records of this handler are stored. Default: the function's qualified name. "
        "Two handlers need different names.",
        "fingerprint": "A function that takes the request and returns what to compare, a mapping or bytes, instead of "
        "the body. See [Fingerprint](../explanation/fingerprint.md).",
        "low_stakes": "Declares that a second execution would do little harm. A "
        "[store that can lose keys](stores.md#for-low-stakes-only) requires it.",
    }
    return [
        "## Other options of a route",
        table(("Option", "What it does"), [(f"`{name}`", says[name]) for name in sorted(says)]),
    ]


def _strictness() -> list[str]:
    rows = [
        (f"`{_CHOICES[type(choice)]}={choice.value}`", *(_STANCES[stances[effects]] for effects in _ALL))
        for choice, stances in STANCES.items()
    ]
    defaults = ", ".join(f"`{effects.name}` means `{BY_EFFECTS[effects].value}`" for effects in _ALL)
    return [
        "## Settings and effects",
        (
            "A setting may forbid a second run that the effects allow, and never allow one that they forbid. Other "
            "combinations raise `ConfigurationError`, which names the fix. Without `on_lease_expired`, "
            f"{defaults}."
        ),
        table(("Setting", *(f"`{effects.name}`" for effects in _ALL)), rows),
    ]


def _scope(setting: Field[Any]) -> str:
    effects = scope_of(setting.metadata).effects
    if not effects:
        return "application"
    named = () if len(effects) == len(_ALL) else [one.name for one in _ALL if one in effects]
    return ", ".join(["application, route", *named])


def _allowed(setting: Field[Any]) -> str:
    """The allowed values, without the long list that has its own page."""
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


OPTIONS: Final = '''# Generated from core/policy.py by `python -m docs.generator`: edit that one.
"""The options of a route, a function or a consumer, as type checkers read them.

Most of them are settings, which override the application's policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from datetime import timedelta

    from oncekey.canonical.fingerprint import Request, Selection
    from oncekey.core.checks import Front
    from oncekey.core.keys import HeaderSyntax, KeyFormat
    from oncekey.core.model import Recovery
    from oncekey.core.policy import InProgress, On5xx, StoreErrorPolicy


class Shared(TypedDict, total=False):
    """Options of every route."""

    low_stakes: bool
    """A second execution would do little harm; a store that can lose keys requires it."""
{shared}


class Options(Shared, total=False):
    """Options of one decorated handler."""

    operation: str
    fingerprint: Callable[[Request], Mapping[str, object] | bytes]


class Outside(TypedDict, total=False):
    """Settings of a handler that calls external systems directly."""

{outside}


class InlineOptions(Options, Outside, total=False):
    """Options of a handler with effects=INLINE."""


class PathOptions(Shared, Outside, total=False):
    """Options of routes that are protected by path, which are INLINE."""


class PhasedOptions(Options, total=False):
    """Options of a handler with effects=PHASED."""

{phased}


class CallOptions(TypedDict, total=False):
    """Options of a protected function or consumer; an option for some effects is refused with others."""

    tenant: str | Callable[..., str]
    """The tenant of a call: a parameter's name, or a function of parameters. Default: one tenant for all calls."""
    result: Any
    """How the result is decoded if the annotation does not show it: a type, a model, a function."""
    ignore: Sequence[str]
    """Parameters that are not compared, such as a client or a session."""
    low_stakes: bool
    """A second execution would do little harm; a store that can lose keys requires it."""
{calls}
'''
SETTINGS: Final = '''# Generated from core/policy.py by `python -m docs.generator`: edit that one.
"""The arguments of `Policy`, as type checkers read them: a choice by its name, a duration in seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from datetime import timedelta

    from oncekey.canonical.fingerprint import Selection
    from oncekey.canonical.jcs import BigInts
    from oncekey.core.checks import Front
    from oncekey.core.keys import HeaderSyntax, KeyFormat
    from oncekey.core.model import Recovery
    from oncekey.core.policy import (
        ErrorFormat,
        ExpiryMode,
        Flavor,
        InProgress,
        KeyCheck,
        On5xx,
        OnExpired,
        StoreErrorPolicy,
    )
    from oncekey.core.scope import BindTo


class Settings(TypedDict, total=False):
    """Every setting."""

{settings}
'''
NO_STATUS: Final = {"on_in_progress": 'InProgress | Literal["conflict", "wait"]'}
"""A function has no status resource, so `accepted` is not a choice."""


def options() -> str:
    """The module of the options."""
    scopes = {setting: scope_of(setting.metadata) for setting in fields(Policy)}

    def offered(chosen: Callable[[Scope], bool], instead: Mapping[str, str] = MappingProxyType({})) -> str:
        found = [setting for setting, scope in scopes.items() if scope.effects and chosen(scope)]
        given = {setting.name: check_of(setting.metadata).given for setting in found}
        return "\n".join(f"    {name}: {instead.get(name, type_)}" for name, type_ in given.items())

    everywhere = frozenset(_ALL)
    return OPTIONS.format(
        shared=offered(lambda scope: scope.effects == everywhere),
        outside=offered(lambda scope: scope.effects != everywhere and Effects.INLINE in scope.effects),
        phased=offered(lambda scope: scope.effects != everywhere and Effects.PHASED in scope.effects),
        calls=offered(lambda scope: scope.functions, NO_STATUS),
    )


def settings() -> str:
    """The module of the arguments of `Policy`."""
    given = {setting.name: check_of(setting.metadata).given for setting in fields(Policy)}
    return SETTINGS.format(settings="\n".join(f"    {name}: {type_}" for name, type_ in given.items()))
