"""Frames and hashes: no two lists of parts become the same bytes, and downstream keys are derived."""

from __future__ import annotations

import hmac
import re
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.properties import stable, thorough
from harness.each import each
from oncekey.canonical.digests import PUBLIC_KEY, Hmac, Seeds, downstream_key, frame, raw
from oncekey.canonical.fingerprint import Request
from oncekey.canonical.whole import fingerprint
from oncekey.core.errors import ConfigurationError
from oncekey.core.model import RecordId

parts = st.lists(st.binary(max_size=6) | st.sampled_from([b"1:", b"0:", b"2:ab", b":", b"1:1:"]), max_size=5)


def test_frame_produces_the_documented_bytes():  # R33, R36
    assert frame() == b""
    assert frame(b"ab", b"") == b"2:ab0:"
    assert frame(b"x" * 12) == b"12:" + b"x" * 12


@thorough
@given(parts, parts)
def test_distinct_parts_frame_to_distinct_bytes(one, other):  # R36
    assert (frame(*one) == frame(*other)) == (one == other)


@thorough
@given(st.text(st.characters()), st.text(st.characters()))
def test_distinct_texts_encode_to_distinct_bytes(one, other):  # R36
    assert (raw(one) == raw(other)) == (one == other)


@each("size", [0, 1, 16, 63, 64, 65, 200])
@each("message", [b"", b"m", b"m" * 55, b"m" * 56, b"m" * 1000])
def test_a_keyed_hash_is_that_of_rfc_2104(size, message):
    key = bytes(range(256))[:size]
    keyed = Hmac(key)
    assert [keyed.digest(message) for _ in range(2)] == [hmac.digest(key, message, "sha256")] * 2


ID = RecordId("4:acme", "8e03978e-40d5-43e8-bc93-6894a57f9324")
FINGERPRINT = "jcs1:sha256:00"


def test_the_seed_is_a_keyed_hash_of_length_prefixed_parts():  # D1
    framed = b"6:4:acme36:8e03978e-40d5-43e8-bc93-6894a57f932414:jcs1:sha256:00"
    assert Seeds(b"secret").of(ID, FINGERPRINT) == hmac.digest(b"secret", framed, "sha256")
    assert Seeds(None).of(ID, FINGERPRINT) == hmac.digest(PUBLIC_KEY, framed, "sha256")


def test_seeds_and_keys_of_this_version_never_change():  # D1: a deploy must not change a key that was sent
    seed = Seeds(None).of(ID, FINGERPRINT)
    assert seed.hex() == "ad0eb6645496d29caaacd628a28b3b0b95f1b8987a89e1bf235314334f0567c8"
    assert downstream_key(seed, "charge_created") == "8e97faba-5070-4798-8c87-7b154a9625fd"


def test_only_scope_key_and_fingerprint_count():  # D1, F38: not the attempt, not the incarnation
    assert Seeds(None).of(RecordId(ID.scope, ID.key), FINGERPRINT) == Seeds(None).of(ID, FINGERPRINT)
    others = [
        Seeds(None).of(ID, FINGERPRINT),
        Seeds(None).of(ID, "jcs1:sha256:01"),
        Seeds(None).of(RecordId("4:acmf", ID.key), FINGERPRINT),
        Seeds(None).of(RecordId(ID.scope, ID.key.upper()), FINGERPRINT),
        Seeds(b"secret").of(ID, FINGERPRINT),
        Seeds(b"other secret").of(ID, FINGERPRINT),
    ]
    assert len(set(others)) == len(others)
    assert {len(seed) for seed in others} == {32}


def test_another_body_under_a_reused_key_gets_another_downstream_key():  # D1, F38, R163
    def key(amount: int) -> str:
        request = Request("POST", "/payments", b"", b"application/json", b'{"amount":%d}' % amount)
        return downstream_key(Seeds(b"secret").of(ID, fingerprint(request)), "charge")

    assert key(10) == key(10)
    assert key(10) != key(11)


def test_adjacent_parts_cannot_collide():  # R36
    assert Seeds(None).of(RecordId("ab", "c"), "d") != Seeds(None).of(RecordId("a", "bc"), "d")
    assert Seeds(None).of(RecordId("a", "b"), "cd") != Seeds(None).of(RecordId("a", "bc"), "d")


def test_an_empty_secret_is_a_mistake():
    with pytest.raises(ConfigurationError, match="secret is empty"):
        Seeds(b"").of(ID, FINGERPRINT)


@stable
@given(st.binary(min_size=32, max_size=32), st.text(st.characters()), st.text(st.characters()))
def test_a_downstream_key_is_a_stable_uuid_of_its_phase(seed, phase, other):  # R117, R126, D1
    key = downstream_key(seed, phase)
    assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", key)
    assert UUID(key).version == 4
    assert downstream_key(seed, phase) == key
    assert (downstream_key(seed, other) == key) == (phase == other)
    assert downstream_key(bytes(reversed(seed)) + b"x", phase) != key


def test_downstream_key_does_not_reveal_the_client_key():  # R126
    key = downstream_key(Seeds(None).of(ID, FINGERPRINT), "charge")
    assert key != ID.key
    assert not set(key.split("-")) & set(ID.key.split("-"))
