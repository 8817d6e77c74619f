"""The results of `bench.scale`: a table, a plot, and the part of the sizing page that `bench --check` compares."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.places import ROOT
from bench.summary import between_markers, shown

Document = Mapping[str, Any]
Point = Mapping[str, Any]

KEPT = Path(__file__).with_name("grown.json")
"""The figures of the run that the sizing page shows."""
PAGE, PLOT = "docs/howto/sizing.md", "docs/assets/growth.svg"
BEGIN, END = "<!-- growth: python -m bench.scale --keep -->", "<!-- /growth -->"
_COLOURS = ("#2563eb", "#059669", "#d97706", "#dc2626", "#7c3aed")
_LEFT, _TOP, _WIDTH, _HEIGHT = 44, 16, 420, 200


def _statement(name: str) -> Callable[[Point], str]:
    def told(point: Point) -> str:
        plan = point["plans"][name]
        return f"{plan['plan_ms']:.1f} ms, {plan['run_ms']:.1f} ms"

    return told


def console_ms(point: Point) -> float:
    """PostgreSQL's time for the slowest statement of the console."""
    return max(plan["plan_ms"] + plan["run_ms"] for name, plan in point["plans"].items() if name.startswith("console:"))


ROWS: Mapping[str, Callable[[Point], str]] = {
    "new `LOCAL` key: processor time": lambda point: f"{point['new_keys']['cpu_us']['median']:.0f} us",
    "new `LOCAL` key, as a multiple of that with 10,000 records": lambda point: shown(point["new_keys"]["of_small"]),
    "replay of a response of another process: processor time": (
        lambda point: f"{point['replays']['cpu_us']['median']:.0f} us"
    ),
    "replay, as a multiple of that with 10,000 records": lambda point: shown(point["replays"]["of_small"]),
    "claim of a new key: planned, run": _statement("claim"),
    "sweeper, a page: planned, run": _statement("stale"),
    "reaper, nothing due: planned, run": _statement("purge_expired"),
    "reaper, a batch of 200 due records: planned, run": _statement("purge_expired, 200 due"),
    "slowest query of the console": lambda point: f"{console_ms(point):.1f} ms",
    "whole tables that a statement reads": lambda point: ", ".join(read_whole(point)) or "none",
}
COSTS: Mapping[str, Callable[[Point], str]] = {
    "processor time of the requests": lambda point: f"{point['new_keys']['cpu_us']['median']:.0f} s",
    "table": lambda point: f"{point['table_bytes']} MB",
    "indexes": lambda point: f"{point['index_bytes']} MB",
    "WAL, each key in the first minutes after a checkpoint": lambda point: f"{point['wal_bytes'] / 1000:.1f} GB",
    "the same with `wal_compression = lz4`": lambda point: f"{point['wal_bytes_lz4'] / 1000:.1f} GB",
}


def read_whole(point: Point) -> list[str]:
    """The tables that grow with the keys and that a statement scans completely."""
    return sorted({table for plan in point["plans"].values() for table in plan["read_whole"]} & {"record", "work"})


def table(found: Document) -> str:
    """The results as text for the terminal."""
    points = found["points"]
    lines = [f"{'':<62}" + "".join(f"{_named(point):>24}" for point in points)]
    for rows in (ROWS, COSTS):
        for title, told in rows.items():
            words = title.replace("`", "")
            lines.append(f"{words:<62}" + "".join(f"{told(point):>24}" for point in points))
        if rows is ROWS:
            lines.append("per million keys:")
    return "\n".join(lines)


def published(found: Document) -> str:
    """The tables of the sizing page, between their markers."""
    points = found["points"]
    head = "".join(f" {_named(point)} |" for point in points)
    ruler = "| --- |" + " --- |" * len(points)

    def rows(of: Mapping[str, Callable[[Point], str]]) -> list[str]:
        return [f"| {title} |" + "".join(f" {told(point)} |" for point in points) for title, told in of.items()]

    return "\n".join(
        [
            BEGIN,
            "",
            f"| Records in the table |{head}",
            ruler,
            *rows(ROWS),
            "",
            "![Processor time and query time as multiples of those with 10,000 records](../assets/growth.svg)",
            "",
            f"| A million new keys, with so many records there before |{head}",
            ruler,
            *rows(COSTS),
            "",
            f"Medians of {found['rounds']} rounds (lowest-highest). The multiples in the first column compare equal",
            "tables: they are the noise of the run.",
            "",
            END,
        ]
    )


