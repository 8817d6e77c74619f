"""An HTTP/1.1 client that sends exactly the given bytes, and returns the server's response unmodified."""

from __future__ import annotations

import io
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, BinaryIO, Final, Self
from urllib.parse import urlsplit

from oncekey_check.carrier import Carrier, Header
from oncekey_check.errors import CheckError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


LARGEST: Final = 16 * 1024 * 1024
"""The largest response that is read; a larger one counts as no response."""

_PORTS: Final = {"http": 80, "https": 443}
_LINE: Final = 65536
_MOST_LINES: Final = 256
_CONTINUE, _SUCCESS, _REDIRECT = 100, 200, 300
_BODILESS: Final = (204, 304)


class BadAddressError(CheckError):
    """The URL cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a server and a target."""

    scheme: str
    host: str
    port: int
    target: str
    cacert: str | None = None
    """A file with the certificates to trust instead of the system's."""

    @classmethod
    def parse(cls, url: str, cacert: str | None = None) -> Address:
        """The parts of a URL with `http` or `https`."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise BadAddressError(f"{url!r} is not a URL ({error})") from None
        if parts.scheme not in _PORTS or not parts.hostname:
            raise BadAddressError(f"{url!r} is not a supported URL: it must begin with http:// or https://")
        target = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
        if not target.isascii() or any(sign <= " " for sign in target):
            raise BadAddressError(f"{url!r} has characters that a URL must escape")
        return cls(parts.scheme, parts.hostname, port or _PORTS[parts.scheme], target, cacert)

    @property
    def authority(self) -> str:
        """Host and port as in the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]

    def at(self, target: str) -> Address:
        """Another target of the same server."""
        return replace(self, target=target)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"


@dataclass(frozen=True, slots=True)
class RawRequest:
    """A request. Headers are sent unchanged, in this order, even duplicates."""

    method: str
    address: Address
    headers: tuple[Header, ...] = ()
    body: bytes = b""
    chunked: bool = False
    keep_open: bool = False
    carrier: Carrier = field(default_factory=Carrier)
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False, repr=False)
    """Fills the placeholders of a body that is sent without a key."""

    salt: str = ""
    """Makes placeholders differ between callers that use the same key."""

    def as_sent(self) -> tuple[tuple[Header, ...], bytes, Address]:
        """The headers, the body and the address as this API expects them."""
        headers, body, target = self.carrier.for_api(
            self.headers, self.body, self.address.target, nonce=self.nonce, salt=self.salt
        )
        return headers, body, self.address.at(target)

    @property
    def content(self) -> bytes:
        """The body as it is sent."""
        return self.as_sent()[1]

    def lines(self) -> list[str]:
        """Request line and header lines."""
        headers, body, address = self.as_sent()
        lines = [f"{self.method} {address.target} HTTP/1.1", f"Host: {address.authority}"]
        lines += [f"{name}: {value}" for name, value in headers]
        if self.chunked:
            lines.append("Transfer-Encoding: chunked")
        elif body or self.method not in {"GET", "HEAD", "OPTIONS"}:
            lines.append(f"Content-Length: {len(body)}")
        if not self.keep_open:
            lines.append("Connection: close")
        return lines

    def head(self) -> bytes:
        """Everything up to the empty line."""
        return "".join(f"{line}\r\n" for line in self.lines()).encode("latin-1") + b"\r\n"

    def wire(self) -> bytes:
        """All bytes of the request; a chunked body has two chunks."""
        body = self.content
        if not self.chunked:
            return self.head() + body
        half = len(body) // 2
        chunks = [b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (body[:half], body[half:]) if chunk]
        return self.head() + b"".join(chunks) + b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """A response. Status 0 means no response; `reason` says what happened instead."""

    status: int
    reason: str
    headers: tuple[Header, ...] = ()
    body: bytes = b""

    @property
    def ok(self) -> bool:
        """Whether the status is a success."""
        return _SUCCESS <= self.status < _REDIRECT

    def header(self, name: str) -> str | None:
        """The first value of a header."""
        return next((value for known, value in self.headers if known.lower() == name.lower()), None)

    def values(self, name: str) -> str:
        """All values of a header as one list, as RFC 9110 lets an intermediary write them; empty without the header."""
        return ", ".join(value for known, value in self.headers if known.lower() == name.lower())


def silence(why: object) -> Answer:
    """The absence of a response."""
    return Answer(0, str(why) or type(why).__name__)


