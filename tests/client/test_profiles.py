"""Each profile puts the key where its API looks for it."""

from __future__ import annotations

import json

import pytest

from oncekey.core.keys import parse_key
from oncekey_client import ClientConfigurationError
from oncekey_client.exchange import Call, Reply
from oncekey_client.profiles import ADYEN, IETF, PAYPAL, PROFILES, SQUARE, STRIPE, KeyPlace, Profile

KEY = "4c1d9a3e-6d0b-4f53-8f0e-5f1f3f7f9999"
CALL = Call("POST", "http://shop.example/orders", (("Content-Type", "application/json"),), b'{"amount": 1.10}')


@pytest.mark.parametrize(
    ("profile", "name", "value"),
    [
        (IETF, "Idempotency-Key", f'"{KEY}"'),
        (STRIPE, "Idempotency-Key", KEY),
        (ADYEN, "Idempotency-Key", KEY),
        (PAYPAL, "PayPal-Request-Id", KEY),
    ],
)
def test_a_header_carries_the_key(profile, name, value):
    # R217
    sent = profile.put(CALL, KEY)
    assert sent.headers == (*CALL.headers, (name, value))
    assert sent.body == CALL.body
    assert profile.key_of(CALL) is None
    assert profile.key_of(sent) == KEY


@pytest.mark.parametrize("key", ['sixteen "quoted" words', "back\\slash-sixteen", "with spaces in between"])
def test_server_parses_a_key_quoted_by_the_client(key):
    sent = IETF.put(CALL, key)
    assert parse_key([(sent.field("Idempotency-Key") or "").encode()]) == key
    assert IETF.key_of(sent) == key


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'{"amount": 1.10}', b'{"idempotency_key":"k-1","amount": 1.10}'),
        (b' { "a":\n1e400 } ', b'{"idempotency_key":"k-1", "a":\n1e400 }'),
        (b"{ }", b'{"idempotency_key":"k-1" }'),
        (b"", b'{"idempotency_key":"k-1"}'),
    ],
)
def test_a_body_carries_the_key_and_keeps_every_other_byte(before, after):
    # R224
    sent = SQUARE.put(CALL.with_body(before), "k-1")
    assert sent.body == after
    assert sent.field("Content-Length") == str(len(after))
    assert json.loads(sent.body)["idempotency_key"] == "k-1" == SQUARE.key_of(sent)


@pytest.mark.parametrize("body", [b"[1]", b"text", b'{"idempotency_key": 7}', b"{"])
def test_a_body_that_cannot_carry_a_key_is_refused_before_anything_is_sent(body):
    with pytest.raises(ClientConfigurationError):
        SQUARE.put(CALL.with_body(body), "k-1")


@pytest.mark.parametrize("spelled", [KEY, f'"{KEY}"'])
@pytest.mark.parametrize("profile", [IETF, STRIPE], ids=lambda profile: profile.name)
def test_profile_keeps_the_header_spelling_of_the_caller(profile, spelled):
    # R226
    given = CALL.with_field("idempotency-key", spelled)
    assert profile.key_of(given) == KEY
    assert profile.put(given, KEY) == given


@pytest.mark.parametrize(
    ("profile", "key"),
    [
        (IETF, ""),
        (IETF, "  "),
        (IETF, "kéy-kéy-kéy-kéy"),
        (IETF, "a\r\nX-Injected: 1"),
        (STRIPE, "two words"),
        (STRIPE, "k" * 256),
        (ADYEN, "k" * 65),
        (SQUARE, "k" * 46),
    ],
)
def test_a_key_that_cannot_be_sent_is_refused(profile, key):
    with pytest.raises(ClientConfigurationError):
        profile.put(CALL, key)


def test_profile_rejects_a_malformed_quoted_key():
    with pytest.raises(ClientConfigurationError, match="cannot be parsed"):
        IETF.key_of(CALL.with_field("Idempotency-Key", '"open'))


def test_a_made_up_key_fits_every_profile():
    for profile in PROFILES.values():
        assert profile.key_of(profile.put(CALL, KEY)) == KEY


def test_custom_profile_uses_its_own_header():
    mine = Profile("checkout", KeyPlace.BARE, "Cko-Idempotency-Key")
    assert mine.put(CALL, KEY).field("Cko-Idempotency-Key") == KEY


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"\xff", b"null", b'{"errors": 7, "error": [], "fault": 1}', b"[" * 99_999]
)
def test_profile_reads_no_error_from_an_uninformative_body(body):
    assert IETF.read(Reply(500, (), body)) is None