def series(found: Document) -> dict[str, list[float]]:
    """The plot's data: requests as multiples of the small table's, statements as multiples of the first size."""
    points = found["points"]
    statements = {"sweeper's page": "stale", "reaper's batch": "purge_expired, 200 due"}
    taken: dict[str, list[float]] = {}
    for title, name in statements.items():
        taken[title] = [point["plans"][name]["plan_ms"] + point["plans"][name]["run_ms"] for point in points]
    taken["slowest console query"] = [console_ms(point) for point in points]
    return {
        "new key": [point["new_keys"]["of_small"]["median"] for point in points],
        "replay": [point["replays"]["of_small"]["median"] for point in points],
        **{title: [value / values[0] for value in values] for title, values in taken.items()},
    }


def plot(found: Document) -> str:
    """A self-contained SVG: the number of records on the x axis, multiples on the y axis."""
    sizes, lines = [point["rows"] for point in found["points"]], series(found)
    highest = max(2.0, math.ceil(max(value for values in lines.values() for value in values)))
    span = math.log(sizes[-1] / sizes[0]) or 1.0

    def x(size: int) -> float:
        return round(_LEFT + _WIDTH * math.log(size / sizes[0]) / span, 1)

    def y(value: float) -> float:
        return round(_TOP + _HEIGHT * (1 - value / highest), 1)

    parts = []
    for tick in range(int(highest) + 1):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y(tick)}" y2="{y(tick)}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(tick) + 4}" text-anchor="end">{tick}</text>')
    for point in found["points"]:
        parts.append(
            f'<text x="{x(point["rows"])}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle">{_named(point)}</text>'
        )
    for number, (title, values) in enumerate(lines.items()):
        colour, at = _COLOURS[number % len(_COLOURS)], _TOP + _HEIGHT + 40 + 18 * number
        places = [(x(size), y(value)) for size, value in zip(sizes, values, strict=True)]
        parts.append(f'<polyline points="{" ".join(f"{a},{b}" for a, b in places)}" stroke="{colour}"/>')
        parts += [f'<circle cx="{a}" cy="{b}" r="3" fill="{colour}"/>' for a, b in places]
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + 18}" y1="{at}" y2="{at}" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{_LEFT + 26}" y="{at + 4}">{title}: {values[-1]:.2f}</text>')
    width, height = _LEFT + _WIDTH + 60, _TOP + _HEIGHT + 40 + 18 * len(lines)
    return _FRAME.format(width=width, height=height, body="\n".join(parts))


def keep(found: Document) -> None:
    """Store the figures, and write them into the sizing page."""
    small = _without_rounds(found)
    page = ROOT / PAGE
    text = page.read_text()
    page.write_text(text.replace(between_markers(text, BEGIN, END), published(small)))
    (ROOT / PLOT).write_text(plot(small))
    KEPT.write_text(json.dumps(small, indent=1) + "\n")


def stale() -> list[str]:
    """The files whose figures differ from the stored ones."""
    found = json.loads(KEPT.read_text())
    text, drawn = (ROOT / PAGE).read_text(), (ROOT / PLOT).read_text()
    wrong = [PAGE] if between_markers(text, BEGIN, END) != published(found) else []
    return wrong + ([PLOT] if drawn != plot(found) else [])


def _without_rounds(found: Any) -> Any:
    if isinstance(found, dict):
        given = {name: one for name, one in found.items() if not (name == "rounds" and isinstance(one, list))}
        return {name: _without_rounds(one) for name, one in given.items()}
    if isinstance(found, list):
        return [_without_rounds(one) for one in found]
    return round(found, 3) if isinstance(found, float) else found


def _named(point: Point) -> str:
    rows = int(point["rows"])
    return f"{rows // 1_000_000} million" if rows >= 1_000_000 else f"{rows:,}"


_FRAME = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" \
aria-label="Multiples of the cost with the first number of records">
<style>
text {{ font: 12px system-ui, sans-serif; fill: #475569 }}
.grid {{ stroke: #94a3b8; stroke-opacity: 0.35 }}
polyline {{ fill: none; stroke-width: 2 }}
@media (prefers-color-scheme: dark) {{ text {{ fill: #cbd5e1 }} }}
</style>
{body}
</svg>
"""
