"""Fingerprints: what is the same request, what is another one, and what has none."""

from __future__ import annotations

import hmac
import json
from dataclasses import replace
from decimal import Decimal
from hashlib import sha256
from urllib.parse import parse_qsl, quote, quote_plus

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from core.jcs_vectors import DOCUMENTS
from core.properties import stable, thorough
from harness.each import each
from oncekey.canonical import fingerprint as module
from oncekey.canonical.fingerprint import Fingerprints, Request, Selection, same
from oncekey.canonical.jcs import BigInts
from oncekey.canonical.whole import fingerprint
from oncekey.core.errors import BodyInvalidError, ConfigurationError

KNOWN = Request("POST", "/payments", b"draft=false", b"application/json", b'{"currency": "EUR", "amount": 10.00}')
KNOWN_HEX = "f305eac199a11c0271a16e5ab13224956ba0a14b36d7ff083b3a344d067453e2"
FORM = b"application/x-www-form-urlencoded"
JSON = b"application/json"


def of(body: bytes, content_type: bytes | None = JSON, query: bytes = b"", **settings: object) -> str:
    return fingerprint(Request("POST", "/orders", query, content_type, body), **settings)


# ------------------------------------------------------------------------------------- the known value


def test_the_published_value_of_the_documented_request():  # R33
    assert fingerprint(KNOWN) == f"jcs1:sha256:{KNOWN_HEX}"
    documented = b'4:jcs14:POST9:/payments11:draft=false4:json16:application/json30:{"amount":10,"currency":"EUR"}'
    assert sha256(documented).hexdigest() == KNOWN_HEX
    assert KNOWN_HEX in (module.__doc__ or "")
    assert documented.decode() in (module.__doc__ or "")


def test_a_secret_makes_it_a_keyed_hash():  # R33, C24
    documented = b'4:jcs14:POST9:/payments11:draft=false4:json16:application/json30:{"amount":10,"currency":"EUR"}'
    expected = hmac.digest(b"a secret", documented, "sha256").hex()
    assert fingerprint(KNOWN, secret=b"a secret") == f"jcs1:hmac-sha256:{expected}"
    assert fingerprint(KNOWN, secret=b"a secret") != fingerprint(KNOWN, secret=b"another")


def test_an_empty_secret_is_a_mistake():  # R33
    with pytest.raises(ConfigurationError, match="secret is empty"):
        fingerprint(KNOWN, secret=b"")


# ------------------------------------------------------------------------- the same request in other words


@pytest.mark.parametrize(
    "body",
    [
        b'{"amount":10,"currency":"EUR"}',
        b'{"amount":1e1,"currency":"EUR"}',
        b'{\r\n\t"currency" : "\\u0045UR",\n "amount" : 10.0 }',
    ],
)
def test_spelling_does_not_matter(body):  # R34
    assert fingerprint(replace(KNOWN, body=body)) == fingerprint(KNOWN)


@pytest.mark.parametrize(
    "content_type",
    [
        b"Application/JSON",
        b"application/json; charset=utf-8",
        b'application/json;charset="UTF-8"',
        b" application/json ;charset=UTF8;",
        b"application/json;charset=us-ascii",
    ],
)
def test_the_spelling_of_the_media_type_does_not_matter(content_type):  # R34, R41
    assert fingerprint(replace(KNOWN, content_type=content_type)) == fingerprint(KNOWN)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_and_its_canonical_form_are_one_request(name):  # R35
    source, canonical = DOCUMENTS[name]
    assert of(source.encode()) == of(canonical.encode())


def test_nested_members_may_be_reordered_and_items_may_not():  # R35
    assert of(b'{"o":{"a":[{"x":1,"y":2}]}}') == of(b'{"o":{"a":[{"y":2,"x":1}]}}')
    assert of(b'{"o":[1,2]}') != of(b'{"o":[2,1]}')


# ---------------------------------------------------------------------------------------- another request


