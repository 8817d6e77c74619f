"""A policy that exists is valid, and its knobs only ever make effects stricter."""

import copy
import dataclasses
from dataclasses import FrozenInstanceError, fields
from datetime import timedelta
from enum import StrEnum
from itertools import product

import pytest

from harness.each import each
from oncekey.canonical.fingerprint import Selection
from oncekey.canonical.jcs import BigInts
from oncekey.core.checks import Front, scope_of
from oncekey.core.errors import ConfigurationError
from oncekey.core.keys import HeaderSyntax, KeyFormat
from oncekey.core.model import SECOND, Effects, Recovery
from oncekey.core.policy import (
    BY_EFFECTS,
    STANCES,
    ErrorFormat,
    ExpiryMode,
    Flavor,
    InProgress,
    KeyCheck,
    On5xx,
    OnExpired,
    Policy,
    StoreErrorPolicy,
    micros,
    never_proven,
)
from oncekey.core.scope import BindTo
from oncekey.core.upkeep import lifetime
from oncekey.frameworks.options import settings_of
from oncekey.options import CallOptions, InlineOptions, Options, PhasedOptions

DEFAULTS = {
    "flavor": Flavor.IETF,
    "header_syntax": HeaderSyntax.COMPAT,
    "key_format": KeyFormat.OPAQUE,
    "min_key_length": None,
    "max_key_length": 255,
    "require_key": True,
    "namespace": "",
    "bind_to": BindTo.TENANT,
    "selection": Selection(),
    "secret": None,
    "big_ints": BigInts.EXACT,
    "max_request_bytes": 1 << 20,
    "body_timeout": timedelta(seconds=60),
    "on_in_progress": InProgress.CONFLICT,
    "wait_max": timedelta(seconds=10),
    "replay_cache": None,
    "lock_hint": None,
    "on_unknown": 409,
    "lease": timedelta(seconds=300),
    "deadline": timedelta(hours=1),
    "call_timeout": timedelta(seconds=30),
    "on_lease_expired": None,
    "naturally_idempotent": False,
    "on_5xx": On5xx.CLASSIFY,
    "is_definitely_not_executed": never_proven,
    "not_executed_statuses": frozenset(),
    "on_store_error": StoreErrorPolicy.FAIL_CLOSED,
    "ttl": timedelta(hours=24),
    "min_ttl": timedelta(hours=24),
    "allow_short_ttl": False,
    "expiry_mode": ExpiryMode.HARD,
    "on_expired": OnExpired.NEW,
    "abandoned_status": 408,
    "sweep_interval": timedelta(seconds=60),
    "reap_interval": timedelta(minutes=5),
    "reap_batch": 5000,
    "reconcile_interval": timedelta(seconds=30),
    "reconcile_max_tries": 10,
    "provider_lag": timedelta(seconds=60),
    "max_attempts": 10,
    "send_window": timedelta(seconds=5),
    "max_result_bytes": 256 * 1024,
    "complete": True,
    "outbox_max_attempts": 10,
    "outbox_lease": timedelta(seconds=60),
    "complete_interval": timedelta(seconds=5),
    "error_format": ErrorFormat.PROBLEM,
    "problem_types": "urn:oncekey:problem:",
    "docs_url": "/idempotency",
    "replay_headers": ("location", "content-type", "content-language", "etag"),
    "max_response_bytes": 1 << 20,
    "max_spool_bytes": 64 << 20,
    "pii_check": KeyCheck.WARN,
    "guessable_check": KeyCheck.WARN,
    "separate_operations": False,
    "max_request_age": None,
    "audit": True,
    "audit_ttl": timedelta(days=90),
    "max_new_keys_per_second": None,
    "max_live_keys": None,
    "max_lookups_per_second": None,
    "limits_storage": None,
    "replayed_header": "Idempotent-Replayed",
    "expires_header": "Idempotency-Key-Expires",
}

CHOICES = {name: type(value) for name, value in DEFAULTS.items() if isinstance(value, StrEnum)} | {
    "on_lease_expired": Recovery
}

OPTIONAL_SPANS = ["max_request_age"]
SPANS = [name for name, value in DEFAULTS.items() if isinstance(value, timedelta)] + OPTIONAL_SPANS
FLAGS = [name for name, value in DEFAULTS.items() if isinstance(value, bool)]


