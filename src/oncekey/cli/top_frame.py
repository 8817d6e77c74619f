"""Draws the frames of `oncekey top`: lines of text from a glance at the store, a size, and the user's place.

Nothing here reads a clock, a key or the terminal: a frame is a value, so it is the same on a screen and in a pipe.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from rich.text import Text

from oncekey.cli.printing import plain
from oncekey.cli.top import LISTED, TILES, TopData, Waiting
from oncekey.core.model import SECOND, DeadLetter, Duration, Instant, lapse
from oncekey.core.scope import shown_scope
from oncekey.ops.explain_retry import WHY, why
from oncekey.ops.stats import ENDINGS, Worker

if TYPE_CHECKING:
    from oncekey.core.transitions import AuditEntry

BARS: Final = "▁▂▃▄▅▆▇█"
SMALLEST: Final = (40, 12)
"""Columns and lines; a smaller terminal gets no frame."""
PARTS: Final = 60
"""Into how many bars the last minutes are divided, where there is room for them."""
WIDE: Final = 120
"""From so many columns on, the workers and the audit are shown beside what waits."""
CROWDED: Final = 9
"""With fewer lines for the panels, only the one that the user has chosen is shown."""
TALL: Final = 34
"""From so many lines on, each outcome has a line of its own."""
NAMES: Final = dict(
    zip(TILES, ("Unknown", "Dead", "Stuck", "To retry", "Under way", "Pending", "Outbox due"), strict=True)
)
COLOURS: Final = {"unknown": "yellow", "dead": "red", "stuck": "cyan"}
STYLES: Final = {"good": "green", "wait": "bold yellow", "bad": "bold red", "note": "cyan"}
ENDED: Final = dict(zip(ENDINGS, ("green", "red", "cyan", "yellow"), strict=True))
FOOT: Final = "q quit  p pause  +/- interval  Tab panel  ↑↓ line  Enter open  / find  ? help"
HELP: Final = (
    "q, Ctrl-C      quit",
    "p, Space       pause: nothing is asked until you press it again",
    "+  -           look less often, or more often",
    "r              look now",
    "Tab, ← →       the next panel, or the one before",
    "↑ ↓, j k       a line; PgUp and PgDn ten, Home and End the first and the last",
    "Enter          open it: what `oncekey keys show` or `oncekey dlq show` prints",
    "/              find a key by its name, or by its beginning",
    "Esc            back",
    "?              this",
    "",
    "Nothing here changes the store. What there is to do is said where a key is opened, as commands to copy.",
    "Duplicates write nothing, so what ended are first requests; LOCAL ones are one commit, and are not timed.",
)


class Panel(IntEnum):
    """A panel with lines through which the user can move."""

    WAITING = 0
    WORKERS = 1
    AUDIT = 2


@dataclass(frozen=True, slots=True)
class Sheet:
    """A text that is shown instead of the overview: help, a record, or what a search found."""

    title: str
    lines: tuple[str, ...]
    choices: tuple[Waiting, ...] = ()
    """If the user is to choose one of its lines: the item of each line."""


@dataclass(slots=True)
class Position:
    """The user's place on the screen."""

    panel: Panel = Panel.WAITING
    rows: dict[Panel, int] = field(default_factory=lambda: dict.fromkeys(Panel, 0))
    sheet: Sheet | None = None
    row: int = 0
    """The first line of the sheet that is shown, or the one that is chosen."""
    typed: str | None = None
    """The text that the user has typed behind the / so far; None: no search is being typed."""
    paused: bool = False
    every: float = 2.0
    message: str = ""
    """What the last key did, for the last line of the screen."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a frame shows around the numbers."""

    store: str
    server: str
    at: datetime
    """This host's clock, in the reader's zone."""
    trouble: str = ""
    """Why the store does not answer, if it does not."""