@each(
    "other",
    [
        replace(KNOWN, method="PATCH"),
        replace(KNOWN, method="post"),
        replace(KNOWN, path="/payment"),
        replace(KNOWN, path="/payments/"),
        replace(KNOWN, path="/Payments"),
        replace(KNOWN, query=b""),
        replace(KNOWN, query=b"draft=true"),
        replace(KNOWN, query=b"draft=false&x=1"),
        replace(KNOWN, content_type=b"application/vnd.pay+json"),
        replace(KNOWN, content_type=b"application/json;v=2"),
        replace(KNOWN, content_type=b"text/plain"),
        replace(KNOWN, content_type=None),
        replace(KNOWN, body=b""),
        replace(KNOWN, body=b"{}"),
        replace(KNOWN, body=b'{"amount":11,"currency":"EUR"}'),
        replace(KNOWN, body=b'{"amount":"10","currency":"EUR"}'),
        replace(KNOWN, body=b'{"amount":10,"currency":"eur"}'),
        replace(KNOWN, body=b'{"amount":10,"currency":"EUR","note":null}'),
        replace(KNOWN, body=b'[{"amount":10,"currency":"EUR"}]'),
    ],
)
def test_anything_else_is_another_request(other):  # R26, R37, R39; peers 23
    assert fingerprint(other) != fingerprint(KNOWN)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Request("POST", "/a", b"b", None, b""), Request("POST", "/ab", b"", None, b"")),
        (Request("POST", "/a", b"", None, b"b"), Request("POST", "/a", b"b", None, b"")),
        (Request("POSTX", "/a", b"", None, b""), Request("POST", "X/a", b"", None, b"")),
        (Request("POST", "/a?b=c", b"", None, b""), Request("POST", "/a", b"b=c", None, b"")),
        (Request("POST", "/a", b"", b"text/x", b"y"), Request("POST", "/a", b"", b"text/xy", b"")),
        (Request("POST", "/a", b"", b"text/x", b"y z"), Request("POST", "/a", b"", b"text/xy", b"z")),
        (Request("POST", "/a", b"5:empty", None, b""), Request("POST", "/a", b"", None, b"5:empty")),
        (Request("POST", "/\ud800", b"", None, b""), Request("POST", "/?", b"", None, b"")),
    ],
)
def test_adjacent_request_parts_cannot_collide(one, other):  # R36; peers 32
    assert fingerprint(one) != fingerprint(other)


def test_delimiters_inside_values_cannot_cause_collisions():  # R36
    assert of(b'{"a":"x|y","b":"z"}') != of(b'{"a":"x","b":"y|z"}')
    assert of(b"a=x&b=y", FORM) != of(b"a=x%26b%3Dy", FORM)
    assert of(b"a=1%3A2&b=", FORM) != of(b"a=1&b=%3A2", FORM)


def test_integers_beyond_double_precision_stay_distinct():  # R40; peers 28
    assert of(b'{"n":9007199254740992}') != of(b'{"n":9007199254740993}')
    assert of(b'{"n":9007199254740992.0}') != of(b'{"n":9007199254740993.0}')


# -------------------------------------------------------------------------------------- bodies that have none


@pytest.mark.parametrize(
    "body",
    [
        b'{"amount":1,"amount":2}',
        b'{"a":NaN}',
        b"[1e400]",
        b'{"a":"\\ud800"}',
        b'{"\\ud800":1}',
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":"\xff"}',
        b"\xef\xbb\xbf{}",
        b"9" * 5000,
        b"not json",
        b" ",
    ],
    ids=range(11),
)
def test_json_without_a_canonical_form_has_no_fingerprint(body):  # R40; peers 28
    for content_type in (JSON, b"application/merge-patch+json", b"application/json;charset=utf-8"):
        with pytest.raises(BodyInvalidError):
            of(body, content_type)
    assert of(body, b"application/octet-stream")


def test_json_in_another_charset_has_no_fingerprint():  # R40
    for charset in (b"utf-16", b"iso-8859-1", b"utf-7"):
        with pytest.raises(BodyInvalidError, match="not UTF-8"):
            of(b"{}", b"application/json; charset=" + charset)


def test_settings_of_the_canonical_form_are_passed_on():  # R40
    assert of(b"[[9007199254740993]]")
    with pytest.raises(BodyInvalidError, match="double"):
        of(b"[[9007199254740993]]", big_ints=BigInts.REJECT)
    with pytest.raises(BodyInvalidError, match="at most 1 levels"):
        of(b"[[1]]", max_depth=1)


# ------------------------------------------------------------------------------------------ bodies not JSON