# R12, R110, R148, R157, R169, R175: the defaults of every setting, in one place
def test_every_setting_has_its_documented_default():
    policy = Policy()
    assert {setting.name: getattr(policy, setting.name) for setting in fields(policy)} == DEFAULTS
    assert policy.key_header == "Idempotency-Key"


STRICT = [setting for setting in fields(Policy) if scope_of(setting.metadata).strict]


@pytest.mark.parametrize("setting", STRICT, ids=lambda setting: setting.name)
@pytest.mark.parametrize("effects", Effects)
def test_a_setting_that_nothing_would_read_is_refused_on_a_route(setting, effects):
    options, meant = {setting.name: getattr(Policy(), setting.name)}, scope_of(setting.metadata).effects
    if effects in meant:
        assert settings_of(effects, options) == options
    else:
        with pytest.raises(ConfigurationError, match="of the whole application" if not meant else "has no effect"):
            settings_of(effects, options)


def test_typed_options_match_the_setting_scopes():
    offered = {
        Effects.LOCAL: Options,
        Effects.OUTBOX: Options,
        Effects.INLINE: InlineOptions,
        Effects.PHASED: PhasedOptions,
    }
    for setting in fields(Policy):
        scope = scope_of(setting.metadata)
        assert {one for one, kind in offered.items() if setting.name in kind.__annotations__} == scope.effects
        assert (setting.name in CallOptions.__annotations__) == bool(scope.functions and scope.effects)


# C10, C11, F7: knobs that the protocol took away
@pytest.mark.parametrize(
    "gone",
    [
        "abandoned_ttl",
        "commit_mode",
        "extend_on_complete",
        "heartbeat",
        "key_header",
        "lock_timeout",
        "max_json_depth",
        "methods",
        "on_abandoned",
        "redis",
    ],
)
def test_fixed_values_are_not_settings(gone):
    with pytest.raises(ConfigurationError, match=f"{gone} is not a setting"):
        Policy().override(**{gone: "x"})


def test_the_heartbeat_is_a_third_of_the_lease():
    assert Policy(lease=timedelta(seconds=90)).heartbeat == timedelta(seconds=30)


def test_a_policy_cannot_be_changed_in_place():
    with pytest.raises(FrozenInstanceError):
        Policy().ttl = timedelta(days=2)


def test_a_policy_has_no_positional_settings():
    with pytest.raises(TypeError):
        Policy(Flavor.IETF)


# R102
@pytest.mark.parametrize("error", [TimeoutError(), ConnectionRefusedError(), KeyboardInterrupt()])
def test_by_default_no_error_proves_anything(error):
    assert Policy().is_definitely_not_executed(error) is False


@each("name", SPANS)
def test_number_is_taken_as_seconds(name):
    policy = Policy().override(allow_short_ttl=True, **{name: 600})
    assert getattr(policy, name) == timedelta(seconds=600)
    assert getattr(policy.override(**{name: 600.5}), name) == timedelta(seconds=600.5)


@each("name", SPANS)
@each("bad", [0, -1, timedelta(0), "5 min", True, float("nan"), float("inf"), 1e300, [1]])
def test_duration_must_be_positive(name, bad):
    with pytest.raises(ConfigurationError, match=rf"^{name}: .* seconds, longer than 0"):
        Policy().override(**{name: bad})


@each("name", [name for name in SPANS if name not in OPTIONAL_SPANS])
def test_only_an_optional_span_can_be_left_out(name):
    with pytest.raises(ConfigurationError, match=name):
        Policy().override(**{name: None})
    assert Policy(max_request_age=None).max_request_age is None


@pytest.mark.parametrize(("name", "kind"), CHOICES.items())
def test_choice_can_be_given_by_name(name, kind):
    for member in kind:
        assert getattr(Policy().override(**{name: member.value}), name) is member


@each(("name", "kind"), CHOICES.items())
@each("bad", ["sometimes", 1, True, [], b"off"])
def test_a_wrong_choice_names_setting_value_and_choices(name, kind, bad):
    with pytest.raises(ConfigurationError) as caught:
        Policy().override(**{name: bad})
    message = str(caught.value)
    assert message.startswith(f"{name}: {bad!r} ")
    assert all(member.value in message for member in kind)


@each("name", FLAGS)
@each("bad", ["no", 0, 1, None])
def test_a_flag_is_true_or_false(name, bad):
    with pytest.raises(ConfigurationError, match=rf"^{name}: .* True \| False"):
        Policy().override(**{name: bad})


