"""Signatures of messages: who sent it and when, or nothing."""

from __future__ import annotations

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
def test_what_was_signed_is_genuine(header):
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
def test_everything_else_is_not(header):
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
