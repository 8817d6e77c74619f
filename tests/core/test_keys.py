"""From field lines to a key: both spellings, every refusal, and that no sentence gives the key away."""

from __future__ import annotations

from itertools import islice

import http_sf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.golden import keys as golden_keys
from core.properties import stable, thorough
from oncekey.core import keys as keys_module
from oncekey.core.errors import KeyMalformedError, MalformedError
from oncekey.core.keys import HeaderSyntax, KeyFormat, key_digest, looks_personal, parse_key

DIGIT_FIRST = "8e03978e-40d5-43e8-bc93-6894a57f9324"
LETTER_FIRST = "f47ac10b-58cc-4372-a567-0e02b2c3d479"
VERSION_7 = "018f6b1e-7c3a-7d2b-9f10-2a3b4c5d6e7f"
NO_VERSION = "ffffffff-ffff-ffff-ffff-ffffffffffff"
SHOUTED = "F47AC10B-58CC-4372-A567-0E02B2C3D479"
UUIDS = [DIGIT_FIRST, LETTER_FIRST, VERSION_7, NO_VERSION, SHOUTED]


def refused(*lines: bytes, **settings: object) -> str:
    """The sentence that these field lines are refused with."""
    with pytest.raises(KeyMalformedError) as caught:
        parse_key(lines, **settings)
    sentence = str(caught.value)
    assert sentence.startswith("The Idempotency-Key")
    assert sentence.endswith(".")
    return sentence


# ------------------------------------------------------------------------------------------ both spellings


@pytest.mark.parametrize("uuid", UUIDS)
def test_quoted_and_bare_are_one_key(uuid):  # R5, C1
    assert parse_key([uuid.encode()]) == uuid
    assert parse_key([f'"{uuid}"'.encode()]) == uuid
    assert parse_key([f'  "{uuid}";v=1  '.encode()]) == uuid
    assert parse_key([f"  {uuid} ".encode()]) == uuid


@pytest.mark.parametrize("uuid", UUIDS)
def test_strict_takes_only_the_quoted_spelling(uuid):  # R5
    assert parse_key([f'"{uuid}"'.encode()], syntax=HeaderSyntax.STRICT) == uuid
    assert "between double quotes" in refused(uuid.encode(), syntax=HeaderSyntax.STRICT)


@pytest.mark.parametrize("uuid", UUIDS)
def test_bare_takes_only_the_spelling_without_quotes(uuid):  # R5
    assert parse_key([uuid.encode()], syntax=HeaderSyntax.BARE) == uuid
    assert "without quotes" in refused(f'"{uuid}"'.encode(), syntax=HeaderSyntax.BARE)


@pytest.mark.parametrize("value", ["KG5LxwFBepaKHyUD", "clkyoesmbgy0000000000", "order:2024/42@eu~1+=._-", "1" * 16])
def test_keys_that_vendors_document_are_taken_bare(value):  # R4, R5
    assert parse_key([value.encode()]) == value


def test_no_field_is_no_key():  # R2, R12
    assert parse_key([]) is None
    assert parse_key((), syntax=HeaderSyntax.STRICT, key_format=KeyFormat.UUID) is None


def test_a_key_is_opaque_and_case_counts():  # R3
    lower, upper = parse_key([b"a" * 16]), parse_key([b"A" * 16])
    assert lower != upper
    assert parse_key([b'"  padded inside quotes  "']) == "  padded inside quotes  "


# ------------------------------------------------------------------------------------------- the refusals


@pytest.mark.parametrize("syntax", HeaderSyntax)
@pytest.mark.parametrize("line", [b"", b" ", b"     ", b" " * 20])
def test_an_empty_field_is_malformed_and_never_absent(line, syntax):  # R10
    assert "is empty" in refused(line, syntax=syntax)


@pytest.mark.parametrize("line", [b'""', b'" "', b'"' + b" " * 20 + b'"', b'"";v=1'])
@pytest.mark.parametrize("min_length", [0, 1, 16])
def test_an_empty_string_is_malformed_whatever_the_minimum(line, min_length):  # R9, R10
    assert "is empty" in refused(line, min_length=min_length)


