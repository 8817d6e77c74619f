"""The middleware for WSGI, plain or Flask's: the lifecycle of the engine in the thread that serves a request.

The answer of a request that was claimed is held back from the server until it is settled; everything else passes
through piece by piece. A protected handler finds its exchange by a context variable and claims when it is called, so
logins, validation and error handlers stay the framework's own.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from oncekey.core.answers import marked_lines
from oncekey.core.errors import LeaseLostError, NotExecuted, StoppingError
from oncekey.engine.capture import IncompleteError
from oncekey.engine.enrolment import SAFE
from oncekey.frameworks.wsgi_exchange import KEY, Exchange, current
from oncekey.frameworks.wsgi_messages import closing, tell

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from oncekey.engine.capture import Capture
    from oncekey.engine.enrolment import Enrolment
    from oncekey.frameworks.wsgi_installation import WsgiInstallation


class OncekeyWsgi:
    """Captures the answers of claimed requests, settles them, and only then hands them to the server."""

    def __init__(self, app: WSGIApplication, installation: WsgiInstallation) -> None:
        self.app = app
        self.installation = installation

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Serve one request."""
        method = environ["REQUEST_METHOD"]
        enrolment = self.installation.patterns.find(method, environ.get("PATH_INFO") or "/")
        # On safe methods a key has no effect, whatever it looks like, unless a pattern names them.
        keyed = KEY in environ and (enrolment is not None or method not in SAFE)
        exchange = Exchange(self.installation, environ, keyed=keyed)
        token = current.set(exchange)
        try:
            if enrolment is None and not keyed:
                return self.app(environ, start_response)
            return self._serve(exchange, start_response, enrolment)
        finally:
            current.reset(token)  # a server uses the thread for its next request
            exchange.close()

    def _serve(self, exchange: Exchange, start_response: StartResponse, enrolment: Enrolment | None) -> Iterable[bytes]:
        try:
            if enrolment is not None:
                exchange.enter(enrolment)
            if exchange.answer is None:
                response = _Response()
                pieces = response.begun(self.app, exchange.environ)
                if exchange.capture is None and exchange.answer is None:
                    return response.passed_on(pieces, start_response)
                for piece in pieces:
                    if not response.captured(piece, exchange.capture):
                        break
                pieces.close()
                if exchange.capture is not None:
                    response.check()
                    exchange.finish(None)
        except BaseException as error:
            if exchange.unsettled:
                exchange.finish(error)
            # What a handler says to us is not a fault that the server has to hear of.
            if exchange.answer is None or not isinstance(error, NotExecuted | LeaseLostError | StoppingError):
                raise
        return _sent(exchange, start_response)


class _Response:
    """What the application answers."""

    def __init__(self) -> None:
        self.started: tuple[str, list[tuple[str, str]]] | None = None
        self._written: list[bytes] = []

    def begun(self, app: WSGIApplication, environ: WSGIEnvironment) -> Generator[bytes, None, None]:
        """Its pieces. Some applications begin only when the first one is asked for, so it is."""
        pieces = closing(app(environ, self._start))
        first = next(pieces, b"")
        return closing(chain(self._written, (first,), pieces), pieces)

    def _start(self, status: str, headers: list[tuple[str, str]], _: Any = None, /) -> Callable[[bytes], object]:  # noqa: ANN401
        self.started = (status, headers)
        return self._written.append

    def check(self) -> tuple[str, list[tuple[str, str]]]:
        """Refuse what was never begun."""
        if self.started is None:
            raise IncompleteError
        return self.started

    def passed_on(self, pieces: Iterator[bytes], start_response: StartResponse) -> Iterable[bytes]:
        """As if we were not there."""
        start_response(*self.check())
        return pieces

    def captured(self, piece: bytes, capture: Capture | None) -> bool:
        """Keep one more piece, whether or not another one is wanted; what we answer ourselves has none."""
        if capture is None:
            return False
        if capture.status is None and self.started is not None:
            status, headers = self.started
            lines = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
            capture.start(int(status[:3]), lines)
        capture.body(piece, more=True)
        return capture.refused is None


def _sent(exchange: Exchange, start_response: StartResponse) -> Iterable[bytes]:
    """Our own answer, or the application's as it was and with our marks."""
    answer, capture, run = exchange.answer, exchange.capture, exchange.run
    if answer is not None:
        tell(start_response, answer.status, answer.headers)
        return [answer.body]
    assert capture is not None
    assert capture.status is not None
    assert run is not None
    lines = marked_lines(capture.headers, run.policy, echo=exchange.echo, expires_at=run.expires_at)
    tell(start_response, capture.status, lines)
    kept = capture.kept
    return _spooled(capture) if kept is None else [kept]


def _spooled(capture: Capture) -> Iterator[bytes]:
    try:
        yield from capture.pieces()
    finally:
        capture.close()
