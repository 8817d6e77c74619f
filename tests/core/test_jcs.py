"""Canonical JSON: the published vectors, what is refused, and that equal values and only those look alike."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from enum import IntEnum
from hashlib import sha256
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.jcs_vectors import DOCUMENTS, DOUBLES_FILES, double, doubles
from core.properties import stable, thorough
from harness.each import each
from oncekey.canonical.jcs import (
    MAX_LITERAL_LENGTH,
    BigInts,
    Number,
    canonical_json,
    canonical_number,
    parse_json,
    serialize,
    serialize_parsed,
)
from oncekey.core.errors import BodyInvalidError, ConfigurationError

# ---------------------------------------------------------------------------------- the published vectors


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_six_documents_of_rfc_8785(name):  # R35
    source, expected = DOCUMENTS[name]
    assert canonical_json(source.encode()) == expected.encode()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_canonical_text_is_its_own_canonical_form(name):  # R35
    expected = DOCUMENTS[name][1].encode()
    assert canonical_json(expected) == expected


@pytest.mark.parametrize(("count", "size", "digest"), DOUBLES_FILES, ids=lambda value: str(value)[:8])
def test_the_published_file_of_doubles(count, size, digest):  # R35
    values = doubles(count)
    array = canonical_json(("[" + ",".join(repr(value) for _, value in values) + "]").encode())
    texts = array.decode()[1:-1].split(",")
    file = "".join(f"{bits},{text}\n" for (bits, _), text in zip(values, texts, strict=True)).encode()
    assert len(file) == size
    assert sha256(file).hexdigest() == digest


@pytest.mark.parametrize(
    ("bits", "text"),
    [
        ("0", "0"),
        ("8000000000000000", "0"),
        ("1", "5e-324"),
        ("7fefffffffffffff", "1.7976931348623157e+308"),
        ("4340000000000001", "9007199254740994"),
        ("444b1ae4d6e2ef50", "1e+21"),
        ("444b1ae4d6e2ef4f", "999999999999999900000"),
        ("3eb0c6f7a0b5ed8d", "0.000001"),
        ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
        ("41b3de4355555555", "333333333.3333333"),
    ],
)
def test_doubles_as_ecmascript_writes_them(bits, text):  # R35
    assert serialize(double(bits)) == text.encode()
    assert serialize([double(bits)]) == f"[{text}]".encode()


@pytest.mark.parametrize("bits", ["7fffffffffffffff", "7ff0000000000000", "fff0000000000000"])
def test_a_value_that_is_not_a_finite_number_is_refused(bits):  # R40
    with pytest.raises(BodyInvalidError, match="NaN or Infinity"):
        serialize({"amount": double(bits)})


# -------------------------------------------------------------------------------- one value, one spelling


@pytest.mark.parametrize(
    "spellings",
    [
        [b"10", b"10.0", b"10.00", b"1e1", b"1E+1", b"100e-1", b" 10 "],
        [b"0", b"-0", b"0.0", b"-0.0", b"0e5", b"0.000e-400", b"-0E0"],
        [b"0.1", b"1e-1", b"0.10", b"0.10000000000000000", b"100e-3"],
        [b"0.00001", b"1e-5", b"0.000010"],
        [b"1000000000000000000000", b"1e21", b"1E+21", b"1000000000000000000000.0"],
        [b"9007199254740993", b"9007199254740993.0", b"9.007199254740993e15", b"90071992547409930e-1"],
        [b"9223372036854775807", b"9223372036854775807.000", b"9.223372036854775807E18"],
        [b"1.000000000000000001", b"1.0000000000000000010", b"1000000000000000001e-18"],
        [b'"A"', b'"\\u0041"'],
        [b'"/"', b'"\\/"'],
        ['"\U0001f602"'.encode(), b'"\\ud83d\\ude02"', b'"\\uD83D\\uDE02"'],
        [b'{"a":1,"b":[1,2]}', b' { "b" : [ 1 ,\t2.0 ] ,\r\n "a" : 1e0 } '],
        [b'{"o":[{"x":1,"y":2}]}', b'{"o":[{"y":2,"x":1}]}'],
    ],
)
def test_spellings_of_one_value(spellings):  # R34, R35
    assert len({canonical_json(spelling) for spelling in spellings}) == 1


@each(
    ("one", "other"),
    [
        (b"9007199254740992", b"9007199254740993"),
        (b"9007199254740992.0", b"9007199254740993.0"),
        (b"9007199254740992", b"9007199254740992.5"),
        (b"-9007199254740992", b"-9007199254740993"),
        (b"9223372036854775807", b"9223372036854775808"),
        (b"100000000000000000000001", b"100000000000000000000002"),
        (b"1e22", b"10000000000000000000001"),
        (b"1.000000000000000001", b"1"),
        (b"1.000000000000000001", b"1.000000000000000002"),
        (b"12345678901234567.89", b"12345678901234567.88"),
        (b"0.12345678901234567", b"0.12345678901234568"),
        (b"333333333.33333329", b"333333333.3333333"),
        (b"1999.9999999999999", b"1999.9999999999998"),
        (b"0.99999999999999999", b"1"),
        (b"1e-400", b"0"),
        (b"1e-400", b"1e-401"),
        (b"1", b"-1"),
        (b"1", b'"1"'),
        (b"1", b"true"),
        (b"0", b"false"),
        (b"null", b'"null"'),
        (b"[]", b"{}"),
        (b"[1,2]", b"[2,1]"),
        (b"[[1],2]", b"[1,[2]]"),
        (b'{"a":null}', b"{}"),
        (b'"\\u00e9"', b'"e\\u0301"'),
        (b'{"a":"x|y","b":"z"}', b'{"a":"x","b":"y|z"}'),
        (b'{"a":"1\\",\\"b\\":\\"2"}', b'{"a":"1","b":"2"}'),
    ],
)
def test_different_values_stay_different(one, other):  # R35, R36, R40
    assert canonical_json(one) != canonical_json(other)


def test_doubles_with_17_digits_match_the_vectors():  # R35
    assert canonical_json(b"0.30000000000000004") == b"0.30000000000000004"
    assert canonical_json(b"333333333.3333333") == b"333333333.3333333"


def test_exact_numbers_use_the_layout_of_doubles():  # R40
    assert canonical_json(b"9007199254740993") == b"9007199254740993"
    assert canonical_json(b"295147905179352825856") == b"295147905179352825856"
    assert canonical_json(b"123456789012345678901234") == b"1.23456789012345678901234e+23"
    assert canonical_json(b"-0.000000000000000000123456789012345678") == b"-1.23456789012345678e-19"
    assert canonical_json(b"-12345678901234567.89") == b"-12345678901234567.89"


# -------------------------------------------------------------------------------------- what is refused


@each(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"   ", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"{}{}", "line 1, column 3"),
        (b"[1,]", "not valid JSON"),
        (b"{'a':1}", "not valid JSON"),
        (b"01", "not valid JSON"),
        (b"1.", "not valid JSON"),
        (b".5", "not valid JSON"),
        (b"+1", "not valid JSON"),
        (b'"\t"', "not valid JSON"),
        (b'"\\x41"', "not valid JSON"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        ('{"a":1}'.encode("utf-16"), "not UTF-8"),
        ('{"a":1}'.encode("utf-16-le"), "not valid JSON"),
        (b'"\xff"', "byte 1 is wrong"),
        (b'"\xed\xa0\x80"', "not UTF-8"),
        (b'"\xc0\xaf"', "not UTF-8"),
        (b'{"amount":1,"amount":2}', "same name twice: 'amount'"),
        (b'{"a":1,"\\u0061":1}', "same name twice: 'a'"),
        (b'[{"x":{"b":1,"a":1,"b":1}}]', "same name twice: 'b'"),
        (b"NaN", "NaN or Infinity"),
        (b"[Infinity]", "NaN or Infinity"),
        (b'{"a":-Infinity}', "NaN or Infinity"),
        (b"1e400", "beyond the range of a double"),
        (b"-1e400", "beyond the range of a double"),
        (b"1e999999999999999999999", "beyond the range of a double"),
        (b"1" + b"0" * 400, "beyond the range of a double"),
        (b"[" + b"9" * 5000 + b"]", "more than 2000 characters"),
        (b"-" + b"9" * 1_000_000, "more than 2000 characters"),
        (b"0." + b"1" * 5000, "more than 2000 characters"),
        (b"1e" + b"0" * 5000 + b"1", "more than 2000 characters"),
        (b'"\\ud800"', "half of a surrogate pair"),
        (b'"\\udc00\\ud800"', "half of a surrogate pair"),
        (b'{"\\ud800":1}', "half of a surrogate pair"),
        (b'{"\\ud800":1,"\\ud83d\\ude02":1e-9}', "half of a surrogate pair"),
        (b'["\\ud800",1e-9]', "half of a surrogate pair"),
    ],
)
def test_body_without_canonical_form_is_rejected_with_a_reason(body, says):  # R40
    with pytest.raises(BodyInvalidError, match=says) as caught:
        canonical_json(body)
    sentence = str(caught.value)
    assert sentence.startswith("The ")
    assert sentence.endswith(".")
    assert len(sentence) < 200


def test_a_long_name_is_not_repeated_in_full():
    name = b"n" * 10_000
    with pytest.raises(BodyInvalidError) as caught:
        canonical_json(b'{"' + name + b'":1,"' + name + b'":2}')
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 101 + b"]" * 101,
        b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 101 + b"1" + b"}" * 101,
        b'[{"a":' * 51 + b"1" + b"}]" * 51,
        b'["]]]]]",' * 101 + b"1" + b"]" * 101,
        b'["\\"]",' * 101 + b"1" + b"]" * 101,
        b'["\\\\",' * 101 + b"1" + b"]" * 101,
    ],
    ids=range(8),
)
def test_deep_nesting_is_refused_and_never_a_recursion_error(body):  # R40
    with pytest.raises(BodyInvalidError, match="nested too deeply; at most 100 levels"):
        canonical_json(body)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100 + b"]" * 100,
        b'{"a":' * 100 + b"1" + b"}" * 100,
        b'["' + b"[" * 500 + b'"]',
        b'["\\"' + b"[" * 500 + b'"]',
        b'["\\\\\\"' + b"{" * 500 + b'"]',
        b'["\\\\","' + b"{" * 500 + b'"]',
        b"[" + b"[]," * 500 + b"[]]",
        b"[" + b'{"a":[{}]},' * 500 + b"1]",
    ],
    ids=range(8),
)
def test_only_real_nesting_counts(body):  # R40
    assert json.loads(canonical_json(body)) == json.loads(body)


def test_the_depth_is_a_setting_and_the_same_everywhere():  # R40
    assert canonical_json(b"[[1]]", max_depth=2) == b"[[1]]"
    with pytest.raises(BodyInvalidError, match="at most 1 levels"):
        canonical_json(b"[[1]]", max_depth=1)
    assert serialize([[1]], max_depth=2) == b"[[1]]"
    with pytest.raises(BodyInvalidError, match="at most 1 levels"):
        serialize([[1]], max_depth=1)
    assert serialize([], max_depth=1) == b"[]"
    assert canonical_json(b"5", max_depth=0) == b"5"
    for body in (b"[]", b"[1]"):
        with pytest.raises(BodyInvalidError, match="at most 0 levels"):
            canonical_json(body, max_depth=0)
        with pytest.raises(BodyInvalidError, match="at most 0 levels"):
            serialize(json.loads(body), max_depth=0)


def test_extreme_max_depth_causes_no_recursion_error():  # R40
    with pytest.raises(BodyInvalidError, match="nested too deeply"):
        canonical_json(b"[" * 200_000 + b"]" * 200_000, max_depth=1_000_000)
    nested: list[object] = []
    for _ in range(200_000):
        nested = [nested]
    with pytest.raises(BodyInvalidError, match="nested too deeply"):
        serialize(nested)
    with pytest.raises(BodyInvalidError, match="nested too deeply"):
        serialize_parsed(nested)


@pytest.mark.parametrize(
    "body",
    [
        b"9007199254740992",
        b"-9007199254740992",
        b"9007199254740993.0",
        b"1.000000000000000001",
        b"1e-400",
        b"0.10000000000000001",
    ],
)
def test_big_ints_can_be_refused(body):  # R40
    assert canonical_json(body, big_ints=BigInts.EXACT)
    with pytest.raises(BodyInvalidError, match="a double cannot hold exactly"):
        canonical_json(b'{"n":' + body + b"}", big_ints=BigInts.REJECT)


@pytest.mark.parametrize("number", [9007199254740992, -(2**63), 10**22 + 1])
def test_big_ints_of_a_chosen_value_can_be_refused(number):  # R40
    assert serialize([number])
    with pytest.raises(BodyInvalidError, match="a double cannot hold exactly"):
        serialize([number], big_ints=BigInts.REJECT)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_refusing_big_ints_refuses_nothing_else(name):  # R40
    source, expected = (text.replace("333333333.33333329", "333333333.3333333") for text in DOCUMENTS[name])
    assert canonical_json(source.encode(), big_ints=BigInts.REJECT) == expected.encode()
    for body in (b"9007199254740991", b"-9007199254740991", b"0.1", b"1234567890.5", b"1E30"):
        assert canonical_json(body, big_ints=BigInts.REJECT) == canonical_json(body)


# ------------------------------------------------------------------------------------ values of a route


class Colour(IntEnum):
    RED = 1


def test_chosen_value_may_contain_mappings_tuples_and_enums():  # R39
    value = MappingProxyType({"b": (1, 2.0), "a": {"x": None, "y": True}, "c": Colour.RED, "d": HeavyName("z")})
    assert serialize(value) == b'{"a":{"x":null,"y":true},"b":[1,2],"c":1,"d":"z"}'


class HeavyName(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "named"),
    [(Decimal(1), "Decimal"), ({1, 2}, "set"), (b"x", "bytes"), ({"a": [object()]}, "object")],
)
def test_chosen_value_of_a_non_json_type_is_rejected(value, named):  # R39
    with pytest.raises(ConfigurationError, match=f"type {named}"):
        serialize(value)


@pytest.mark.parametrize("name", [1, None, True, b"a"])
def test_a_name_that_is_not_a_str_is_never_taken_for_one(name):  # R39: {1: x} must not equal {"1": x}
    with pytest.raises(ConfigurationError, match="only str names"):
        serialize({name: "x"})


@pytest.mark.parametrize("value", [10**400, -(10**5000)], ids=["400 digits", "5000 digits"])
def test_a_huge_int_of_a_route_is_refused(value):  # R40
    with pytest.raises(BodyInvalidError, match="beyond the range of a double"):
        serialize(value)


@pytest.mark.parametrize("value", ["\ud800", {"\udfff": 1}, ["\ud83d", "\ude02"]])
def test_half_a_surrogate_pair_of_a_route_is_refused(value):  # R40
    with pytest.raises(BodyInvalidError, match="surrogate"):
        serialize(value)


# ------------------------------------------------------------------------------------------- properties

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(10**30), max_value=10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=15,
)


def exactly(value: object) -> object:
    """A value that is equal to another one exactly if JSON calls them the same (1 is not true)."""
    match value:
        case dict():
            return ("object", frozenset((name, exactly(member)) for name, member in value.items()))
        case list():
            return ("array", tuple(exactly(item) for item in value))
        case bool() | None | str():
            return (type(value).__name__, value)
        case int():
            return ("number", Decimal(value))
        case float():
            return ("number", Decimal(repr(value)))
    raise AssertionError(value)


def respelled(value: object, draw: st.DrawFn) -> str:
    """The JSON text of `value` in some other spelling."""
    space = draw(st.sampled_from(["", " ", "\n\t", "\r\n"]))
    match value:
        case dict():
            members = draw(st.permutations(list(value.items())))
            inside = f"{space},".join(
                f"{respelled(name, draw)}{space}:{respelled(member, draw)}" for name, member in members
            )
            return f"{{{space}{inside}{space}}}"
        case list():
            return "[" + ",".join(space + respelled(item, draw) for item in value) + "]"
        case str():
            return json.dumps(value, ensure_ascii=draw(st.booleans()))
        case bool() | None:
            return json.dumps(value)
        case int():
            return draw(st.sampled_from([f"{value}", f"{value}.0", f"{value}e0", f"{value}.00E+0"]))
        case float():
            mantissa, _, exponent = repr(value).partition("e")
            return draw(st.sampled_from([repr(value), f"{mantissa}E{exponent or 0}"]))
    raise AssertionError(value)


@thorough
@given(st.data(), values)
def test_any_spelling_of_a_value_has_one_canonical_form(data, value):  # R34, R35
    canonical = serialize(value)
    assert canonical_json(data.draw(spelling_of(value)).encode("utf-8")) == canonical
    assert canonical_json(canonical) == canonical


def spelling_of(value: object) -> st.SearchStrategy[str]:
    return st.composite(lambda draw: respelled(value, draw))()


@stable
@given(values)
def test_canonical_form_preserves_the_value(value):  # R34
    read = json.loads(serialize(value), parse_float=Decimal, parse_int=Decimal)
    assert as_decimals(read) == exactly(value)


def as_decimals(value: object) -> object:
    match value:
        case dict():
            return ("object", frozenset((name, as_decimals(member)) for name, member in value.items()))
        case list():
            return ("array", tuple(as_decimals(item) for item in value))
        case Decimal():
            return ("number", value)
    return exactly(value)


@thorough
@given(values, values)
def test_two_values_look_alike_exactly_if_they_are_the_same(one, other):  # R34, R36
    assert (serialize(one) == serialize(other)) == (exactly(one) == exactly(other))


@stable
@given(values)
def test_the_fast_and_the_slow_writer_agree(value):  # R35
    parsed = parse_json(json.dumps(value).encode())
    assert serialize_parsed(parsed) == serialize(parsed)


@stable
@given(st.dictionaries(st.text(st.characters(min_codepoint=0xD000, exclude_categories=("Cs",))), st.none()))
def test_names_are_sorted_by_utf16_code_units(members):  # R35
    names = list(json.loads(canonical_json(json.dumps(members).encode())))
    assert names == sorted(names, key=lambda name: list(name.encode("utf-16-be")))


literals = st.from_regex(r"-?(0|[1-9][0-9]{0,22})(\.[0-9]{1,22})?([eE][+-]?[0-9]{1,2})?", fullmatch=True)


def neighbours() -> Iterator[st.SearchStrategy[str]]:
    """Numbers close to each other, where a double would make one of two."""
    for template in ("9007199254740{}", "90071992547409{}.0", "1234567890.12345{}", "0.000{}e-3", "{}e10"):
        yield st.integers(100, 99_999).map(template.format)


@thorough
@given(st.one_of(literals, *neighbours()), st.one_of(literals, *neighbours()))
def test_numbers_look_alike_if_and_only_if_they_are_equal(one, other):  # R34, R40
    assert (canonical_number(one) == canonical_number(other)) == (Decimal(one) == Decimal(other))


@thorough
@given(literals)
def test_a_canonical_number_is_a_fixed_point_near_its_literal(literal):  # R34
    text = canonical_number(literal)
    assert canonical_number(text) == text
    assert float(text) == float(literal)
    assert canonical_json(literal.encode()) == text.encode()


@thorough
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_double_is_written_so_that_it_reads_back(value):  # R35
    text = canonical_number(repr(value))
    assert float(text) == value
    assert math.copysign(1, value) == (-1 if text.startswith("-") else 1) or value == 0


def test_the_longest_number_that_is_taken():  # R40
    literal = "0." + "0" * (MAX_LITERAL_LENGTH - 3) + "1"
    assert canonical_number(literal) == f"1e-{MAX_LITERAL_LENGTH - 2}"
    with pytest.raises(BodyInvalidError, match="characters"):
        canonical_number(literal + "0")


def test_numbers_that_python_prints_otherwise_are_parsed_to_their_text():
    assert parse_json(b"[1e30,0.00001,1,0.5,0.0,12345678901234567890]") == [
        Number("1e+30"),
        Number("0.00001"),
        1,
        0.5,
        0,
        12345678901234567890,
    ]