@pytest.mark.parametrize("syntax", HeaderSyntax)
def test_two_lines_are_refused_even_if_they_are_equal(syntax):  # R7
    line = DIGIT_FIRST.encode()
    quoted = b'"' + line + b'"'
    for lines in ([line, line], [quoted, quoted], [line, b""], [b"", b""], [quoted] * 3):
        assert "more than once" in refused(*lines, syntax=syntax)


@pytest.mark.parametrize(
    "line",
    [
        f"{DIGIT_FIRST},{LETTER_FIRST}",
        f"{DIGIT_FIRST}, {LETTER_FIRST}",
        f'"{DIGIT_FIRST}","{LETTER_FIRST}"',
        f'"{DIGIT_FIRST}" , "{LETTER_FIRST}"',
        f'"{DIGIT_FIRST}";v=1, "{LETTER_FIRST}"',
        f"{DIGIT_FIRST},",
        f",{DIGIT_FIRST}",
    ],
)
def test_a_list_is_refused_because_servers_join_lines_with_commas(line):  # R7
    assert "list" in refused(line.encode())


def test_a_comma_inside_a_string_is_part_of_the_key():  # R6
    assert parse_key([b'"foo, bar, and the rest"']) == "foo, bar, and the rest"


@pytest.mark.parametrize(
    "line",
    [
        b"'8e03978e-40d5-43e8-bc93-6894a57f9324'",
        b"\t8e03978e-40d5-43e8-bc93-6894a57f9324",
        b"8e03978e-40d5-43e8-bc93-6894a57f9324\t",
        b'\t"8e03978e-40d5-43e8-bc93-6894a57f9324"',
        b'"8e03978e-40d5-43e8-bc93-6894a57f9324"\t',
        b"8e03978e-40d5-43e8-bc93-6894a57f9324\n",
        b'"8e03978e-40d5-43e8-bc93-6894a57f9324"\r\n',
        b"8e03978e 40d5 43e8 bc93 6894a57f9324",
        b"8e03978e-40d5-43e8-bc93-6894a57f9324;v=1",
        b'8e03978e-40d5-43e8-bc93-"6894a57f9324"',
        b":OGUwMzk3OGUtNDBkNS00M2U4LWJjOTM=:",
        b"@1659578233000000",
        b"?1",
        b'%"8e03978e-40d5-43e8-bc93-6894a57f9324"',
        b"(8e03978e-40d5-43e8)",
        b"k\xc3\xbcy-k\xc3\xbcy-k\xc3\xbcy-k\xc3\xbcy",
        b'"k\xc3\xbcy-k\xc3\xbcy-k\xc3\xbcy-k\xc3\xbcy"',
        b'"8e03978e-40d5-43e8-bc93-6894a57f9324',
        b'"8e03978e-40d5-43e8-bc93-6894a57f9324"x',
        b'"8e03978e-40d5-43e8-bc93-6894a57f9324";V=1',
        b'"8e03978e-40d5-43e8-bc93-6894a57f9324";;',
        b'"8e03978e\\n40d5-43e8-bc93-6894a57f9324"',
        b'"8e03978e\x0040d5-43e8-bc93-6894a57f9324"',
        b"8e03978e\x0040d5-43e8-bc93-6894a57f9324",
        b"8e03978e\x7f40d5-43e8-bc93-6894a57f9324",
        b"'; DROP TABLE oncekey_records; --",
        b"key\r\nSET admin 1\r\n$12345",
        b"${jndi:ldap://example.org/a}",
    ],
)
@pytest.mark.parametrize("syntax", HeaderSyntax)
def test_what_is_neither_spelling_is_malformed(line, syntax):  # R6, R196
    refused(line, syntax=syntax)