def test_an_empty_body_is_empty_whatever_its_media_type():  # R41
    nothing = of(b"", None)
    assert of(b"", JSON) == of(b"", FORM) == of(b"", b"multipart/form-data;boundary=x") == nothing
    for body, content_type in ((b"{}", JSON), (b"null", JSON), (b'""', JSON), (b"&", FORM), (b" ", None)):
        assert of(body, content_type) != nothing


def test_other_bodies_are_compared_by_bytes_and_media_type():  # R41
    image = of(b"\x89PNG\x00", b"image/png")
    assert of(b"\x89PNG\x00", b"IMAGE/PNG") == image
    assert of(b"\x89PNG\x01", b"image/png") != image
    assert of(b"\x89PNG\x00", b"image/jpeg") != image
    assert of(b"\x89PNG\x00", None) != image
    assert of(b"x", b"text/plain;charset=utf-8") == of(b"x", b"text/plain; Charset=UTF-8")
    assert of(b"x", b"text/plain;charset=utf-8") != of(b"x", b"text/plain;charset=latin1")
    assert of(b'{"a":1,"b":2}', b"text/plain") != of(b'{"b":2,"a":1}', b"text/plain")


def test_invalid_media_type_is_compared_byte_for_byte():  # R41
    assert of(b"x", b"json") != of(b"x", b"JSON")
    assert of(b"x", b"10:text/plain7:charset6:latin1") != of(b"x", b"text/plain;charset=latin1")
    assert of(b"x", b"") == of(b"x", None)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"a=b+c", b"a=b%20c"),
        (b"a=%2f", b"a=%2F"),
        (b"a=%41", b"a=A"),
        (b"%61=1", b"a=1"),
        (b"a=1&&b=2&", b"a=1&b=2"),
        (b"a", b"a="),
        (b"a=b=c", b"a=b%3Dc"),
    ],
)
def test_equivalent_form_spellings_have_one_fingerprint(one, other):  # R34, R41
    assert of(one, FORM) == of(other, FORM + b"; charset=UTF-8")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"a=%ff", b"a=%fe"),
        (b"a=%ff", b"a=%EF%BF%BD"),
        (b"step=debit&step=credit", b"step=credit&step=debit"),
        (b"a=1&b=2", b"b=2&a=1"),
        (b"a=1&a=1", b"a=1"),
        (b"a=+", b"a=%2B"),
        (b"a=1", b"a=01"),
        (b"a=&b", b"a&b=x"),
        (b"ab=c", b"a=bc"),
        (b"a=b", b"ab="),
        (b"a=1%26b=2", b"a=1&b=2"),
        (b"a=%", b"a=%00"),
        (b"a=1;b=2", b"a=1&b=2"),
    ],
)
def test_other_forms_are_other_requests(one, other):  # R36, R41; peers 28
    assert of(one, FORM) != of(other, FORM)


def test_a_form_in_another_charset_is_another_request():  # R41
    assert of(b"a=1", FORM + b";charset=latin1") != of(b"a=1", FORM)


def upload(boundary: bytes, *, content: bytes = b"\x00\x01", filename: bytes = b"x.bin", name: bytes = b"file") -> str:
    body = (
        b'--%b\r\nContent-Disposition: form-data; name="note"\r\n\r\nhello\r\n'
        b'--%b\r\nContent-Disposition: form-data; name="%b"; filename="%b"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n%b\r\n--%b--\r\n"
    ) % (boundary, boundary, name, filename, content, boundary)
    return of(body, b"multipart/form-data; boundary=" + boundary)


def test_another_boundary_is_not_another_request():  # R41
    assert upload(b"----WebKitFormBoundaryA") == upload(b"b2") == upload(b"b2")


def test_other_parts_are_another_request():  # R41
    plain = upload(b"b")
    assert upload(b"b", content=b"\x00\x02") != plain
    assert upload(b"b", filename=b"y.bin") != plain
    assert upload(b"b", name=b"other") != plain
    assert upload(b"b", content=b"\x00\x01\r\n") != plain


