"""Checks of settings: each converts a value, or raises and names what is allowed. `Front`: a cache before the store."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from oncekey.core.errors import ConfigurationError
from oncekey.core.headers import field_name, is_field_name

if TYPE_CHECKING:
    from enum import StrEnum

    from oncekey.core.model import Duration, Effects

MEMORY: Final = "memory"
SHARED: Final = ("redis", "rediss", "unix")
LONGEST: Final = timedelta(hours=1)
"""The longest lifetime of a copy, and so for how long the copy of a busted response must not be written again."""
TIMEOUT: Final = timedelta(milliseconds=50)
_CHECK: Final = "oncekey.check"
_SCOPE: Final = "oncekey.scope"
_URL: Final = re.compile(r"[A-Za-z0-9\-._~:/?@!$&'()*+,;=%]+")


@dataclass(frozen=True, slots=True)
class Check:
    """A rule for one setting: `convert` raises for every value that `allowed` does not describe."""

    allowed: str
    given: str
    """The type of the allowed values, as it is written in an annotation."""
    convert: Callable[[Any], object]
    secret: bool = False

    def __call__(self, setting: str, value: object) -> object:
        """The value, converted for the policy."""
        try:
            return self.convert(value)
        except (TypeError, ValueError, OverflowError):
            shown = "not shown" if self.secret else repr(value)
            raise ConfigurationError(f"{setting}: {shown} is not allowed; allowed is {self.allowed}") from None


Rule = MappingProxyType[str, Any]
"""A check, or a scope, as the metadata of a dataclass field."""


def check_of(metadata: Mapping[Any, Any]) -> Check:
    """The check that a field was declared with."""
    found: Check = metadata[_CHECK]
    return found


def _rule(allowed: str, given: str, convert: Callable[[Any], object], *, secret: bool = False) -> Rule:
    return MappingProxyType({_CHECK: Check(allowed, given, convert, secret)})


@dataclass(frozen=True, slots=True)
class Scope:
    """Where a setting is allowed in addition to the policy of the whole application."""

    effects: frozenset[Effects]
    """Handlers with these effects."""
    functions: bool
    """Functions and consumers with these effects too."""
    strict: bool
    """Whether oncekey itself rejects it elsewhere, where nothing would read it; else only a type checker does."""


def scope(*effects: Effects, functions: bool = True, strict: bool = False) -> Rule:
    """A scope as metadata."""
    return MappingProxyType({_SCOPE: Scope(frozenset(effects), functions, strict)})


def scope_of(metadata: Mapping[Any, Any]) -> Scope:
    """The scope that a field was declared with."""
    found: Scope = metadata[_SCOPE]
    return found


def choice(kind: type[StrEnum]) -> Rule:
    """A member of `kind`, or its name in a configuration file."""
    names = ", ".join(f'"{one}"' for one in kind)
    return _rule(" | ".join(kind), f"{kind.__name__} | Literal[{names}]", kind)


def optional(rule: Rule) -> Rule:
    """What `rule` allows, or None."""
    inner = check_of(rule)
    return _rule(
        f"None, or {inner.allowed}",
        f"{inner.given} | None",
        lambda value: None if value is None else inner.convert(value),
        secret=inner.secret,
    )


def flag(*words: str) -> Rule:
    """True, False or one of the words; any other string, such as "no", would be true."""

    def convert(value: object) -> bool | str:
        if isinstance(value, bool) or (isinstance(value, str) and value in words):
            return value
        raise TypeError

    given = f" | Literal[{', '.join(map(json.dumps, words))}]" if words else ""
    return _rule(" | ".join(("True", "False", *words)), f"bool{given}", convert)


def whole(at_least: int, at_most: int | None = None) -> Rule:
    """A whole number within bounds."""

    def convert(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError
        if value < at_least or (at_most is not None and value > at_most):
            raise ValueError
        return value

    bounds = f"of {at_least} or more" if at_most is None else f"from {at_least} to {at_most}"
    return _rule(f"a whole number {bounds}", "int", convert)


def one_of(*numbers: int) -> Rule:
    """One of a few numbers."""

    def convert(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value not in numbers:
            raise ValueError
        return value

    return _rule(" | ".join(map(str, numbers)), f"Literal[{', '.join(map(str, numbers))}]", convert)


def span() -> Rule:
    """A duration above zero: a `timedelta`, or a number of seconds."""
    return _rule("a timedelta or a number of seconds, longer than 0", "timedelta | float", _span)


def _span(value: object) -> timedelta:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        value = timedelta(seconds=value)
    if not isinstance(value, timedelta):
        raise TypeError
    if value <= timedelta():
        raise ValueError
    return value


def front(life: timedelta, *, memory: bool) -> Rule:
    """A `Front` before the store; a duration alone means one in this process, with that lifetime."""

    def convert(value: object) -> Front:
        if memory and not isinstance(value, Front | str):
            value = Front(MEMORY, _span(value))
        made = Front(value) if isinstance(value, str) else value
        if not isinstance(made, Front) or (made.place == MEMORY and not memory):
            raise TypeError
        return made if made.life is not None else Front(made.place, life, made.timeout)

    places = '"memory", a duration (the same, with that lifetime), ' if memory else ""
    given = "Front | str | timedelta | float" if memory else "Front | str"
    return _rule(f"{places}redis://host:6379/0, or a Front of one of these", given, convert, secret=True)


def text(at_most: int) -> Rule:
    """Printable text of a bounded length, possibly empty."""

    def convert(value: object) -> str:
        if not isinstance(value, str) or len(value) > at_most or not value.isprintable():
            raise ValueError
        return value

    return _rule(f"printable text of at most {at_most} characters", "str", convert)


def url() -> Rule:
    """The beginning of a URL reference; oncekey adds the fragment."""

    def convert(value: object) -> str:
        if not isinstance(value, str) or not _URL.fullmatch(value):
            raise ValueError
        return value

    return _rule("a URL or URL path without a fragment, in ASCII", "str", convert)


def secret_bytes(at_least: int) -> Rule:
    """A secret; its value is never shown."""

    def convert(value: object) -> bytes:
        if not isinstance(value, bytes) or len(value) < at_least:
            raise ValueError
        return value

    return _rule(f"bytes, {at_least} or more of them", "bytes", convert, secret=True)


def secret_text(what: str) -> Rule:
    """Text that may hold a password; its value is never shown."""

    def convert(value: object) -> str:
        if not isinstance(value, str) or "://" not in value or not value.isprintable():
            raise ValueError
        return value

    return _rule(what, "str", convert, secret=True)


def a(kind: type) -> Rule:
    """An instance of `kind`."""

    def convert(value: object) -> object:
        if not isinstance(value, kind):
            raise TypeError
        return value

    return _rule(f"a {kind.__name__}", kind.__name__, convert)


def function(given: str) -> Rule:
    """A callable of this type."""

    def convert(value: object) -> object:
        if not callable(value):
            raise TypeError
        return value

    return _rule("a function", given, convert)


def own_field(never: frozenset[bytes]) -> Rule:
    """The name of a header field that oncekey may send, none of `never`."""

    def convert(value: object) -> str:
        if not isinstance(value, str) or not is_field_name(value) or field_name(value) in never:
            raise ValueError
        return value

    return _rule(f"the name of a header field, but not {_listed(never)}", "str", convert)


def field_names(never: frozenset[bytes]) -> Rule:
    """Names of header fields in lower case, none of `never`."""

    def convert(value: object) -> tuple[str, ...]:
        names = tuple(name.lower() for name in _strings(value))
        if not all(is_field_name(name) and field_name(name) not in never for name in names):
            raise ValueError
        return names

    return _rule(f"a list of names of header fields, without {_listed(never)}", "Sequence[str]", convert)


def _listed(names: frozenset[bytes]) -> str:
    return ", ".join(sorted(name.decode("ascii") for name in names))


def statuses(at_least: int, at_most: int) -> Rule:
    """A set of status codes, possibly empty."""
    number = check_of(whole(at_least, at_most))

    def convert(value: object) -> frozenset[object]:
        if not isinstance(value, Iterable):
            raise TypeError
        return frozenset(number.convert(status) for status in value)

    return _rule(f"a set of status codes from {at_least} to {at_most}", "set[int] | frozenset[int]", convert)


def _strings(value: object) -> Iterable[str]:
    # A single string is iterable too, character by character, which is never intended.
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError
    items = tuple(value)
    if not all(isinstance(item, str) for item in items):
        raise TypeError
    return items


@dataclass(frozen=True, slots=True)
class Front:
    """A cache in front of the store: `Front("redis://cache:6379/0", life=30)`, or `Front("memory")`.

    `life` is how long a copy is valid at most, by the store's clock. If an operator busts a response and the front
    cannot be reached, the front may serve the old copy for that long. `timeout` limits one query to a shared front.
    """

    place: str = field(repr=False)
    life: timedelta | float | None = None
    """None: the default of the setting."""
    timeout: timedelta | float = TIMEOUT

    def __post_init__(self) -> None:
        if self.place != MEMORY and not _is_address(self.place):
            raise ValueError(f"a front is 'memory' or redis://host:6379/0, one of {', '.join(SHARED)}")
        for name in ("life", "timeout"):
            value = getattr(self, name)
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                object.__setattr__(self, name, value := timedelta(seconds=value))
            if value is None and name == "life":
                continue
            if not isinstance(value, timedelta) or value <= timedelta() or (self.shared and value > LONGEST):
                raise ValueError(f"{name} is longer than 0 and at a Redis at most {LONGEST}")

    @property
    def shared(self) -> bool:
        """Whether other processes use it too."""
        return self.place != MEMORY

    @property
    def span(self) -> Duration:
        """Its lifetime in microseconds."""
        assert isinstance(self.life, timedelta)  # the setting filled it in
        return self.life // timedelta(microseconds=1)

    @property
    def patience(self) -> float:
        """The seconds that a query may take."""
        assert isinstance(self.timeout, timedelta)
        return self.timeout.total_seconds()

    @property
    def shown(self) -> str:
        """Its address, without the credentials in the URL."""
        if not self.shared:
            return self.place
        url = urlsplit(self.place)
        return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"


def _is_address(place: str) -> bool:
    try:
        url = urlsplit(place)
    except (ValueError, AttributeError):  # not even text
        return False
    return url.scheme in SHARED and bool(url.path if url.scheme == "unix" else url.hostname)
