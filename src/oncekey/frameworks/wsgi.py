"""WSGI: reads requests, and captures and sends responses. `blocking.BlockingExchange` does the rest.

The response of a claimed request is withheld until it is stored; everything else passes through piece by piece.
"""

from __future__ import annotations

from http import HTTPStatus
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from oncekey.core.answers import Answer, marked_lines
from oncekey.core.errors import CONTROL_ERRORS
from oncekey.core.headers import trace_id_of
from oncekey.core.model import Refuse
from oncekey.engine.capture import IncompleteError
from oncekey.engine.claiming import Parts
from oncekey.engine.enrolment import SAFE, Enrolment
from oncekey.frameworks.blocking import NO_LENGTH, BlockingExchange, Threads, length_of, read_up_to
from oncekey.frameworks.resuming import Resumption
from oncekey.frameworks.shared import RESUMPTION, thread_exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    _Begun = tuple[str, list[tuple[str, str]]]

KEY: Final = "HTTP_IDEMPOTENCY_KEY"


class OncekeyWsgi:
    """Captures and stores the responses of claimed requests before they are passed to the server."""

    exchange: type[BlockingExchange] = BlockingExchange
    """The exchange class; a framework on top of WSGI may have its own."""

    def __init__(self, app: WSGIApplication, threads: Threads, *, serves_resources: bool = True) -> None:
        self.app, self.threads = app, threads
        self._serves_resources = serves_resources

    @staticmethod
    def asked(environ: WSGIEnvironment, limit: int | None = None) -> Environ:
        """A request as it is read."""
        return Environ(environ, limit)

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Serve one request."""
        self.threads.begin(self.start)
        method, path = environ["REQUEST_METHOD"], decoded(environ.get("PATH_INFO", "")) or "/"
        own = self._serves_resources and method == "GET" and self.threads.resource(self.asked(environ), path)
        if own:
            return responding(own)(environ, start_response)
        enrolment = self.enrolled(method, path)
        # A key has no effect on safe methods, even if it is malformed, unless a pattern names them.
        keyed = KEY in environ and (method not in SAFE or method in self.threads.patterns.methods)
        if keyed and not self.threads.started:
            self.start()
        exchange = self.exchange(self.threads, self.asked(environ, self.threads.max_request_bytes if keyed else None))
        token = thread_exchange.set(exchange)
        try:
            if enrolment is None and not keyed:
                return self.app(environ, start_response)
            return self._serve(exchange, environ, start_response, enrolment)
        finally:
            thread_exchange.reset(token)  # the server reuses the thread for its next request
            exchange.close()

    def enrolled(self, method: str, path: str) -> Enrolment | None:
        """The enrolment of a request by its path, before the application runs."""
        return self.threads.patterns.find_spelled(method, path)

    def start(self) -> None:
        """Check everything before the application runs.

        The start needs a connection. A request whose application has taken one from the same pool must not wait for the
        start of another request.
        """
        self.threads.ready()

    def _serve(
        self,
        exchange: BlockingExchange,
        environ: WSGIEnvironment,
        start_response: StartResponse,
        enrolment: Enrolment | None,
    ) -> Iterable[bytes]:
        try:
            if enrolment is not None:
                exchange.enter(enrolment)
            if exchange.answer is None:
                begun: list[_Begun] = []
                pieces = _begun(self.app, environ, begun)
                if exchange.capture is None and exchange.answer is None:
                    start_response(*_last(begun))
                    return pieces
                _captured(exchange, pieces, begun)
                if exchange.capture is not None:
                    _last(begun)
                    exchange.finish(None)
        except BaseException as error:
            if exchange.unsettled:
                exchange.finish(error)
            if exchange.answer is None or not isinstance(error, CONTROL_ERRORS):
                raise
        return _sent(exchange, start_response)


class Environ:
    """A request. Its body is read before the application runs, which may consume it before it calls a handler."""

    def __init__(self, environ: WSGIEnvironment, limit: int | None = None) -> None:
        self.environ = environ
        self.method: str = environ["REQUEST_METHOD"]
        self.echo: bytes | None = None if limit is None else environ[KEY].encode("latin-1")
        self.token: str = environ.get("HTTP_AUTHORIZATION", "")
        self.query: str = environ.get("QUERY_STRING", "")
        self.trace_id = trace_id_of(environ.get("HTTP_TRACEPARENT"))
        self.resumption: Resumption | None = environ.get(RESUMPTION)
        self._body = b"" if limit is None else read(environ, limit)

    @property
    def shown(self) -> Any:  # noqa: ANN401  (a framework on top of WSGI shows its own)
        """The argument of the `tenant` and `principal` functions."""
        return self.environ

    def parts(self) -> Parts | Refuse:
        """The parts of the request, or a refusal."""
        environ, body = self.environ, self._body
        if isinstance(body, Refuse):
            return body
        root = decoded(environ.get("SCRIPT_NAME", ""))
        return Parts(
            method=self.method,
            path=root + decoded(environ.get("PATH_INFO", "")),
            query=environ.get("QUERY_STRING", "").encode("latin-1"),
            headers=lines_of(environ),
            content_type=environ.get("CONTENT_TYPE", "").encode("latin-1") or None,
            body=body,
            root_path=root,
        )

    @staticmethod
    def instead(answer: Answer, args: tuple[Any, ...]) -> Any:  # noqa: ANN401
        """A WSGI application, which Flask accepts as a response; a handler that is one itself has run it."""
        for place, given in enumerate(args[:-1]):
            if isinstance(given, dict) and "wsgi.input" in given:
                return responding(answer)(given, args[place + 1])
        return responding(answer)


def read(environ: WSGIEnvironment, limit: int) -> bytes | Refuse:
    """The body, or a refusal; the application can read it again."""
    size = length_of(environ.get("CONTENT_LENGTH") or "")
    if size is None and not environ.get("wsgi.input_terminated"):
        return NO_LENGTH if "HTTP_TRANSFER_ENCODING" in environ else b""
    body, environ["wsgi.input"] = read_up_to(limit, environ["wsgi.input"], size)
    return body


def lines_of(environ: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
    """The header lines of a request, as an ASGI server would pass them.

    A request without `Host`, of HTTP/1.0 or of Django's test client, gets the server's name, as WSGI prescribes: the
    application would reject a worker's request to another host.
    """
    sent = [(name[5:], value) for name, value in environ.items() if name.startswith("HTTP_")]
    known = [(name, environ[name]) for name in ("CONTENT_TYPE",) if environ.get(name)]
    if "HTTP_HOST" not in environ and environ.get("SERVER_NAME"):
        port = environ.get("SERVER_PORT", "")
        known.append(("HOST", environ["SERVER_NAME"] + (f":{port}" if port not in {"", "80", "443"} else "")))
    names = ((name.replace("_", "-").lower(), str(value)) for name, value in (*known, *sent))
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in names]


def decoded(text: str) -> str:
    """A path decoded as UTF-8, as in ASGI: WSGI decodes its bytes as latin-1."""
    return text.encode("latin-1").decode("utf-8", "replace")


def _begun(app: WSGIApplication, environ: WSGIEnvironment, begun: list[_Begun]) -> Generator[bytes, None, None]:
    """The application's response. Some applications begin only when the first piece is read, so it is read."""
    written: list[bytes] = []

    def start(status: str, headers: list[tuple[str, str]], _: Any = None, /) -> Callable[[bytes], object]:  # noqa: ANN401
        begun.append((status, headers))
        return written.append

    pieces = _closing(app(environ, start))
    first = next(pieces, b"")
    return _closing(chain(written, (first,), pieces), pieces)


