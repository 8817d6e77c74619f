"""The most important figures in one table: for the terminal, the report, the sizing page and the README.

Each line has a function that reads its figure from the results, and a goal. Lines that a run did not measure are
omitted. Nothing is asserted: on a busy machine a figure may miss its goal, so the noise of the run is shown, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.figures import BenchError

Document = dict[str, Any]
Found = Mapping[str, float]

KEPT = Path(__file__).with_name("kept.json")
"""The figures of the run that the README and the sizing page show."""
BEGIN, END = "<!-- figures: python -m bench --readme -->", "<!-- /figures -->"


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of the summary."""

    words: str
    where: Callable[[Document], Found | None]
    goal: str
    digits: int = 2
    unit: str = ""
    told: bool = True
    """Whether the documentation shows it; a comparison with an older commit is for the terminal only."""
    headline: bool = False
    """Whether the README shows it, too."""

    def figure(self, document: Document) -> str | None:
        """The median with the lowest and the highest round, if it was measured."""
        found = self.where(document)
        return None if found is None else shown(found, self.digits) + self.unit


def _ratio(name: str, by: str) -> Callable[[Document], Found | None]:
    return lambda document: (document["ratios"].get(name) or {}).get(by)


def _rate(variant: str) -> Callable[[Document], Found | None]:
    """Absolute requests per second: they depend on the machine, which is named below the figures."""
    return lambda document: rates(document).get(variant)


def _of_before(name: str) -> Callable[[Document], Found | None]:
    """The cost of a request as a share of its cost in the baseline."""

    def found(document: Document) -> Found | None:
        ratio = _ratio(f"{name}/before", "cpu")(document)
        if ratio is None:
            return None
        return {"median": 1 / ratio["median"], "low": 1 / ratio["high"], "high": 1 / ratio["low"]}

    return found


def _drained(which: str, queue: str) -> Callable[[Document], Found | None]:
    def found(document: Document) -> Found | None:
        drained = document["workers"].get(which)
        return None if drained is None else drained["queues"][queue]["rate"]

    return found


def _reaped(name: str) -> Callable[[Document], Found | None]:
    def found(document: Document) -> Found | None:
        reaped = document["workers"].get("reap")
        if reaped is None:
            return None
        if name == "p99_ratio" and reaped["p99_ratios"] is not None:
            return {**reaped["p99_ratios"], "median": reaped["p99_ratio"]}
        return dict.fromkeys(("median", "low", "high"), float(reaped[name]))

    return found


ABSOLUTE = ("local", "replay")
"""The variants whose absolute rates are shown, in addition to ratios."""

LINES = (
    Line("`LOCAL` writes with a new key per second, one server process", _rate("local"), "", 0),
    Line("Replays per second, one server process", _rate("replay"), "", 0),
    Line(
        "`LOCAL` write with a new key, against the same write on asyncpg's own pool: requests per second of processor "
        "time",
        _ratio("local/stock", "cpu"),
        "0.70 or more",
        headline=True,
    ),
    Line(
        "`LOCAL` write with a new key: added to the median response time of the same write",
        _ratio("local/stock", "added_p50_us"),
        "",
        0,
        " us",
    ),
    Line(
        "`LOCAL` write with a new key: added to its 99th percentile",
        _ratio("local/stock", "added_p99_us"),
        "",
        0,
        " us",
    ),
    Line(
        "`LOCAL` write with a new key, against the same write with idemkit on PostgreSQL: requests per second",
        _ratio("local/idemkit", "rate"),
        "1.5 or more",
    ),
    Line(
        "Replay, against a route that does nothing: requests per second",
        _ratio("replay/bare", "rate"),
        "0.50 or more",
        headline=True,
    ),
    Line(
        "Replay from the response cache, against a route that does nothing: requests per second",
        _ratio("replay-cached/bare", "rate"),
        "0.65 or more",
    ),
    Line(
        "Replay by idemkit, against a route that does nothing: requests per second",
        _ratio("idemkit-replay/bare", "rate"),
        "",
    ),
    Line(
        "SQLite: write with a new key, against the same write without a key: requests per second",
        _ratio("sqlite/unkeyed", "rate"),
        "0.75 or more",
    ),
    Line(
        "Unprotected route behind the middleware, against the same route without it: processor time",
        _ratio("passing/bare", "cpu"),
        "",
    ),
    Line(
        "`PHASED` with two phases and a call, against a DBOS workflow with as many steps: requests per second",
        _ratio("phased/dbos", "rate"),
        "",
        headline=True,
    ),
    Line("`LOCAL`, new key: processor time, of that before", _of_before("local"), "", told=False),
    Line("`INLINE`, new key: processor time, of that before", _of_before("inline"), "0.70 or less", told=False),
    Line("`PHASED`, new key: processor time, of that before", _of_before("phased"), "0.70 or less", told=False),
    Line(
        "Outbox messages per second, delivered by two workers",
        _drained("drain", "oncekey asyncpg"),
        "15000 or more",
        0,
        headline=True,
    ),
    Line(
        "Outbox messages per second in 200 ordered queues, delivered by two workers",
        _drained("drain_ordered", "oncekey asyncpg"),
        "6000 or more",
        0,
    ),
    Line(
        "Deletion of a million expired records, with audit entries, under load",
        _reaped("million_s"),
        "60 s or less",
        0,
        " s",
    ),
    Line("99th percentile of that load, against the same load without deletion", _reaped("p99_ratio"), "1.3 or less"),
)


