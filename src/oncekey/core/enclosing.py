"""Sealed content: the place that it is sealed for, and the form in which it is stored.

`core.envelopes` recognises that form; a process without a seal needs only that module.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from oncekey.canonical.digests import frame, raw
from oncekey.core.envelopes import BYTES_BEGIN, TEXT_BEGINS, described, key_of_text
from oncekey.core.model import SEALED_SCHEMA, Headers, RecordId, StoredResponse

if TYPE_CHECKING:
    from uuid import UUID

KEY_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,32}")
"""The pattern of a key's name, which is stored in clear with everything that was sealed under it."""
HEADER: Final = b"oncekey-sealed"
_WITH_BODY: Final = b"+"
_WITHOUT_BODY: Final = b"-"
_NAME: Final = b"oncekey seal 1"


def about_record(record_id: RecordId, incarnation: UUID, part: str) -> bytes:
    """The place of a response, or of a step's result, in one incarnation of a key."""
    return frame(_NAME, raw(record_id.scope), raw(record_id.key), incarnation.bytes, raw(part))


def about_request(record_id: RecordId, fingerprint: str) -> bytes:
    """The place of a kept request, in any incarnation: a take-over leaves the sealed bytes as they are."""
    return frame(_NAME, raw(record_id.scope), raw(record_id.key), raw(fingerprint), b"request")


def about_parcel(incarnation: UUID, parcel_id: UUID) -> bytes:
    """The place of a payload, in the outbox and with the dead letters."""
    return frame(_NAME, incarnation.bytes, parcel_id.bytes, b"parcel")


def about_evidence(source: str, event_id: str) -> bytes:
    """The place of evidence about a call."""
    return frame(_NAME, raw(source), raw(event_id), b"evidence")


def enclose(key_id: str, sealed: bytes) -> bytes:
    """Sealed bytes with the name of their key."""
    return b"%b%b:%b" % (BYTES_BEGIN, key_id.encode("ascii"), sealed)


def enclose_text(key_id: str, sealed: bytes) -> str:
    """Sealed bytes as text, with the name of their key."""
    return f"{TEXT_BEGINS}{key_id}:{b64encode(sealed).decode('ascii')}"


def tagged(tag: str, text: str) -> str:
    """A result with its tag before it."""
    return f"{tag}{text}}}" if tag else text


def plain_answer(response: StoredResponse) -> bytes:
    """Headers and body in the form that is sealed; whether there is a body is sealed too."""
    lines = json.dumps([[name.decode("latin-1"), value.decode("latin-1")] for name, value in response.headers])
    head = lines.encode("ascii")
    form = _WITHOUT_BODY if response.body is None else _WITH_BODY
    return b"%d:%b%b%b" % (len(head), head, form, response.body or b"")


def sealed_answer(response: StoredResponse, key_id: str, sealed: bytes) -> StoredResponse:
    """A response in its sealed form: only the status is readable."""
    marked: Headers = ((HEADER, key_id.encode("ascii")),)
    return StoredResponse(response.status, marked, enclose(key_id, sealed), SEALED_SCHEMA)


def opened_answer(response: StoredResponse, plain: bytes) -> StoredResponse:
    """The response as it was before sealing."""
    size, _, rest = plain.partition(b":")
    end = int(size)
    lines = json.loads(rest[:end])
    body = rest[end + 1 :] if rest[end : end + 1] == _WITH_BODY else None
    headers = tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in lines)
    return StoredResponse(response.status, headers, body)


def shown_text(text: str) -> str:
    """A text for people; a sealed text is replaced by the name of its key."""
    key_id = key_of_text(text)
    return text if key_id is None else described(key_id)


@dataclass(frozen=True, slots=True)
class InUse:
    """How much of one kind of content is sealed under a key. Key None: it is not sealed."""

    part: str
    key_id: str | None
    found: int
