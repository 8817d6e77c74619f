"""Multipart bodies: exactly parts between delimiters, or nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.properties import stable
from oncekey.core.multipart import Part, parts_of

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
def test_what_could_be_read_in_two_ways_has_no_parts(body, boundary):  # R41
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


def test_a_header_of_spaces_takes_no_time():
    parts_of(b"--b\r\na: " + b" " * 1_000_000 + b"x\r\n\r\n\r\n--b--", b"b")


@stable
@given(st.lists(st.binary(max_size=20).filter(lambda content: b"--b" not in content), max_size=4))
def test_any_contents_come_back(contents):  # R41
    body = b"".join(b"--b\r\nn: v\r\n\r\n" + content + b"\r\n" for content in contents) + b"--b--\r\n"
    assert parts_of(body, b"b") == tuple(Part(((b"n", b"v"),), content) for content in contents)
