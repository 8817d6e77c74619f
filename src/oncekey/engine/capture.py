"""Captures a handler's whole response before anything is sent: in memory up to the stored size, else on disk.

A body over `max_response_bytes` is sent but not stored, so it is spooled to a temporary file. A body over
`max_spool_bytes` or an event stream, which has no end, is refused: the client gets an error instead.
"""

from __future__ import annotations

import tempfile
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from oncekey.core.model import Headers
    from oncekey.core.policy import Policy

PIECE = 64 * 1024


class IncompleteError(Exception):
    """The application returned without starting its response, or without finishing it."""


class Capture:
    """A response as it is produced. Header lines are kept as received; nothing is recomputed."""

    __slots__ = ("_chunks", "_policy", "_spool", "complete", "headers", "refused", "size", "status")

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._chunks: list[bytes] = []
        self._spool: IO[bytes] | None = None
        self.status: int | None = None
        self.headers: Headers = ()
        self.size = 0
        self.complete = False
        self.refused: str | None = None

    def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Take the status and the header lines; they become tuples, because outer middleware changes lists in place."""
        self.status = int(status)  # an `HTTPStatus` member is equal to it, but not the same to a driver
        lines = []
        for name, value in headers:
            lines.append((bytes(name), bytes(value)))
            if name.lower() == b"content-type" and value.lower().startswith(b"text/event-stream"):
                self.refused = "event_stream_cannot_be_enrolled"
        self.headers = tuple(lines)

    def body(self, chunk: bytes, *, more: bool) -> None:
        """Add a piece of the body; `more`: another one follows."""
        self.size += len(chunk)
        self.complete = not more
        if self.refused or not chunk:
            return
        if self.size > self._policy.max_spool_bytes:
            self.refused = "response_too_large"
            self.close()
        elif self._spool is None and self.size <= self._policy.max_response_bytes:
            self._chunks.append(bytes(chunk))
        else:
            self._spill().write(chunk)

    @property
    def kept(self) -> bytes | None:
        """The body as it will be stored; None if it is over the limit."""
        if self._spool is not None:
            return None
        return self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)

    def pieces(self) -> Iterator[bytes]:
        """The pieces of a spooled body; none if the body is in memory (`kept`)."""
        if self._spool is None:
            return
        self._spool.seek(0)
        while piece := self._spool.read(PIECE):
            yield piece

    def close(self) -> None:
        """Discard the body."""
        self._chunks.clear()
        if self._spool is not None:
            self._spool.close()
            self._spool = None

    def _spill(self) -> IO[bytes]:
        if self._spool is None:
            self._spool = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the exchange)
            self._spool.writelines(self._chunks)
            self._chunks.clear()
        return self._spool
