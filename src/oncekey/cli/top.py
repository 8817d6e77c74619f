"""`oncekey top`: a store in a terminal, live."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from datetime import datetime
from itertools import count as counting
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oncekey import wire
from oncekey.cli import options
from oncekey.cli.printing import address
from oncekey.cli.top_data import envelope, read_top, server_of
from oncekey.core.errors import ConfigurationError, StoreError
from oncekey.core.model import moment
from oncekey.flow import adrive

if TYPE_CHECKING:
    from oncekey.cli.top_data import TopData
    from oncekey.engine.shell import AsyncEngine

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
    as_json: Annotated[bool, typer.Option("--json", help="For programs to read: a line for each frame.")] = False,
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
        return json.dumps({**shape, "store": address(url), "error": trouble})
    return json.dumps(envelope(seen, address(url), server))


def _text(url: str, server: str, seen: TopData | None, trouble: str) -> str:
    from oncekey.cli.top_frame import Position, Setting, frame

    setting = Setting(address(url), server, datetime.now().astimezone(), trouble)
    width = shutil.get_terminal_size((_COLUMNS, 24)).columns
    return "\n".join(line.plain.rstrip() for line in frame(seen, setting, Position(), width, None)) + "\n"