@each(
    ("name", "bad"),
    [
        ("min_key_length", 0),
        ("max_key_length", 256),
        ("max_key_length", True),
        ("max_request_bytes", 0),
        ("max_request_bytes", 1.5),
        ("max_response_bytes", -1),
        ("max_spool_bytes", -1),
        ("reap_batch", 0),
        ("max_attempts", 0),
        ("outbox_max_attempts", 0),
        ("reconcile_max_tries", 0),
        ("on_unknown", 404),
        ("on_unknown", "409"),
        ("on_unknown", True),
        ("abandoned_status", 500),
        ("namespace", 7),
        ("namespace", "a\nb"),
        ("namespace", "x" * 101),
        ("selection", {"include": ["amount"]}),
        ("is_definitely_not_executed", True),
        ("not_executed_statuses", {200}),
        ("not_executed_statuses", {600}),
        ("not_executed_statuses", ["503"]),
        ("not_executed_statuses", 503),
        ("docs_url", ""),
        ("docs_url", "/docs#idempotency"),
        ("docs_url", "/docs\r\nx: y"),
        ("docs_url", "/docs>"),
        ("docs_url", None),
        ("problem_types", "https://api.example.com/<x>"),
        ("replay_headers", "location"),
        ("replay_headers", ("x y",)),
        ("replay_headers", ("ünïcode",)),
        ("replayed_header", "a b"),
        ("replayed_header", "Set-Cookie"),
        ("expires_header", "Idempotency-Key"),
        ("expires_header", None),
    ],
)
def test_a_wrong_value_is_refused_by_name(name, bad):
    with pytest.raises(ConfigurationError, match=rf"^{name}: .* is not allowed; allowed is "):
        Policy().override(**{name: bad})


# R90
@pytest.mark.parametrize("name", ["Set-Cookie", "Date", "content-length", "Connection", "Transfer-Encoding"])
def test_unsafe_replay_headers_are_rejected(name):
    with pytest.raises(ConfigurationError, match=r"^replay_headers: .*set-cookie"):
        Policy(replay_headers=("location", name))


def test_header_and_status_lists_are_normalised():
    policy = Policy().override(replay_headers=["X-Total", "ETag"], not_executed_statuses=[503, 429, 503])
    assert policy.replay_headers == ("x-total", "etag")
    assert policy.not_executed_statuses == frozenset({503, 429})


class TestSecret:
    SECRET = b"a secret of at least 16 bytes"

    # R195
    def test_secret_is_hidden_in_repr_and_str(self):
        policy = Policy(secret=self.SECRET)
        assert policy.secret == self.SECRET
        assert "a secret" not in repr(policy)
        assert "a secret" not in str(policy)

    @pytest.mark.parametrize("bad", [b"short-secret", "a secret of at least 16 bytes"])
    def test_rejected_secret_is_not_shown(self, bad):
        with pytest.raises(ConfigurationError) as caught:
            Policy().override(secret=bad)
        assert str(caught.value).startswith("secret: not shown is not allowed; allowed is None, or bytes, 16 ")
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__


class TestTogether:
    @pytest.mark.parametrize(
        ("settings", "says"),
        [
            ({"min_key_length": 40, "max_key_length": 36}, "min_key_length=40 .* max_key_length=36"),
            ({"lease": 7200}, "deadline=1:00:00 .* lease=2:00:00"),
            ({"deadline": 10}, "deadline=0:00:10 .* lease=0:05:00"),
            ({"lease": 10, "deadline": 20}, "call_timeout=0:00:30 .* deadline=0:00:20"),
            ({"max_spool_bytes": 10}, "max_spool_bytes=10 .* max_response_bytes=1048576"),
            ({"replayed_header": "X-Key", "expires_header": "x-key"}, "replayed_header and expires_header"),
        ],
    )
    def test_settings_that_contradict_each_other_are_named(self, settings, says):
        with pytest.raises(ConfigurationError, match=says):
            Policy().override(**settings)

    # R157, C14
    @pytest.mark.parametrize(
        "settings", [{"ttl": 3600}, {"min_ttl": 3600}, {"ttl": 3600, "min_ttl": 3600}, {"min_ttl": 172800}]
    )
    def test_short_ttl_requires_allow_short_ttl(self, settings):
        with pytest.raises(ConfigurationError, match="allow_short_ttl=True"):
            Policy().override(**settings)

    # R160
    def test_a_short_ttl_is_possible(self):
        assert Policy().override(ttl=3600, allow_short_ttl=True).ttl == timedelta(hours=1)

    # R157
    def test_long_ttl_needs_no_confirmation(self):
        assert Policy(ttl=timedelta(days=30)).ttl == timedelta(days=30)


