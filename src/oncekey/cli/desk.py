"""What the operators' commands share: the store, whose key it is, and how things are shown."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, TypeVar

import typer

from oncekey import wire
from oncekey.core.audit import Mover
from oncekey.core.errors import CommitAmbiguousError, ConfigurationError
from oncekey.core.model import HOUR, MINUTE, SECOND, Duration, Instant, RecordId
from oncekey.core.prospects import prospect
from oncekey.core.scope import BindTo, bound_scope
from oncekey.core.transitions import Actor

if TYPE_CHECKING:
    from oncekey.core.model import Snapshot
    from oncekey.core.operate import Forbidden, Moved, Possibility
    from oncekey.engine.shell import AsyncEngine

T = TypeVar("T")

REFUSED: Final = 1
"""The exit code for what is not there, or is not allowed: nothing was changed."""
NO_NAMESPACE: Final = "-"
SECRET: Final = "ONCEKEY_SECRET"  # noqa: S105  (the name of a variable, not a secret)
CODES: Final = "Exit code: 0 done, 1 not there or not allowed (nothing was changed), 2 a mistake or no store."

StoreUrl = Annotated[
    str, typer.Option("--store", envvar="ONCEKEY_STORE", help=f"The store's URL: {wire.FORMS}.", metavar="URL")
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs to read.")]
Key = Annotated[str, typer.Argument(help="The Idempotency-Key, without quotes.", metavar="KEY")]
Tenant = Annotated[str | None, typer.Option("--tenant", help="Whose key it is, as the application names its tenants.")]
Namespace = Annotated[
    str | None, typer.Option("--namespace", envvar="ONCEKEY_NAMESPACE", help="The policy's `namespace`, if it has one.")
]
Principal = Annotated[
    str | None, typer.Option("--principal", help="Who in the tenant, where keys are bound to principals.")
]
Scope = Annotated[
    str | None, typer.Option("--scope", help="Instead of the tenant: the scope, as lists show it.", metavar="TEXT")
]
Reason = Annotated[
    str, typer.Option("--reason", help="Why; the audit keeps it. Nothing is changed without one.", metavar="TEXT")
]
By = Annotated[
    str | None, typer.Option("--by", help="Who you are, for the audit. [default: your login name]", metavar="NAME")
]
Version = Annotated[
    int | None,
    typer.Option("--version", help="Only if the record is still at this version, as `keys show` says.", metavar="N"),
]
Limit = Annotated[int, typer.Option("--limit", min=1, max=1000, help="How many at most.")]


def work(url: str, doing: Callable[[AsyncEngine], Awaitable[T]], *, checked: bool = True) -> T:
    """Do something with a store whose schema fits, under asyncio, because every database has a driver for that."""
    _there(url)

    async def within() -> T:
        engine = wire.aconnect(url)
        try:
            if checked:
                await engine.check()
            return await doing(engine)
        except CommitAmbiguousError as error:
            raise CommitAmbiguousError(
                "the connection was lost while the change was committed, so it may have been made: "
                "look with `oncekey keys show` and `oncekey keys history` before you repeat it"
            ) from error
        finally:
            await engine.close()

    return asyncio.run(within())


def _there(url: str) -> None:
    """Refuse what has no tables, and a SQLite file that opening would make: who looks for trouble makes none."""
    wire.migrations_for(url)
    address = wire.understand(url)
    if address.kind is wire.Kind.SQLITE and not Path(address.place).is_file():
        raise ConfigurationError(f"there is no file {address.place}: is the --store right?")


def record_id(
    key: str, tenant: str | None, namespace: str | None, principal: str | None, scope: str | None
) -> RecordId:
    """The record that a key, and whose it is, name."""
    whose = scope_named(tenant, namespace, principal, scope)
    if whose is None:
        raise ConfigurationError("whose key is it? Say --tenant, or --scope as `oncekey keys list` shows it")
    return RecordId(whose, key)


def scope_named(tenant: str | None, namespace: str | None, principal: str | None, scope: str | None) -> str | None:
    """The scope, as requests make it; None if nobody is named."""
    if scope is not None:
        if tenant is not None or principal is not None:
            raise ConfigurationError("--scope is instead of --tenant and --principal: say one or the other")
        return scope
    if tenant is None:
        if principal is not None:
            raise ConfigurationError("--principal is somebody in a tenant: say --tenant too")
        return None
    bind_to = BindTo.TENANT if principal is None else BindTo.PRINCIPAL
    return bound_scope(bind_to, namespace or NO_NAMESPACE, tenant, principal=principal)


def secret() -> bytes | None:
    """The policy's secret, from the environment only: command lines are seen by others."""
    value = os.environ.get(SECRET)
    return value.encode() if value else None


