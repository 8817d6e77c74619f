"""`oncekey top` on a terminal: reads keys, draws frames, and restores the terminal however it ends."""

from __future__ import annotations

import asyncio
import codecs
import os
import re
import signal
import termios
import tty
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from io import StringIO
from typing import TYPE_CHECKING, Final

from rich.console import Console

from oncekey import wire
from oncekey.cli import dlq, keys_show, options, printing
from oncekey.cli.keys import known_of
from oncekey.cli.top import TopData, Waiting, read_top, server_of
from oncekey.cli.top_frame import HELP, Panel, Position, Setting, Sheet, frame
from oncekey.core.errors import StoreError
from oncekey.core.model import DeadLetter, RecordId, moment
from oncekey.core.operate import Forbidden
from oncekey.flow import adrive

if TYPE_CHECKING:
    from rich.text import Text

    from oncekey.core.transitions import AuditEntry
    from oncekey.engine.shell import AsyncEngine
    from oncekey.ops.stats import Worker

PATIENCE: Final = 10.0
"""Seconds after which the screen reports that the store does not answer."""
INTERVALS: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
ALONE: Final = 0.05
"""Seconds after which an escape byte that nothing follows was the Escape key, and not the beginning of another one."""
_ENTER: Final = b"\x1b[?1049h\x1b[?25l\x1b[2J"
_LEAVE: Final = b"\x1b[0m\x1b[?25h\x1b[?1049l"
_KEYS: Final = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left", "\x1bOA": "up", "\x1bOB": "down",
    "\x1bOC": "right", "\x1bOD": "left", "\x1b[5~": "page up", "\x1b[6~": "page down", "\x1b[H": "home",
    "\x1b[F": "end", "\x1b[1~": "home", "\x1b[4~": "end", "\x1bOH": "home", "\x1bOF": "end", "\x1b[Z": "back tab",
    "\t": "tab", "\r": "enter", "\n": "enter", "\x7f": "rub out", "\x08": "rub out", "\x15": "rub all",
    "\x1b": "escape", "k": "up", "j": "down", " ": "p",
}  # fmt: skip
_ONE_KEY: Final = re.compile(r"\x1b\[[0-9;?]*[@-~]|\x1bO[@-~]|\x1b(?=[^\[O])|[^\x1b]", re.DOTALL)
_STEPS: Final = {"up": -1, "down": 1, "page up": -10, "page down": 10, "home": -(10**6), "end": 10**6}


class Keyboard:
    """Turns the bytes from the terminal, which come in pieces, into keys."""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._rest = ""

    def feed(self, data: bytes) -> list[str]:
        """The keys that are complete now, in their order."""
        text = self._rest + self._decode(data)
        keys, at = [], 0
        while found := _ONE_KEY.match(text, at):
            keys.append(found[0])
            at = found.end()
        self._rest = text[at:]
        return keys

    @property
    def waits(self) -> bool:
        """Whether a key has begun and is not complete."""
        return bool(self._rest)

    def give_up(self) -> list[str]:
        """The key that began and did not go on: an escape byte by itself is the Escape key."""
        keys, self._rest = ["\x1b"] * bool(self._rest), ""
        return keys


@contextmanager
def raw(source: int, target: int) -> Iterator[Callable[[], None]]:
    """Put the terminal into raw mode, on a screen of its own, and restore it at the end, also after an error.

    The yielded function restores the terminal while the process is stopped, and takes it again afterwards.
    """
    before = termios.tcgetattr(source)

    def enter() -> None:
        tty.setcbreak(source)  # Ctrl-C still sends its signal
        os.write(target, _ENTER)

    def leave() -> None:
        with suppress(OSError, termios.error):  # the terminal may be gone
            os.write(target, _LEAVE)
            termios.tcsetattr(source, termios.TCSANOW, before)

    def rest() -> None:
        leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        enter()

    enter()
    try:
        yield rest
    finally:
        leave()


