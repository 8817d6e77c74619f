"""The fingerprint of a request: equal for every attempt of one request, different for different requests.

It is a hash over length-prefixed parts, so no value can imitate a boundary. The parts are the name of the
algorithm, method, path, query, and the body:

* **JSON** (`application/json`, anything `+json`): its canonical form, see `oncekey.canonical.jcs`. A JSON body
  without one is rejected, because two different bodies could look alike.
* **Form**: its pairs, decoded, in their order; `+` and `%20` are the same, `%ff` and `%fe` are not.
* **Multipart**: its parts, whatever the boundary was; header names of a part in any case and order. Only the exact
  syntax of RFC 2046 is accepted: a body that a lenient parser might read differently has no parts here, and its bytes
  count as they are.
* **Empty**: nothing, whatever the media type is. `{}` is a body, and so a different request.
* **Anything else**: media type and bytes.

The media type is normalised: case, order of parameters and a UTF-8 charset do not matter. The query
keeps the order of its pairs; only percent-encoding is normalised (RFC 3986, 6.2.2), and `+`
is left as it is. Method and path count as they are.

A value is `jcs1:sha256:` or, with a secret, `jcs1:hmac-sha256:` and the digest in hex. The content of a body can
often be guessed, and a plain hash then confirms the guess: set a secret where that matters.
A change of any rule here changes `jcs1`, and fingerprints of two algorithms are never equal.

A known value: `POST /payments?draft=false` with `Content-Type: application/json` and the body
`{"currency": "EUR", "amount": 10.00}` hashes

    4:jcs14:POST9:/payments11:draft=false4:json16:application/json30:{"amount":10,"currency":"EUR"}

and has the fingerprint
`jcs1:sha256:f305eac199a11c0271a16e5ab13224956ba0a14b36d7ff083b3a344d067453e2`.
"""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Final, TypeAlias
from urllib.parse import unquote_to_bytes

from oncekey.canonical.digests import Hmac, frame
from oncekey.canonical.jcs import MAX_DEPTH, BigInts, canonical_json, parse_json, serialize, serialize_parsed
from oncekey.core.errors import BodyInvalidError, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["ALGORITHM", "EVERYTHING", "Fingerprints", "Request", "Selection", "same"]


_TOKEN: Final = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_ESSENCE: Final = re.compile(rb"[ \t]*(" + _TOKEN + rb"/" + _TOKEN + rb")[ \t]*")
_PARAMETER: Final = re.compile(
    rb";[ \t]*(?:(" + _TOKEN + rb')=(?:"((?:[^"\\]|\\.)*)"|(' + _TOKEN + rb")))?[ \t]*", re.DOTALL
)
_ESCAPE: Final = re.compile(rb"\\(.)", re.DOTALL)
LONGEST_KEPT: Final = 200
"""A longer value is parsed every time, so that clients cannot fill the cache's memory."""


@dataclass(frozen=True, slots=True)
class MediaType:
    """A media type in lower case and its parameters, sorted by name."""

    essence: bytes
    parameters: tuple[tuple[bytes, bytes], ...] = ()

    def __getitem__(self, name: bytes) -> bytes | None:
        return next((value for other, value in self.parameters if other == name), None)

    def without(self, *names: bytes) -> MediaType:
        """The media type without some parameters."""
        return MediaType(self.essence, tuple(pair for pair in self.parameters if pair[0] not in names))

    @property
    def is_json(self) -> bool:
        """Whether it is `application/json`, `text/json` or ends in `+json`."""
        return self.essence in (b"application/json", b"text/json") or self.essence.endswith(b"+json")

    @property
    def is_form(self) -> bool:
        """Whether it is the type of an HTML form without files."""
        return self.essence == b"application/x-www-form-urlencoded"

    @property
    def is_multipart(self) -> bool:
        """Whether it is a multipart type."""
        return self.essence.startswith(b"multipart/")


def media_type_of(content_type: bytes | None) -> MediaType:
    """The media type of a body. If it cannot be parsed it counts byte for byte, as a nameless parameter."""
    if not content_type:
        return MediaType(b"")
    return _parsed(content_type) if len(content_type) <= LONGEST_KEPT else _parsed.__wrapped__(content_type)


@lru_cache(maxsize=256)
def _parsed(content_type: bytes) -> MediaType:
    essence = _ESSENCE.match(content_type)
    parameters = parameters_of(content_type[essence.end() :]) if essence else None
    if essence is None or parameters is None:
        return MediaType(b"", ((b"", content_type),))
    return MediaType(essence[1].lower(), parameters)


