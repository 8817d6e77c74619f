"""Scopes: one text for each caller, so that two callers never share a record.

A scope is its parts, each after its own length: `4:acme5:alice` is ("acme", "alice"). Characters other than printable
ASCII are percent-encoded, so that every store can hold them and counts the same length; a scope that would be too long
is `sha256:` and a digest of the parts, which no readable scope can equal, because those begin with a digit.
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache
from hashlib import sha256
from types import MappingProxyType
from typing import Final, assert_never
from urllib.parse import quote, unquote_to_bytes

from oncekey.canonical.digests import frame, raw
from oncekey.core.errors import ConfigurationError

MAX_SCOPE_LENGTH: Final = 200
NO_NAMESPACE: Final = "-"
"""The namespace in a scope if the policy has none."""
_UNSAFE: Final = re.compile(rb"[^!-$&-~]")
_NAMES: Final = {"token": "token_digest"}
_CALLER: Final = MappingProxyType({2: "tenant", 4: "principal"})
"""The parts of a caller's scope that the application names."""
_NONE: Final = str(None)
"""The name of nobody: `str(request.user.pk)` of a caller without a login."""
_DIGITS: Final = frozenset("0123456789")
_LENGTH: Final = re.compile(r"([0-9]+):")


class BindTo(StrEnum):
    """Who shares a key: the whole tenant, one principal in it, or one token."""

    TENANT = "tenant"
    PRINCIPAL = "principal"
    TOKEN = "token"  # noqa: S105  (the name of a choice, not a secret)


def scope_of(*parts: str) -> str:
    """The scope of `parts` (namespace, tenant, principal, ...); other parts have another scope.

    Raises:
        ConfigurationError: A part is missing or empty, which would put different callers into one scope.
    """
    try:
        if sum(map(len, parts)) <= MAX_SCOPE_LENGTH:  # longer scopes are not cached: callers must not fill the memory
            return _scope(parts)
    except TypeError:
        pass  # a part that cannot be hashed; it is rejected below, by name
    return _scope.__wrapped__(parts)


@lru_cache(maxsize=4096)
def _scope(parts: tuple[str, ...]) -> str:
    if not parts:
        raise ConfigurationError("A scope needs at least one part: give the tenant of the caller.")
    encoded = [raw(_require(part, number)) for number, part in enumerate(parts, start=1)]
    readable = frame(*[_UNSAFE.sub(_percent, part) for part in encoded])
    if len(readable) <= MAX_SCOPE_LENGTH:
        return readable.decode("ascii")
    return f"sha256:{sha256(frame(*encoded)).hexdigest()}"


def bound_scope(bind_to: BindTo, *parts: str, principal: str | None = None, token: str | None = None) -> str:
    """The scope of a caller: `parts` (namespace, tenant, ...), and what `bind_to` adds to them.

    A token is a secret, so only its digest becomes part of the scope.
    """
    shared = scope_of(*parts)
    match bind_to:
        case BindTo.TENANT:
            return shared
        case BindTo.PRINCIPAL:
            return scope_of(*parts, bind_to, _given(principal, bind_to))
        case BindTo.TOKEN:
            return scope_of(*parts, bind_to, sha256(raw(_given(token, bind_to))).hexdigest())
        case _:
            assert_never(bind_to)


def beginning_of(namespace: str | None) -> str:
    """The beginning of all readable scopes of a namespace."""
    return frame(_UNSAFE.sub(_percent, raw(namespace or NO_NAMESPACE))).decode("ascii")


def is_in(namespace: str | None, scope: str) -> bool:
    """Whether a scope may be of a namespace: a digest does not show it."""
    return scope[:1] not in _DIGITS or scope.startswith(beginning_of(namespace))


def parts_of(scope: str) -> list[str]:
    """The parts of a scope, if it is readable; empty for a digest."""
    parts: list[str] = []
    rest = scope
    while found := _LENGTH.match(rest):
        end = found.end() + int(found[1])
        try:
            parts.append(unquote_to_bytes(rest[found.end() : end]).decode())
        except UnicodeDecodeError:
            return []
        rest = rest[end:]
    return [] if rest else parts


def tenant_of(scope: str) -> str:
    """The tenant in a caller's scope; the scope itself if it is not readable."""
    parts = parts_of(scope)
    return parts[1] if len(parts) > 1 else scope


def names_of(scope: str) -> dict[str, str]:
    """The names in a caller's scope, for log lines: the tenant first, then the other parts.

    Keys are `tenant`, and if there is one `principal`, `token_digest`, `function` or `namespace`. A scope that is
    not readable is the tenant's name.
    """
    parts = [part if part.isprintable() else quote(part) for part in parts_of(scope)]
    match parts:
        case [namespace, tenant, *more] if len(more) % 2 == 0:
            bound = {_NAMES.get(kind, kind): name for kind, name in zip(more[::2], more[1::2], strict=True)}
            named = {} if namespace == NO_NAMESPACE else {"namespace": namespace}
            return {"tenant": tenant, **bound, **named}
        case _:
            return {"tenant": scope}


def shown_scope(scope: str) -> str:
    """A scope for people: the tenant, then the other parts, as `acme, principal alice`."""
    names = names_of(scope)
    tenant = names.pop("tenant")
    return ", ".join((tenant, *(f"{kind.replace('_', ' ')} {name}" for kind, name in names.items())))


def _require(part: object, number: int) -> str:
    if not isinstance(part, str) or not part.strip() or (part == _NONE and number in _CALLER):
        what = repr(part) if part is None or isinstance(part, str) else f"of type {type(part).__name__}"
        name = _CALLER.get(number, f"part {number} of the scope")
        raise ConfigurationError(
            f"the {name} is {what}: its function must return a non-empty str for every caller, because callers without "
            "one would share responses"
        )
    return part


def _given(value: str | None, bind_to: BindTo) -> str:
    if not value:
        raise ConfigurationError(
            f"keys are bound to the {bind_to}, and this caller has none: authenticate the callers of this route, or "
            "bind keys to the tenant"
        )
    return value


def _percent(found: re.Match[bytes]) -> bytes:
    return b"%%%02X" % found[0][0]
