"""The form of sealed content in a store: it describes itself, and names the key that opens it.

The headers and the body of a response, the result of a step, the payload of a parcel, the request that the completer
repeats, and the evidence about a call are sealed. Everything by which a record is found or moved stays readable.

* Bytes are `oncekey-sealed:KEY_ID:` and the sealed bytes.
* Text is the same with the sealed bytes in Base64. All texts that are sealed were JSON before, and no JSON begins like
  that. That a call was rejected, or not made, stays outside the envelope: a store decides by it.
* A response has its headers in the same envelope as its body, the header line `oncekey-sealed` in their place, and the
  schema version 2, which versions of oncekey that cannot open it refuse to read.

Each is sealed for its place: `about` names the record, its incarnation and the part, and bytes that were moved to
another place do not open. Content that cannot be opened stays as it is, and the code that would use it refuses to:
`check_open`, `check_steps`.
"""

from __future__ import annotations

from base64 import b64decode
from typing import Final

from oncekey.core.errors import RecordUnreadableError
from oncekey.core.keys import key_digest
from oncekey.core.model import SEALED_SCHEMA, Finished, Record, StoredResponse

BYTES_BEGIN: Final = b"oncekey-sealed:"
TEXT_BEGINS: Final = "oncekey-sealed:"
_TAGGED: Final = '{"$":"rejected","v":'


def disclose(stored: bytes) -> tuple[str, bytes] | None:
    """The name of the key and the sealed bytes; None: these bytes are not sealed."""
    if not stored.startswith(BYTES_BEGIN):
        return None
    key_id, _, sealed = stored[len(BYTES_BEGIN) :].partition(b":")
    return key_id.decode("latin-1"), sealed


def disclose_text(stored: str) -> tuple[str, bytes] | None:
    """The name of the key and the sealed bytes; None: this text is not sealed."""
    if not is_sealed(stored):
        return None
    key_id, _, sealed = stored[len(TEXT_BEGINS) :].partition(":")
    try:
        return key_id, b64decode(sealed, validate=True)
    except ValueError:
        return key_id, b""


def is_sealed(text: str) -> bool:
    """Whether a text is sealed."""
    return text.startswith(TEXT_BEGINS)


def tag_of(result: str) -> str:
    """The part of a step's result that is not sealed: the mark that the provider refused the call."""
    return _TAGGED if result.startswith(_TAGGED) else ""


def untagged(tag: str, result: str) -> str:
    """A result without its tag."""
    return result[len(tag) : -1] if tag else result


def key_of_answer(response: StoredResponse) -> str | None:
    """The name of the key that a response is still sealed under; None: it is readable. `?`: this read left it out."""
    if response.schema_version != SEALED_SCHEMA:
        return None
    found = None if response.body is None else disclose(response.body)
    return "?" if found is None else found[0]


def key_of_text(text: str) -> str | None:
    """The name of the key that a step's result, a payload or evidence is still sealed under; None: it is readable."""
    found = disclose_text(untagged(tag_of(text), text))
    return None if found is None else found[0]


def described(key_id: str) -> str:
    """The text that is shown in place of sealed content."""
    return f"sealed under the key {key_id}"


def check_open(record: Record | Finished) -> None:
    """Refuse to replay a response that is still sealed.

    Raises:
        RecordUnreadableError: The key it was sealed under is missing, or has other bytes now.
    """
    key_id = None if record.response is None else key_of_answer(record.response)
    if key_id is not None:
        raise _closed(record, key_id)


def check_steps(record: Record) -> None:
    """Refuse to resume after steps whose results are still sealed; raises `RecordUnreadableError`."""
    for entry in record.memo:
        key_id = key_of_text(entry.result)
        if key_id is not None:
            raise _closed(record, key_id)


def _closed(record: Record | Finished, key_id: str) -> RecordUnreadableError:
    return RecordUnreadableError(_CLOSED.format(digest=key_digest(record.id.key), sealed=described(key_id)))


_CLOSED: Final = (
    "the record of a key (digest {digest}) cannot be read: it is {sealed}, which this process does not have, or has "
    "another one by that name (Once(seal=...))"
)
