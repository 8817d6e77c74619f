"""Signatures of messages: who sent it and when, or nothing."""

from __future__ import annotations

import hashlib
import hmac
import json

import pytest

from oncekey.core.resolution import is_genuine, sign

SECRET, OTHER = b"0123456789abcdef", b"fedcba9876543210"
NOW = 1_800_000_000
BODY = b'{"id":1}'
GOOD = sign(BODY, SECRET, NOW)
DIGEST = GOOD.partition("v1=")[2]


def genuine(header, body=BODY, secrets=(SECRET,), now=NOW):
    return is_genuine(header, body, secrets, now)


@pytest.mark.parametrize(
    "header",
    [GOOD, f"t={NOW},v1={'0' * 64},v1={DIGEST}", f" t={NOW} , v1={DIGEST}", f"v1={DIGEST},t={NOW},v0=abc"],
)
def test_valid_signature_is_accepted(header):
    assert genuine(header)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "t=,v1=",
        f"t={NOW}",
        f"v1={DIGEST}",
        f"t={NOW + 1},v1={DIGEST}",
        f"t={NOW},t={NOW},v1={DIGEST}",
        f"t=-{NOW},v1={DIGEST}",
        f"t={NOW},v1={DIGEST[:-1]}",
        f"t={NOW},v1={DIGEST.upper()}x",
        f"t={NOW},v0={DIGEST}",
        "t=" + "9" * 400 + f",v1={DIGEST}",
        f"t=\N{ARABIC-INDIC DIGIT ONE},v1={DIGEST}",
        ",".join([f"t={NOW}", *[f"v1={'0' * 64}"] * 10, f"v1={DIGEST}"]),
    ],
)
def test_invalid_signature_header_is_rejected(header):
    assert not genuine(header)


def test_body_secret_and_time_all_count():
    assert not genuine(GOOD, body=BODY + b" ")
    assert not genuine(GOOD, secrets=(OTHER,))
    assert genuine(GOOD, secrets=(OTHER, SECRET))
    assert genuine(GOOD, now=NOW + 300)
    assert genuine(GOOD, now=NOW - 300)
    assert not genuine(GOOD, now=NOW + 301)
    assert not genuine(GOOD, now=NOW - 301)
    assert not genuine(GOOD, secrets=())


AT = 1_533_204_620
ITEM = {
    "id": "ii_123",
    "object": "invoiceitem",
    "amount": 1000,
    "currency": "usd",
    "customer": "cus_123",
    "date": AT,
    "description": "Test Invoice Item",
    "discountable": False,
    "invoice": "in_123",
    "livemode": False,
    "metadata": {},
    "period": {"start": AT, "end": AT},
    "proration": False,
    "quantity": 3,
}
EVENT = {
    "id": "evt_123",
    "object": "event",
    "account": "acct_123",
    "api_version": "2017-05-25",
    "created": AT,
    "data": {"object": ITEM},
    "livemode": False,
    "pending_webhooks": 1,
    "request": {"id": "req_123", "idempotency_key": "idempotency-key-123"},
    "type": "invoiceitem.created",
}
STRIPES = (json.dumps(EVENT, indent=2) + "\n").encode()
V1, V0 = (
    "82216eca827bcb7b34b8055eb2d2d9e6bc13b9ac39ded14a61e69f70c565f53a",
    "63f3a72374a733066c4be69ed7f8e5ac85c22c9f0a6a612ab9a025a9e4ee7eef",
)
"""A message, its time and its signatures, as a public client of Stripe's has them in its tests."""


def by_hand(secret: bytes, at: int = AT, body: bytes = STRIPES) -> str:
    """The scheme as Stripe publishes it: HMAC-SHA256 of the time, a dot and the body, in hexadecimal."""
    return hmac.new(secret, str(at).encode() + b"." + body, hashlib.sha256).hexdigest()


@pytest.mark.parametrize(
    ("header", "secrets", "now", "expected"),
    [
        (f"t={AT},v1={V1},v0={V0}", (b"webhook_secret",), AT, True),
        (f"t={AT},v1={by_hand(b'whsec_old')},v1={by_hand(b'whsec_new')}", (b"whsec_new",), AT, True),
        (f"t={AT},v1={by_hand(b'whsec_old')},v1={by_hand(b'whsec_new')}", (b"whsec_old",), AT, True),
        (f"t={AT},v1={by_hand(b'whsec_new')}", (b"whsec_old", b"whsec_new"), AT + 300, True),
        (f"t={AT},v1={by_hand(b'whsec_new')}", (b"whsec_new",), AT + 301, False),
        (f"t={AT},v1={by_hand(b'whsec_new')}", (b"whsec_old",), AT, False),
        (f"t={AT},v1={by_hand(b'whsec_new', AT + 1)}", (b"whsec_new",), AT, False),
        (f"t={AT},v1={by_hand(b'whsec_new', body=STRIPES.strip())}", (b"whsec_new",), AT, False),
        (f"t={AT},v0={by_hand(b'whsec_new')}", (b"whsec_new",), AT, False),
        (f"t={AT},v1={V0},v0={V1}", (b"webhook_secret",), AT, False),
    ],
    ids=[
        "published",
        "rolling",
        "rolled",
        "two of ours",
        "stale",
        "forged",
        "other time",
        "other body",
        "v0",
        "swapped",
    ],
)
def test_stripe_signatures_are_verified(header: str, secrets: tuple[bytes, ...], now: int, expected: bool) -> None:
    assert is_genuine(header, STRIPES, secrets, now) is expected