class TestOverride:
    def test_override_changes_only_the_named_settings(self):
        policy = Policy(flavor=Flavor.STRIPE)
        other = policy.override(lease=60)
        assert (other.lease, other.flavor) == (timedelta(seconds=60), Flavor.STRIPE)
        assert policy.lease == timedelta(seconds=300)
        assert policy.override() == policy

    @pytest.mark.parametrize(
        ("name", "close"),
        [("leese", "lease"), ("on5xx", "on_5xx"), ("ttl_", "ttl"), ("Docs_URL", "docs_url")],
    )
    def test_an_unknown_setting_names_the_closest(self, name, close):
        with pytest.raises(ConfigurationError) as caught:
            Policy().override(**{name: 1})
        assert str(caught.value) == f"{name} is not a setting; the closest one is {close}"

    def test_constructor_rejects_unknown_settings_with_a_suggestion(self):
        with pytest.raises(ConfigurationError) as caught:
            Policy(leas=3)
        assert str(caught.value) == "leas is not a setting; the closest one is lease"
        assert (caught.value.__cause__, caught.value.__context__) == (None, None)

    def test_distant_setting_name_still_gets_a_suggestion(self):
        with pytest.raises(ConfigurationError, match=r"^q is not a setting; the closest one is [a-z]"):
            Policy().override(q=1)


def test_spans_are_counted_in_microseconds():
    assert micros(timedelta(seconds=300)) == 300_000_000
    assert micros(timedelta(microseconds=1)) == 1
    assert micros(timedelta(days=30, microseconds=7)) == 30 * 86_400_000_000 + 7


class TestStrictness:
    """F7: what a crash means has one source, and a knob may only take away."""

    # P2, F7
    @pytest.mark.parametrize(
        ("effects", "recovery"),
        [
            (Effects.LOCAL, Recovery.RETRY),
            (Effects.PHASED, Recovery.RESUME),
            (Effects.OUTBOX, Recovery.RETRY),
            (Effects.INLINE, Recovery.UNKNOWN),
        ],
    )
    def test_recovery_defaults_to_the_effects(self, effects, recovery):
        assert Policy().recovery_for(effects) is recovery
        Policy().check(effects)

    def test_the_tables_are_total(self):
        choices = {*Recovery, *On5xx, *StoreErrorPolicy}
        assert set(STANCES) == choices
        assert all(set(STANCES[choice]) == set(Effects) for choice in choices)
        assert set(BY_EFFECTS) == set(Effects)

    # F7: allowed, allowed with a promise, refused; the order is LOCAL, PHASED, OUTBOX, INLINE
    MATRIX = (
        ("on_lease_expired", "unknown", "aaaa"),
        ("on_lease_expired", "fail", "aaaa"),
        ("on_lease_expired", "retry", "arap"),
        ("on_lease_expired", "resume", "rarr"),
        ("on_5xx", "classify", "aaaa"),
        ("on_5xx", "retry_fresh", "rrrp"),
        ("on_5xx", "store", "rrra"),
        ("on_store_error", "fail_closed", "aaaa"),
        ("on_store_error", "fail_open", "rrrp"),
    )
    CELLS = tuple(
        (setting, value, effects, stance)
        for setting, value, row in MATRIX
        for effects, stance in zip((Effects.LOCAL, Effects.PHASED, Effects.OUTBOX, Effects.INLINE), row, strict=True)
    )

    def test_the_matrix_below_is_the_whole_table(self):
        assert len(self.CELLS) == sum(len(row) for row in STANCES.values())

    @each(("setting", "value", "effects", "stance"), CELLS)
    @each("promise", [False, True])
    def test_each_setting_is_allowed_or_rejected_per_effects(self, setting, value, effects, stance, promise):
        policy = Policy().override(naturally_idempotent=promise, **{setting: value})
        if stance == "a" or (stance == "p" and promise):
            policy.check(effects)
            expected = Recovery(value) if setting == "on_lease_expired" else BY_EFFECTS[effects]
            assert policy.recovery_for(effects) is expected
            return
        with pytest.raises(ConfigurationError) as caught:
            policy.check(effects)
        message = str(caught.value)
        assert message.startswith(f"{setting}={value!r} with effects={effects.value!r} ")
        assert ("naturally_idempotent=True" in message) is (stance == "p")
        # A policy that was never checked cannot loosen a claim either.
        with pytest.raises(ConfigurationError):
            policy.recovery_for(effects)

    # P2: stricter is always possible, together too
    @pytest.mark.parametrize(("effects", "recovery"), [*product(Effects, [Recovery.UNKNOWN, Recovery.FAIL, None])])
    def test_stricter_is_always_allowed(self, effects, recovery):
        policy = Policy(on_lease_expired=recovery)
        assert policy.recovery_for(effects) is (recovery or BY_EFFECTS[effects])