def _closing(body: Iterable[bytes], source: object = None) -> Generator[bytes, None, None]:
    """The pieces of a body; its source is closed after the last piece, or when the server stops reading."""
    try:
        yield from body
    finally:
        close = getattr(body if source is None else source, "close", None)
        if close is not None:
            close()


def _last(begun: list[_Begun]) -> _Begun:
    """The last arguments of `start_response`; raises for an application that never called it."""
    if not begun:
        raise IncompleteError
    return begun[-1]


def _captured(exchange: BlockingExchange, pieces: Generator[bytes, None, None], begun: list[_Begun]) -> None:
    """Capture the response; oncekey's own is not captured, and a body that cannot be stored is not read further."""
    capture = exchange.capture
    for piece in pieces:
        if capture is None:
            break
        if capture.status is None and begun:
            status, headers = begun[-1]
            lines = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
            capture.start(int(status[:3]), lines)
        capture.body(piece, more=True)
        if capture.refused is not None:
            break
    pieces.close()


def _sent(exchange: BlockingExchange, start_response: StartResponse) -> Iterable[bytes]:
    """Return oncekey's own response, or the application's with oncekey's headers added."""
    answer, capture, run = exchange.answer, exchange.capture, exchange.run
    if answer is not None:
        return responding(answer)({}, start_response)
    assert capture is not None
    assert capture.status is not None
    assert run is not None
    lines = marked_lines(capture.headers, run.policy, echo=exchange.echo, expires_at=run.expires_at)
    _notify(start_response, capture.status, lines)
    kept = capture.kept
    return _closing(capture.pieces(), capture) if kept is None else [kept]


def responding(answer: Answer) -> WSGIApplication:
    """A WSGI application that always returns this response."""

    def application(_: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        _notify(start_response, answer.status, answer.headers)
        return [answer.body]

    return application


def _notify(start_response: StartResponse, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Status"  # the status line needs a phrase
    start_response(f"{status} {phrase}", [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers])
