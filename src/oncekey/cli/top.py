"""`oncekey top`: a store in a terminal, live.

A refresh reads what the console's overview reads, by the same statements; programs get it as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import count as counting
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from oncekey import wire
from oncekey.cli import dlq, keys_show, options, printing
from oncekey.core.errors import ConfigurationError, StoreError
from oncekey.core.model import MINUTE, DeadLetter, Record, State, moment
from oncekey.engine.operate import box_of, operations_of, pulse, survey_of
from oncekey.flow import Flow, adrive
from oncekey.ops.stats import ENDINGS, RANKS, End, Pace, Roll, Tally, Walk, headline, pace

if TYPE_CHECKING:
    from oncekey.core.transitions import AuditEntry
    from oncekey.engine.shell import AsyncEngine
    from oncekey.ports import Store

_COLUMNS = 100
"""The width of a frame if the output is no terminal."""


def register(app: typer.Typer) -> None:
    """Add the command `top`."""
    app.command("top")(top)


def top(
    store: options.StoreUrl,
    *,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.", metavar="SECONDS")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="One frame as plain text; also what a pipe gets.")] = False,
    count: Annotated[
        int | None, typer.Option(min=1, help="So many frames, as plain text or as JSON.", metavar="N")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: a line for each frame.")] = False,
) -> None:
    """Watch a store: what needs an operator, what waits, which workers live, how requests end. Changes nothing.

    It shows what the console's overview shows, by the same statements, each along an index; a database user who may
    only read is enough. In a terminal it is live: `?` lists the keys. If the store stops answering, the screen says so,
    and the command asks again until the store is back. NO_COLOR is respected.

    JSON, a line for each frame, without end unless --count or --once says so: {"now", "items": [what `unknown list`
    and `dlq list` show, and "what": "unknown" | "dead_letter"], "next": null, "store", "server", "level", "headline",
    "counts", "ended", "took_ms", "workers", "audit"}, or {"now", "items": [], "next": null, "store", "error"} while
    the store does not answer.

    Exit code: 0 ended by q, Ctrl-C or --count, 2 a mistake, or no store at the first of some frames.
    """
    options.check_exists(store)
    wanted = 1 if once else count
    if wanted is None and not as_json:
        if _is_terminal():
            raise typer.Exit(_live(store, interval))
        wanted = 1
    try:
        asyncio.run(_frames(store, interval, wanted, as_json=as_json))
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    except BrokenPipeError:  # the reader of the pipe has closed it; Python would complain once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in {"dumb", "unknown"}


def _live(store: str, interval: float) -> int:
    try:
        from oncekey.cli.top_screen import watch
    except ImportError as error:  # termios is not for Windows
        raise ConfigurationError(f"there is no {error.name} here to draw with: say --once, or --json") from None
    return watch(store, interval, sys.stdin.fileno(), sys.stdout.fileno())


async def _frames(url: str, interval: float, wanted: int | None, *, as_json: bool) -> None:
    """Print frames one after the other. A store that fails at the first one is an error; later frames report it."""
    engine = wire.aconnect(url)
    try:
        await engine.check()
        server = await adrive(server_of(engine.store), engine.driver.run)
        seen: TopData | None = None
        for number in counting(1):
            seen, trouble = await _looked(engine, seen, first=number == 1)
            print(_line(url, server, seen, trouble) if as_json else _text(url, server, seen, trouble), flush=True)
            if number == wanted:
                return
            await asyncio.sleep(interval)
    finally:
        await engine.close()


async def _looked(engine: AsyncEngine, before: TopData | None, *, first: bool) -> tuple[TopData | None, str]:
    try:
        return await adrive(read_top(engine.store), engine.driver.run), ""
    except StoreError as error:
        if first:
            raise
        return before, str(error)


def _line(url: str, server: str, seen: TopData | None, trouble: str) -> str:
    if trouble or seen is None:
        shape: dict[str, Any] = {"now": moment(time.time_ns() // 1000), "items": [], "next": None}
        return json.dumps({**shape, "store": printing.address(url), "error": trouble})
    return json.dumps(envelope(seen, printing.address(url), server))


def _text(url: str, server: str, seen: TopData | None, trouble: str) -> str:
    from oncekey.cli.top_frame import Position, Setting, frame

    setting = Setting(printing.address(url), server, datetime.now().astimezone(), trouble)
    width = shutil.get_terminal_size((_COLUMNS, 24)).columns
    return "\n".join(line.plain.rstrip() for line in frame(seen, setting, Position(), width, None)) + "\n"


ENDS: Final = 1000
"""How many finished requests a refresh reads at most, for each outcome."""
WINDOW: Final = 15 * MINUTE
LISTED: Final = 200
"""How many unknown records, and how many dead letters, a refresh lists at most."""
LINES: Final = 50
"""How many lines of the audit a refresh reads."""
TILES: Final = ("unknown", "dead", "stuck", "failed_retryable", "in_progress", "pending", "due")
"""What is counted, the most important first."""

Waiting: TypeAlias = "Record | DeadLetter"
"""An item that an operator has to look at."""


@dataclass(frozen=True, slots=True)
class TopData:
    """A store at one moment."""

    tally: Tally
    roll: Roll
    ends: tuple[End, ...]
    unknown: tuple[Record, ...]
    """The oldest first; where there are more than `LISTED`, the newest of them."""
    letters: tuple[DeadLetter, ...]
    """The oldest first."""
    audit: tuple[AuditEntry, ...]
    """The newest first."""

    @property
    def headline(self) -> tuple[str, str]:
        """The state of the store: one word for the colour, and one sentence."""
        return headline(self.tally, self.roll)

    @property
    def waiting(self) -> tuple[Waiting, ...]:
        """The items that an operator has to look at: unknown outcomes, then dead letters."""
        return (*self.unknown, *self.letters)

    def pace(self, parts: int) -> Pace:
        """How requests ended lately, with the window in so many parts."""
        return pace(self.ends, self.tally.now, limit=ENDS, window=WINDOW, parts=parts)


def read_top(store: Store) -> Flow[TopData]:
    """Read everything, with a handful of statements, each along an index and with a bound."""
    survey = survey_of(store)
    tally, roll = yield from pulse(store)
    ends = yield from survey.ended(ENDS)
    unknown = yield from survey.walk(Walk(states=(State.UNKNOWN,)), LISTED)
    letters = yield from box_of(store).dead_letters(LISTED)
    lines = yield from survey.notes(LINES)
    return TopData(tally, roll, ends, unknown.records[::-1], letters, lines.entries)


def server_of(store: Store) -> Flow[str]:
    """The name of the database, with its version if the database shows that to this user."""
    diagnostics = yield from operations_of(store).diagnostics("diagnostic_settings", "diagnostic_file")
    for setting in diagnostics.get("diagnostic_settings", ()):
        if setting["name"] == "server_version":
            return f"PostgreSQL {str(setting['value']).split()[0]}"
    for file in diagnostics.get("diagnostic_file", ()):
        return f"SQLite {file['version']}"
    return "PostgreSQL"


def envelope(seen: TopData, store: str, server: str) -> dict[str, Any]:
    """One frame for programs: the three members of every list (items are what waits for an operator), and the rest."""
    tally, now = seen.tally, seen.tally.now
    lately = seen.pace(1)
    colour, sentence = seen.headline
    return {
        "now": moment(now),
        "items": list(_items(seen)),
        "next": None,
        "store": store,
        "server": server,
        "level": colour,
        "headline": sentence,
        "counts": {
            what: {"count": tally.of(what).found, "more": tally.of(what).more, "oldest": moment(tally.of(what).oldest)}
            for what in TILES
        },
        "ended": {
            "seconds": lately.window / 1_000_000,
            **{name.replace(" ", "_"): lately.ended[name] for name in ENDINGS},
        },
        "took_ms": {f"p{rank}": lately.took[rank] / 1000 if rank in lately.took else None for rank in RANKS},
        "workers": [
            {
                "name": one.name,
                "alive": one.is_alive(seen.roll.now),
                "tasks": list(one.tasks),
                "started_at": moment(one.started_at),
                "seen_at": moment(one.seen_at),
            }
            for one in seen.roll.workers
        ],
        "audit": [{**keys_show.shown_entry(entry), "digest": entry.note.key_digest} for entry in seen.audit],
    }


def _items(seen: TopData) -> Iterator[dict[str, Any]]:
    for one in seen.waiting:
        if isinstance(one, DeadLetter):
            yield {"what": "dead_letter", **dlq.line_of(one)}
        else:
            calls = seen.roll.inline_calls(one.operation)
            yield {"what": "unknown", **keys_show.in_doubt(one, seen.tally.now, calls=calls)}