def rates(document: Document) -> Mapping[str, Found]:
    """Absolute requests per second, from a run or from the stored part of one."""
    if "rates" in document:
        return document["rates"]
    measured = document.get("variants", {})
    return {name: measured[name]["rate"] for name in ABSOLUTE if name in measured}


def shown(found: Found | None, digits: int = 2) -> str:
    """A range as text: the median, and the lowest and the highest round in brackets."""
    if found is None:
        return "?"
    low, median, high = (f"{found[name]:.{digits}f}" for name in ("low", "median", "high"))
    return median if low == high else f"{median} ({low}-{high})"


def lines(document: Document) -> list[tuple[Line, str]]:
    """The lines that a run has measured."""
    found = [(line, line.figure(document)) for line in LINES]
    return [(line, figure) for line, figure in found if figure is not None]


def table(document: Document) -> str:
    """The summary for the terminal."""
    rows = [
        f"{line.words.replace('`', ''):<100} {figure:>22}  {line.goal}".rstrip() for line, figure in lines(document)
    ]
    return "\n".join([f"{'':<100} {'measured':>22}  goal", *rows]) if rows else ""


def noise(document: Document) -> str:
    """One sentence about the machine and how noisy the run was."""
    machine = document["machine"]
    foreign, spread, twin = machine["foreign_cores"], machine["cpu_spread"], document["ratios"].get("again/stock")
    said = f"{machine['cores']} cores, Python {machine['python']}, PostgreSQL {machine['postgresql']}"
    if foreign is not None:
        said += f"; other programs used {shown(foreign)} cores"
    if spread is not None:
        said += f"; the cost of a request varied by {spread:.0%} between rounds"
    if twin is not None and twin["cpu"] is not None:
        said += f"; the same request measured twice: {shown(twin['cpu'])}"
    return said + "."


def kept(document: Document) -> Document:
    """The part of a run that the repository stores: enough for the published figures, without every round."""
    return {
        "made": document["made"],
        "commits": document["commits"],
        "settings": document["settings"],
        "machine": document["machine"],
        "missing": document["missing"],
        "rates": _without_rounds(rates(document)),
        "ratios": {name: _without_rounds(ratio) for name, ratio in document["ratios"].items()},
        "workers": _without_rounds(document["workers"]),
    }


def _without_rounds(found: Any) -> Any:
    if not isinstance(found, dict):
        return round(found, 4) if isinstance(found, float) else found
    # In a plan `rounds` is a number, in a figure a list.
    return {
        name: _without_rounds(one) for name, one in found.items() if not (name == "rounds" and isinstance(one, list))
    }


def readme(document: Document) -> str:
    """The four figures of the README, between their markers."""
    return _marked(document, [(line, figure) for line, figure in lines(document) if line.headline])


def sizing(document: Document) -> str:
    """All figures of the sizing page, between their markers."""
    return _marked(document, [(line, figure) for line, figure in lines(document) if line.told])


PUBLISHED: Mapping[str, Callable[[Document], str]] = {"README.md": readme, "docs/howto/sizing.md": sizing}
"""The pages with figures of the stored run."""


def _marked(document: Document, found: list[tuple[Line, str]]) -> str:
    rows = [f"| {line.words} | {figure} |" for line, figure in found]
    plan = document["settings"]
    rounds, connections = plan["rounds"], plan["connections"]
    about = f"Medians of {rounds} rounds (lowest-highest), {connections} connections, one row written."
    return "\n".join(
        [
            BEGIN,
            "",
            "| | |",
            "| --- | --- |",
            *rows,
            "",
            "A ratio of 1.00 means equal cost or speed; 0.50 means twice the cost, or half the speed.",
            about,
            noise(document),
            "",
            END,
        ]
    )


def between_markers(text: str, first: str = BEGIN, last: str = END) -> str:
    """The current figures of a page, with their markers."""
    begin, end = text.find(first), text.find(last)
    if begin < 0 or end < begin:
        raise BenchError(f"the page has no figures between {first} and {last}")
    return text[begin : end + len(last)]
