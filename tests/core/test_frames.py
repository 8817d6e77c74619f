"""Length-prefixed joining: no value can imitate a border."""

from __future__ import annotations

import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.properties import thorough
from oncekey.core.frames import Hmac, frame, raw

parts = st.lists(st.binary(max_size=6) | st.sampled_from([b"1:", b"0:", b"2:ab", b":", b"1:1:"]), max_size=5)


def test_the_bytes_are_documented():  # R33, R36
    assert frame() == b""
    assert frame(b"ab", b"") == b"2:ab0:"
    assert frame(b"x" * 12) == b"12:" + b"x" * 12


@thorough
@given(parts, parts)
def test_other_parts_give_other_bytes(one, other):  # R36
    assert (frame(*one) == frame(*other)) == (one == other)


@thorough
@given(st.text(st.characters()), st.text(st.characters()))
def test_other_texts_give_other_bytes(one, other):  # R36
    assert (raw(one) == raw(other)) == (one == other)


@pytest.mark.parametrize("size", [0, 1, 16, 63, 64, 65, 200])
@pytest.mark.parametrize("message", [b"", b"m", b"m" * 55, b"m" * 56, b"m" * 1000])
def test_a_keyed_hash_is_that_of_rfc_2104(size, message):
    key = bytes(range(256))[:size]
    keyed = Hmac(key)
    assert [keyed.digest(message) for _ in range(2)] == [hmac.digest(key, message, "sha256")] * 2