# R9, R230: Stripe's clients choose keys of any length
def test_stripe_flavor_allows_short_keys_by_default():
    assert [Policy().shortest_key, Policy(flavor="stripe").shortest_key] == [16, 1]
    assert Policy(flavor="stripe", min_key_length=8).shortest_key == 8
    assert Policy().override(flavor="stripe").shortest_key == 1


# R158: every addend has a name of its own
def test_lifetime_adds_retry_and_recovery_times():
    hours = timedelta(hours=1)
    assert lifetime(retries=12 * hours, recovery=72 * hours) == 84 * hours
    assert lifetime(retries=12 * hours, recovery=72 * hours, audit=24 * hours) == 108 * hours
    assert lifetime(retries=timedelta(minutes=5), recovery=timedelta()) == 24 * hours
    assert Policy(ttl=lifetime(retries=48 * hours, recovery=hours)).ttl == 49 * hours


def test_lifetime_rejects_negative_durations():
    with pytest.raises(ConfigurationError, match=r"recovery=.* is negative"):
        lifetime(retries=timedelta(hours=1), recovery=timedelta(seconds=-1))


def test_a_policy_can_be_copied():
    policy = Policy(lease=30)
    assert copy.copy(policy) == copy.deepcopy(policy) == dataclasses.replace(policy) == policy


# C21: nothing stands in front of the store by default; a shared memory is sealed, so it needs a secret
def test_replay_cache_and_lock_hint_accept_memory_and_urls():
    secret = b"sixteen bytes at least"
    assert Policy(replay_cache=30).replay_cache == Front("memory", 30) == Front("memory", timedelta(seconds=30))
    assert Policy(replay_cache="memory").replay_cache == Front("memory", 60)
    shared = Policy(replay_cache="redis://:pass@cache:6379/1", lock_hint=Front("rediss://cache", life=1), secret=secret)
    assert shared.replay_cache is not None
    assert shared.lock_hint is not None
    assert (shared.replay_cache.shown, shared.replay_cache.span) == ("redis://cache:6379/1", 60 * SECOND)
    assert (shared.lock_hint.shown, shared.lock_hint.span) == ("rediss://cache", SECOND)
    assert "pass" not in repr(shared)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"replay_cache": "redis://cache:6379/0"}, "need secret="),
        ({"lock_hint": "redis://cache:6379/0"}, "need secret="),
        ({"replay_cache": "http://cache"}, "replay_cache: not shown is not allowed"),
        ({"replay_cache": "redis://"}, "replay_cache: not shown is not allowed"),
        ({"replay_cache": 0}, "replay_cache: not shown is not allowed"),
        ({"replay_cache": True}, "replay_cache: not shown is not allowed"),
        ({"lock_hint": "memory"}, "lock_hint: not shown is not allowed"),
        ({"lock_hint": 2}, "lock_hint: not shown is not allowed"),
        ({"lock_hint": Front("redis://cache", life=60), "lease": 30, "secret": b"x" * 16}, "longer than lease="),
    ],
)
def test_invalid_front_is_rejected(given, said):
    with pytest.raises(ConfigurationError, match=said):
        Policy(**given)


@pytest.mark.parametrize("wrong", [{"life": 0}, {"life": timedelta(hours=2)}, {"timeout": -1}, {"timeout": None}])
def test_a_shared_front_has_bounds(wrong):
    with pytest.raises(ValueError, match="longer than 0"):
        Front("redis://cache", **wrong)


def test_audit_each_must_be_given_by_name():
    assert [Policy(audit=lines).audit for lines in (True, False, "each")] == [True, False, "each"]
    for lines in ("all", "no", 1, None):
        with pytest.raises(ConfigurationError, match=r"allowed is True \| False \| each"):
            Policy(audit=lines)
