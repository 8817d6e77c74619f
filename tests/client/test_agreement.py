"""The client has its own key syntax, codes and waits, and they are those of the library."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from core.properties import stable
from oncekey.core import keys as library_keys
from oncekey.core.headers import KEY_HEADER
from oncekey.core.model import Code
from oncekey.core.pacing import Backoff as LibraryBackoff
from oncekey.core.policy import Policy
from oncekey.core.problems import PROBLEMS
from oncekey_client import Backoff
from oncekey_client import keys as client_keys
from oncekey_client.exchange import Reply
from oncekey_client.profiles import IETF, OURS, NextMove, next_move

BY_STATUS = {
    Code.KEY_MISSING: NextMove.ACCEPT,
    Code.KEY_MALFORMED: NextMove.ACCEPT,
    Code.BODY_INVALID: NextMove.ACCEPT,
    Code.BODY_LENGTH_MISSING: NextMove.ACCEPT,
    Code.BODY_TOO_LARGE: NextMove.ACCEPT,
    Code.BODY_TOO_SLOW: NextMove.RETRY,
    Code.KEY_NOT_FOUND: NextMove.ACCEPT,
    Code.EXECUTION_FAILED: NextMove.RETRY,
    Code.TIMED_OUT: NextMove.RETRY,
    Code.RATE_LIMITED: NextMove.RETRY,
    Code.REQUEST_TOO_OLD: NextMove.ACCEPT,
}
"""The refusals whose status is enough for the client."""


def patterns(module: object) -> dict[str, tuple[object, int]]:
    found = {name: value for name, value in vars(module).items() if isinstance(value, re.Pattern)}
    return {name: (pattern.pattern, pattern.flags) for name, pattern in found.items()}


def test_client_and_library_key_patterns_are_equal():
    ours = patterns(client_keys)
    assert len(ours) >= 9
    assert ours.items() <= patterns(library_keys).items()


def parsed(module, field: bytes) -> str:
    try:
        return f"key {module.parse_string_item(field)}"
    except module.NotAStringItemError as error:
        return f"error {error}"


@stable
@given(
    st.one_of(
        st.binary(max_size=40), st.from_regex(library_keys._STRING), st.from_regex(rb'"[a-z]{1,3}"(; ?[a-z]=.{0,9})*')
    )
)
@example(rb'"a";b=%"%ff"')
@example(b'"a", "b"')
def test_client_and_library_parse_a_key_header_equally(field):
    assert parsed(client_keys, field) == parsed(library_keys, field)


@stable
@given(
    st.one_of(
        st.text(max_size=60),
        *(st.from_regex(getattr(library_keys, name)) for name in ("_EMAIL", "_PHONE", "_SOCIAL_SECURITY")),
    )
)
@example("ann@shop.example")
@example("+49 30 1234567")
def test_client_and_library_flag_the_same_personal_keys(key):
    assert client_keys.looks_personal(key) == library_keys.looks_personal(key)


def test_client_maps_every_problem_code_of_the_library():
    told = {code: fault for code, fault, _ in OURS}
    assert told == {code.value: PROBLEMS[code].fault_code for code in Code if code.value in told}
    assert set(told) | {code.value for code in BY_STATUS} == {code.value for code in Code}
    assert set(told).isdisjoint(code.value for code in BY_STATUS)


@pytest.mark.parametrize("code", BY_STATUS)
def test_client_maps_the_remaining_codes_by_status(code):
    assert next_move(Reply(PROBLEMS[code].status), IETF).move is BY_STATUS[code]


def test_client_and_library_backoff_defaults_are_equal():
    assert [(one.name, one.default) for one in fields(Backoff)] == [
        (one.name, one.default) for one in fields(LibraryBackoff)
    ]


@stable
@given(st.integers(-5, 10_000), st.floats(-1, 2), st.one_of(st.none(), st.floats(-5, 1e6)))
def test_client_and_library_backoff_waits_are_equal(failures, chance, asked):
    ours, theirs = Backoff(0.2, 10.0, 0.1, 30.0), LibraryBackoff(0.2, 10.0, 0.1, 30.0)
    assert ours.wait(failures, chance, asked=asked) == theirs.wait(failures, chance, asked=asked)


def test_client_and_library_header_names_are_equal():
    assert (IETF.field, IETF.replayed) == (KEY_HEADER, Policy().replayed_header)
