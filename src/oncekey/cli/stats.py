"""`oncekey stats`: counts the keys and pending work, once or repeatedly."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from oncekey.cli import options, printing
from oncekey.core.errors import StoreError
from oncekey.core.flow import adrive
from oncekey.core.model import SECOND, Instant, moment
from oncekey.engine import operate
from oncekey.ops.stats import Group, Roll, StoreStats, Tally, headline

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.engine.shell import AsyncEngine

UNKNOWABLE: Final = (
    "Duplicates cannot be counted here: a replay writes nothing to the store. See the application's metrics."
)
WATCHED: Final = ("unknown", "dead", "stuck", "failed_retryable", "in_progress", "pending", "due")
"""The counts of `--watch`, most important first."""
_CLEAR: Final = "\x1b[H\x1b[2J"


def register(app: typer.Typer) -> None:
    """Add the command `stats`."""
    app.command("stats")(stats)


def stats(
    store: options.StoreUrl,
    *,
    watch: Annotated[
        float | None,
        typer.Option(
            min=0.1, metavar="SECONDS", help="Count pending work every SECONDS seconds, until Ctrl-C; see above."
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Count keys by state, effects and operation, and pending work in the outbox and the dead letters.

    Changes nothing. It scans the whole table, which is slow on a large one. The number of duplicate requests is not in
    the store: a replay writes nothing.

    JSON: {"now", "items": [{"state", "effects", "operation", "keys", "stale", "resumable", "expired", "oldest",
    "newest"}], "next", "keys", "by_state", "by_effects", "by_operation": {name: {state: n}}, "waiting": {what:
    {"count", "oldest", "age_seconds"}}, "outbox": {"depth", "held", "oldest_due", "by_topic": [...]}, "dead_letters":
    {"count", "oldest", "by_topic": [...]}, "duplicates": null, "duplicates_note"}.

    With --watch it reads only pending work and live workers, as the console's overview does: each count uses an index
    and stops at 10,000, so it is cheap on a large table. If the store does not respond, it reports that and retries.
    JSON, one line per reading: {"now", "level", "headline", "counts": {what: {"count", "more", "oldest"}}, "workers":
    [{"name", "alive", "tasks", "started_at", "seen_at"}]}, or {"now", "error"}.
    """
    if watch is not None:
        _watch(store, watch, as_json=as_json)
        return

    async def counting(engine: AsyncEngine) -> StoreStats:
        return await adrive(operate.operations_of(engine.store).stats(), engine.driver.run)

    stats = options.work(store, counting)
    if as_json:
        printing.as_json(shape_of(stats))
        return
    _print(stats)


def shape_of(stats: StoreStats) -> dict[str, Any]:
    """The counts as JSON."""
    by_operation: dict[str, dict[str, int]] = {}
    for group in stats.groups:
        states = by_operation.setdefault(group.operation, {})
        states[group.state.value] = states.get(group.state.value, 0) + group.records
    return {
        "now": moment(stats.now),
        "items": [_group(group) for group in stats.groups],
        "next": None,
        "keys": sum(group.records for group in stats.groups),
        "by_state": _summed(stats, lambda group: group.state.value),
        "by_effects": _summed(stats, lambda group: group.effects.value),
        "by_operation": by_operation,
        "waiting": {
            one.what: {
                "count": one.count,
                "oldest": moment(one.oldest),
                "age_seconds": _seconds(one.oldest, stats.now),
            }
            for one in stats.waiting
        },
        "outbox": {
            "depth": sum(queue.parcels for queue in stats.queues),
            "held": sum(queue.held for queue in stats.queues),
            "oldest_due": moment(min((queue.oldest_due for queue in stats.queues), default=None)),
            "by_topic": [
                {
                    "topic": queue.topic,
                    "kind": queue.kind.value,
                    "parcels": queue.parcels,
                    "held": queue.held,
                    "oldest_due": moment(queue.oldest_due),
                }
                for queue in stats.queues
            ],
        },
        "dead_letters": {
            "count": sum(letters.letters for letters in stats.letters),
            "oldest": moment(min((letters.oldest for letters in stats.letters), default=None)),
            "by_topic": [
                {
                    "topic": letters.topic,
                    "kind": letters.kind.value,
                    "letters": letters.letters,
                    "oldest": moment(letters.oldest),
                }
                for letters in stats.letters
            ],
        },
        "duplicates": None,
        "duplicates_note": UNKNOWABLE,
    }


