"""The String item of RFC 9651, by the vectors of its working group and against its author's own parser."""

from __future__ import annotations

import http_sf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.properties import thorough
from oncekey.core.sfstring import NotAStringItemError, parse_string_item

# From the structured-field-tests of the HTTP working group: string.json.
STRINGS = [
    ("basic string", '"foo bar"', "foo bar"),
    ("empty string", '""', ""),
    ("long string", '"' + "foo " * 65 + '"', "foo " * 65),
    ("whitespace string", '"   "', "   "),
    ("non-ascii string", '"f\u00fc\u00fc"', None),
    ("tab in string", '"\\t"', None),
    ("newline in string", '" \\n "', None),
    ("single quoted string", "'foo'", None),
    ("unbalanced string", '"foo', None),
    ("string quoting", '"foo \\"bar\\" \\\\ baz"', 'foo "bar" \\ baz'),
    ("bad string quoting", '"foo \\,"', None),
    ("ending string quote", '"foo \\"', None),
    ("abruptly ending string quote", '"foo \\', None),
]
# From item.json: all of these but the first are items, and none of them is a String.
ITEMS = ["", "  1", "1  ", "  1  ", "     1  "]


@pytest.mark.parametrize(("name", "field", "expected"), STRINGS, ids=[name for name, *_ in STRINGS])
def test_the_working_groups_vectors_for_strings(name, field, expected):  # R6
    if expected is None:
        with pytest.raises(NotAStringItemError):
            parse_string_item(field.encode("utf-8"))
    else:
        assert parse_string_item(field.encode()) == expected


@pytest.mark.parametrize("field", ITEMS)
def test_the_working_groups_vectors_for_items_are_not_strings(field):  # R6
    with pytest.raises(NotAStringItemError):
        parse_string_item(field.encode())


@pytest.mark.parametrize("byte", range(256))
def test_every_byte_inside_a_string(byte):  # R6: string-generated.json
    field = b'"' + bytes([byte]) + b'"'
    if 0x20 <= byte <= 0x7E and byte not in b'"\\':
        assert parse_string_item(field) == chr(byte)
    else:
        with pytest.raises(NotAStringItemError):
            parse_string_item(field)


@pytest.mark.parametrize("byte", range(256))
def test_every_byte_after_a_backslash(byte):  # R6: string-generated.json
    field = b'"\\' + bytes([byte]) + b'"'
    if byte in b'"\\':
        assert parse_string_item(field) == chr(byte)
    else:
        with pytest.raises(NotAStringItemError):
            parse_string_item(field)


@pytest.mark.parametrize(
    "parameters",
    [
        ";v=1",
        ";v",
        ";a;b;c",
        "; a=1;   b=2",
        ";a=1;a=2",
        ";*=1",
        ";a_b-c.d*9=1",
        ";a=-999999999999999",
        ";a=123456789012.123",
        ';a="\\"\\\\"',
        ";a=*tok/en:!#$%&'*+-.^_`|~",
        ";a=::",
        ";a=:YWJj:",
        ";a=:YWI=:",
        ";a=:YQ==:",
        ";a=:YWJjYQ==:",
        ";a=:YWJjZGVm:",
        ";a=:YWI:",
        ";a=?0",
        ";a=@-1659578233",
        ';a=%"f%c3%bc \\"',
        ";k" * 300,
        "  ",
    ],
)
def test_well_formed_parameters_are_accepted_and_ignored(parameters):  # R6
    field = f'"the key"{parameters}'.encode()
    assert parse_string_item(field) == "the key"
    assert http_sf.parse(field, tltype="item")[0] == "the key"


@pytest.mark.parametrize(
    "rest",
    [
        ";",
        ";;",
        ";V=1",
        ";1=1",
        ";a=",
        ";a= 1",
        ";a =1",
        " ;a=1",
        ";\ta",
        ";a=1;",
        ";a=1.",
        ";a=.5",
        ";a=1.1234",
        ";a=1234567890123.1",
        ";a=1234567890123456",
        ";a=--1",
        ";a='x'",
        ';a="x',
        ';a="\t"',
        ";a=:YWJj",
        ";a=:Y:",
        ";a=:=:",
        ";a=:YW=Jj:",
        ";a=:YWI===:",
        ";a=:YW J:",
        ";a=?2",
        ";a=?",
        ";a=@1.5",
        ";a=@",
        ';a=%"%C3%BC"',
        ';a=%"%ff"',
        ';a=%"%c"',
        ";a=%x",
        ";a=(1 2)",
        ";a=b,c",
        "x",
        ' "b"',
        ', "b"',
        "\t",
        "\n",
    ],
)
def test_what_is_not_a_parameter_is_refused(rest):  # R6, R7
    field = f'"the key"{rest}'.encode()
    with pytest.raises(NotAStringItemError):
        parse_string_item(field)
    with pytest.raises(http_sf.StructuredFieldError):
        http_sf.parse(field, tltype="item")


pieces = st.sampled_from(
    [
        *'"\\;=,:?@%*(). \t\n\x7f',
        "a",
        "b",
        "Z",
        "0",
        "9",
        "-",
        "ff",
        "%c3",
        "%bc",
        '%"',
        ";a=",
        '"x"',
        "\u00fc",
    ]
)
parameter_values = st.one_of(
    st.integers(-(10**15) + 1, 10**15 - 1).map(str),
    st.decimals(-(10**11), 10**11, places=3).map(str),
    st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E)).map(http_sf.ser),
    st.booleans().map(http_sf.ser),
    st.binary().map(http_sf.ser),
    st.text(max_size=4).map(lambda text: http_sf.ser(http_sf.DisplayString(text)) if text.isprintable() else "1"),
    st.lists(pieces, max_size=4).map("".join),
)
parameters = st.tuples(
    st.sampled_from([";", "; ", ";  ", ",", " ;"]),
    st.sampled_from(["a", "b1", "*", "x-y.z_*", "A", ""]),
    st.just("") | parameter_values.map(lambda value: f"={value}"),
).map("".join)
keys = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E))
fields = st.one_of(
    st.tuples(keys.map(http_sf.ser), st.lists(parameters, max_size=3).map("".join)).map("".join),
    st.lists(pieces, max_size=12).map("".join),
    st.lists(pieces, max_size=12).map(lambda inside: '"' + "".join(inside)),
).map(lambda text: text.encode("utf-8"))


def by_http_sf(field: bytes) -> str | None:
    """What the reference parser makes of it: its String, or None for anything else."""
    try:
        value, _ = http_sf.parse(field, tltype="item")
    except http_sf.StructuredFieldError:
        return None
    return value if isinstance(value, str) else None


def by_us(field: bytes) -> str | None:
    try:
        return parse_string_item(field)
    except NotAStringItemError:
        return None


@thorough
@given(fields)
def test_we_and_the_reference_parser_agree(field):  # R6
    assert by_us(field) == by_http_sf(field)


@thorough
@given(keys, st.integers(0, 3), st.integers(0, 3))
def test_every_string_comes_back(key, before, after):  # R6
    field = " " * before + http_sf.ser(key) + " " * after
    assert parse_string_item(field.encode()) == key


def test_a_date_beyond_the_year_9999_is_still_a_parameter():
    # RFC 9651 asks for the years 1 to 9999 at least; the reference parser stops there, we need not.
    assert parse_string_item(b'"k";a=@999999999999999') == "k"