def parameters_of(text: bytes) -> tuple[tuple[bytes, bytes], ...] | None:
    """The parameters in `; name=value; name="value"`; None if `text` has another form."""
    parameters: list[tuple[bytes, bytes]] = []
    position = 0
    while position < len(text):
        found = _PARAMETER.match(text, position)
        if found is None:
            return None
        position = found.end()
        name, quoted, plain = found.groups()
        if name is None:
            continue
        value = plain if quoted is None else _ESCAPE.sub(rb"\1", quoted)
        # Only a charset is known to be case-insensitive.
        parameters.append((name.lower(), value.lower() if name.lower() == b"charset" else value))
    return tuple(sorted(parameters))


_PADDED_LINE_END: Final = re.compile(rb"[ \t]*\r\n")
_CLOSING: Final = re.compile(rb"--[ \t]*(?:\r\n)?")
_FIELD_NAME: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a multipart body: its header fields, names in lower case and sorted, and its bytes."""

    headers: tuple[tuple[bytes, bytes], ...]
    content: bytes

    @property
    def name(self) -> str:
        """The name of its form field; empty if it has none."""
        disposition = dict(self.headers).get(b"content-disposition", b"")
        _, semicolon, rest = disposition.partition(b";")
        return dict(parameters_of(semicolon + rest) or ()).get(b"name", b"").decode("utf-8", "surrogateescape")


def parts_of(body: bytes, boundary: bytes) -> tuple[Part, ...] | None:
    """The parts of `body`; None unless it consists exactly of parts between delimiters."""
    preamble, *chunks = (b"\r\n" + body).split(b"\r\n--" + boundary)
    if preamble or not boundary or not chunks or not _CLOSING.fullmatch(chunks[-1]):
        return None
    parts = [_part(chunk) for chunk in chunks[:-1]]
    found = tuple(part for part in parts if part is not None)
    return found if len(found) == len(parts) else None


def _part(chunk: bytes) -> Part | None:
    line_end = _PADDED_LINE_END.match(chunk)
    if line_end is None:
        return None
    # With the line end kept in front, a part without header fields is parsed like any other.
    head, blank_line, content = chunk[line_end.end() - 2 :].partition(b"\r\n\r\n")
    fields = [line.partition(b":") for line in head.split(b"\r\n")[1:]]
    if not blank_line or not all(colon and _FIELD_NAME.fullmatch(name) for name, colon, _ in fields):
        return None
    return Part(tuple(sorted((name.lower(), value.strip(b" \t")) for name, _, value in fields)), content)


Path: TypeAlias = tuple[str, ...]

_BAD_ESCAPE: Final = re.compile(r"~(?![01])")


@dataclass(frozen=True, slots=True)
class Selection:
    """The fields that count, or the fields that do not; without either, everything counts.

    A field is a top-level name (`amount`) or, when it begins with a slash, a JSON pointer of RFC 6901
    (`/customer/id`, `/items/0/sku`). In forms and in multipart bodies it is the name of a field. A body that
    has none of the included fields counts as a whole, so that different bodies never share an empty selection;
    so does a body without fields, such as an image.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.include and self.exclude:
            raise ConfigurationError(
                "A selection has include and exclude at once; give the fields that count or those that don't."
            )
        _require_fields(self.include, "include")
        _require_fields(self.exclude, "exclude")

    def __bool__(self) -> bool:
        return bool(self.include or self.exclude)

    def included(self, value: object) -> dict[str, object]:
        """The included fields that a parsed JSON value has, by their pointers."""
        found: dict[str, object] = {}
        for field in self.include:
            _find(value, path_of(field), found)
        return found

    def rest(self, value: object) -> object:
        """A parsed JSON value without the excluded fields."""
        return _without(value, [path_of(field) for field in self.exclude]) if self.exclude else value

    def of_names(self, names: Sequence[str]) -> list[int]:
        """The positions in `names` of the form fields that count."""
        everything = range(len(names))
        if self.include:
            wanted = {path_of(field) for field in self.include}
            return [at for at in everything if (names[at],) in wanted] or list(everything)
        unwanted = {path_of(field) for field in self.exclude}
        return [at for at in everything if (names[at],) not in unwanted]


