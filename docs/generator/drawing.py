"""Drawings for the documentation, as plain SVG, created from the tables with which the code decides."""

from __future__ import annotations

import ast
import html
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from oncekey.core.model import State
from oncekey.core.transitions import ROWS, Transition

Spot = tuple[float, float]
"""A position, in pixels."""

_ROOT: Final = Path(__file__).resolve().parents[2]
_WIDE, _HIGH = 150, 40
_BEND: Final = 0.13
"""How far a curve bows out, as a part of its length: a move and its way back do not cover each other."""

_SPOTS: Final[Mapping[State | None, Spot]] = {
    None: (90, 50),
    State.PENDING: (640, 50),
    State.IN_PROGRESS: (420, 270),
    State.COMPLETED: (810, 240),
    State.EXPIRED: (810, 400),
    State.FAILED_RETRYABLE: (180, 450),
    State.UNKNOWN: (600, 450),
}
LEFT_OUT: Final = {30, 31}
"""Rows that end or renew an expired record, from three states each; the text below the drawing explains them."""

# The colours follow the reader's: dark where the page is dark, also where the picture is embedded as an image.
_STYLE: Final = """\
svg { font: 13px system-ui, sans-serif; }
text { fill: #1c2530; text-anchor: middle; }
.description { text-anchor: start; }
rect { fill: #eef3f8; stroke: #48647f; }
path { fill: none; stroke: #7089a1; stroke-width: 1.3; }
marker path { fill: #7089a1; stroke: none; }
.label { font-size: 11px; fill: #3d5873; paint-order: stroke; stroke: #ffffff; stroke-width: 4px; }
@media (prefers-color-scheme: dark) {
  text { fill: #e3ebf3; } .description { text-anchor: start; }
rect { fill: #223040; stroke: #8aa5bf; } path { stroke: #7f99b3; }
  marker path { fill: #7f99b3; } .label { fill: #b9cde0; stroke: #1e2129; }
}"""
_ARROW: Final = (
    '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z"/></marker></defs>'
)


def states(rows: Iterable[Transition] = ROWS) -> str:
    """The states and the moves between them; the numbers at an arrow are rows of the table."""
    moves: dict[tuple[State | None, State | None], list[int]] = {}
    for row in (row for row in rows if row.number not in LEFT_OUT):
        numbers = moves.setdefault((row.source, row.to), [])
        if row.number not in numbers:
            numbers.append(row.number)
    parts = [_move(source, to, ", ".join(map(str, sorted(numbers)))) for (source, to), numbers in moves.items()]
    boxes = [_box(spot, (state or "no row").replace("_", " ")) for state, spot in _SPOTS.items()]
    return _svg(900, 530, "The states of a record and the moves between them", [*parts, *boxes])


def layers() -> str:
    """The packages, from the outermost to the innermost: each imports only packages below its line."""
    contracts = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    rows: Sequence[str] = next(one["layers"] for one in contracts if one["type"] == "layers")
    parts: list[str] = []
    top = 30
    for row in rows:
        for name in (name.strip() for name in re.split("[|:]", row)):
            parts.append(_box((_WIDE / 2 + 10, top), name))
            sentence = html.escape(_description(name))
            parts.append(f'<text class="description" x="{_WIDE + 30}" y="{top + 5}">{sentence}</text>')
            top += _HIGH + 6
        parts.append(f'<path d="M10 {top - 17} H890"/>')
        top += 14
    return _svg(900, top - 24, "The packages of oncekey and their purpose; imports point downwards", parts[:-1])


def _description(name: str) -> str:
    """The first sentence of a module's docstring."""
    folder = _ROOT / "src" / "oncekey"
    package = folder / name / "__init__.py"
    file = package if package.is_file() else folder / f"{name}.py"
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    if text is None:
        raise ValueError(f"{file.name} has no docstring")
    return text.splitlines()[0].partition(". ")[0].rstrip(".").replace("`", "")


def _svg(wide: int, high: int, title: str, parts: Iterable[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{_STYLE}\n</style>\n{_ARROW}\n{body}\n</svg>\n"
    )


def _box(at: Spot, name: str) -> str:
    left, top = at[0] - _WIDE / 2, at[1] - _HIGH / 2
    return (
        f'<rect x="{left:g}" y="{top:g}" width="{_WIDE}" height="{_HIGH}" rx="8"/>'
        f'<text x="{at[0]:g}" y="{at[1] + 5:g}">{html.escape(name)}</text>'
    )


def _move(source: State | None, to: State | None, label: str) -> str:
    start, end = _SPOTS[source], _SPOTS[to]
    if source == to:
        return _loop(start, label)
    wide, high = end[0] - start[0], end[1] - start[1]
    middle = ((start[0] + end[0]) / 2 - high * _BEND, (start[1] + end[1]) / 2 + wide * _BEND)
    first, last = _edge(start, middle), _edge(end, middle)
    top = ((first[0] + 2 * middle[0] + last[0]) / 4, (first[1] + 2 * middle[1] + last[1]) / 4)
    curve = f"M{_point(first)} Q{_point(middle)} {_point(last)}"
    return f'<path d="{curve}" marker-end="url(#end)"/>{_label(top, label)}'


def _loop(at: Spot, label: str) -> str:
    middle, bottom = at[0] - 36, at[1] + _HIGH / 2
    curve = f"M{middle - 18:g} {bottom:g} c-22 44 58 44 36 0"
    return f'<path d="{curve}" marker-end="url(#end)"/>{_label((middle, bottom + 48), label)}'


def _label(at: Spot, text: str) -> str:
    return f'<text class="label" x="{at[0]:.0f}" y="{at[1] + 4:.0f}">{html.escape(text)}</text>'


def _edge(box: Spot, towards: Spot) -> Spot:
    """Where a line from the middle of a box to somewhere else leaves the box."""
    wide, high = towards[0] - box[0], towards[1] - box[1]
    part = min((_WIDE / 2 + 3) / (abs(wide) or math.inf), (_HIGH / 2 + 3) / (abs(high) or 1e-9)) if wide else 0.0
    part = part or (_HIGH / 2 + 3) / abs(high)
    return box[0] + wide * part, box[1] + high * part


def _point(spot: Spot) -> str:
    return f"{spot[0]:.0f} {spot[1]:.0f}"