def operator(by: str | None) -> Mover:
    """Who makes a change."""
    try:
        name = (by if by is not None else getpass.getuser()).strip()
    except (KeyError, OSError):  # a container's user may have no name
        name = ""
    if not name:
        raise ConfigurationError("--by is empty: say who you are, the audit keeps it")
    return Mover(Actor.OPERATOR, name)


def given(reason: str) -> str:
    """The reason, or the refusal to do anything without one."""
    if not reason.strip():
        raise ConfigurationError("--reason is empty: say why, the audit keeps it. Nothing was changed")
    return reason.strip()


def span(text: str) -> Duration:
    """`90`, `90s`, `15m`, `2h` or `3d`."""
    units = {"s": SECOND, "m": MINUTE, "h": HOUR, "d": 24 * HOUR}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, SECOND)
    try:
        found = round(float(number) * unit)
    except (ValueError, OverflowError):
        found = -1
    if found < 0:
        raise ConfigurationError(f"{text!r} is no span of time: say 90s, 15m, 2h or 3d")
    return found


def instant(text: str) -> Instant:
    """An RFC 3339 instant, with its offset."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(f"{text!r} is no instant: say it as 2026-11-16T01:50:00Z") from None
    if at.tzinfo is None:
        raise ConfigurationError(f"{text!r} has no offset: say it as 2026-11-16T01:50:00Z")
    return round(at.astimezone(UTC).timestamp() * SECOND)


def age(since: Instant | None, now: Instant) -> str:
    """How long ago, for people."""
    if since is None:
        return ""
    left = max(0, now - since)
    for unit, name in ((24 * HOUR, "d"), (HOUR, "h"), (MINUTE, "min")):
        if left >= 2 * unit:
            return f"{left // unit} {name}"
    return f"{left // SECOND} s"


def as_json(shape: Any) -> None:
    """One JSON document on standard output."""
    typer.echo(json.dumps(shape, indent=2))


def plain(value: Any) -> str:
    """A value as one line of text that cannot move a terminal's cursor: clients write part of what is shown."""
    text = "" if value is None else str(value)
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], *, empty: str) -> None:
    """Rows under a head: framed on a terminal, aligned columns elsewhere."""
    lines = [[plain(cell) for cell in row] for row in rows]
    if not lines:
        typer.echo(empty)
    elif sys.stdout.isatty():
        _framed(head, lines)
    else:
        everything = [list(head), *lines]
        widths = [max(len(line[column]) for line in everything) for column in range(len(head))]
        for line in everything:
            typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _framed(head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    framed = Table(*head)
    for line in lines:
        framed.add_row(*(Text(cell, overflow="fold") for cell in line))
    Console().print(framed)


def told(moved: Moved, *, json_wanted: bool) -> None:
    """What was done, and what a retry will do now."""
    from oncekey.core.showing import describe

    seen, after = moved.move.seen, moved.snapshot.record
    assert after is not None
    if json_wanted:
        as_json(
            {
                "changed": True,
                "row": moved.move.row.number,
                "from": seen.state.value,
                "to": after.state.value,
                "retry": prospect(after, moved.snapshot.now),
                "record": describe(after),
            }
        )
        return
    typer.echo(f"{seen.state} -> {after.state} (row {moved.move.row.number} of the table of moves; audited)")
    typer.echo(prospect(after, moved.snapshot.now))


def refuse(forbidden: Forbidden, *, json_wanted: bool, snapshot: Snapshot | None = None) -> NoReturn:
    """Why not, and what is possible instead. Nothing was changed."""
    if json_wanted:
        as_json({"changed": False, "why": forbidden.why, "possible": [possibility(one) for one in forbidden.instead]})
    else:
        typer.echo(f"oncekey: not done: {plain(forbidden.why)}", err=True)
        record = None if snapshot is None else snapshot.record
        if forbidden.instead:
            typer.echo("Possible now:", err=True)
            for one in forbidden.instead:
                typer.echo(f"  {one.command}    (row {one.row}, to {one.to}{one.note and '; '}{one.note})", err=True)
        elif record is not None:
            typer.echo("Nothing is possible by hand now.", err=True)
    raise typer.Exit(REFUSED)


def possibility(one: Possibility) -> dict[str, Any]:
    """An order that the table allows, as programs read it."""
    return {"command": one.command, "row": one.row, "to": one.to.value, "note": one.note}