class Connection:
    """One connection to a server, for the duration of the block."""

    def __init__(self, address: Address, timeout: float) -> None:
        plain = socket.create_connection((address.host, address.port), timeout=timeout)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket = plain if address.scheme == "http" else _encrypted(plain, address)
        except BaseException:
            plain.close()
            raise
        self._stream = _Stream(self._socket, timeout)
        self._reader = io.BufferedReader(self._stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._reader.close()
        self._socket.close()

    def send(self, data: bytes) -> None:
        """Send bytes. A connection closed by the server is not an error: it may have responded already."""
        try:
            self._socket.sendall(data)
        except OSError:
            return

    def receive(self, method: str) -> Answer:
        """The next response on this connection."""
        self._stream.begin()
        try:
            return _read_answer(self._reader, method)
        except (OSError, ValueError) as error:
            return silence(error)


class _Stream(io.RawIOBase):
    """Reads from the socket with a deadline: a server that sends a byte now and then must not block the run."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        super().__init__()
        self._socket, self._timeout, self._ends = connection, timeout, 0.0

    def begin(self) -> None:
        """Start the timer of a response."""
        self._ends = time.monotonic() + self._timeout

    def readable(self) -> bool:
        """Always True."""
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Read what is available, or wait until the deadline."""
        left = self._ends - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(left)
        return self._socket.recv_into(buffer)


def send_raw(request: RawRequest, timeout: float) -> Answer:
    """Send a request, and wait for its response."""
    return _on_its_own(request, timeout, [request.wire()], 0.0)


def dribble(request: RawRequest, timeout: float, *, pieces: int, pause: float) -> Answer:
    """Send the body in small pieces with pauses between them, as over a bad connection."""
    body = request.content
    size = max(1, len(body) // pieces)
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return _on_its_own(request, timeout, [request.head(), *parts], pause)


def cut_off(request: RawRequest, timeout: float, *, sent: int, stay: float = 0.0, listen: bool = False) -> None:
    """Send the first bytes of a request and disconnect, after a delay, or with the first byte of a response."""
    with Connection(request.address, timeout) as connection:
        connection.send(request.wire()[:sent])
        if listen:
            connection.receive("HEAD")
        time.sleep(stay)


def pipelined(requests: Sequence[RawRequest], timeout: float) -> list[Answer]:
    """Send all requests at once on one connection; responses come in the same order."""
    with _opened(requests[0].address, timeout) as connection:
        if isinstance(connection, Answer):
            return [connection] * len(requests)
        connection.send(b"".join(request.wire() for request in requests))
        return [connection.receive(request.method) for request in requests]


def volley(requests: Sequence[RawRequest], timeout: float) -> list[Answer]:
    """Send all requests at the same moment: each connection withholds its last byte until all are ready."""
    answers = [silence("it could not be sent")] * len(requests)
    start = threading.Barrier(len(requests))

    def one(number: int, request: RawRequest) -> None:
        with _opened(request.address, timeout) as connection:
            data = request.wire()
            if not isinstance(connection, Answer):
                connection.send(data[:-1])
            try:
                start.wait(timeout)
            except threading.BrokenBarrierError:
                return
            if isinstance(connection, Answer):
                answers[number] = connection
                return
            connection.send(data[-1:])
            answers[number] = connection.receive(request.method)

    threads = [threading.Thread(target=one, args=pair, daemon=True) for pair in enumerate(requests)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def _on_its_own(request: RawRequest, timeout: float, parts: Iterable[bytes], pause: float) -> Answer:
    with _opened(request.address, timeout) as connection:
        if isinstance(connection, Answer):
            return connection
        for number, part in enumerate(parts):
            if number:
                time.sleep(pause)
            connection.send(part)
        return connection.receive(request.method)


@contextmanager
def _opened(address: Address, timeout: float) -> Iterator[Connection | Answer]:
    try:
        connection = Connection(address, timeout)
    except OSError as error:
        yield silence(error)
        return
    with connection:
        yield connection


def _encrypted(plain: socket.socket, address: Address) -> socket.socket:
    return ssl.create_default_context(cafile=address.cacert).wrap_socket(plain, server_hostname=address.host)


def _read_answer(reader: BinaryIO, method: str) -> Answer:
    status, reason, headers = _read_head(reader)
    while _CONTINUE <= status < _SUCCESS:
        status, reason, headers = _read_head(reader)
    bare = Answer(status, reason, headers)
    if method == "HEAD" or status in _BODILESS:
        return bare
    return Answer(status, reason, headers, _read_body(reader, bare))


def _read_head(reader: BinaryIO) -> tuple[int, str, tuple[Header, ...]]:
    first = reader.readline(_LINE).decode("latin-1").rstrip("\r\n")
    if not first:
        raise ValueError("the connection was closed without a response")
    version, _, rest = first.partition(" ")
    code, _, reason = rest.partition(" ")
    if not version.startswith("HTTP/1.") or not code.isdecimal():
        raise ValueError(f"this is not HTTP/1.1: {first[:80]!r}")
    headers: list[Header] = []
    while line := reader.readline(_LINE).decode("latin-1").strip():
        name, _, value = line.partition(":")
        headers.append((name.strip(), value.strip()))
        if len(headers) > _MOST_LINES:
            raise ValueError("the response has too many headers")
    return int(code), reason, tuple(headers)


def _read_body(reader: BinaryIO, bare: Answer) -> bytes:
    if "chunked" in (bare.header("Transfer-Encoding") or "").lower():
        return b"".join(_read_chunks(reader))
    length = bare.header("Content-Length")
    if length is None:
        return _exactly(reader, None)
    return _exactly(reader, int(length))


def _read_chunks(reader: BinaryIO) -> Iterator[bytes]:
    left = LARGEST
    while size := int(reader.readline(_LINE).partition(b";")[0], 16):
        left -= size
        if left < 0:
            raise ValueError("the response is too large")
        yield _exactly(reader, size)
        reader.readline(_LINE)
    while reader.readline(_LINE).strip():
        pass


def _exactly(reader: BinaryIO, size: int | None) -> bytes:
    if size is not None and size > LARGEST:
        raise ValueError("the response is too large")
    data = reader.read(LARGEST + 1 if size is None else size)
    if len(data) > LARGEST or (size is not None and len(data) < size):
        raise ValueError("the body of the response is incomplete")
    return data