def frame(seen: TopData | None, setting: Setting, place: Position, width: int, height: int | None) -> list[Text]:
    """A frame of `height` lines. Without a height: as many lines as there are, and none about the keys."""
    wide, high = SMALLEST
    if width < wide or (height is not None and height < high):
        return [_cut(Text(f"{wide} columns and {high} lines are needed"), width)]
    head = [*_head(setting, place, width, live=height is not None), _state(seen, setting, width)]
    if height is None:
        return head if seen is None else [*head, *_numbers(seen, width, tall=True), *_stack(seen, place, width, None)]
    room = height - len(head) - 1
    if place.sheet is not None:
        body = _sheet(place.sheet, place, width, room)
    elif seen is None:
        body = []
    else:
        numbers = _numbers(seen, width, tall=height >= TALL)
        layout = _beside if width >= WIDE else _stack
        body = [*numbers, *layout(seen, place, width, room - len(numbers))]
    body = [*body[:room], *(Text() for _ in range(room - len(body)))]
    return [*head, *body, _foot(place, width)]


def _head(setting: Setting, place: Position, width: int, *, live: bool) -> list[Text]:
    local, utc = setting.at, setting.at.astimezone(UTC)
    times = f"{utc:%Y-%m-%d %H:%M:%S} UTC" + ("" if local.tzname() == "UTC" else f", {local:%H:%M:%S} {local.tzname()}")
    pace = "paused" if place.paused else f"every {place.every:g} s"
    left = Text.assemble(("oncekey top  ", "bold"), plain(setting.store), (f"  {setting.server}", "dim"))
    right = Text(f"{times}  {pace}" if live else times, style="dim")
    if left.cell_len + right.cell_len + 2 <= width:
        left.append(" " * (width - left.cell_len - right.cell_len))
        return [left.append_text(right)]
    return [_cut(left, width), _cut(right, width)]


def _state(seen: TopData | None, setting: Setting, width: int) -> Text:
    if setting.trouble:
        old = (
            ""
            if seen is None
            else f" What is shown is {lapse(round(setting.at.timestamp() * SECOND) - seen.tally.now)} old."
        )
        message = f"The store does not answer. Trying again.{old} ({plain(setting.trouble)})"
        return _cut(Text(message, style="bold red"), width)
    if seen is None:
        return Text("Looking ...", style="dim")
    colour, sentence = seen.headline
    return _cut(Text(sentence, style=STYLES[colour]), width)


