"""What is sealed in a store, and how it looks there: a self-describing form that names the key which opens it.

Sealed are the headers and the body of an answer, the result of a step, the payload of a parcel, the request that the
completer repeats, and the evidence about a call. Everything by which a record is found, moved or ended stays readable.

* Bytes are `oncekey-sealed:KEY_ID:` and what the seal made of them.
* Text is the same with the sealed bytes in Base64. All texts that are sealed were JSON before, and no JSON begins like
  that. That a call was rejected, or not made, stays outside of the envelope: a store decides by it.
* An answer has its headers in the same envelope as its body, the header line `oncekey-sealed` in their place, and the
  schema version 2, which versions of oncekey that cannot open it refuse to read.

Each is sealed for its place: `about` names the record, its incarnation and the part, and bytes that were moved to
another place do not open. Content that cannot be opened stays as it is, and the code that would use it refuses to:
`check_open`, `check_steps`.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from oncekey.canonical.digests import frame, raw
from oncekey.core.errors import RecordUnreadableError
from oncekey.core.keys import key_digest
from oncekey.core.model import SEALED_SCHEMA, Finished, Headers, Record, RecordId, StoredResponse

if TYPE_CHECKING:
    from uuid import UUID

KEY_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,32}")
"""What the name of a key looks like; it is stored in clear with everything that was sealed under it."""
HEADER: Final = b"oncekey-sealed"

_BEGINS: Final = b"oncekey-sealed:"
_TEXT: Final = "oncekey-sealed:"
_TAGGED: Final = '{"$":"rejected","v":'
_WITH_BODY: Final = b"+"
_WITHOUT_BODY: Final = b"-"
_NAME: Final = b"oncekey seal 1"


def about_record(record_id: RecordId, incarnation: UUID, part: str) -> bytes:
    """The place of an answer, or of a step's result, in one incarnation of a key."""
    return frame(_NAME, raw(record_id.scope), raw(record_id.key), incarnation.bytes, raw(part))


def about_request(record_id: RecordId, fingerprint: str) -> bytes:
    """The place of a kept request, in whatever incarnation: a take-over leaves the sealed bytes as they are."""
    return frame(_NAME, raw(record_id.scope), raw(record_id.key), raw(fingerprint), b"request")


def about_parcel(incarnation: UUID, parcel_id: UUID) -> bytes:
    """The place of a payload, in the outbox and with the dead letters."""
    return frame(_NAME, incarnation.bytes, parcel_id.bytes, b"parcel")


def about_evidence(source: str, event_id: str) -> bytes:
    """The place of evidence about a call."""
    return frame(_NAME, raw(source), raw(event_id), b"evidence")


def enclose(key_id: str, sealed: bytes) -> bytes:
    """Sealed bytes with the name of their key."""
    return b"%b%b:%b" % (_BEGINS, key_id.encode("ascii"), sealed)


def disclose(stored: bytes) -> tuple[str, bytes] | None:
    """The name of the key and the sealed bytes; None: these are no sealed bytes."""
    if not stored.startswith(_BEGINS):
        return None
    key_id, _, sealed = stored[len(_BEGINS) :].partition(b":")
    return key_id.decode("latin-1"), sealed


def enclose_text(key_id: str, sealed: bytes) -> str:
    """The same as text."""
    return f"{_TEXT}{key_id}:{b64encode(sealed).decode('ascii')}"


def disclose_text(stored: str) -> tuple[str, bytes] | None:
    """The name of the key and the sealed bytes; None: this is no sealed text."""
    if not is_sealed(stored):
        return None
    key_id, _, sealed = stored[len(_TEXT) :].partition(":")
    try:
        return key_id, b64decode(sealed, validate=True)
    except ValueError:
        return key_id, b""


def is_sealed(text: str) -> bool:
    """Whether a text is sealed."""
    return text.startswith(_TEXT)


def tag_of(result: str) -> str:
    """The part of a step's result that is not sealed: the mark that the provider refused the call."""
    return _TAGGED if result.startswith(_TAGGED) else ""


def tagged(tag: str, text: str) -> str:
    """A result with its tag before it."""
    return f"{tag}{text}}}" if tag else text


def untagged(tag: str, result: str) -> str:
    """A result without its tag."""
    return result[len(tag) : -1] if tag else result


def plain_answer(response: StoredResponse) -> bytes:
    """Headers and body as they are sealed together; that there is no body is sealed, too."""
    lines = json.dumps([[name.decode("latin-1"), value.decode("latin-1")] for name, value in response.headers])
    head = lines.encode("ascii")
    form = _WITHOUT_BODY if response.body is None else _WITH_BODY
    return b"%d:%b%b%b" % (len(head), head, form, response.body or b"")


def sealed_answer(response: StoredResponse, key_id: str, sealed: bytes) -> StoredResponse:
    """An answer as it is stored: the status alone is readable."""
    marked: Headers = ((HEADER, key_id.encode("ascii")),)
    return StoredResponse(response.status, marked, enclose(key_id, sealed), SEALED_SCHEMA)


def opened_answer(response: StoredResponse, plain: bytes) -> StoredResponse:
    """The answer as it was before sealing."""
    size, _, rest = plain.partition(b":")
    end = int(size)
    lines = json.loads(rest[:end])
    body = rest[end + 1 :] if rest[end : end + 1] == _WITH_BODY else None
    headers = tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in lines)
    return StoredResponse(response.status, headers, body)


def key_of_answer(response: StoredResponse) -> str | None:
    """The name of the key that an answer is still sealed under; None: it is readable. `?`: this read left it out."""
    if response.schema_version != SEALED_SCHEMA:
        return None
    found = None if response.body is None else disclose(response.body)
    return "?" if found is None else found[0]


def key_of_text(text: str) -> str | None:
    """The same for a step's result, a payload, or evidence."""
    found = disclose_text(untagged(tag_of(text), text))
    return None if found is None else found[0]


def shown_text(text: str) -> str:
    """A text for people: of a sealed one only the name of its key."""
    key_id = key_of_text(text)
    return text if key_id is None else said_of(key_id)


def said_of(key_id: str) -> str:
    """The text that is shown in place of sealed content."""
    return f"sealed under the key {key_id}"


def check_open(record: Record | Finished) -> None:
    """Refuse to replay an answer that is still sealed.

    Raises:
        RecordUnreadableError: The key it was sealed under is missing, or has other bytes now.
    """
    key_id = None if record.response is None else key_of_answer(record.response)
    if key_id is not None:
        raise _closed(record, key_id)


def check_steps(record: Record) -> None:
    """Refuse to go on after steps whose results are still sealed; raises the same."""
    for entry in record.memo:
        key_id = key_of_text(entry.result)
        if key_id is not None:
            raise _closed(record, key_id)


def _closed(record: Record | Finished, key_id: str) -> RecordUnreadableError:
    return RecordUnreadableError(_CLOSED.format(digest=key_digest(record.id.key), sealed=said_of(key_id)))


_CLOSED: Final = (
    "the record of a key (digest {digest}) cannot be read: it is {sealed}, which this process does not have, or has "
    "another one by that name (Once(seal=...))"
)


@dataclass(frozen=True, slots=True)
class InUse:
    """How much of one kind of content is sealed under a key. A key of None: it is not sealed."""

    part: str
    key_id: str | None
    found: int
