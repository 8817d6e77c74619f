"""The short way of `canonical_json` gives what the exact way gives, and leaves to it what it cannot prove."""

from __future__ import annotations

from itertools import islice

import pytest

from core.golden import bodies
from core.jcs_vectors import DOCUMENTS
from oncekey.canonical import jcs
from oncekey.canonical.jcs import BigInts, canonical_json, parse_json, serialize, serialize_parsed
from oncekey.core.errors import BodyInvalidError

TEXTS = 20_000


def exact(body, big_ints=BigInts.EXACT, max_depth=100) -> bytes | str:
    """What the exact way says: every member heard of, and every piece written in Python."""
    try:
        parsed = parse_json(body, big_ints=big_ints, max_depth=max_depth)
        return serialize(parsed)
    except BodyInvalidError as error:
        return str(error)


def said(body, big_ints=BigInts.EXACT, max_depth=100) -> bytes | str:
    try:
        return canonical_json(body, big_ints=big_ints, max_depth=max_depth)
    except BodyInvalidError as error:
        return str(error)


@pytest.fixture
def exactly(monkeypatch):
    """The bodies that the exact way was asked about."""
    asked: list[bytes] = []

    def parsing(body, **settings):
        asked.append(body)
        return parse_json(body, **settings)

    monkeypatch.setattr(jcs, "parse_json", parsing)
    return asked


def test_twenty_thousand_texts_are_the_same_either_way(exactly):  # R34, R35, R40
    """Seeded texts, a third of them damaged: the short way is taken often, and never says anything else."""
    refused = twice = 0
    for number, body in enumerate(islice(bodies(2026), TEXTS)):
        big_ints = BigInts.REJECT if number % 5 == 0 else BigInts.EXACT
        max_depth = 100 if number % 3 else 1 + number % 4
        expected = exact(body, big_ints, max_depth)
        assert said(body, big_ints, max_depth) == expected, body
        refused += isinstance(expected, str)
        twice += isinstance(expected, str) and "same name twice" in expected
    short = TEXTS - len(exactly)
    assert short > TEXTS // 5
    assert twice > 1000
    assert refused < len(exactly)  # whoever is refused was judged by the exact way, and so were others


@pytest.mark.parametrize(
    "body",
    [
        b'{"amount": 10, "currency": "EUR"}',
        b'{"a":{"b":[1,2,{"c":null}]},"d":"x:y","e":":"}',
        b'{":":":","\\"":1,"tab\\t":"\\\\"}',
        b'{"a" : 1 , "b"\n:\t2}\r\n',
        b'{"price":1.5,"total":-0,"zero":-0.0,"big":123456789012345678901}',
        '{"é":"ключ","ﬀ":"€"}'.encode(),
        b" \r\n\t[]\n",
        b'"x"',
        b"12",
    ],
)
def test_ordinary_body_uses_the_fast_path(body, exactly):
    assert canonical_json(body) == exact(body)
    assert exactly == []


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":1,"a":2}',
        b'{"a" :1,"a":2}',
        b'{"a":":","a":2}',
        b'[{"x":1},{"a":{"b":1,"b":1}}]',
        b'{"a":"\\u003a","b":1,"b":2}',
        b'{"a\\u003a":1}',
        b'"\\ud800"',
        b"1234567890123456789012",
        b"1e400",
        b"".join((b"[", b"1e-400," * 1001, b"1]")),
        b"NaN",
        b"[1]x",
        b" \xef\xbb\xbf[1]",
        b"\x0b[1]",
        b"\xc2\xa0[1]",
        b"",
        b" ",
        b"\xff",
        b"\xef\xbb\xbf{}",
        b'{"a":1',
        b"[" * 101 + b"]" * 101,
        b'"' + b"[" * 101 + b'"',
    ],
)
def test_unproven_body_falls_back_to_the_exact_path(body, exactly):  # R40
    assert said(body) == exact(body)
    assert exactly == [body]


def test_sixteen_digits_use_the_exact_path_only_when_rejected(exactly):
    body = b"[9007199254740993]"
    assert canonical_json(body) == body
    assert exactly == []
    assert "cannot hold exactly" in str(said(body, BigInts.REJECT))
    assert exactly == [body]


def test_recursion_error_falls_back_to_the_exact_path(monkeypatch):
    """A parser that runs out of stack is no answer; the exact way has a sentence for it."""

    def exhausted(*_):
        raise RecursionError

    monkeypatch.setattr(jcs, "_SCAN_EXACT", (exhausted, b"0" * 22))
    assert canonical_json(b'{"a": 1}') == b'{"a":1}'


@pytest.mark.parametrize("name", DOCUMENTS)
def test_without_the_c_writer_the_texts_are_the_same(name, monkeypatch):
    """Other interpreters have no such thing; the public encoder then writes."""
    source, expected = DOCUMENTS[name]
    monkeypatch.setattr("json.encoder.c_make_encoder", None)
    monkeypatch.setattr(jcs, "_pieces", jcs._writer(sort_keys=True))
    monkeypatch.setattr(jcs, "_pieces_in_order", jcs._writer(sort_keys=False))
    assert canonical_json(source.encode()) == expected.encode()
    assert serialize_parsed(parse_json(source.encode())) == expected.encode()
