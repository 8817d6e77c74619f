"""The demo's own provider: a process beside it that ends when the demo does, however it ends."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Self

from oncekey.demo.listening import CannotServeError

if TYPE_CHECKING:
    from pathlib import Path

_COMMAND = (sys.executable, "-c", "from oncekey.cli import main; main()", "provider", "--until-eof", "--port", "0")
_GRACE_SECONDS = 5.0


class HouseProvider:
    """Use it as a context manager: entering starts it and waits until it serves."""

    def __init__(self, ledger: Path, webhooks: str | None = None) -> None:
        self._options = ("--ledger", str(ledger), *(() if webhooks is None else ("--webhooks", webhooks)))
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def __enter__(self) -> Self:
        # It holds the read end of a pipe that only we can write to: even `kill -9` of the demo closes it.
        # A session of its own keeps Ctrl-C from it, because requests that are under way still need it.
        self._process = subprocess.Popen(  # noqa: S603  (our own command)
            [*_COMMAND, *self._options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        self.url = next((word for word in said.split() if word.startswith("http://")), "")
        if not self.url:
            self.__exit__()
            raise CannotServeError("its provider did not start; the line above says why")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        try:
            self._process.communicate(timeout=_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