def _numbers(seen: TopData, width: int, *, tall: bool) -> list[Text]:
    """The counts, how requests end, and how long they take."""
    column = min(width // len(TILES), 16)
    names, counts, ages = Text(), Text(), Text()
    for what in TILES:
        count = seen.tally.of(what)
        colour = COLOURS.get(what, "bold") if count.found else "dim"
        age = "" if count.oldest is None else lapse(max(0, seen.tally.now - count.oldest))
        names.append(NAMES[what][: column - 1].ljust(column), "dim")
        counts.append((f"{count.found:,}" + "+" * count.more).ljust(column), colour)
        ages.append(age.ljust(column), "dim")
    return [names, counts, ages, *_ends(seen, width, tall=tall), *([Text()] if tall else [])]


def _ends(seen: TopData, width: int, *, tall: bool) -> list[Text]:
    lately = seen.pace(min(width - 28, PARTS))
    if tall:
        lines = [
            Text.assemble(
                (f"{name:<16}", "dim"), f"{lately.rate(name):7.2f}/s  ", (_bars(lately.bars[name]), ENDED[name])
            )
            for name in ENDINGS
        ]
    else:
        brief = zip(ENDINGS, ("succeeded", "failed", "to retry", "unknown"), strict=True)
        shown = Text("a second: ", style="dim")
        shown.append_text(
            Text("  ").join(Text(f"{lately.rate(name):.2f} {word}", style=ENDED[name]) for name, word in brief)
        )
        lines = [shown, Text.assemble(("all of them: ", "dim"), (_bars(lately.all_bars), "green"))]
    took = ", ".join(
        f"{word} {_span(lately.took[rank])}"
        for rank, word in ((50, "half within"), (95, "95 %"), (99, "99 %"))
        if rank in lately.took
    )
    window = f"  in {lapse(lately.window)}: {sum(lately.ended.values()):,} ended"
    lines.append(Text.assemble(("took: ", "dim"), took or "none was timed", (window, "dim")))
    return [_cut(line, width) for line in lines]


def _bars(counts: Sequence[int]) -> str:
    most = max(counts) or 1
    return "".join(" " if not one else BARS[-(-one * len(BARS) // most) - 1] for one in counts)


def _stack(seen: TopData, place: Position, width: int, room: int | None) -> list[Text]:
    """The three panels, one over the other: what waits gets the lines that the others leave."""
    if room is None:
        return [line for panel in Panel for line in (*_panel(seen, panel, place, width, None), Text())][:-1]
    if room < CROWDED:
        return _panel(seen, place.panel, place, width, room - 1)
    left = room - len(Panel)
    workers = min(len(seen.roll.workers) or 1, max(left // 4, 1))
    audit = min(len(seen.audit) or 1, max(left // 3, 1))
    waiting = max(left - workers - audit, 1)
    return [
        *_panel(seen, Panel.WAITING, place, width, waiting),
        *_panel(seen, Panel.WORKERS, place, width, workers),
        *_panel(seen, Panel.AUDIT, place, width, audit),
    ]


def _beside(seen: TopData, place: Position, width: int, room: int) -> list[Text]:
    """What waits on the left; workers and the audit on the right."""
    right = width * 2 // 5
    left = width - right - 2
    workers = min(len(seen.roll.workers) or 1, max((room - 2) // 3, 1))
    one = _panel(seen, Panel.WAITING, place, left, room - 1)
    other = [
        *_panel(seen, Panel.WORKERS, place, right, workers),
        *_panel(seen, Panel.AUDIT, place, right, room - 2 - workers),
    ]
    lines = []
    for first, second in zip(one, other, strict=True):
        first.pad_right(max(0, left + 2 - first.cell_len))
        lines.append(first.append_text(second))
    return lines


def _panel(seen: TopData, panel: Panel, place: Position, width: int, room: int | None) -> list[Text]:
    """A title and `room` lines, among them the line that the user has chosen."""
    rows: Sequence[Text]
    now = seen.tally.now
    match panel:
        case Panel.WAITING:
            title, rows = _waiting_title(seen), _waiting(seen.waiting, now, width)
            empty = "Nothing is unknown, and there are no dead letters."
        case Panel.WORKERS:
            alive = sum(one.is_alive(seen.roll.now) for one in seen.roll.workers)
            title, rows = f"Workers: {alive} alive", [_worker(one, seen.roll.now) for one in seen.roll.workers]
            empty = "None has written itself down: oncekey worker --app MODULE:once starts one."
        case Panel.AUDIT:
            title, rows = "Audit, the newest first", [_note(one) for one in seen.audit]
            empty = "Nothing was moved but by its own request."
    here = room is not None and place.panel is panel
    lines = [_cut(Text(f"{'▸ ' if here else ''}{title} ".ljust(width, "─"), "bold" if here else "dim"), width)]
    if not rows:
        rows = [Text(empty, style="dim")]
    elif here:
        place.rows[panel] = max(0, min(place.rows[panel], len(rows) - 1))
        rows[place.rows[panel]].stylize("reverse")
    if room is None:
        return [*lines, *(_cut(row, width) for row in rows)]
    first = max(0, min(place.rows[panel] - room + 1, len(rows) - room)) if len(rows) > room else 0
    shown = [_cut(row, width) for row in rows[first : first + room]]
    return [*lines, *shown, *(Text() for _ in range(room - len(shown)))]


def _waiting_title(seen: TopData) -> str:
    unknown = seen.tally.of("unknown").found
    if unknown > LISTED:
        return f"Unknown (the newest {LISTED} of {unknown:,}) and dead letters"
    return "Unknown outcomes and dead letters, the oldest first"


def _waiting(waiting: Sequence[Waiting], now: Instant, width: int) -> list[Text]:
    """A line each: what it is, its key by both ends where there is no room, whose, what, how old, and why."""
    cells = [_cells(one, now) for one in waiting]
    most = (7, max(width // 4, 12), max(width // 8, 8), max(width // 5, 12), 6)
    widths = [min(max((len(row[at]) for row in cells), default=0), limit) for at, limit in enumerate(most)]
    lines = []
    for one, row in zip(waiting, cells, strict=True):
        line = Text()
        for at, size in enumerate(widths):
            text = _by_ends(row[at], size) if at == 1 else _fit(row[at], size)
            line.append(text.ljust(size) + "  ", ("red" if isinstance(one, DeadLetter) else "yellow") if not at else "")
        lines.append(line.append(row[-1], "dim"))
    return lines


def _cells(one: Waiting, now: Instant) -> tuple[str, ...]:
    if isinstance(one, DeadLetter):
        parcel = one.parcel
        key, what, since = parcel.record_id, parcel.topic, one.died_at
        reason = WHY.get(one.last_error, one.last_error)
        name = "dead"
    else:
        key, what, since, reason = one.id, one.operation, one.created_at, why(one) or ""
        name = "unknown"
    return name, *(plain(part) for part in (key.key, shown_scope(key.scope), what, lapse(max(0, now - since)), reason))


def _worker(one: Worker, now: Instant) -> Text:
    alive = one.is_alive(now)
    return Text.assemble(
        ("● ", "green" if alive else "red"),
        plain(one.name),
        f"  {'alive' if alive else 'silent'}, seen {lapse(now - one.seen_at)} ago, there for "
        f"{lapse(now - one.started_at)}  ",
        (plain(", ".join(one.tasks)), "dim"),
    )


def _note(entry: AuditEntry) -> Text:
    note = entry.note
    at = datetime.fromtimestamp(entry.at / SECOND, tz=UTC)
    path = " → ".join("none" if state is None else state.value for state in (note.source, note.to))
    return Text.assemble(
        (f"{at:%H:%M:%S}  ", "dim"),
        f"{note.actor.value} {plain(note.who)}  ",
        (f"{plain(note.operation)} {note.key_digest[:8]}  ", "dim"),
        f"{path}  " if note.source is not note.to else f"{note.trigger.value.replace('_', ' ')}  ",
        (plain(note.why), "dim"),
    )


def _sheet(sheet: Sheet, place: Position, width: int, room: int) -> list[Text]:
    """A text from the line to which the user has scrolled. Lines are folded and not cut, so commands can be copied."""
    title = _cut(Text(f"▸ {plain(sheet.title)} ".ljust(width, "─"), "bold"), width)
    if sheet.choices:
        place.row = max(0, min(place.row, len(sheet.lines) - 1))
        lines = [_cut(Text(plain(line)), width) for line in sheet.lines]
        lines[place.row].stylize("reverse")
        first = max(0, place.row - room + 2)
    else:
        lines = [Text(part) for line in sheet.lines for part in _folded(plain(line), width)]
        place.row = first = max(0, min(place.row, len(lines) - room + 1))
    return [title, *lines[first : first + room - 1]]


def _foot(place: Position, width: int) -> Text:
    if place.typed is not None:
        return _cut(Text.assemble(("Find a key: ", "bold"), plain(place.typed), ("▏", "bold")), width)
    if place.message:
        return _cut(Text(plain(place.message), style="bold yellow"), width)
    foot = "Esc back  ↑↓ line  q quit" + ("  Enter open" if place.sheet and place.sheet.choices else "")
    return _cut(Text(foot if place.sheet is not None else FOOT, style="dim"), width)


def _cut(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis")
    return line


def _folded(line: str, width: int) -> list[str]:
    """A line in parts that fit, between its words where it can be, each as far from the edge as the first."""
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [""]


def _fit(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _by_ends(text: str, most: int) -> str:
    """A long key by its two ends."""
    if len(text) <= most:
        return text
    half = (most - 1) // 2
    return f"{text[: most - 1 - half]}…{text[len(text) - half :]}"


def _span(took: Duration) -> str:
    millis = took / 1000
    return f"{millis:.0f} ms" if millis < 1000 else f"{millis / 1000:.1f} s"  # noqa: PLR2004  (of a second)
