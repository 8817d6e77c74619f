"""A path has many spellings. Every one that a framework serves by a protected view is protected, on every server.

The test does not say which spellings a framework serves: it sends all of them, and looks at what was executed.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import pytest

from harness.patience import wait_until
from harness.served import Wire
from skins.spelled import MARK
from skins.stage import PLACES

SERVED = [
    *((kind, "uvicorn") for kind in ("starlette", "fastapi", "rooted", "litestar", "asgi")),
    *((kind, server) for kind in ("wsgi", "flask", "loose_flask", "django") for server in ("waitress", "gunicorn")),
]
PLAIN = ("/jobs", "/größe", "/slash/", "/items/a", "/numbers/7", "/files/a/b")
ONLY = {
    "starlette": ("/mounted/jobs",),
    "fastapi": ("/mounted/jobs", "/v1/jobs"),
    "rooted": tuple(f"/api{path}" for path in PLAIN),
    "django": ("/old/7/pay", "/v1/jobs/"),
}
"""Paths of some applications besides."""
CHANGES: dict[str, Callable[[str], str]] = {
    "as it is": lambda path: path,
    "slash in front": lambda path: f"/{path}",
    "slash inside": lambda path: re.sub(r"(?<=.)/", "//", path),
    "slash at the end": lambda path: f"{path}/",
    "no slash at the end": lambda path: path.rstrip("/"),
    "newline at the end": lambda path: f"{path}%0A",
    "space at the end": lambda path: f"{path}%20",
    "letters in percent": lambda path: re.sub(r"(?<![%\w])\w", lambda found: f"%{ord(found[0]):02x}", path),
    "slash in percent": lambda path: path[0] + path[1:].replace("/", "%2F"),
    "slash in a value": lambda path: f"{path}%2Fx",
    "lower percent": lambda path: re.sub("%[0-9A-F]{2}", lambda found: found[0].lower(), path),
    "here": lambda path: f"/.{path}",
    "there and back": lambda path: f"/x/..{path}",
    "parameters": lambda path: f"{path};v=1",
    "a query": lambda path: f"{path}?n=1",
    "zeros": lambda path: path.replace("7", "007"),
    "a format": lambda path: f"{path.rstrip('/')}.json",
    "latin-1": lambda path: path.replace("%C3%B6", "%F6").replace("%C3%9F", "%DF"),
    "capitals": str.upper,
    "with a host": lambda path: f"http://shop{path}",
}


def spellings(kind: str) -> list[str]:
    """Every change, and every two changes, of every path."""
    paths = [quote(path) for path in (*PLAIN, *ONLY.get(kind, ()))]
    pairs = itertools.combinations_with_replacement(CHANGES.values(), 2)
    return sorted({second(first(path)) for first, second in pairs for path in paths})


@pytest.fixture(params=SERVED, ids="-".join)
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, int]]:
    """A kind of application, and the port at which a server of its own process serves it."""
    kind, server = request.param
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening, (tmp_path / "log").open("w+b") as log:
        number = str(listening.fileno())
        command = [sys.executable, "-m", "skins.spelled", kind, server, number]
        if server == "gunicorn":
            words = ("--threads", "8", "--log-level", "error", "--no-control-socket", "--bind", f"fd://{number}")
            command = [sys.executable, "-m", "gunicorn", "--worker-class", "gthread", *words, "skins.spelled:app"]
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": PLACES, "SPELLED": kind},
            pass_fds=[listening.fileno()],
            stdout=log,
            stderr=log,
        )
        port: int = listening.getsockname()[1]
        try:
            with ThreadPoolExecutor(1) as pool:
                first = pool.submit(sent, port, "/", None)
                wait_until(lambda: first.done() or process.poll() is not None, "the server did not start")
                if process.poll() is not None:
                    listening.close()  # which ends the client
                    pytest.fail((tmp_path / "log").read_text())
            yield kind, port
        finally:
            process.terminate()
            process.wait()


def sent(port: int, path: str, key: str | None) -> tuple[int, str]:
    """Post nothing to a path as it is written; the status, and the mark of an execution."""
    with Wire(port) as wire:
        keys = () if key is None else (f"Idempotency-Key: {key}",)
        wire.say(f"POST {path} HTTP/1.1", "Host: shop", *keys, "Content-Length: 0", "Connection: close")
        status, _, body = wire.hear()
    found = re.search(rf"{MARK} \d+\.", body.decode("utf-8", "replace"))
    return status, "" if found is None else found[0]


def test_every_spelling_that_is_served_is_protected(served: tuple[str, int]) -> None:
    # R11, R87: no key is refused, and one key executes once
    kind, port = served

    def tried(path: str) -> tuple[str, list[tuple[int, str]]]:
        key = uuid.uuid4().hex
        return path, [sent(port, path, one) for one in (None, key, key)]

    with ThreadPoolExecutor(4) as pool:
        found = dict(pool.map(tried, spellings(kind)))
    executed = {path: replies for path, replies in found.items() if any(mark for _, mark in replies)}
    wrong = {
        path: replies for path, replies in executed.items() if replies[0] != (400, "") or replies[1][1] != replies[2][1]
    }
    assert wrong == {}
    root = "/api" if kind == "rooted" else ""
    assert {root + quote(path) for path in PLAIN if kind != "litestar" or path != "/slash/"} <= set(executed)


@pytest.mark.parametrize("served", [("flask", "waitress")], indirect=True, ids=["flask"])
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("PUT", "/jobs", 400), ("GET", "/jobs", 400), ("PUT", "/decorated", 400), ("GET", "/decorated", 500)],
)
def test_method_override_headers_do_not_bypass_protection(
    served: tuple[str, int], method: str, path: str, status: int
) -> None:
    _, port = served
    with Wire(port) as wire:
        wire.say(f"{method} {path} HTTP/1.1", "Host: shop", "X-HTTP-Method-Override: POST", "Content-Length: 0")
        found, _, body = wire.hear()
    assert (found, MARK in body.decode()) == (status, False)
