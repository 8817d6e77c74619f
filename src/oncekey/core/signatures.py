"""Signed messages: `t=1700000000,v1=<hex>`, a keyed hash over the time and the body, as webhooks bring it.

A signature proves who sent a message and when, not that the message is new: the receiver stores event ids for that.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Final

HEADER: Final = b"oncekey-signature"
TOLERANCE: Final = 300
"""Seconds that a sender's clock may be away from ours, in both directions."""

_TIME: Final = re.compile(r"[0-9]{1,12}", re.ASCII)
_DIGEST: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
_MOST_DIGESTS: Final = 10


def sign(body: bytes, secret: bytes, at: int) -> str:
    """The header's value for a body that is sent at a second of the epoch."""
    return f"t={at},v1={_digest(body, secret, at)}"


def is_genuine(header: str, body: bytes, secrets: tuple[bytes, ...], now: float, tolerance: float = TOLERANCE) -> bool:
    """Whether one of the secrets signed the body not too long ago; every secret is tried, at the same speed."""
    time, digests = _parts(header)
    if time is None or abs(now - time) > tolerance:
        return False
    expected = [_digest(body, secret, time) for secret in secrets]
    matches = [hmac.compare_digest(one, given) for one in expected for given in digests]
    return any(matches)


def _parts(header: str) -> tuple[int | None, list[str]]:
    times: list[int] = []
    digests: list[str] = []
    for part in header.split(","):
        name, _, value = part.strip().partition("=")
        if name == "t" and _TIME.fullmatch(value):
            times.append(int(value))
        elif name == "v1" and _DIGEST.fullmatch(value):
            digests.append(value)
    # Two times leave open which of them was signed.
    return (times[0] if len(times) == 1 else None), digests[:_MOST_DIGESTS]


def _digest(body: bytes, secret: bytes, at: int) -> str:
    return hmac.new(secret, b"%d.%b" % (at, body), hashlib.sha256).hexdigest()
