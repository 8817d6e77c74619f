"""The processes of a run. The run starts, kills, pauses and continues each of them by its process id.

`python -m oncekey_demo.torture.processes` is such a process: `serve MODULE PORT`, or any command of `oncekey`. It ends
with the run, however that ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Final

from oncekey.core.errors import OncekeyError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PATIENCE: Final = 60.0
GRACE: Final = 15.0


class ChildFailedError(OncekeyError):
    """A process did not start; the message is the end of its log."""


class Child:
    """One process, which the run may kill and start again many times under one name."""

    def __init__(self, name: str, folder: Path, environment: Mapping[str, str], *words: str) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.paused = False
        self.ready = False
        """Whether it has started: the nemesis does not touch a process that is starting."""
        self._folder = folder
        self._environment = environment
        self._words = words
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it; its output goes into its log."""
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "oncekey_demo.torture.processes",
                *self._words,
                cwd=self._folder,
                env=self._environment,
                # The run never writes to this pipe; it closes when the run ends in any way, and then the child ends.
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self.paused = False
        self.ready = True

    async def first_line(self) -> str:
        """Its next line on standard output; empty when it has ended instead."""
        assert self._process is not None
        assert self._process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            return (await self._process.stdout.readline()).decode().strip()

    @property
    def alive(self) -> bool:
        """Whether the process exists, running or paused."""
        return self._process is not None and self._process.returncode is None

    async def kill(self) -> None:
        """Kill it at once, as in a crash."""
        self.ready = False
        if self.alive:
            assert self._process is not None
            self._process.kill()
            await self._process.wait()

    def pause(self) -> None:
        """Stop it with SIGSTOP; its connections stay open."""
        self._signal(signal.SIGSTOP)
        self.paused = True

    def go_on(self) -> None:
        """Continue a paused process."""
        self._signal(signal.SIGCONT)
        self.paused = False

    async def stop(self) -> None:
        """Terminate it, and kill it if it does not exit."""
        if not self.alive:
            return
        assert self._process is not None
        self.go_on()
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(GRACE):
                await self._process.wait()
        except TimeoutError:
            await self.kill()

    def log_tail(self, lines: int = 12) -> str:
        """The end of its log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def failed(self) -> ChildFailedError:
        """The error for a failed start, with the end of its log."""
        return ChildFailedError(f"{self.name} did not start:\n{self.log_tail()}")

    def _signal(self, sign: signal.Signals) -> None:
        if self.alive:
            assert self._process is not None
            self._process.send_signal(sign)


class Server(Child):
    """A child that serves HTTP, on the same port after each start."""

    def __init__(self, name: str, folder: Path, environment: Mapping[str, str], module: str) -> None:
        super().__init__(name, folder, environment)
        self.port = 0
        self._module = module

    async def start(self) -> None:
        """Start it, and return when it listens."""
        self._words = ("serve", self._module, str(self.port))
        await super().start()
        self.ready = False
        address = await self.first_line()
        if not address.startswith("http://"):
            await self.kill()
            raise self.failed()
        self.port = int(address.rpartition(":")[2])
        self.ready = True


class ProviderProcess(Child):
    """The provider. The nemesis never kills it, because its ledger is the proof of what happened."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        words = ("provider", "--ledger", str(folder / "ledger.db"), "--port", "0")
        super().__init__("provider", folder, environment, *words)
        self.url = ""

    async def start(self) -> None:
        """Start it, and return when it listens."""
        await super().start()
        line = await self.first_line()
        self.url = next((word for word in line.split() if word.startswith("http://")), "")
        if not self.url:
            await self.kill()
            raise self.failed()


def main(words: list[str]) -> None:
    """Run the server or the command that the words name."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    match words:
        case ["serve", module, port]:
            _serve(module, int(port))
        case _:
            # Imported by name: the layer of the command line is above this module.
            sys.argv = ["oncekey", *words]
            import_module("oncekey.cli").main()


def _serve(module: str, port: int) -> None:
    import uvicorn  # noqa: PLC0415  (a worker does not need it)

    from oncekey_demo.provider_server import address_of, listen  # noqa: PLC0415

    host = "127.0.0.1"
    app = import_module(module).app  # before a client can connect: a refused connection is better than a long wait
    with listen(host, port) as listener:
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="on", timeout_graceful_shutdown=5, log_config=None
        )
        server = uvicorn.Server(config)
        print(address_of(host, listener), flush=True)  # noqa: T201  (the parent process reads it)
        server.run(sockets=[listener])


def _end_with_parent() -> None:
    """End the process at the end of standard input, a pipe that the run holds open until it ends, even by kill -9."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
