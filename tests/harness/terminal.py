"""A terminal for tests: a real pseudo terminal, the program in it, and what stands on its screen."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self

from harness.patience import PATIENCE

_OWN: Final = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
_SEQUENCE: Final = re.compile(r"\x1b\[([?0-9;]*)([@-~])|\x1b(?:\[[?0-9;]*)?\Z|(.)", re.DOTALL)


class Screen:
    """What a terminal shows after what was sent to it, as far as programs of ours send it."""

    def __init__(self, columns: int, lines: int) -> None:
        self.alternate = False
        self.cursor = True
        self.styles: set[str] = set()
        """Every style that was sent."""
        self.resize(columns, lines)
        self.stale = False
        """Whether what was drawn for another size may still come."""
        self._rest = ""

    def resize(self, columns: int, lines: int) -> None:
        """Become this large, and empty."""
        self.columns, self.rows = columns, lines
        self._cells = [[" "] * columns for _ in range(lines)]
        self._row = self._column = 0
        self.stale = True

    @property
    def lines(self) -> list[str]:
        """The lines, without the blanks behind them."""
        return ["".join(row).rstrip() for row in self._cells]

    def feed(self, text: str) -> None:
        """Take what the program sent."""
        text, self._rest = self._rest + text, ""
        at = 0
        while at < len(text):
            found = _SEQUENCE.match(text, at)
            assert found is not None
            if found[2] is None and found[3] is None:
                self._rest = text[at:]
                return
            at = found.end()
            if found[3] is None:
                self._obey(found[1], found[2])
            else:
                self._put(found[3])

    def _obey(self, words: str, verb: str) -> None:
        match verb:
            case "H":
                row, _, column = words.partition(";")
                self._row, self._column = int(row or 1) - 1, int(column or 1) - 1
            case "K":
                if self._row < self.rows or not self.stale:  # else it was on its way before the window got smaller
                    self._cells[self._row] = [" "] * self.columns
            case "J":
                self._cells = [[" "] * self.columns for _ in range(self.rows)]
            case "m":
                self.styles.add(words)
            case "h" | "l" if words == "?1049":
                self.alternate = verb == "h"
                self.resize(self.columns, self.rows)  # what was on the other one is not kept
            case "h" | "l" if words == "?25":
                self.cursor = verb == "h"
            case _:
                raise AssertionError(f"a terminal is asked for {words!r} {verb!r}")

    def _put(self, letter: str) -> None:
        match letter:
            case "\r":
                self._column = 0
            case "\n":
                self._row += 1
            case _:
                if self.alternate and self.stale and (self._row >= self.rows or self._column >= self.columns):
                    return  # it was on its way before the window got smaller, and a terminal cuts it off
                if self.alternate:  # who draws a screen knows its size; whoever only writes does not
                    assert self._row < self.rows, f"{letter!r} is written below the screen"
                    assert self._column < self.columns, f"{letter!r} is written beside the screen"
                self._scroll()
                self._cells[self._row][self._column] = letter
                self._column += 1

    def _scroll(self) -> None:
        if self._column >= self.columns:
            self._row, self._column = self._row + 1, 0
        while self._row >= self.rows:
            self._cells = [*self._cells[1:], [" "] * self.columns]
            self._row -= 1


class Terminal:
    """A program in a terminal of its own. Use it as a context manager; leaving kills what still runs."""

    def __init__(
        self, *command: str, columns: int = 80, lines: int = 24, environment: Mapping[str, str] | None = None
    ) -> None:
        self._command = command
        self._environment = {**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8", **(environment or {})}
        self._environment.pop("COLUMNS", None)
        self._decode = codecs.getincrementaldecoder("utf-8")().decode  # a letter may come in two pieces
        self.screen = Screen(columns, lines)
        self.sent = ""
        """All that the program has sent."""

    def __enter__(self) -> Self:
        self._ours, self._its = pty.openpty()
        self._fit()
        self.before = termios.tcgetattr(self._its)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _OWN, *self._command],
            stdin=self._its,
            stdout=self._its,
            stderr=self._its,
            env=self._environment,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._its)

    @property
    def settings(self) -> list[Any]:
        """How the terminal is set now."""
        return termios.tcgetattr(self._its)

    @property
    def text(self) -> str:
        """What stands on the screen."""
        return "\n".join(self.screen.lines)

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self._ours, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        """Make the window another size; the program is told by the kernel."""
        self._read(0)
        self.screen.resize(columns, lines)
        self._fit()

    def until(self, *wanted: str, gone: Sequence[str] = ()) -> str:
        """Wait until all of this stands on the screen, and nothing of that: the screen."""
        self._wait(lambda: all(one in self.text for one in wanted) and not any(one in self.text for one in gone))
        self.screen.stale = False
        return self.text

    def ended(self) -> int:
        """Wait for the program's end: its exit code. What it wrote last is read."""
        self._wait(lambda: self.process.poll() is not None)
        while self._read(0):
            pass
        return self.process.wait()

    def _wait(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not done():
            if time.monotonic() > deadline:
                raise AssertionError(f"it did not come to that; the screen is\n{self.text}")
            self._read(0.02)

    def _read(self, patience: float) -> bool:
        ready, _, _ = select.select([self._ours], [], [], patience)
        if not ready:
            return False
        said = self._decode(os.read(self._ours, 65536))
        self.sent += said
        self.screen.feed(said)
        return True

    def _fit(self) -> None:
        size = struct.pack("HHHH", self.screen.rows, self.screen.columns, 0, 0)
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, size)
