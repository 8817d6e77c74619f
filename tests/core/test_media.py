"""Content types in one spelling."""

from __future__ import annotations

import pytest

from oncekey.core import media as media_module
from oncekey.core.media import MediaType, media_type_of


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
def test_what_a_content_type_says(field, essence, parameters):  # R41
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
def test_which_bodies_are_read(field, kind):  # R41
    media = media_type_of(field)
    assert [name for name in ("is_json", "is_form", "is_multipart") if getattr(media, name)] == ([kind] if kind else [])


def test_parameters_by_name():
    media = media_type_of(b"text/x;b=2;a=1")
    assert media[b"a"] == b"1"
    assert media[b"c"] is None
    assert media.without(b"a", b"c") == MediaType(b"text/x", ((b"b", b"2"),))


def test_what_is_long_is_parsed_and_not_kept_in_memory():
    before = media_module._parsed.cache_info().currsize
    long = b"application/json; x=" + b"y" * 500
    assert media_type_of(long) == MediaType(b"application/json", ((b"x", b"y" * 500),))
    assert media_module._parsed.cache_info().currsize == before
    assert media_module._parsed.cache_info().maxsize is not None
