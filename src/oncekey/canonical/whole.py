"""The fingerprint of one request, for callers without an enrolment: tests, and the clients of `oncekey torture`."""

from __future__ import annotations

from oncekey.canonical.fingerprint import EVERYTHING, Fingerprints, Request, Selection
from oncekey.canonical.jcs import MAX_DEPTH, BigInts


def fingerprint(
    request: Request,
    *,
    selection: Selection = EVERYTHING,
    secret: bytes | None = None,
    big_ints: BigInts = BigInts.EXACT,
    max_depth: int = MAX_DEPTH,
) -> str:
    """The fingerprint of one request; for many requests of one policy, create `Fingerprints` once."""
    under = Fingerprints(selection=selection, secret=secret, big_ints=big_ints, max_depth=max_depth)
    return under.of(request.method, request.path, request.query, request.content_type, request.body)
