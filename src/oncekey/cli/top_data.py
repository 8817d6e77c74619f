"""Reads what `oncekey top` shows in one refresh, by the console's statements, and makes the JSON that programs get."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from oncekey.cli.dlq import line_of as letter_line
from oncekey.cli.keys_show import in_doubt, shown_entry
from oncekey.core.model import MINUTE, DeadLetter, State, moment
from oncekey.engine.operate import box_of, operations_of, pulse, survey_of
from oncekey.ops.stats import ENDINGS, RANKS, headline, pace
from oncekey.ops.survey import Walk

if TYPE_CHECKING:
    from oncekey.core.audit import AuditEntry
    from oncekey.core.model import Record
    from oncekey.flow import Flow
    from oncekey.ops.stats import Pace, Roll
    from oncekey.ops.survey import End, Tally
    from oncekey.ports import Store

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
        "audit": [{**shown_entry(entry), "digest": entry.note.key_digest} for entry in seen.audit],
    }


def _items(seen: TopData) -> Iterator[dict[str, Any]]:
    for one in seen.waiting:
        if isinstance(one, DeadLetter):
            yield {"what": "dead_letter", **letter_line(one)}
        else:
            calls = seen.roll.inline_calls(one.operation)
            yield {"what": "unknown", **in_doubt(one, seen.tally.now, calls=calls)}