class Screen:
    """The lines on the terminal. Only lines that change are sent."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._shown: list[str] = []
        self._size = (0, 0)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        with suppress(OSError):
            found = os.get_terminal_size(self._target)
            if found.columns and found.lines:
                return found.columns, found.lines
        return 80, 24

    def forget(self) -> None:
        """Let the next `draw` send every line."""
        self._size = (0, 0)

    def draw(self, lines: list[Text]) -> None:
        """Show these lines, as many as there are."""
        size = self.size
        drawn = [_encoded(line, size[0]) for line in lines]
        parts = []
        if size != self._size:
            parts.append("\x1b[2J")
            self._shown, self._size = [], size
        before = [*self._shown, *([""] * (len(drawn) - len(self._shown)))]
        # The line is erased before it is written: after a full line the cursor still stands on its last letter.
        parts += [
            f"\x1b[{row};1H\x1b[2K{line}"
            for row, (line, old) in enumerate(zip(drawn, before, strict=False), start=1)
            if line != old
        ]
        parts += [f"\x1b[{row};1H\x1b[2K" for row in range(len(drawn) + 1, len(self._shown) + 1)]
        self._shown = drawn
        data = "".join(parts).encode()
        while data:
            data = data[os.write(self._target, data) :]


def _encoded(line: Text, width: int) -> str:
    paper = StringIO()
    colourless = bool(os.environ.get("NO_COLOR"))
    Console(file=paper, force_terminal=True, width=width, no_color=colourless, highlight=False).print(
        line, end="", no_wrap=True, overflow="crop", soft_wrap=True
    )
    return paper.getvalue()


class Live:
    """Reads the store again and again, and does what keys say, until the user ends it."""

    def __init__(self, url: str, every: float, source: int, target: int) -> None:
        self._url = url
        self._source = source
        self._screen = Screen(target)
        self._keyboard = Keyboard()
        self._place = Position(every=every)
        self._setting = Setting(printing.address(url), "", datetime.now().astimezone())
        self._seen: TopData | None = None
        self._engine: AsyncEngine | None = None
        self._connecting = asyncio.Lock()
        self._again = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self, rest: Callable[[], None]) -> int:
        """Run until the user ends it; returns the exit code."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._end, 0)
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._end, 128 + number)
        loop.add_signal_handler(signal.SIGWINCH, self._draw)
        loop.add_signal_handler(signal.SIGTSTP, self._stopped, rest)
        loop.add_reader(self._source, self._read_keys)
        self._draw()
        self._in_background(self._looking())
        try:
            return await self._ended
        finally:
            loop.remove_reader(self._source)
            for task in self._background:
                task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)
            if self._engine is not None:
                with suppress(StoreError):
                    await self._engine.close()

    def _end(self, code: int) -> None:
        if not self._ended.done():
            self._ended.set_result(code)

    def _stopped(self, rest: Callable[[], None]) -> None:
        rest()
        self._screen.forget()
        self._draw()

    # The store

    async def _looking(self) -> None:
        while True:
            self._again.clear()
            if not self._place.paused:
                await self._look()
            self._draw()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._place.every):
                    await self._again.wait()

    async def _look(self) -> None:
        trouble = ""
        try:
            async with asyncio.timeout(PATIENCE):
                engine = await self._connected()
                self._seen = await adrive(read_top(engine.store), engine.driver.run)
        except StoreError as error:
            trouble = str(error)
        except TimeoutError:
            trouble = f"no answer in {PATIENCE:.0f} s"
        self._setting = replace(self._setting, trouble=trouble)

    async def _connected(self) -> AsyncEngine:
        async with self._connecting:
            if self._engine is None:
                engine = wire.aconnect(self._url)
                try:
                    await engine.check()
                    server = await adrive(server_of(engine.store), engine.driver.run)
                except BaseException:
                    await engine.close()
                    raise
                self._engine, self._setting = engine, replace(self._setting, server=server)
            return self._engine

    def _in_background(self, doing: Awaitable[None]) -> None:
        async def done() -> None:
            try:
                await doing
            except StoreError as error:
                self._place.message = f"The store does not answer: {error}."
            except Exception as error:  # noqa: BLE001  (`run` raises it again)
                if not self._ended.done():
                    self._ended.set_exception(error)
            self._draw()

        task = asyncio.ensure_future(done())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # The terminal

    def _draw(self) -> None:
        width, height = self._screen.size
        setting = replace(self._setting, at=datetime.now().astimezone())
        try:
            self._screen.draw(frame(self._seen, setting, self._place, width, height))
        except OSError:  # the terminal is gone
            self._end(128 + signal.SIGHUP)

    def _read_keys(self) -> None:
        try:
            data = os.read(self._source, 4096)
        except OSError:
            data = b""
        if not data:
            self._end(128 + signal.SIGHUP)
            return
        self._pressed(self._keyboard.feed(data))
        if self._keyboard.waits:
            asyncio.get_running_loop().call_later(ALONE, lambda: self._pressed(self._keyboard.give_up()))

    def _pressed(self, keys: list[str]) -> None:
        for key in keys:
            self._place.message = ""
            if self._place.typed is not None:
                self._type(key)
            elif self._place.sheet is not None:
                self._read(_KEYS.get(key, key))
            else:
                self._overview(_KEYS.get(key, key))
        if keys:
            self._draw()

    def _type(self, key: str) -> None:
        place = self._place
        assert place.typed is not None
        match _KEYS.get(key) if not key.isprintable() else None:
            case "escape":
                place.typed = None
            case "rub out":
                place.typed = place.typed[:-1]
            case "rub all":
                place.typed = ""
            case "enter":
                wanted, place.typed = place.typed.strip().strip('"'), None
                if wanted:
                    self._in_background(self._find(wanted))
            case _ if key.isprintable():
                place.typed += key
            case _:
                pass

    def _read(self, key: str) -> None:
        place, sheet = self._place, self._place.sheet
        assert sheet is not None
        match key:
            case "q":
                self._end(0)
            case "escape" | "left" | "?":
                place.sheet, place.row = None, 0
            case "/":
                place.typed = ""
            case "enter" if sheet.choices:
                self._in_background(self._open(sheet.choices[place.row]))
            case "enter":
                place.sheet, place.row = None, 0
            case _:
                place.row = max(0, place.row + _STEPS.get(key, 0))

    def _overview(self, key: str) -> None:
        place = self._place
        match key:
            case "q":
                self._end(0)
            case "p":
                place.paused = not place.paused
                self._again.set()
            case "r":
                self._again.set()
            case "+" | "-":
                place.every = _interval(place.every, longer=key == "+")
                self._again.set()
            case "tab" | "right":
                place.panel = Panel((place.panel + 1) % len(Panel))
            case "back tab" | "left":
                place.panel = Panel((place.panel - 1) % len(Panel))
            case "/":
                place.typed = ""
            case "?":
                self._turn(Sheet("Keys", HELP))
            case "enter":
                self._enter()
            case _:
                place.rows[place.panel] = max(0, place.rows[place.panel] + _STEPS.get(key, 0))

    def _turn(self, sheet: Sheet) -> None:
        self._place.sheet, self._place.row = sheet, 0

    # What is opened

    def _enter(self) -> None:
        seen, panel = self._seen, self._place.panel
        rows: tuple[Waiting | Worker | AuditEntry, ...] = ()
        if seen is not None:
            rows = (seen.waiting, seen.roll.workers, seen.audit)[panel]
        if not rows:
            self._place.message = "There is nothing to open here."
            return
        at = min(self._place.rows[panel], len(rows) - 1)
        match panel:
            case Panel.WAITING:
                assert seen is not None
                self._in_background(self._open(seen.waiting[at]))
            case Panel.WORKERS:
                assert seen is not None
                self._turn(_about_worker(seen.roll.workers[at]))
            case Panel.AUDIT:
                assert seen is not None
                self._turn(_about_line(seen.audit[at]))

    async def _open(self, one: Waiting) -> None:
        if isinstance(one, DeadLetter):
            self._turn(Sheet(f"Dead letter {one.parcel.id}", tuple(dlq.letter_lines(one))))
        else:
            await self._show(one.id)

    async def _show(self, record_id: RecordId) -> None:
        known = await known_of(await self._connected(), record_id)
        if isinstance(known, Forbidden):
            self._place.message = f"{known.why[0].upper()}{known.why[1:]}."
        else:
            lines = keys_show.record_lines(known, keys_show.shown(known, record_id.key), verbose=False)
            self._turn(Sheet(f"Key {record_id.key}", tuple(lines)))

    async def _find(self, wanted: str) -> None:
        found = await options.find(await self._connected(), wanted, None)
        match found:
            case Forbidden():
                self._place.message = f"{found.why[0].upper()}{found.why[1:]}."
            case options.Several():
                lines = tuple(
                    f"{options.typed(one.id)}  {one.state}, {one.operation}, "
                    f"{options.age(one.created_at, found.now)} old"
                    for one in found.records
                )
                more = "More than " * found.more
                self._turn(Sheet(f"{more}{len(lines)} keys begin with {wanted}", lines, found.records))
            case _:
                await self._show(found)