def test_header_names_of_a_part_have_no_case_and_no_order():  # R41
    one = b"--b\r\nContent-Type: text/x\r\nContent-Disposition: form-data; name=a\r\n\r\n1\r\n--b--"
    other = b"--b\r\ncontent-disposition:form-data; name=a \r\nCONTENT-TYPE: text/x\r\n\r\n1\r\n--b--\r\n"
    content_type = b"multipart/form-data;boundary=b"
    assert of(one, content_type) == of(other, content_type)
    assert of(one, content_type) != of(one.replace(b"text/x", b"text/y"), content_type)


def test_parts_in_another_order_are_another_request():  # R41
    a, b = (b"--b\r\nn: %b\r\n\r\nx\r\n" % name for name in (b"1", b"2"))
    content_type = b"multipart/mixed;boundary=b"
    assert of(a + b + b"--b--", content_type) != of(b + a + b"--b--", content_type)
    assert of(a + b"--b--", content_type) != of(a + b"--b--", b"multipart/related;boundary=b")


@pytest.mark.parametrize("body", [b"no parts", b"--b\r\n\r\nx", b"pre\r\n--b\r\n\r\nx\r\n--b--", b"--b\n\nx\n--b--"])
def test_invalid_multipart_body_is_compared_as_bytes(body):  # R41
    content_type = b"multipart/form-data;boundary=b"
    assert of(body, content_type) == of(body, content_type)
    assert of(body, content_type) != of(body + b"!", content_type)
    assert of(body, content_type) != of(body, b"multipart/form-data;boundary=c")
    assert of(body, b"multipart/form-data") == of(body, b"Multipart/Form-Data")


# --------------------------------------------------------------------------------------------- the query


@pytest.mark.parametrize(
    ("one", "other"),
    [(b"a=%7Eb", b"a=~b"), (b"a=%7eb", b"a=~b"), (b"a=%2f", b"a=%2F"), (b"%61=1", b"a=1"), (b"a=%c3%a9", b"a=%C3%A9")],
)
def test_percent_encoding_of_a_query_has_one_spelling(one, other):  # R34, R39
    assert of(b"", query=one) == of(b"", query=other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"a=1&b=2", b"b=2&a=1"),
        (b"a=+", b"a=%20"),
        (b"a=+", b"a=%2B"),
        (b"a=%2B", b"a=%20"),
        (b"a=1%26b=2", b"a=1&b=2"),
        (b"a", b"a="),
        (b"a=%ff", b"a=%fe"),
        (b"a=%2541", b"a=A"),
        (b"a=%2541", b"a=%41"),
        (b"a=%zz", b"a=%25zz"),
        (b"", b"&"),
    ],
)
def test_other_queries_are_other_requests(one, other):  # R39; peers 23, 28
    assert of(b"", query=one) != of(b"", query=other)


# ------------------------------------------------------------------------------------------- the selection


def test_an_excluded_field_may_change_and_any_other_may_not():  # R39
    selection = Selection(exclude=("client_ts", "/meta/trace"))

    def chosen(body: bytes) -> str:
        return of(body, selection=selection)

    first = chosen(b'{"amount":1,"client_ts":100,"meta":{"trace":"x","k":1}}')
    assert chosen(b'{"amount":1,"client_ts":200,"meta":{"trace":"y","k":1}}') == first
    assert chosen(b'{"amount":1,"meta":{"k":1}}') == first
    assert chosen(b'{"amount":2,"client_ts":100,"meta":{"trace":"x","k":1}}') != first
    assert chosen(b'{"amount":1,"client_ts":100,"meta":{"trace":"x","k":2}}') != first


def test_only_included_fields_count():  # R39
    selection = Selection(include=("amount", "/customer/id"))

    def chosen(body: bytes) -> str:
        return of(body, selection=selection)

    first = chosen(b'{"amount":1,"customer":{"id":"c","name":"n"},"ts":1}')
    assert chosen(b'{"ts":2,"customer":{"id":"c"},"amount":1.0}') == first
    assert chosen(b'{"amount":2,"customer":{"id":"c"}}') != first
    assert chosen(b'{"amount":1,"customer":{"id":"d"}}') != first
    assert chosen(b'{"amount":1}') != first
    assert chosen(b'{"amount":1}') != chosen(b'{"amount":1,"customer":{"id":null}}')


