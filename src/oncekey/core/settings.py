# Generated from core/policy.py by `python -m docs.generator`: edit that one.
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

    require_key: bool
    header_syntax: HeaderSyntax | Literal["strict", "compat", "bare"]
    key_format: KeyFormat | Literal["opaque", "uuid"]
    min_key_length: int | None
    max_key_length: int
    pii_check: KeyCheck | Literal["off", "warn", "reject"]
    guessable_check: KeyCheck | Literal["off", "warn", "reject"]
    bind_to: BindTo | Literal["tenant", "principal", "token"]
    namespace: str
    separate_operations: bool
    selection: Selection
    secret: bytes | None
    big_ints: BigInts | Literal["exact", "reject"]
    max_request_bytes: int
    body_timeout: timedelta | float
    on_in_progress: InProgress | Literal["conflict", "accepted", "wait"]
    wait_max: timedelta | float
    replay_cache: Front | str | timedelta | float | None
    lock_hint: Front | str | None
    ttl: timedelta | float
    min_ttl: timedelta | float
    allow_short_ttl: bool
    on_expired: OnExpired | Literal["new", "gone"]
    expiry_mode: ExpiryMode | Literal["hard", "soft"]
    reap_interval: timedelta | float
    reap_batch: int
    lease: timedelta | float
    deadline: timedelta | float
    on_lease_expired: Recovery | Literal["retry", "resume", "unknown", "fail"] | None
    max_attempts: int
    complete: bool
    complete_interval: timedelta | float
    sweep_interval: timedelta | float
    on_store_error: StoreErrorPolicy | Literal["fail_closed", "fail_open"]
    call_timeout: timedelta | float
    send_window: timedelta | float
    max_result_bytes: int
    naturally_idempotent: bool
    on_5xx: On5xx | Literal["classify", "retry_fresh", "store"]
    is_definitely_not_executed: Callable[[BaseException], bool]
    not_executed_statuses: set[int] | frozenset[int]
    outbox_max_attempts: int
    outbox_lease: timedelta | float
    abandoned_status: Literal[408, 410]
    on_unknown: Literal[409, 202, 503]
    reconcile_interval: timedelta | float
    reconcile_max_tries: int
    provider_lag: timedelta | float
    max_request_age: timedelta | float | None
    max_new_keys_per_second: int | None
    max_live_keys: int | None
    max_lookups_per_second: int | None
    limits_storage: str | None
    flavor: Flavor | Literal["ietf", "stripe"]
    error_format: ErrorFormat | Literal["problem", "fault", "code"]
    problem_types: str
    docs_url: str
    replay_headers: Sequence[str]
    replayed_header: str
    expires_header: str
    max_response_bytes: int
    max_spool_bytes: int
    audit: bool | Literal["each"]
    audit_ttl: timedelta | float
