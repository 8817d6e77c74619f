"""What a served application has loaded of oncekey, measured in a process that serves real requests.

`seen_by` starts an application of `harness.slices.__main__` and sends it a new key, a replay, a mismatch and a
duplicate in flight.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from harness.patience import PATIENCE

TESTS: Final = Path(__file__).resolve().parents[2]
SOURCE: Final = TESTS.parent / "src"
APPLICATIONS: Final = {
    "fastapi_local": "postgresql+asyncpg",
    "fastapi_phased": "postgresql+asyncpg",
    "fastapi_emitting": "postgresql+asyncpg",
    "fastapi_outbox": "postgresql+asyncpg",
    "fastapi_inline": "postgresql+asyncpg",
    "fastapi_configured": "postgresql+asyncpg",
    "fastapi_def": "postgresql",
    "flask_local": "postgresql",
    "django_local": "postgresql",
}
"""The applications, and the scheme that chooses each one's driver."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a process had loaded before its requests and after them."""

    before: frozenset[str]
    after: frozenset[str]
    imports: tuple[tuple[str, str], ...]
    """What was imported during the requests by or of oncekey: the module, and where it was imported."""
    statuses: tuple[tuple[int, bool], ...]
    """The responses, each with whether it was a replay."""


def seen_by(application: str, dsn: str, *, source: Path = SOURCE) -> Seen:
    """Start an application on a database, send it requests, and return what it had loaded."""
    store = dsn.replace("postgresql", APPLICATIONS[application], 1)
    process = subprocess.Popen(
        [sys.executable, "-m", "harness.slices", application, store],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (source, TESTS)))},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{application} did not start")
        return _requests(int(line), starts_with_a_request=not application.startswith("fastapi"))
    finally:
        process.stdin.close()
        process.wait(PATIENCE)
        process.stdout.close()


def _requests(port: int, *, starts_with_a_request: bool) -> Seen:
    if starts_with_a_request:  # WSGI has no lifespan: the first request makes the checks of the start
        _order(port, uuid.uuid4().hex, {"item": "first"})
    statuses: list[tuple[int, bool]] = []
    before = _ask(port, "GET", "/slice")
    _ask(port, "POST", "/mark")
    key, waiting = uuid.uuid4().hex, uuid.uuid4().hex
    statuses += [
        _order(port, key, {"item": "tea"}),
        _order(port, key, {"item": "tea"}),
        _order(port, key, {"item": "milk"}),
    ]
    with ThreadPoolExecutor(2) as clients:
        both = [clients.submit(_order, port, waiting, {"item": "cake", "wait": True}) for _ in range(2)]
        for response in as_completed(both):
            statuses.append(response.result())  # the first one to return is the duplicate
            _ask(port, "POST", "/release")
    after = _ask(port, "GET", "/slice")
    imports = tuple((name, by) for name, by in after["imports"])
    return Seen(frozenset(before["loaded"]), frozenset(after["loaded"]), imports, tuple(statuses))


def _order(port: int, key: str, order: dict[str, Any]) -> tuple[int, bool]:
    headers = {"Content-Type": "application/json", "Idempotency-Key": f'"{key}"'}
    status, fields, _ = _exchange(port, "POST", "/orders", json.dumps(order).encode(), headers)
    return status, fields.get("Idempotent-Replayed") == "true"


def _ask(port: int, method: str, path: str) -> Any:
    status, _, body = _exchange(port, method, path, b"", {})
    if status != http.client.OK:
        raise RuntimeError(f"{path}: {status}")
    return json.loads(body or b"null")


def _exchange(port: int, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()