@lru_cache(maxsize=1024)
def path_of(field: str) -> Path:
    """The path from the top of a body to `field`."""
    if not field.startswith("/"):
        return (field,)
    return tuple(step.replace("~1", "/").replace("~0", "~") for step in field[1:].split("/"))


def _require_fields(fields: Iterable[object], where: str) -> None:
    if not isinstance(fields, tuple) or not all(isinstance(field, str) and field for field in fields):
        raise ConfigurationError(
            f"{where} of a selection is not a tuple of field names; write {where}=('amount', '/customer/id')."
        )
    for field in fields:
        if field.startswith("/") and _BAD_ESCAPE.search(field):
            raise ConfigurationError(
                f"{field!r} in {where} is not a JSON pointer: only 0 (for ~) and 1 (for /) may follow a ~."
            )


def _find(value: object, path: Path, found: dict[str, object]) -> None:
    for step in path:
        match value:
            case dict() if step in value:
                value = value[step]
            case list() if step in (indices := _indices(value)):
                value = value[indices[step]]
            case _:
                return
    found["".join(f"/{step.replace('~', '~0').replace('/', '~1')}" for step in path)] = value


def _without(value: object, paths: Sequence[Path]) -> object:
    gone = {path[0] for path in paths if len(path) == 1}
    deeper: dict[str, list[Path]] = {}
    for path in paths:
        if len(path) > 1:
            deeper.setdefault(path[0], []).append(path[1:])
    match value:
        case dict():
            return {
                name: _without(member, deeper.get(name, ())) if name in deeper else member
                for name, member in value.items()
                if name not in gone
            }
        case list():
            return [
                _without(value[index], deeper.get(step, ())) if step in deeper else value[index]
                for step, index in _indices(value).items()
                if step not in gone
            ]
        case _:
            return value


def _indices(items: Sequence[object]) -> dict[str, int]:
    """The indices of the items, in the only form that RFC 6901 allows: no sign, no leading zero."""
    return {str(index): index for index in range(len(items))}


ALGORITHM: Final = "jcs1"
EVERYTHING: Final = Selection()
_FRAMED_NAME: Final = frame(ALGORITHM.encode("ascii"))
_PLAIN: Final = f"{ALGORITHM}:sha256:"
_KEYED: Final = f"{ALGORITHM}:hmac-sha256:"
_PERCENT: Final = re.compile(rb"%([0-9A-Fa-f]{2})")
_UNRESERVED: Final = re.compile(rb"[A-Za-z0-9._~-]")
_UTF8_CHARSETS: Final = (None, b"utf-8", b"utf8", b"us-ascii")


@dataclass(frozen=True, slots=True)
class Request:
    """The parts of a request that its fingerprint covers. `query` is without the question mark."""

    method: str
    path: str
    query: bytes
    content_type: bytes | None
    body: bytes


