"""A real server on loopback, in a thread of this process: for what only a server does."""

from __future__ import annotations

import socket
import threading
from types import TracebackType
from typing import Any, Self

import uvicorn

from harness.patience import PATIENCE, wait_until


class Served:
    """An application behind uvicorn. `stop` is what a SIGTERM does; leaving the block stops it too."""

    def __init__(self, app: Any, **options: Any) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._server = uvicorn.Server(uvicorn.Config(app, **{"lifespan": "on", "log_level": "critical", **options}))
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        wait_until(lambda: self._server.started or not self._thread.is_alive(), "the server did not start")
        if not self._server.started:
            raise RuntimeError("the server did not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self.wait()
        self._listener.close()

    def stop(self) -> None:
        """Ask it to stop."""
        self._server.should_exit = True

    def wait(self) -> None:
        """Wait until it has stopped."""
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            raise RuntimeError("the server did not stop")

    def connect(self) -> Wire:
        """A client's connection."""
        return Wire(self.port)


class Wire:
    """A connection on which a test says exactly what it wants, byte by byte."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self._rest = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def say(self, *lines: str, body: bytes = b"") -> None:
        """Send a request's head, line by line, and then some bytes."""
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + body)

    def send(self, data: bytes) -> None:
        """Send bytes."""
        self._socket.sendall(data)

    def hear(self) -> tuple[int, dict[str, str], bytes]:
        """The next answer: its status, its headers, its body."""
        head = self.hear_until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        status = int(head[0].split()[1])
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)
        }
        if headers.get("transfer-encoding") == "chunked":
            return status, headers, self._chunks()
        length = int(headers.get("content-length", "0")) if status >= 200 else 0
        return status, headers, self._take(length)

    def hear_until(self, mark: bytes) -> bytes:
        """Everything up to and with a mark."""
        while mark not in self._rest:
            self._more()
        found, self._rest = self._rest.split(mark, 1)
        return found + mark

    def is_over(self) -> bool:
        """Whether the server has closed the connection."""
        return not self._rest and self._socket.recv(1) == b""

    def close(self) -> None:
        """Leave."""
        self._socket.close()

    def _chunks(self) -> bytes:
        body = b""
        while size := int(self.hear_until(b"\r\n").split(b";")[0], 16):
            body += self._take(size)
            self.hear_until(b"\r\n")
        self.hear_until(b"\r\n")
        return body

    def _take(self, size: int) -> bytes:
        while len(self._rest) < size:
            self._more()
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken

    def _more(self) -> None:
        data = self._socket.recv(65536)
        if not data:
            raise ConnectionError("the server closed the connection")
        self._rest += data
