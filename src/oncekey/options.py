# Generated from core/policy.py by `python -m docs.generator`: edit that one.
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
    require_key: bool
    header_syntax: HeaderSyntax | Literal["strict", "compat", "bare"]
    key_format: KeyFormat | Literal["opaque", "uuid"]
    selection: Selection
    max_request_bytes: int
    body_timeout: timedelta | float
    on_in_progress: InProgress | Literal["conflict", "accepted", "wait"]
    wait_max: timedelta | float
    replay_cache: Front | str | timedelta | float | None
    lock_hint: Front | str | None
    ttl: timedelta | float
    allow_short_ttl: bool
    lease: timedelta | float
    deadline: timedelta | float
    on_lease_expired: Recovery | Literal["retry", "resume", "unknown", "fail"] | None
    on_unknown: Literal[409, 202, 503]
    replay_headers: Sequence[str]
    max_response_bytes: int


class Options(Shared, total=False):
    """Options of one decorated handler."""

    operation: str
    fingerprint: Callable[[Request], Mapping[str, object] | bytes]


class Outside(TypedDict, total=False):
    """Settings of a handler that calls external systems directly."""

    on_store_error: StoreErrorPolicy | Literal["fail_closed", "fail_open"]
    naturally_idempotent: bool
    on_5xx: On5xx | Literal["classify", "retry_fresh", "store"]
    is_definitely_not_executed: Callable[[BaseException], bool]
    not_executed_statuses: set[int] | frozenset[int]


class InlineOptions(Options, Outside, total=False):
    """Options of a handler with effects=INLINE."""


class PathOptions(Shared, Outside, total=False):
    """Options of routes that are protected by path, which are INLINE."""


class PhasedOptions(Options, total=False):
    """Options of a handler with effects=PHASED."""

    max_attempts: int
    complete: bool
    call_timeout: timedelta | float
    send_window: timedelta | float
    max_result_bytes: int
    is_definitely_not_executed: Callable[[BaseException], bool]


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
    max_request_bytes: int
    on_in_progress: InProgress | Literal["conflict", "wait"]
    wait_max: timedelta | float
    replay_cache: Front | str | timedelta | float | None
    lock_hint: Front | str | None
    ttl: timedelta | float
    allow_short_ttl: bool
    lease: timedelta | float
    deadline: timedelta | float
    on_lease_expired: Recovery | Literal["retry", "resume", "unknown", "fail"] | None
    max_attempts: int
    complete: bool
    on_store_error: StoreErrorPolicy | Literal["fail_closed", "fail_open"]
    call_timeout: timedelta | float
    send_window: timedelta | float
    max_result_bytes: int
    naturally_idempotent: bool
    on_5xx: On5xx | Literal["classify", "retry_fresh", "store"]
    is_definitely_not_executed: Callable[[BaseException], bool]
    max_response_bytes: int
