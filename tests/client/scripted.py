"""A server on loopback that answers by a script: one step for each request, in order, as raw as it gets."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import threading
from dataclasses import dataclass
from typing import Self

from harness.patience import PATIENCE

_LOOK = 0.02


@dataclass(frozen=True)
class Seen:
    """A request as it arrived."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def key(self) -> str | None:
        return self.headers.get("idempotency-key")


def answer(status: int, body: object = None, **fields: str) -> bytes:
    """An answer with its length; `Retry_After="1"` is a header field."""
    content = b"" if body is None else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} Scripted", f"Content-Length: {len(content)}", "Content-Type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    return "\r\n".join([*lines, "", ""]).encode() + content


DROP = b""
"""Hang up without a word after reading the request."""
RESET = b"reset"
"""The same, with a reset."""
TRUNCATED = b'HTTP/1.1 201 Created\r\nContent-Length: 400\r\n\r\n{"id"'
"""Half an answer, then the end."""
HANG = b"hang"
"""Say nothing until the server is closed."""


class ScriptedServer:
    """Use it as a context manager. After the script it answers 599, which no test expects."""

    def __init__(self, *script: bytes) -> None:
        self._script = list(script)
        self.seen: list[Seen] = []
        self.arrived = threading.Event()
        self._over = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, name="scripted")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        # Wakes the one that accepts.
        with socket.create_connection(self._socket.getsockname()[:2], PATIENCE):
            pass
        self._thread.join(PATIENCE)
        self._socket.close()

    @property
    def keys(self) -> list[str | None]:
        return [seen.key for seen in self.seen]

    def _serve(self) -> None:
        talks: list[threading.Thread] = []
        while not self._over.is_set():
            connection, _ = self._socket.accept()
            talks.append(threading.Thread(target=self._talk, args=(connection,), name="scripted talk"))
            talks[-1].start()
        for talk in talks:
            talk.join(PATIENCE)

    def _talk(self, connection: socket.socket) -> None:
        connection.settimeout(_LOOK)
        with connection, contextlib.suppress(ConnectionError):
            self._exchange(connection)

    def _more(self, connection: socket.socket) -> bytes:
        """What comes next; nothing if the client hung up or the test is over."""
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                return connection.recv(65_536)
        return b""

    def _exchange(self, connection: socket.socket) -> None:
        data = b""
        while True:
            while b"\r\n\r\n" not in data:
                more = self._more(connection)
                if not more:
                    return
                data += more
            head, _, data = data.partition(b"\r\n\r\n")
            lines = head.decode("latin-1").split("\r\n")
            headers = {
                name.lower(): value for name, value in (re.split(r": *", line, maxsplit=1) for line in lines[1:])
            }
            length = int(headers.get("content-length", "0"))
            while len(data) < length:
                more = self._more(connection)
                if not more:
                    return
                data += more
            body, data = data[:length], data[length:]
            method, target, _ = lines[0].split(" ")
            self.seen.append(Seen(method, target, headers, body))
            step = self._script.pop(0) if self._script else answer(599)
            self.arrived.set()
            if step == HANG:
                self._over.wait(PATIENCE)
                return
            if step == RESET:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return
            connection.sendall(step)
            if step in (DROP, TRUNCATED):
                return