def test_the_length_has_two_ends():  # R8, R9
    for quote in ("", '"'):
        assert parse_key([f"{quote}{'k' * 255}{quote}".encode()]) == "k" * 255
        assert parse_key([f"{quote}{'k' * 16}{quote}".encode()]) == "k" * 16
        assert "at most 255 characters" in refused(f"{quote}{'k' * 256}{quote}".encode())
        assert "at least 16 characters" in refused(f"{quote}{'k' * 15}{quote}".encode())


def test_the_length_is_that_of_the_decoded_value():  # R8
    assert parse_key([b'"' + b"\\\\" * 255 + b'"']) == "\\" * 255
    assert "at most" in refused(b'"' + b"\\\\" * 256 + b'"')
    assert parse_key([b'"' + b"k" * 255 + b'";a=' + b"1" * 15]) == "k" * 255


def test_spaces_around_it_do_not_make_a_short_key_long():  # R9
    assert "at least" in refused(b'"' + b" " * 20 + b"short" + b" " * 20 + b'"')
    assert "at most" in refused(b'"' + b"k" * 16 + b" " * 240 + b'"')


def test_both_ends_are_settings():  # R8, R9, C2
    assert parse_key([b"k"], min_length=1) == "k"
    assert parse_key([b"k" * 100], max_length=100) == "k" * 100
    assert "at most 100" in refused(b"k" * 101, max_length=100)
    assert "at least 32" in refused(b"k" * 31, min_length=32)


@pytest.mark.parametrize("uuid", UUIDS)
def test_uuid_format_takes_any_uuid_and_keeps_its_case(uuid):  # R4, C2
    assert parse_key([uuid.encode()], key_format=KeyFormat.UUID) == uuid
    assert parse_key([f'"{uuid}"'.encode()], key_format=KeyFormat.UUID) == uuid


@pytest.mark.parametrize(
    "value",
    [
        "not-a-uuid-not-a-uuid",
        DIGIT_FIRST[:-1],
        DIGIT_FIRST + "0",
        DIGIT_FIRST.replace("-", ""),
        DIGIT_FIRST.replace("8", "g"),
        f"urn:uuid:{DIGIT_FIRST}",
        DIGIT_FIRST.replace("-", "_"),
    ],
)
def test_uuid_format_refuses_everything_else(value):  # R4
    assert parse_key([value.encode()]) == value
    assert "8-4-4-4-12" in refused(value.encode(), key_format=KeyFormat.UUID)
    assert "8-4-4-4-12" in refused(f'"{value}"'.encode(), key_format=KeyFormat.UUID)


def test_a_uuid_with_spaces_inside_the_quotes_is_not_one():  # R3, R4
    assert "not a UUID" in refused(f'" {DIGIT_FIRST}"'.encode(), key_format=KeyFormat.UUID)


def test_a_malformed_key_is_a_malformed_request():
    with pytest.raises(MalformedError):
        parse_key([b"short"])


# --------------------------------------------------------------------------------------------- properties

printable = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=60)
bare_keys = st.from_regex(r"[A-Za-z0-9._~/+=-][A-Za-z0-9._~:/+=@-]{15,60}", fullmatch=True)


@thorough
@given(st.binary(max_size=40) | printable.map(str.encode), st.sampled_from(HeaderSyntax))
def test_any_bytes_are_a_key_or_a_sentence(line, syntax):  # R6, R10, R196
    try:
        key = parse_key([line], syntax=syntax, min_length=1)
    except KeyMalformedError:
        return
    assert key is not None
    assert key.isascii()
    assert key.isprintable()
    assert key.strip(" ")


@stable
@given(bare_keys)
def test_any_bare_key_equals_its_quoted_spelling(key):  # R5
    assert parse_key([key.encode()]) == parse_key([http_sf.ser(key).encode()]) == key


@thorough
@given(printable)
def test_whatever_the_reference_parser_calls_a_string_is_that_key(key):  # R6
    field = http_sf.ser(key).encode()
    value, _ = http_sf.parse(field, tltype="item")
    if value.strip(" "):
        assert parse_key([field], min_length=1, syntax=HeaderSyntax.STRICT) == value
    else:
        refused(field, min_length=1, syntax=HeaderSyntax.STRICT)