def _summed(stats: StoreStats, of: Callable[[Group], str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for group in stats.groups:
        counts[of(group)] = counts.get(of(group), 0) + group.records
    return counts


def _group(group: Group) -> dict[str, Any]:
    return {
        "state": group.state.value,
        "effects": group.effects.value,
        "operation": group.operation,
        "keys": group.records,
        "stale": group.stale,
        "resumable": group.resumable,
        "expired": group.expired,
        "oldest": moment(group.oldest),
        "newest": moment(group.newest),
    }


def _seconds(since: Instant | None, now: Instant) -> int | None:
    return None if since is None else max(0, now - since) // SECOND


def _print(stats: StoreStats) -> None:
    now = stats.now
    printing.table(
        ("state", "effects", "operation", "keys", "stale", "resumable", "expired", "oldest", "newest"),
        [
            (
                group.state,
                group.effects,
                group.operation,
                group.records,
                group.stale,
                group.resumable,
                group.expired,
                options.age(group.oldest, now),
                options.age(group.newest, now),
            )
            for group in stats.groups
        ],
        empty="no keys",
        first=("operation", "state", "keys", "effects", "oldest", "stale", "resumable"),
    )
    typer.echo("")
    printing.table(
        ("waiting", "count", "oldest since"),
        [(one.what.replace("_", " "), one.count, options.age(one.oldest, now)) for one in stats.waiting],
        empty="",
    )
    if stats.queues:
        typer.echo("")
        rows = [(one.topic, one.kind, one.parcels, one.held, options.age(one.oldest_due, now)) for one in stats.queues]
        printing.table(("outbox topic", "kind", "parcels", "held", "due since"), rows, empty="")
    if stats.letters:
        typer.echo("")
        dead = [(one.topic, one.kind, one.letters, options.age(one.oldest, now)) for one in stats.letters]
        printing.table(("dead letters' topic", "kind", "letters", "oldest since"), dead, empty="")
    typer.echo(f"\n{UNKNOWABLE}")


def _watch(store: str, every: float, *, as_json: bool) -> None:
    async def reading(engine: AsyncEngine) -> None:
        for number in count():
            try:
                tally, roll = await adrive(operate.pulse(engine.store), engine.driver.run)
            except StoreError as error:
                if number == 0:
                    raise
                _print_unavailable(error, as_json=as_json)
            else:
                _print_reading(tally, roll, printing.address(store), as_json=as_json)
            sys.stdout.flush()
            await asyncio.sleep(every)

    try:
        options.work(store, reading)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _print_unavailable(error: StoreError, *, as_json: bool) -> None:
    if as_json:
        now = time.time_ns() // (1_000_000_000 // SECOND)
        typer.echo(json.dumps({"now": moment(now), "error": str(error)}))
    else:
        typer.echo(f"The store does not respond; retrying. ({printing.plain(error)})")


def _print_reading(tally: Tally, roll: Roll, store: str, *, as_json: bool) -> None:
    level, sentence = headline(tally, roll)
    if as_json:
        counts = {what: tally.of(what) for what in WATCHED}
        shape = {
            "now": moment(tally.now),
            "level": level,
            "headline": sentence,
            "counts": {
                what: {"count": one.found, "more": one.more, "oldest": moment(one.oldest)}
                for what, one in counts.items()
            },
            "workers": [
                {
                    "name": one.name,
                    "alive": one.is_alive(roll.now),
                    "tasks": list(one.tasks),
                    "started_at": moment(one.started_at),
                    "seen_at": moment(one.seen_at),
                }
                for one in roll.workers
            ],
        }
        typer.echo(json.dumps(shape))
        return
    if sys.stdout.isatty():
        sys.stdout.write(_CLEAR)
    typer.echo(f"{printing.plain(store)}  {moment(tally.now)}\n{sentence}\n")
    rows = []
    for what in WATCHED:
        found = tally.of(what)
        number = f"{found.found:,}{'+' * found.more}"
        rows.append((what.replace("_", " "), number, options.age(found.oldest, tally.now)))
    printing.table(("waiting", "count", "oldest since"), rows, empty="")
    typer.echo("")
    printing.table(
        ("worker", "state", "last heartbeat", "tasks"),
        [
            (
                one.name,
                "alive" if one.is_alive(roll.now) else "dead",
                options.age(one.seen_at, roll.now),
                ", ".join(one.tasks),
            )
            for one in roll.workers
        ],
        empty="no workers",
    )
    typer.echo("")
