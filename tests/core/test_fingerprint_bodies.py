"""What a fingerprint reads of a body: content types in one spelling, multipart bodies as parts, and chosen fields."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.properties import stable
from harness.each import each
from oncekey.canonical import fingerprint as media_module
from oncekey.canonical.fingerprint import MediaType, Part, Selection, media_type_of, parts_of, path_of
from oncekey.core.errors import ConfigurationError


@pytest.mark.parametrize(
    ("field", "essence", "parameters"),
    [
        (None, b"", ()),
        (b"", b"", ()),
        (b"application/json", b"application/json", ()),
        (b" Application/JSON ", b"application/json", ()),
        (b"application/json;charset=UTF-8", b"application/json", ((b"charset", b"utf-8"),)),
        (b'application/json ; Charset="UTF-8" ', b"application/json", ((b"charset", b"utf-8"),)),
        (b"text/x;b=2;A=1", b"text/x", ((b"a", b"1"), (b"b", b"2"))),
        (b"text/x; boundary=AbC", b"text/x", ((b"boundary", b"AbC"),)),
        (b'text/x; a="q\\"u;o\\\\te"', b"text/x", ((b"a", b'q"u;o\\te'),)),
        (b"text/x;;  ; a=1;", b"text/x", ((b"a", b"1"),)),
        (b"json", b"", ((b"", b"json"),)),
        (b"text/x; a", b"", ((b"", b"text/x; a"),)),
        (b'text/x; a="open', b"", ((b"", b'text/x; a="open'),)),
        (b"text/x, text/y", b"", ((b"", b"text/x, text/y"),)),
        (b"text/\xff", b"", ((b"", b"text/\xff"),)),
    ],
)
def test_content_type_is_parsed_into_essence_and_parameters(field, essence, parameters):  # R41
    assert media_type_of(field) == MediaType(essence, parameters)


@pytest.mark.parametrize(
    ("field", "kind"),
    [
        (b"application/json", "is_json"),
        (b"TEXT/JSON", "is_json"),
        (b"application/problem+json", "is_json"),
        (b"application/vnd.api+json;ext=x", "is_json"),
        (b"application/x-www-form-urlencoded", "is_form"),
        (b"multipart/form-data; boundary=x", "is_multipart"),
        (b"multipart/mixed", "is_multipart"),
        (b"application/jsonl", None),
        (b"application/json-seq", None),
        (b"application/x-ndjson", None),
        (b"text/plain", None),
        (b"image/png", None),
        (b"json", None),
        (None, None),
    ],
)
def test_media_type_is_classified_as_json_form_or_multipart(field, kind):  # R41
    media = media_type_of(field)
    assert [name for name in ("is_json", "is_form", "is_multipart") if getattr(media, name)] == ([kind] if kind else [])


def test_parameters_by_name():
    media = media_type_of(b"text/x;b=2;a=1")
    assert media[b"a"] == b"1"
    assert media[b"c"] is None
    assert media.without(b"a", b"c") == MediaType(b"text/x", ((b"b", b"2"),))


def test_long_content_type_is_not_cached():
    before = media_module._parsed.cache_info().currsize
    long = b"application/json; x=" + b"y" * 500
    assert media_type_of(long) == MediaType(b"application/json", ((b"x", b"y" * 500),))
    assert media_module._parsed.cache_info().currsize == before
    assert media_module._parsed.cache_info().maxsize is not None


TWO_PARTS = (
    b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n'
    b'--b\r\ncontent-type: text/plain\r\nContent-Disposition: form-data; name="f"; filename="x.txt"\r\n\r\n'
    b"line\r\nline\r\n\r\n--b--\r\n"
)


def test_the_parts_of_a_form():  # R41
    first, second = parts_of(TWO_PARTS, b"b") or ()
    assert first == Part(((b"content-disposition", b'form-data; name="a"'),), b"1")
    assert second.headers == (
        (b"content-disposition", b'form-data; name="f"; filename="x.txt"'),
        (b"content-type", b"text/plain"),
    )
    assert second.content == b"line\r\nline\r\n"
    assert (first.name, second.name) == ("a", "f")


@pytest.mark.parametrize(
    ("body", "contents"),
    [
        (b"--b--", []),
        (b"--b--\r\n", []),
        (b"--b-- \t\r\n", []),
        (b"--b\r\n\r\n\r\n--b--", [b""]),
        (b"--b  \r\n\r\nx\r\n--b--", [b"x"]),
        (b"--b\r\n\r\n--b\r\n--b--", None),
        (b"--b\r\n\r\nx--b\r\n--b--", [b"x--b"]),
        (b"--b\r\n\r\nx\n--b\r\n--b--", [b"x\n--b"]),
        (b"--b\r\n\r\n\x00\xff\r\n\r\n\r\n--b--", [b"\x00\xff\r\n\r\n"]),
    ],
)
def test_contents_are_exact(body, contents):  # R41
    parts = parts_of(body, b"b")
    assert (None if parts is None else [part.content for part in parts]) == contents


@pytest.mark.parametrize(
    ("body", "boundary"),
    [
        (TWO_PARTS, b""),
        (TWO_PARTS, b"other"),
        (b"", b"b"),
        (b"no delimiters at all", b"b"),
        (b"preamble\r\n--b\r\n\r\nx\r\n--b--", b"b"),
        (b"--b\r\n\r\nx\r\n--b--\r\nepilogue", b"b"),
        (b"--b\r\n\r\nx\r\n--b", b"b"),
        (b"--b\r\n\r\nx", b"b"),
        (b"--b\n\nx\n--b--", b"b"),
        (b"--b\r\n\r\nx\r\n--bc\r\n--b--", b"b"),
        (b"--b\r\nno blank line\r\n--b--", b"b"),
        (b"--b\r\nno colon\r\n\r\nx\r\n--b--", b"b"),
        (b"--b\r\n: no name\r\n\r\nx\r\n--b--", b"b"),
        (b"--b\r\nbad name: x\r\n\r\nx\r\n--b--", b"b"),
        (b"--b\r\na: folded\r\n line\r\n\r\nx\r\n--b--", b"b"),
    ],
)
def test_ambiguous_multipart_body_is_not_split(body, boundary):  # R41
    assert parts_of(body, boundary) is None


@pytest.mark.parametrize(
    ("disposition", "name"),
    [
        (b'form-data; name="a"', "a"),
        (b"form-data; name=a", "a"),
        (b'form-data; filename="n"; NAME="a\\"b"', 'a"b'),
        (b'form-data; name="\xc3\xa4"', "\u00e4"),
        (b'form-data; name="\xff"', "\udcff"),
        (b"form-data", ""),
        (b"form-data; name", ""),
        (b"", ""),
    ],
)
def test_the_name_of_a_part(disposition, name):  # R39
    assert Part(((b"content-disposition", disposition),), b"").name == name


def test_a_part_without_headers_has_no_name():
    assert Part((), b"x").name == ""


def test_header_with_a_million_spaces_is_parsed_quickly():
    parts_of(b"--b\r\na: " + b" " * 1_000_000 + b"x\r\n\r\n\r\n--b--", b"b")


@stable
@given(st.lists(st.binary(max_size=20).filter(lambda content: b"--b" not in content), max_size=4))
def test_arbitrary_part_contents_round_trip(contents):  # R41
    body = b"".join(b"--b\r\nn: v\r\n\r\n" + content + b"\r\n" for content in contents) + b"--b--\r\n"
    assert parts_of(body, b"b") == tuple(Part(((b"n", b"v"),), content) for content in contents)


ORDER = {
    "amount": 10,
    "customer": {"id": "c1", "ts": 5},
    "items": [{"sku": "a", "ts": 1}, {"sku": "b", "ts": 2}],
    "a/b": {"m~n": 1},
    "": "empty name",
    "/": 2,
}


def test_include_and_exclude_at_once_are_refused():  # R39
    with pytest.raises(ConfigurationError, match="include and exclude at once"):
        Selection(include=("a",), exclude=("b",))


@pytest.mark.parametrize("fields", ["amount", ["amount"], ("",), (None,), (1,), ("ok", "")])
@pytest.mark.parametrize("where", ["include", "exclude"])
def test_selection_fields_must_be_a_tuple_of_names(fields, where):  # R39
    with pytest.raises(ConfigurationError, match=f"{where} of a selection is not a tuple of field names"):
        Selection(**{where: fields})


@pytest.mark.parametrize("pointer", ["/a~", "/a~2", "/~~0", "/a/b~x"])
def test_malformed_json_pointer_is_rejected(pointer):  # R39
    with pytest.raises(ConfigurationError, match="not a JSON pointer"):
        Selection(exclude=(pointer,))


def test_a_name_may_have_a_tilde():
    assert Selection(include=("a~b",)).included({"a~b": 1}) == {"/a~0b": 1}


def test_empty_selection_selects_everything():  # R39
    assert not Selection()
    assert Selection(include=("a",))
    assert Selection(exclude=("a",))
    assert Selection().included(ORDER) == {}
    assert Selection().rest(ORDER) is ORDER


@each(
    ("field", "found"),
    [
        ("amount", {"/amount": 10}),
        ("/amount", {"/amount": 10}),
        ("/customer/id", {"/customer/id": "c1"}),
        ("/items/1/sku", {"/items/1/sku": "b"}),
        ("/a~1b/m~0n", {"/a~1b/m~0n": 1}),
        ("a/b", {"/a~1b": {"m~n": 1}}),
        ("/", {"/": "empty name"}),
        ("/~1", {"/~1": 2}),
        ("missing", {}),
        ("/customer/missing", {}),
        ("/amount/deeper", {}),
        ("/items/2", {}),
        ("/items/-", {}),
        ("/items/01", {}),
        ("/items/-1", {}),
        ("/items/x", {}),
        ("customer.id", {}),
    ],
)
def test_field_selects_by_name_or_json_pointer(field, found):  # R39: RFC 6901
    assert Selection(include=(field,)).included(ORDER) == found


def test_pointers_into_an_array_at_the_top():  # R39
    assert Selection(include=("/0/sku",)).included(ORDER["items"]) == {"/0/sku": "a"}


def test_excluded_fields_are_left_out_and_nothing_else():  # R39
    selection = Selection(exclude=("amount", "/customer/ts", "/items/0/ts", "/items/1", "/nowhere/at/all"))
    assert selection.rest(ORDER) == {
        "customer": {"id": "c1"},
        "items": [{"sku": "a"}],
        "a/b": {"m~n": 1},
        "": "empty name",
        "/": 2,
    }


def test_excluded_indices_refer_to_the_original_array():  # R39
    assert Selection(exclude=("/0", "/1", "/3")).rest(["a", "b", "c", "d", "e"]) == ["c", "e"]
    assert Selection(exclude=("/0", "/0/x")).rest([{"x": 1}, {"x": 2}]) == [{"x": 2}]


def test_exclusion_does_not_modify_the_input():
    body = {"a": {"b": 1, "c": 2}}
    assert Selection(exclude=("/a/b",)).rest(body) == {"a": {"c": 2}}
    assert body == {"a": {"b": 1, "c": 2}}


@pytest.mark.parametrize("value", [5, "text", None, True])
def test_a_value_without_fields_stays_whole(value):  # R39
    assert Selection(exclude=("a", "/b/c")).rest(value) == value
    assert Selection(include=("a",)).included(value) == {}


def test_names_of_a_form():  # R39
    names = ["a", "b", "a", "c/d"]
    assert Selection(include=("a",)).of_names(names) == [0, 2]
    assert Selection(include=("/c~1d",)).of_names(names) == [3]
    assert Selection(exclude=("a", "c/d")).of_names(names) == [1]
    assert Selection(include=("missing", "/a/b")).of_names(names) == [0, 1, 2, 3]


def test_pointer_is_split_into_path_steps():
    assert path_of("amount") == ("amount",)
    assert path_of("/a/b") == ("a", "b")
    assert path_of("/~01") == ("~1",)