def test_method_path_and_query_count_with_any_selection():  # R26, R39
    selection = Selection(include=("amount",))
    request = Request("POST", "/a", b"", JSON, b'{"amount":1}')
    first = fingerprint(request, selection=selection)
    for other in (replace(request, method="PATCH"), replace(request, path="/b"), replace(request, query=b"x")):
        assert fingerprint(other, selection=selection) != first


def test_bodies_without_any_included_field_do_not_look_alike():  # R37, R39
    selection = Selection(include=("amount",))
    bodies = [b'{"total":1}', b'{"total":2}', b"[1]", b"[2]", b"5", b"{}", b'{"/amount":1}', b'{"amount":1}']
    assert len({of(body, selection=selection) for body in bodies}) == len(bodies)


def test_a_field_of_a_form_and_of_a_multipart_body():  # R39
    exclude = Selection(exclude=("ts",))
    assert of(b"a=1&ts=5", FORM, selection=exclude) == of(b"ts=6&a=1", FORM, selection=exclude)
    assert of(b"a=1&ts=5", FORM, selection=exclude) != of(b"a=2&ts=5", FORM, selection=exclude)
    include = Selection(include=("a",))
    assert of(b"a=1&ts=5", FORM, selection=include) == of(b"a=1", FORM, selection=include)
    assert of(b"ts=5", FORM, selection=include) != of(b"ts=6", FORM, selection=include)

    def form(ts: bytes, amount: bytes) -> str:
        body = b"--b\r\nContent-Disposition: form-data; name=%b\r\n\r\n%b\r\n"
        parts = body % (b'"ts"', ts) + body % (b'"a"', amount) + b"--b--"
        return of(parts, b"multipart/form-data;boundary=b", selection=exclude)

    assert form(b"1", b"x") == form(b"2", b"x")
    assert form(b"1", b"x") != form(b"1", b"y")


def test_selection_does_not_apply_to_binary_bodies():  # R39
    selection = Selection(include=("a",))
    assert of(b"bytes", b"image/png", selection=selection) == of(b"bytes", b"image/png")


# --------------------------------------------------------------------------------------- the custom extractor


def test_route_can_choose_the_fingerprinted_value():  # R39
    def chosen(value: object, method: str = "POST", path: str = "/orders", **settings: object) -> str:
        return Fingerprints(**settings).of_chosen(value, method=method, path=path)

    first = chosen({"amount": 10, "sku": ["a", "b"]})
    assert first.startswith("jcs1:sha256:")
    assert chosen({"sku": ("a", "b"), "amount": 10.0}) == first
    assert chosen({"amount": 11, "sku": ["a", "b"]}) != first
    assert chosen({"amount": 10, "sku": ["a", "b"]}, method="PATCH") != first
    assert chosen({"amount": 10, "sku": ["a", "b"]}, path="/other") != first
    assert chosen({"amount": 10, "sku": ["a", "b"]}, secret=b"s").startswith("jcs1:hmac-sha256:")
    assert chosen(b"bytes") == chosen(b"bytes")
    assert chosen(b"bytes") != chosen(b"other")
    assert chosen(b"{}") != chosen({})


def test_value_chosen_by_a_route_never_collides_with_a_body():  # R36, R39
    chosen = Fingerprints().of_chosen(b"empty", method="POST", path="/a")
    assert chosen != fingerprint(Request("POST", "/a", b"chosen bytes", None, b""))
    nothing = Fingerprints().of_chosen({}, method="POST", path="/a")
    assert nothing != fingerprint(Request("POST", "/a", b"", JSON, b"{}"))


def test_a_choice_that_is_not_json_is_a_mistake_of_the_route():  # R39
    with pytest.raises(ConfigurationError, match="Decimal"):
        Fingerprints().of_chosen({"amount": Decimal("1.0")}, method="POST", path="/a")
    with pytest.raises(BodyInvalidError, match="NaN"):
        Fingerprints().of_chosen({"amount": float("nan")}, method="POST", path="/a")
    with pytest.raises(BodyInvalidError, match="at most 1 levels"):
        Fingerprints(max_depth=1).of_chosen({"a": []}, method="POST", path="/a")
    with pytest.raises(BodyInvalidError, match="double"):
        Fingerprints(big_ints=BigInts.REJECT).of_chosen({"a": 2**60}, method="POST", path="/a")


# ----------------------------------------------------------------------------------------------- comparison