@stable
@given(st.from_regex(r"[a-z0-9]{24}", fullmatch=True), st.data())
def test_no_sentence_gives_the_key_away(secret, data):  # R195
    spoiled = data.draw(
        st.sampled_from(
            [
                f"{secret},x",
                f'"{secret}',
                f"{secret} x",
                f'"{secret}"x',
                f'"{secret}";A',
                f"\u00fc{secret}",
                f"'{secret}'",
            ]
        )
    )
    for syntax in HeaderSyntax:
        assert secret not in refused(spoiled.encode(), syntax=syntax)
    assert secret not in refused(secret.encode(), key_format=KeyFormat.UUID)
    assert secret not in refused(secret.encode(), min_length=25)
    assert secret not in refused(secret.encode(), max_length=23)
    assert secret not in refused(secret.encode(), secret.encode())


def test_no_chained_error_gives_the_key_away_either():  # R195
    with pytest.raises(KeyMalformedError) as caught:
        parse_key([b'"open-8e03978e-40d5'])
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


# ---------------------------------------------------------------------------------- personal data and logs


@pytest.mark.parametrize(
    "key",
    [
        "alice@example.com-1234567",
        "order-for-bob.smith+shop@mail.example.co.uk",
        "alice%40example.com-2024",
        "+49 171 2345678-order-1",
        "order:+14155550123",
        "+44-20-7946-0958/7",
        "call-me (415) 555-0123 now",
        "415-555-0123 order",
        "415.555.0123",
        "ssn 078-05-1120 order 1",
    ],
)
def test_keys_with_personal_data_are_found(key):  # R18
    assert looks_personal(key)


@pytest.mark.parametrize(
    "key",
    [
        *UUIDS,
        "12345678-1234-1234-1234-123456789012",
        "01ARZ3NDEKTSV4RRFFQ69G5FAV",
        "KG5LxwFBepaKHyUD",
        "order-2024-06-30-000000012345",
        "20240630121530123456",
        "a+b/c+1234=0987654321",
        "dGhpcyBpcyBhIGtleQ+12345678/==",
        "checkout@v2-8e03978e40d543e8",
        "1719748800000-42",
    ],
)
def test_ordinary_keys_are_not_suspected(key):  # R18
    assert not looks_personal(key)


def test_a_log_shows_a_digest_instead_of_the_key():  # R18, R195
    assert key_digest("abc") == "ba7816bf8f01cfea"
    assert key_digest(DIGIT_FIRST) != key_digest(LETTER_FIRST)
    assert key_digest(LETTER_FIRST) != key_digest(SHOUTED)
    assert len(key_digest(DIGIT_FIRST)) == 16
    assert DIGIT_FIRST[:8] not in key_digest(DIGIT_FIRST)


def _slowly_personal(key: str) -> bool:
    """What `looks_personal` says without its short cuts."""
    return any(
        pattern.search(key) for pattern in (keys_module._EMAIL, keys_module._PHONE, keys_module._SOCIAL_SECURITY)
    )


def test_no_short_cut_overlooks_anything():  # R18
    found = 0
    for line in islice(golden_keys(77), 20_000):
        key = line.decode()
        found += looks_personal(key)
        assert looks_personal(key) == _slowly_personal(key), key
    assert found > 500


_PIECES = ["5", "55", "555", "1234", "-", " ", ".", "(", ")", "+", "+1", "@", "%40", "a", "é", "_", "٣", "x.de", "45"]


@thorough
@given(st.lists(st.sampled_from(_PIECES), max_size=14).map("".join))
def test_no_short_cut_overlooks_what_is_put_together(key):  # R18
    assert looks_personal(key) == _slowly_personal(key)


@pytest.mark.parametrize("key", ["555-123-4567", "123-45-6789", "é555-123-4567", "555-123-4567é", "_123-45-6789_"])
def test_a_number_alone_is_personal(key):  # R18
    assert looks_personal(key)
    assert _slowly_personal(key)
