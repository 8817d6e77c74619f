# Generated from core/policy.py by `python -m docs.generator`: edit that one.
"""The options of a route, a function or a consumer, as type checkers read them.

Most of them are settings, which override the policy of the whole application.
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
    """Options of everything that HTTP requests reach."""

    low_stakes: bool
    """A second execution would do little harm: only then its keys may lie in a store that can forget them."""
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
    """Settings of a handler that talks to the outside directly."""

    on_store_error: StoreErrorPolicy | Literal["fail_closed", "fail_open"]
    naturally_idempotent: bool
    on_5xx: On5xx | Literal["classify", "retry_fresh", "store"]
    is_definitely_not_executed: Callable[[BaseException], bool]
    not_executed_statuses: set[int] | frozenset[int]


class InlineOptions(Options, Outside, total=False):
    """Options of a handler with effects=INLINE."""


class PathOptions(Shared, Outside, total=False):
    """Options of what is enrolled by its path, which is INLINE."""


class PhasedOptions(Options, total=False):
    """Options of a handler with effects=PHASED."""

    max_attempts: int
    complete: bool
    call_timeout: timedelta | float
    send_window: timedelta | float
    max_result_bytes: int
    is_definitely_not_executed: Callable[[BaseException], bool]


class CallOptions(TypedDict, total=False):
    """Options of a protected function or consumer; what is for one kind of effects only is refused with others."""

    tenant: str | Callable[..., str]
    """Whose call it is: a parameter's name, or a function of parameters. Without it all calls are one tenant's."""
    result: Any
    """What the result is read as, where the annotation does not say: a type, a model, a function."""
    ignore: Sequence[str]
    """Parameters that do not count, such as a client or a session."""
    low_stakes: bool
    """A second execution would do little harm: only then its keys may lie in a store that can forget them."""
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