def _about_worker(worker: Worker) -> Sheet:
    rows = [
        ("name", worker.name),
        ("tasks", ", ".join(worker.tasks)),
        ("started at", moment(worker.started_at)),
        ("seen at", moment(worker.seen_at)),
        ("is seen every", f"{worker.every / 1_000_000:g} s"),
        *((f"calls of {operation}", ", ".join(calls)) for operation, calls in worker.calls.items()),
    ]
    return Sheet(f"Worker {worker.name}", tuple(printing.pairs(rows)))


def _about_line(entry: AuditEntry) -> Sheet:
    shape = {**keys_show.shown_entry(entry), "scope": entry.note.scope, "digest of the key": entry.note.key_digest}
    lines = printing.pairs([(name, value) for name, value in shape.items() if value is not None])
    command = f"  oncekey keys list --digest {entry.note.key_digest}"
    return Sheet("A line of the audit", (*lines, "", "The audit keeps no key. This looks for it:", command))


def _interval(every: float, *, longer: bool) -> float:
    fitting = [one for one in INTERVALS if (one > every if longer else one < every)]
    return every if not fitting else fitting[0] if longer else fitting[-1]


def watch(url: str, every: float, source: int, target: int) -> int:
    """Show a store on a terminal until the user ends it; returns the exit code."""

    async def within(rest: Callable[[], None]) -> int:
        return await Live(url, every, source, target).run(rest)

    with raw(source, target) as rest:
        return asyncio.run(within(rest))
