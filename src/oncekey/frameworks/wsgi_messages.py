"""Requests and answers as WSGI has them: bodies that are read to their length and not beyond, texts for bytes."""

from __future__ import annotations

import io
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from oncekey.core.model import Code, Refuse
from oncekey.engine.claiming import Parts

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable
    from wsgiref.types import InputStream, StartResponse, WSGIEnvironment

    from oncekey.core.answers import Answer

_CHUNK: Final = 64 * 1024
_DIGITS: Final = 18
_TOO_LARGE: Final = Refuse(Code.BODY_TOO_LARGE)
_NO_LENGTH: Final = Refuse(Code.BODY_INVALID, detail="The body has no Content-Length, and this server needs one.")
_CUT_OFF: Final = Refuse(Code.BODY_INVALID, detail="The body is shorter than its Content-Length.")


def read_body(environ: WSGIEnvironment, limit: int) -> bytes | None:
    """The body, or None if it is too long; never beyond its length, where some servers would wait for ever."""
    size = _length(environ)
    if size is not None:
        return None if size > limit else _up_to(environ["wsgi.input"], size)
    if not environ.get("wsgi.input_terminated"):
        return b""
    body = _up_to(environ["wsgi.input"], limit + 1)
    return None if len(body) > limit else body


def read_ahead(environ: WSGIEnvironment, limit: int) -> bytes | Refuse:
    """The body of a request that may be claimed later, or why it cannot be; the application reads it as if anew."""
    size, stream = _length(environ), environ["wsgi.input"]
    if size is not None and size > limit:
        return _TOO_LARGE  # unread: whoever is not protected may take it
    if size is None and not environ.get("wsgi.input_terminated"):
        return _NO_LENGTH if "HTTP_TRANSFER_ENCODING" in environ else b""
    body = _up_to(stream, limit + 1 if size is None else size)
    if len(body) > limit:
        environ["wsgi.input"] = io.BufferedReader(_Both(body, stream))
        return _TOO_LARGE
    environ["wsgi.input"] = io.BytesIO(body)
    return body if size is None or len(body) == size else _CUT_OFF


def _length(environ: WSGIEnvironment) -> int | None:
    length: str = environ.get("CONTENT_LENGTH") or ""
    if not (length.isascii() and length.isdigit()):
        return None
    # A number of thousands of digits is too large for every limit, and nothing that int() would take.
    return int(length) if len(length) <= _DIGITS else 10**_DIGITS


def _up_to(stream: InputStream, size: int) -> bytes:
    body = b""
    while len(body) < size:
        chunk = stream.read(min(size - len(body), _CHUNK))
        if not chunk:
            break
        body += chunk
    return body


class _Both(io.RawIOBase):
    """What was read already, and then the rest."""

    def __init__(self, read: bytes, rest: InputStream) -> None:
        self._read = io.BytesIO(read)
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:  # noqa: ANN401  (a buffer of any kind)
        chunk = self._read.read(len(buffer)) or self._rest.read(len(buffer))
        buffer[: len(chunk)] = chunk
        return len(chunk)


def parts_of(environ: WSGIEnvironment, body: bytes) -> Parts:
    """A request as the engine claims it."""
    root = _path(environ.get("SCRIPT_NAME", ""))
    return Parts(
        method=environ["REQUEST_METHOD"],
        path=root + _path(environ.get("PATH_INFO", "")),
        query=environ.get("QUERY_STRING", "").encode("latin-1"),
        headers=lines_of(environ),
        content_type=environ.get("CONTENT_TYPE", "").encode("latin-1") or None,
        body=body,
        root_path=root,
    )


def lines_of(environ: WSGIEnvironment) -> list[tuple[bytes, bytes]]:
    """The lines of the header, with names in lower case."""
    sent = ((name[5:], value) for name, value in environ.items() if name.startswith("HTTP_"))
    known = ((name, environ[name]) for name in ("CONTENT_TYPE",) if environ.get(name))
    return [
        (name.replace("_", "-").lower().encode("latin-1"), str(value).encode("latin-1"))
        for name, value in (*known, *sent)
    ]


def _path(text: str) -> str:
    """A path as other servers give it: WSGI has its bytes as latin-1."""
    return text.encode("latin-1").decode("utf-8", "replace")


def tell(start_response: StartResponse, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Begin a response."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Status"  # a line needs some word there
    texts = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
    start_response(f"{status} {phrase}", texts)


def told(answer: Answer, args: tuple[Any, ...]) -> Any:  # noqa: ANN401  (what the handler's framework takes)
    """What a handler that was not called returns: a WSGI application, which Flask takes for a response.

    A handler that is such an application itself, which its arguments show, has run it.
    """

    def application(_: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        tell(start_response, answer.status, answer.headers)
        return [answer.body]

    for place, given in enumerate(args[:-1]):
        if isinstance(given, dict) and "wsgi.input" in given:
            return application(given, args[place + 1])
    return application


def closing(body: Iterable[bytes], source: object = None) -> Generator[bytes, None, None]:
    """The pieces of a body; where they come from is closed with the last of them, or when nobody wants more."""
    try:
        yield from body
    finally:
        close = getattr(body if source is None else source, "close", None)
        if close is not None:
            close()
