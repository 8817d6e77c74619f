"""The options of a route and of an application in threads, as type checkers read them; `options` checks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, Required, TypedDict

from oncekey.core.model import Effects, Recovery

if TYPE_CHECKING:
    from datetime import timedelta

    from oncekey.canonical.fingerprint import Request, Selection
    from oncekey.core.checks import Front
    from oncekey.core.keys import HeaderSyntax, KeyFormat
    from oncekey.core.policy import InProgress, On5xx
    from oncekey.engine.enrolment import Enrolment


class Shared(TypedDict, total=False):
    """Settings of everything that is enrolled; each overrides the policy of the whole application."""

    require_key: bool
    low_stakes: bool
    """A second execution would do little harm: only then its keys may lie in a store that can forget them."""
    on_in_progress: InProgress | Literal["conflict", "accepted", "wait"]
    wait_max: timedelta | float
    replay_cache: Front | str | timedelta | float | None
    lock_hint: Front | str | None
    lease: timedelta | float
    deadline: timedelta | float
    ttl: timedelta | float
    allow_short_ttl: bool
    selection: Selection
    header_syntax: HeaderSyntax | Literal["strict", "compat", "bare"]
    key_format: KeyFormat | Literal["opaque", "uuid"]
    max_request_bytes: int
    body_timeout: timedelta | float
    max_response_bytes: int
    replay_headers: Sequence[str]
    on_lease_expired: Recovery | Literal["unknown", "resume", "retry", "fail"]
    on_unknown: Literal[409, 202, 503]


class Options(Shared, total=False):
    """Settings of one decorated handler."""

    operation: str
    fingerprint: Callable[[Request], Mapping[str, object] | bytes]


class Outside(TypedDict, total=False):
    """What only a handler has that talks to the outside directly."""

    on_5xx: On5xx | Literal["classify", "retry_fresh", "store"]
    is_definitely_not_executed: Callable[[BaseException], bool]
    not_executed_statuses: set[int] | frozenset[int]
    naturally_idempotent: bool
    on_store_error: Literal["fail_closed", "fail_open"]


class InlineOptions(Options, Outside, total=False):
    """Settings of a handler with effects=INLINE."""


class PathOptions(Shared, Outside, total=False):
    """Settings of what is enrolled by its path, which is INLINE."""


class PhasedOptions(Options, total=False):
    """Settings of a handler with effects=PHASED."""

    complete: bool
    is_definitely_not_executed: Callable[[BaseException], bool]
    call_timeout: timedelta | float
    send_window: timedelta | float
    max_attempts: int
    max_result_bytes: int


class ThreadOptions(TypedDict, total=False):
    """How an application is protected that is served in threads; `tenant` is handed what its framework has."""

    tenant: Required[Callable[[Any], str]]
    principal: Callable[[Any], str] | None
    status: str | None
    keep_headers: Sequence[str]


class WsgiOptions(ThreadOptions, total=False):
    """The same of a plain one, which may be protected by its paths."""

    enrol: Mapping[str, Enrolment] | None


OFFERED: Final[Mapping[Effects, type]] = MappingProxyType(
    {
        Effects.LOCAL: Options,
        Effects.OUTBOX: Options,
        Effects.INLINE: InlineOptions,
        Effects.PHASED: PhasedOptions,
    }
)
"""What a type checker knows of the options of a decorated handler."""
