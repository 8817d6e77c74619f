"""The tester's own client: exactly the bytes that it was told, and no answer that never ends."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from oncekey_check.raw_http import (
    Address,
    Answer,
    BadAddressError,
    RawRequest,
    cut_off,
    dribble,
    pipelined,
    send_raw,
    volley,
)

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


@contextmanager
def server(act: Callable[[socket.socket], None], connections: int = 1) -> Iterator[Address]:
    """Serve a few connections, each by what is to be done with it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(connections):
                connection, _ = listener.accept()
                with connection:
                    act(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Address.parse(f"http://127.0.0.1:{listener.getsockname()[1]}/a?b=1")
        thread.join(10)
        assert not thread.is_alive()


def _everything(connection: socket.socket, into: list[bytes]) -> None:
    connection.settimeout(10)
    while data := connection.recv(65536):
        into.append(data)


def _answering(data: bytes, into: list[bytes] | None = None) -> Callable[[socket.socket], None]:
    def act(connection: socket.socket) -> None:
        got = connection.recv(65536)
        if into is not None:
            into.append(got)
        connection.sendall(data)

    return act


@pytest.mark.parametrize(
    ("url", "authority", "target"),
    [
        ("http://shop.example", "shop.example", "/"),
        ("https://shop.example:443/a?b=c", "shop.example", "/a?b=c"),
        ("http://[::1]:81/x", "[::1]:81", "/x"),
    ],
)
def test_address_parses_authority_and_target(url: str, authority: str, target: str) -> None:
    address = Address.parse(url)
    assert (address.authority, address.target) == (authority, target)


@pytest.mark.parametrize("url", ["", "shop.example", "ftp://shop.example", "http://", "http://a:b/", "http://a/b c"])
def test_address_rejects_an_unusable_url(url: str) -> None:
    with pytest.raises(BadAddressError):
        Address.parse(url)


def test_header_lines_are_sent_as_they_are() -> None:
    got: list[bytes] = []
    with server(_answering(OK, got)) as address:
        answer = send_raw(RawRequest("POST", address, (("K", "1"), ("K", ""), ("k", "\xfc")), b"{}"), 5)
    assert (answer.status, answer.body) == (200, b"hi")
    host = address.authority.encode()
    assert got == [
        b"POST /a?b=1 HTTP/1.1\r\nHost: " + host + b"\r\nK: 1\r\nK: \r\nk: \xfc\r\n"
        b"Content-Length: 2\r\nConnection: close\r\n\r\n{}"
    ]


def test_raw_request_encodes_a_chunked_body() -> None:
    request = RawRequest("POST", Address.parse("http://a/"), (), b"abc", chunked=True)
    head, _, body = request.wire().partition(b"\r\n\r\n")
    assert b"Transfer-Encoding: chunked" in head
    assert b"Content-Length" not in head
    assert body == b"1\r\na\r\n2\r\nbc\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        OK,
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
        b"HTTP/1.1 200 OK\r\n\r\nhi",
        b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;x=y\r\nh\r\n1\r\ni\r\n0\r\nTrailer: t\r\n\r\n",
    ],
)
def test_raw_client_reads_responses_in_every_framing(data: bytes) -> None:
    with server(_answering(data)) as address:
        answer = send_raw(RawRequest("POST", address), 5)
    assert (answer.status, answer.reason, answer.body) == (200, "OK", b"hi")
    assert answer.ok


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"SSH-2.0-x\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffff\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 300 + b"\r\n",
    ],
)
def test_raw_client_reports_an_incomplete_response_as_status_0(data: bytes) -> None:
    with server(_answering(data)) as address:
        answer = send_raw(RawRequest("POST", address), 5)
    assert answer.status == 0
    assert answer.reason


def test_raw_client_times_out_on_a_slowly_dripping_response() -> None:
    def drip(connection: socket.socket) -> None:
        connection.recv(65536)
        for letter in b"HTTP/1.1 200 OK\r\n" + b"x" * 1000:
            try:
                connection.sendall(bytes([letter]))
            except OSError:
                return
            time.sleep(0.02)

    with server(drip) as address:
        began = time.monotonic()
        assert send_raw(RawRequest("POST", address), 0.3).status == 0
        assert time.monotonic() - began < 10  # a byte every now and then would keep it for twenty


def test_raw_client_reports_a_refused_connection_as_status_0() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address.parse(f"http://127.0.0.1:{listener.getsockname()[1]}/")
    assert [
        answer.status
        for answer in (send_raw(RawRequest("GET", address), 1), *volley([RawRequest("GET", address)] * 3, 1))
    ] == [0] * 4


def test_an_https_address_is_never_asked_in_the_clear() -> None:
    got: list[bytes] = []
    with server(_answering(OK, got)) as address:
        answer = send_raw(RawRequest("POST", Address("https", address.host, address.port, "/"), (("A", "secret"),)), 5)
    assert answer.status == 0
    assert "SSL" in answer.reason
    assert b"secret" not in b"".join(got)


def test_cut_off_request_sends_exactly_the_given_bytes() -> None:
    got: list[bytes] = []
    with server(lambda connection: _everything(connection, got)) as address:
        request = RawRequest("POST", address, (), b"0123456789")
        cut_off(request, 5, sent=len(request.wire()) - 4)
    assert b"".join(got) == request.wire()[:-4]


def test_a_slow_body_comes_in_pieces() -> None:
    got: list[bytes] = []

    def act(connection: socket.socket) -> None:
        while not b"".join(got).endswith(b"9"):
            got.append(connection.recv(65536))
        connection.sendall(OK)

    with server(act) as address:
        answer = dribble(RawRequest("POST", address, (), b"0123456789"), 5, pieces=5, pause=0.02)
    assert answer.ok
    assert len(got) > 3


def test_pipelined_requests_get_their_answers_in_order() -> None:
    two = b"HTTP/1.1 409 Conflict\r\nContent-Length: 0\r\n\r\n"
    with server(_answering(OK + two)) as address:
        answers = pipelined([RawRequest("POST", address, keep_open=True), RawRequest("POST", address)], 5)
    assert [answer.status for answer in answers] == [200, 409]


def test_volley_completes_requests_only_after_all_have_arrived() -> None:
    # R241: requests that arrive one after the other are no race.
    waiting, complete = [], []
    ready = threading.Barrier(5)

    def act(connection: socket.socket) -> None:
        data = connection.recv(65536)
        waiting.append(data)
        ready.wait(10)
        complete.append(len(waiting))
        connection.sendall(OK)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address.parse(f"http://127.0.0.1:{listener.getsockname()[1]}/")

        def serve() -> None:
            for _ in range(5):
                connection, _ = listener.accept()
                threading.Thread(target=lambda c=connection: (act(c), c.close()), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        answers = volley([RawRequest("POST", address, (), b"{}")] * 5, 10)
    assert [answer.status for answer in answers] == [200] * 5
    assert complete == [5] * 5


def test_no_thread_is_left_behind() -> None:
    before = threading.active_count()
    with server(_answering(OK), connections=4) as address:
        volley([RawRequest("POST", address, (), b"{}")] * 4, 5)
    assert threading.active_count() <= before  # one of another test may have ended meanwhile


def test_response_is_ok_only_with_a_2xx_status() -> None:
    assert [Answer(status, "").ok for status in (0, 199, 200, 202, 299, 300, 409)] == [
        False,
        False,
        True,
        True,
        True,
        False,
        False,
    ]
