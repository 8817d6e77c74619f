"""The demo as a process: started, asked, killed and started again like anybody's server."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import httpx

from harness.patience import PATIENCE, wait_until
from harness.ports import free_port, listens

COMMAND = (sys.executable, "-c", "from oncekey.cli import main; main()", "demo")
ALPHA, BETA = "demo-alpha", "demo-beta"
TEAPOT = {"customer_id": "cus_1", "items": [{"product_id": "sku_teapot", "quantity": 2}]}
MONEY = {"customer_id": "cus_1", "amount_cents": 1999, "currency": "EUR"}


class DemoFailedError(Exception):
    """The demo did not start; the message is what it said."""


class Demo:
    """One `oncekey demo`. Use it as a context manager: entering starts it, leaving ends it."""

    def __init__(self, folder: Path, *options: str, store: str | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._options = (*options, *(() if store is None else ("--store", store)))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")

    def start(self) -> None:
        """Start it and return when it serves."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*COMMAND, "--port", str(self.port), *self._options], cwd=self._folder, stdout=log, stderr=log
            )
        process = self._process
        try:
            wait_until(lambda: self._serves() or process.poll() is not None, lambda: self.output)
            if process.poll() is not None:
                raise DemoFailedError(self.output)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End it with SIGKILL, as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self, sign: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to end, and return its exit code."""
        assert self._process is not None
        self._process.send_signal(sign)
        code = self._process.wait(PATIENCE)
        self._process = None
        return code

    def client(self) -> httpx.Client:
        """A client that keeps its connections to itself, and reads no certificates."""
        return httpx.Client(base_url=self.url, timeout=PATIENCE, verify=False)

    def order(
        self, key: str | None, body: object = TEAPOT, *, token: str = ALPHA, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        """Send `POST /orders`."""
        sent = {"Authorization": f"Bearer {token}", **(headers or {})}
        if key is not None:
            sent["Idempotency-Key"] = key
        with self.client() as client:
            return client.post("/orders", json=body, headers=sent)

    def orders(self, token: str = ALPHA, limit: int = 10_000) -> list[dict[str, object]]:
        """Return the tenant's orders, the newest first."""
        with self.client() as client:
            answer = client.get(f"/orders?limit={limit}", headers={"Authorization": f"Bearer {token}"})
        answer.raise_for_status()
        found: list[dict[str, object]] = answer.json()
        return found

    def post(
        self,
        route: str,
        key: str,
        body: object = MONEY,
        *,
        token: str = ALPHA,
        fault: str | None = None,
        repeatable: bool = True,
        dedup: bool = True,
    ) -> httpx.Response:
        """Send a request that moves money, with wishes for the provider."""
        sent = {"Authorization": f"Bearer {token}", "Idempotency-Key": key}
        if fault is not None:
            sent["X-Demo-Fault"] = fault
        if not repeatable:
            sent["X-Demo-Repeatable"] = "off"
        if not dedup:
            sent["X-Demo-Dedup"] = "off"
        with self.client() as client:
            return client.post(route, json=body, headers=sent)

    def read(self, path: str, token: str = ALPHA) -> httpx.Response:
        """Send a GET."""
        with self.client() as client:
            return client.get(path, headers={"Authorization": f"Bearer {token}"})

    def record(self, key: str) -> dict[str, Any]:
        """Return what the status resource tells of a key."""
        answer = self.read(f"/idempotency-keys/{key}")
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def ledger(self) -> list[dict[str, Any]]:
        """Return the provider's charges, by way of the demo."""
        answer = self.read("/demo/ledger")
        answer.raise_for_status()
        found: list[dict[str, Any]] = answer.json()["charges"]
        return found

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process is not None
        return self._process.pid

    def say(self, *pieces: bytes) -> bytes:
        """Send bytes as they are, and return everything that comes back until the server is done."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as connection:
            for piece in pieces:
                connection.sendall(piece)
            received = []
            while data := connection.recv(65536):
                received.append(data)
        return b"".join(received)

    def _serves(self) -> bool:
        """Whether it answers; its listener is open before the application is ready."""
        try:
            return listens(self.port) and self.read("/healthz").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    @property
    def _log(self) -> Path:
        return self._folder / f"demo-{self.port}.log"


def get(url: str, **request: Any) -> httpx.Response:
    """A GET on loopback, without the certificates, which take longer to read than most answers to come."""
    return httpx.get(url, timeout=PATIENCE, verify=False, **request)
