"""Values that no version may change: a record that an older one wrote must be found, compared and locked alike.

Each digest is over thousands of results, refusals included. Whoever changes one on purpose changes the name of the
algorithm with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from itertools import islice

import pytest

from core.golden import MEDIA, SECRETS, WORDS, Rng, bodies, header_lines, json_text, keys, tried
from core.records import a_record
from oncekey.canonical.digests import Seeds, downstream_key
from oncekey.canonical.fingerprint import Fingerprints, Request, Selection, media_type_of
from oncekey.canonical.jcs import BigInts, canonical_json
from oncekey.canonical.whole import fingerprint
from oncekey.core.answers import marks, replay
from oncekey.core.endings import Ending, Progress, decide, kept_headers
from oncekey.core.keys import HeaderSyntax, KeyFormat, key_digest, looks_personal, parse_key
from oncekey.core.model import Effects, RecordId, Replay, StoredResponse
from oncekey.core.onecommit import LockNumbers, lock_number
from oncekey.core.policy import Flavor, On5xx, Policy
from oncekey.core.scope import BindTo, bound_scope, scope_of

SELECTIONS = (Selection(), Selection(), Selection(include=("amount", "/a")), Selection(exclude=("a", "/b/0")))
POLICIES = (
    Policy(),
    Policy(replay_headers=("X-Own", "etag"), replayed_header="X-Replayed", expires_header="X-Expires"),
    Policy(flavor=Flavor.STRIPE, max_response_bytes=3, not_executed_statuses=frozenset({409, 503})),
)


def canonical() -> Iterator[str]:
    for number, body in enumerate(islice(bodies(1), 6000)):
        big_ints = BigInts.REJECT if number % 7 == 0 else BigInts.EXACT
        yield tried(
            lambda body=body, big=big_ints, n=number: canonical_json(
                body, big_ints=big, max_depth=(100, 100, 100, n % 9 + 1)[n % 4]
            )
        )


def fingerprints() -> Iterator[str]:
    rng = Rng(2)
    for body in islice(bodies(3), 4000):
        request = Request(
            rng.one(("POST", "PATCH", "PUT")),
            rng.one(("/orders", "/orders/7", "/ä/\udcff", "/")),
            rng.one((b"", b"", b"draft=false", b"a=%7e&b=%2f", b"a=%zz+%41")),
            rng.one(MEDIA),
            rng.one((body, body, body, b"", b"a=1&b=+&%61=2&amount=3", b"--xx\r\nA: b\r\n\r\nc\r\n--xx--\r\n")),
        )
        selection, secret, depth = rng.one(SELECTIONS), rng.one(SECRETS), rng.one((100, 3))
        yield tried(
            lambda request=request, selection=selection, secret=secret, depth=depth: fingerprint(
                request, selection=selection, secret=secret, max_depth=depth
            )
        )


def chosen_fingerprints() -> Iterator[str]:
    rng = Rng(4)
    values = (1, 1.5, True, None, "x", [1, "é"], {"b": 1, "a": [2**70]}, 10**20, -0.0, "\ud800", float("nan"), object)
    for _ in range(1000):
        parts = rng.one((b"bytes", {rng.one(WORDS): rng.one(values), "z": rng.one(values)}))
        secret = rng.one(SECRETS)
        yield tried(
            lambda parts=parts, secret=secret: Fingerprints(secret=secret).of_chosen(parts, method="POST", path="/p")
        )


def parsed_keys() -> Iterator[str]:
    rng = Rng(5)
    for line in islice(keys(6), 6000):
        syntax, kind = rng.one(list(HeaderSyntax)), rng.one((KeyFormat.OPAQUE, KeyFormat.OPAQUE, KeyFormat.UUID))
        lines = [] if rng.below(50) == 0 else [line] if rng.below(30) else [line, line]
        yield tried(
            lambda lines=lines, syntax=syntax, kind=kind: parse_key(
                lines, syntax=syntax, key_format=kind, min_length=16, max_length=255
            )
        )


def personal() -> Iterator[str]:
    for line in islice(keys(7), 8000):
        key = line.decode()
        yield f"{looks_personal(key)} {key_digest(key)}"


def scopes() -> Iterator[str]:
    rng = Rng(8)
    for _ in range(3000):
        bind_to, tenant = rng.one(list(BindTo)), rng.some((*WORDS, "acme", "acme", "t" * 90), 3)
        who, token = rng.one(("alice", "", None, "b" * 200)), rng.one(("Bearer x", "", None))
        yield tried(
            lambda b=bind_to, t=tenant, w=who, k=token: bound_scope(b, rng.one(("-", "shop")), t, principal=w, token=k)
        )
    yield tried(scope_of)


def seeds_and_locks() -> Iterator[str]:
    rng = Rng(9)
    for line in islice(keys(10), 3000):
        record_id = RecordId(rng.one(("1:-4:acme", "sha256:ff", "ключ", "", "\ud800")), line.decode())
        mark, secret = f"jcs1:sha256:{rng.below(10**9):064x}", rng.one((*SECRETS, b""))
        schema = rng.one(("oncekey", "other"))
        yield tried(lambda i=record_id, m=mark, s=secret: Seeds(s).of(i, m).hex())
        yield f"{LockNumbers(schema, secret).of(record_id, mark)} {lock_number(schema, record_id, secret)}"
        yield downstream_key(mark.encode(), record_id.key)


def media_types() -> Iterator[str]:
    rng = Rng(11)
    pieces = ("a/b", "application/json", "; ", ";", "charset=UTF-8", "x=y", 'b="q\\"; z"', " ", "/", "=", "V=1", "\t")
    for _ in range(3000):
        text = rng.some(pieces, 6).encode() if rng.below(3) else rng.one(MEDIA)
        yield repr(media_type_of(text))


def answers() -> Iterator[str]:
    rng = Rng(12)
    for number in range(3000):
        policy, headers = rng.one(POLICIES), header_lines(rng)
        echo, until = (
            rng.one((None, b"key-1", b"\xff", b"a\r\nb", b"")),
            rng.one((None, 1_789_000_000_000_000 + number)),
        )
        yield repr((kept_headers(headers, policy), marks(policy, echo=echo, expires_at=until)))
        body = rng.one((None, b"", b"{}", b"long enough"))
        stored = rng.one((None, StoredResponse(rng.one((200, 204, 304, 409, 422, 500)), headers, body)))
        record = a_record(response=stored)
        yield repr(
            replay(Replay(record, 5), policy, echo=echo, status_url=rng.one((None, "/keys/ä")), fault_id="0" * 32)
        )


def decisions() -> Iterator[str]:
    rng = Rng(13)
    flags = (False, True)
    for _ in range(6000):
        ending = Ending(
            status=rng.one((None, 100, 200, 201, 204, 301, 404, 409, 401, 500, 503, 600)),
            headers=header_lines(rng),
            body=rng.one((None, b"", b"{}", b"long")),
            entered=bool(rng.below(6)),
            raised=rng.one((*flags, False)),
            not_executed=rng.one((*flags, False)),
            kept=rng.one(flags),
            rolled_back=rng.one((*flags, False)),
            error=rng.one((None, "card_declined", "Not A Code")),
            progress=Progress(*(rng.below(4) == 0 for _ in range(4)), *([None, "diverged"][rng.below(5) == 0],)),
            resume_after=rng.below(3),
        )
        effects, policy = rng.one(list(Effects)), rng.one(POLICIES)
        policy = rng.one((policy, policy.override(on_5xx=rng.one(list(On5xx)))))
        yield repr(decide(effects, policy, ending))


FAMILIES = {
    canonical: "62e946ea538bc4e06d133cf5a4aa008f69f12441383c4ca8112dc26aae51718f",
    fingerprints: "5e7c9c21fccdc4cdb033f9bcd87a4ee2fd5049783a7b5db9d4d03369f5d6787b",
    chosen_fingerprints: "255f65796d62fc6a548f57ffb71147fe5fa7ea931e6ac0113986ddaf8c217f21",
    parsed_keys: "9e2fb8c7818b953917a6bfab754574dda8d83459642e2db389a2b321657a88f4",
    personal: "3bd5545f4958acd083741b6273cdb326dc4a99901afbcb5138112be399d99ca2",
    scopes: "8299cc66a447d40000cfbba6f14162be9474ce043e5217f208c676f70aa74ec4",
    seeds_and_locks: "2ff41a880ee5352fbae95faecf7c7a56a98d0030ece63c1c5e9f5cad82a37373",
    media_types: "db341741538759d2091c1d4bec32da81df5811c4d95c178c5833bf60f1c191eb",
    answers: "d60ec1d92a9a23eb0dc4985edba1613db426b4503d6ef020f707a7d51c0baf3d",
    decisions: "c9b099a1ec60d07f9cced73fad6102ad3c856dd8932ec04fecc329b79a6a4af1",
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_nothing_has_changed(family):  # R33, L1, D1
    results = list(family())
    assert len(set(results)) > 30
    assert sha256("\n".join(results).encode("utf-8", "backslashreplace")).hexdigest() == FAMILIES[family]


def test_golden_corpus_mixes_valid_and_invalid_bodies():
    """The corpus would prove little if most of it were refused, or nothing."""
    results = list(canonical())
    assert 0.1 < results.count("BodyInvalidError") / len(results) < 0.7
    assert len(json_text(Rng(1))) > 0
