"""The shop behind other names: a front that takes the key from another header or from the body, and marks otherwise."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import closing
from email.message import Message
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import urlsplit


class Front:
    """A server that passes requests on to another one, and translates names on the way.

    It drops the key where `unprotected` says so, answers by itself where `answer` has something to say, and makes
    answers longer by `padding`.
    """

    def __init__(
        self,
        url: str,
        *,
        header: str = "Idempotency-Key",
        member: str | None = None,
        marker: str | None = None,
        unprotected: Callable[[Message], bool] = lambda _: False,
        answer: Callable[[Message], tuple[int, bytes] | None] = lambda _: None,
        answers: str = "POST",
        padding: Callable[[Message], int] = lambda _: 0,
    ) -> None:
        host, port = urlsplit(url).hostname, urlsplit(url).port

        class Handler(_Handler):
            pass

        Handler.upstream, Handler.header, Handler.member, Handler.marker = (host, port), header, member, marker
        Handler.unprotected, Handler.answer = staticmethod(unprotected), staticmethod(answer)
        Handler.padding, Handler.answers = staticmethod(padding), answers
        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients hang up."""


class _Handler(BaseHTTPRequestHandler):
    upstream: tuple[str | None, int | None]
    header: str
    member: str | None
    marker: str | None
    unprotected: Callable[[Message], bool]
    answer: Callable[[Message], tuple[int, bytes] | None]
    answers: str
    padding: Callable[[Message], int]

    def log_message(self, *_: object) -> None:
        pass

    def _pass_on(self) -> None:
        body = self._body()
        headers = [(name, value) for name, value in self.headers.items() if name.lower() != "transfer-encoding"]
        keys = [value for name, value in headers if name.lower() == self.header.lower()]
        dropped = {self.header.lower(), "idempotency-key", "content-length"}
        headers = [line for line in headers if line[0].lower() not in dropped]
        own = self.answer(self.headers) if self.command == self.answers else None
        if own is not None:
            self.send_response(own[0])
            self.send_header("Content-Length", str(len(own[1])))
            self.end_headers()
            self.wfile.write(own[1])
            return
        if self.unprotected(self.headers):
            keys = []
        if self.member is not None:
            body, keys = self._taken(body)
        with closing(HTTPConnection(self.upstream[0] or "", self.upstream[1], timeout=30)) as connection:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            headers += [*(("Idempotency-Key", key) for key in keys), ("Content-Length", str(len(body)))]
            for name, value in headers:
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            data = answer.read() + b" " * self.padding(self.headers)
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() != "content-length":
                self.send_header(*self._translated(name, value))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def __getattr__(self, name: str) -> Any:
        """Every method is passed on in the same way."""
        if name.startswith("do_"):
            return self._pass_on
        raise AttributeError(name)

    def _taken(self, body: bytes) -> tuple[bytes, list[str]]:
        try:
            document = json.loads(body)
        except ValueError:
            return body, ["a-body-without-a-key"]
        if not isinstance(document, dict) or self.member not in document:
            return body, []
        key = document.pop(self.member)
        return json.dumps(document).encode(), [json.dumps(key)]

    def _translated(self, name: str, value: str) -> tuple[str, str]:
        if name.lower() == "idempotency-key" and self.member is None:
            return self.header, value
        if name.lower() == "idempotent-replayed" and self.marker is not None:
            return self.marker, "hit"
        return name, value

    def _body(self) -> bytes:
        if "Transfer-Encoding" not in self.headers:
            return self.rfile.read(int(self.headers.get("Content-Length", "0")))
        chunks = []
        while size := int(self.rfile.readline() or b"0", 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)
