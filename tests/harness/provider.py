"""The demo's payment provider as a process of its own, which survives a demo that is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import httpx

from harness.patience import PATIENCE

COMMAND = (sys.executable, "-c", "from oncekey.cli import main; main()", "provider")


class ProviderFailedError(Exception):
    """The provider did not start; the message is what it said."""


class Provider:
    """One `oncekey provider`. Use it as a context manager: entering starts it, leaving ends it."""

    def __init__(self, folder: Path, *options: str, ledger: str = "ledger.db") -> None:
        self.url = ""
        self.ledger = folder / ledger
        self._folder = folder
        self._options = options
        self._port = 0
        # No connection is used twice: the provider may close one that rests just as it is used again.
        self.client = httpx.Client(timeout=PATIENCE, verify=False, limits=httpx.Limits(max_keepalive_connections=0))
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.client.close()

    def start(self) -> None:
        """Start it and return when it serves; a second time on the port of the first."""
        command = [*COMMAND, "--ledger", str(self.ledger), "--port", str(self._port), *self._options]
        self._process = subprocess.Popen(
            command, cwd=self._folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        if " http://" not in said:
            self.kill()
            raise ProviderFailedError(said)
        self.url = next(word for word in said.split() if word.startswith("http://"))
        self._port = int(self.url.rpartition(":")[2])
        self.client.get(f"{self.url}/healthz").raise_for_status()

    def kill(self) -> None:
        """End it with SIGKILL, as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def stop(self) -> int:
        """Ask it to end, and return its exit code."""
        assert self._process is not None
        self._process.terminate()
        code = self._process.wait(PATIENCE)
        self.kill()
        return code

    def charge(
        self, key: str | None, order: dict[str, object], *, timeout: float = PATIENCE, **headers: str
    ) -> httpx.Response:
        """Send `POST /charges`; headers are written `x_demo_fault="drop-after"`."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            sent["Idempotency-Key"] = key
        return self.client.post(f"{self.url}/charges", json=order, headers=sent, timeout=timeout)

    def charges(self, key: str | None = None) -> list[dict[str, Any]]:
        """Return the ledger, or what it has of one key."""
        params = {} if key is None else {"downstream_key": key}
        found: list[dict[str, Any]] = self.client.get(f"{self.url}/charges", params=params).json()["charges"]
        return found

    def fault(self, fault: str | None, times: int | None = None) -> None:
        """Set the fault that stands, or none."""
        if fault is None:
            self.client.delete(f"{self.url}/faults").raise_for_status()
        else:
            self.client.post(f"{self.url}/faults", json={"fault": fault, "times": times}).raise_for_status()