class Fingerprints:
    """Computes the fingerprints of requests under one policy; a secret is processed once and not for every request."""

    __slots__ = ("_big_ints", "_keyed", "_max_depth", "_selection", "_whole")

    def __init__(
        self,
        *,
        selection: Selection = EVERYTHING,
        secret: bytes | None = None,
        big_ints: BigInts = BigInts.EXACT,
        max_depth: int = MAX_DEPTH,
    ) -> None:
        if secret is not None and not secret:
            raise ConfigurationError("The secret is empty; give at least 16 random bytes, or None for no secret.")
        self._selection = selection
        self._whole = not selection
        self._keyed = None if secret is None else Hmac(secret)
        self._big_ints = big_ints
        self._max_depth = max_depth

    def of(self, method: str, path: str, query: bytes, content_type: bytes | None, body: bytes) -> str:
        """The fingerprint of a request, of its selected fields only if a selection is given.

        Raises:
            BodyInvalidError: The body is declared as JSON, and has no canonical form.
        """
        spelled = None
        if self._whole and body:
            long = content_type is not None and len(content_type) > LONGEST_KEPT
            spelled = (_json_spelling.__wrapped__ if long else _json_spelling)(content_type)
        if not body:
            rest = b"5:empty"
        elif spelled is not None:
            canonical = canonical_json(body, big_ints=self._big_ints, max_depth=self._max_depth)
            rest = b"4:json%d:%b%d:%b" % (len(spelled), spelled, len(canonical), canonical)
        else:
            rest = frame(*self._body(content_type, body))
        return self._digest(method, path, _PERCENT.sub(_one_spelling, query) if b"%" in query else query, rest)

    def of_chosen(self, parts: Mapping[str, object] | bytes, *, method: str, path: str) -> str:
        """The fingerprint of a value that a route selects, such as its validated input.

        Raises:
            BodyInvalidError: The chosen value has no canonical form.
            ConfigurationError: It has types other than those of JSON: None, bool, int, float, str, lists and mappings.
        """
        if isinstance(parts, bytes):
            rest = frame(b"chosen bytes", parts)
        else:
            canonical = serialize(parts, big_ints=self._big_ints, max_depth=self._max_depth)
            rest = frame(b"chosen json", canonical)
        return self._digest(method, path, b"", rest)

    def _digest(self, method: str, path: str, query: bytes, rest: bytes) -> str:
        verb, place = method.encode("utf-8", "surrogatepass"), path.encode("utf-8", "surrogatepass")
        framed = b"%b%d:%b%d:%b%d:%b%b" % (_FRAMED_NAME, len(verb), verb, len(place), place, len(query), query, rest)
        if self._keyed is None:
            return _PLAIN + sha256(framed).hexdigest()
        return _KEYED + self._keyed.digest(framed).hex()

    def _body(self, content_type: bytes | None, body: bytes) -> tuple[bytes, ...]:
        selection, media = self._selection, media_type_of(content_type)
        if media.is_json:
            _require_utf8(media)
            value = parse_json(body, big_ints=self._big_ints, max_depth=self._max_depth)
            spelled = _spelled(media.without(b"charset"))
            if found := selection.included(value):
                return (b"json fields", spelled, serialize_parsed(found))
            return (b"json", spelled, serialize_parsed(selection.rest(value)))
        if media.is_form:
            return (b"form", _spelled(_without_utf8(media)), *_pairs(body, selection))
        if media.is_multipart:
            parts = _parts(body, media[b"boundary"] or b"", selection)
            if parts is not None:
                return (b"multipart", _spelled(media.without(b"boundary")), *parts)
        return (b"bytes", _spelled(media), body)


def same(a: str, b: str) -> bool:
    """Whether two fingerprints are equal, in a time that does not reveal where they differ."""
    return hmac.compare_digest(a.encode("utf-8", "surrogatepass"), b.encode("utf-8", "surrogatepass"))


@lru_cache(maxsize=256)
def _json_spelling(content_type: bytes | None) -> bytes | None:
    """The normalised media type of a JSON body; None if the body is not JSON.

    Raises:
        BodyInvalidError: It declares a charset other than UTF-8.
    """
    media = media_type_of(content_type)
    if not media.is_json:
        return None
    _require_utf8(media)
    return _spelled(media.without(b"charset"))


def _require_utf8(media: MediaType) -> None:
    if media[b"charset"] not in _UTF8_CHARSETS:
        raise BodyInvalidError("The Content-Type gives JSON a charset that is not UTF-8; JSON is always UTF-8.")


def _without_utf8(media: MediaType) -> MediaType:
    return media.without(b"charset") if media[b"charset"] in _UTF8_CHARSETS else media


def _spelled(media: MediaType) -> bytes:
    """The normalised text of a media type; without parameters, the common case, it is the type itself."""
    if not media.parameters:
        return media.essence
    return frame(media.essence, *[piece for pair in media.parameters for piece in pair])


def _one_spelling(found: re.Match[bytes]) -> bytes:
    byte = bytes.fromhex(found[1].decode("ascii"))
    return byte if _UNRESERVED.fullmatch(byte) else found[0].upper()


def _pairs(body: bytes, selection: Selection) -> list[bytes]:
    fields = [field.partition(b"=") for field in body.replace(b"+", b" ").split(b"&") if field]
    pairs = [(unquote_to_bytes(name), unquote_to_bytes(value)) for name, _, value in fields]
    names = [name.decode("utf-8", "surrogateescape") for name, _ in pairs]
    chosen = selection.of_names(names) if selection else range(len(pairs))
    return [piece for at in chosen for piece in pairs[at]]


def _parts(body: bytes, boundary: bytes, selection: Selection) -> list[bytes] | None:
    parts = parts_of(body, boundary)
    if parts is None:
        return None
    chosen = selection.of_names([part.name for part in parts]) if selection else range(len(parts))
    return [
        piece
        for at in chosen
        for piece in (
            frame(*[piece for field in parts[at].headers for piece in field]),
            parts[at].content,
        )
    ]