def test_fingerprints_are_compared_whole():  # R42
    value = fingerprint(KNOWN)
    assert same(value, "".join(value))
    assert not same(value, value[:-1])
    assert not same(value, value.upper())
    assert not same(value, value.replace("jcs1", "jcs2"))
    assert not same("jcs1:sha256:00", "jcs1:hmac-sha256:00")
    assert not same("\u00e9", "e")


def test_fingerprint_comparison_uses_constant_time(monkeypatch):  # R42
    seen: list[tuple[bytes, bytes]] = []

    def spy(a: bytes, b: bytes) -> bool:
        seen.append((a, b))
        return True

    monkeypatch.setattr(hmac, "compare_digest", spy)
    assert same("a", "b")
    assert seen == [(b"a", b"b")]


# ----------------------------------------------------------------------------------------------- properties

small = st.sampled_from(["", "a", "b", "/a", "1:a", ":", "5:empty", "=", "&", "\ud800", "\u00e9"])
small_bytes = st.sampled_from([b"", b"a", b"a=1", b"b", b"&", b"+", b"%41", b"%2F", b"5:empty", b"4:json"])
opaque = st.builds(
    Request,
    method=small,
    path=small,
    query=small_bytes.filter(lambda query: b"%" not in query),
    content_type=st.sampled_from([None, b"text/x", b"text/y", b"text/x;a=b", b"unparsable"]),
    body=small_bytes,
)


@thorough
@given(opaque, opaque)
def test_opaque_requests_look_alike_exactly_if_they_are_the_same(one, other):  # R36, R37, R41
    def identity(request: Request) -> Request:
        return replace(request, content_type=None) if not request.body else request

    assert (fingerprint(one) == fingerprint(other)) == (identity(one) == identity(other))


fields = st.lists(st.tuples(st.binary(min_size=1, max_size=4), st.binary(max_size=4)), min_size=1, max_size=4)


@thorough
@given(fields, fields, st.data())
def test_forms_look_alike_exactly_if_their_pairs_are_the_same(one, other, data):  # R34, R36, R41
    def spelled(pairs: list[tuple[bytes, bytes]]) -> bytes:
        encode = data.draw(st.sampled_from([quote, quote_plus, lambda part: "".join(f"%{byte:02x}" for byte in part)]))
        return "&".join(f"{encode(name)}={encode(value)}" for name, value in pairs).encode()

    a, b = spelled(one), spelled(other)
    read = parse_qsl(a.decode(), keep_blank_values=True, encoding="latin-1")
    assert [(name.encode("latin-1"), value.encode("latin-1")) for name, value in read] == one
    assert (of(a, FORM) == of(b, FORM)) == (one == other)
    assert of(spelled(one), FORM) == of(a, FORM)


@stable
@given(st.binary(max_size=60), st.sampled_from([None, FORM, b"multipart/form-data;boundary=b", b"image/png", b"x"]))
def test_any_bytes_that_are_not_json_have_a_fingerprint(body, content_type):  # R41
    assert of(body, content_type) == of(body, content_type)


@thorough
@given(st.binary(max_size=30) | st.text(alphabet='[]{}",:\\u0dD8e+-.9 tfn', max_size=30).map(str.encode))
def test_any_bytes_called_json_have_a_fingerprint_or_are_refused(body):  # R40
    assume(body)
    try:
        value = of(body)
    except BodyInvalidError:
        return
    json.loads(body.decode("utf-8"))
    assert value == of(b" " + body + b"\n")


@stable
@given(
    st.lists(st.tuples(st.sampled_from([b"a", b"b"]), st.binary(max_size=8)), min_size=1, max_size=3),
    st.lists(st.tuples(st.sampled_from([b"a", b"b"]), st.binary(max_size=8)), min_size=1, max_size=3),
)
def test_multipart_bodies_look_alike_exactly_if_their_parts_are_the_same(one, other):  # R41
    def sent(parts: list[tuple[bytes, bytes]], boundary: bytes) -> str:
        part = b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
        body = b"".join(part % (boundary, name, content) for name, content in parts) + b"--%b--\r\n" % boundary
        return of(body, b"multipart/form-data; boundary=" + boundary)

    assert (sent(one, b"first-boundary") == sent(other, b"second-boundary")) == (one == other)
