"""The results as one self-contained page: plots are SVG written here, and nothing is fetched.

Positions in a plot are percentages of its width, so that it fits a phone as well as a wide screen while its text keeps
its size. Every plot is a list of rows: a label, a drawing, and the figure as text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from bench.reap import told
from bench.summary import Document, lines, noise, shown

GROUPS = {
    "plain": "Without business logic",
    "replay": "A replay",
    "local": "One row, PostgreSQL through asyncpg",
    "drivers": "One row, other drivers",
    "sqlite": "One row, SQLite",
    "effects": "Other effects, and steps",
}
PEERS = ("idemkit", "header", "dbos")
PLAIN = ("bare", "stock")
HEIGHT = 26
MIDDLE = HEIGHT / 2


def page(document: Document) -> str:
    """The whole page."""
    made, commits = document["made"], document["commits"]
    sources = f"commit {commits['now'][:12]}" + (" with changes" if commits["changed"] else "")
    if "before" in commits:
        sources += f", before: {commits['before'][:12]}"
    parts = [
        "<header><h1>What oncekey costs</h1>",
        f"<p>{escape(noise(document))}</p>",
        f'<p class="quiet">Measured {escape(made[:16].replace("T", " "))} UTC, {escape(sources)}.</p></header>',
        _summary(document),
        _ratios(document),
        _workers(document),
        _costs(document),
        _latencies(document),
        _counts(document),
        _about(document),
    ]
    return _FRAME.format(style=_STYLE, body="\n".join(parts))


def _summary(document: Document) -> str:
    found = lines(document)
    if not found:
        return ""
    rows = [
        f"<tr><td>{escape(line.words.replace('`', ''))}</td><td>{escape(figure)}</td><td>{escape(line.goal)}</td></tr>"
        for line, figure in found
    ]
    return _section(
        "At a glance",
        "The median, and the lowest and the highest round. A share of 1 is as cheap, or as fast, as the other.",
        f'<div class="wide"><table><tr><th></th><th>measured</th><th>goal</th></tr>{"".join(rows)}</table></div>',
    )


def _workers(document: Document) -> str:
    blocks = []
    for name, title in (("drain", "The outbox, messages per second"), ("drain_ordered", "The same, in lines")):
        drained = document["workers"].get(name)
        if drained is None:
            continue
        queues = drained["queues"]
        ticks = steps(max(one["rate"]["high"] for one in queues.values()))
        scale = Scale(0.0, ticks[-1], logarithmic=False)
        rows = []
        for queue, one in queues.items():
            rate, cpu = one["rate"], one["cpu_us"]
            kind = "ours" if queue.startswith("oncekey") else "peer"
            drawing = _bar(0.0, scale.at(rate["median"]), f"server {kind}")
            drawing += _whisker(scale, rate) + _dots(scale, rate["rounds"])
            beside = "" if cpu is None else f", {cpu['median']:.0f} µs"
            rows.append((queue, drawing, shown(rate, 0) + beside))
        blocks.append(f"<h3>{escape(title)}</h3>" + _plot(rows, scale, ticks, lambda tick: f"{tick:g}"))
    reaped = document["workers"].get("reap")
    if reaped is not None:
        facts = "".join(f"<li>{escape(line)}</li>" for line in told(reaped).splitlines())
        blocks.append(f'<h3>The reaper</h3><ul class="facts">{facts}</ul>')
    if not blocks:
        return ""
    return _section("Workers", "Queues were drained in turn; the reaper worked during a load.", "".join(blocks))


class Scale:
    """The position of a value, in percent of the width, on a logarithmic or linear scale."""

    def __init__(self, low: float, high: float, *, logarithmic: bool) -> None:
        self._turn = math.log if logarithmic else float
        self._low, self._high = self._turn(low), self._turn(high)

    def at(self, value: float) -> float:
        share = (self._turn(value) - self._low) / ((self._high - self._low) or 1.0)
        return round(100 * min(1.0, max(0.0, share)), 2)


def doublings(values: Sequence[float]) -> list[float]:
    """The powers of two around some values, at least from a half to two."""
    low = math.floor(math.log2(min(*values, 0.5)))
    high = math.ceil(math.log2(max(*values, 2.0)))
    return [2.0**power for power in range(low, high + 1)]


def steps(highest: float) -> list[float]:
    """Three to six round numbers from 0 to a value not below the highest."""
    size = 10 ** math.floor(math.log10(highest))
    for step in (size / 5, size / 2, size, 2 * size):
        if highest / step <= 5:
            break
    return [step * number for number in range(math.ceil(highest / step) + 1)]


def _plot(rows: Sequence[tuple[str, str, str]], scale: Scale, ticks: Sequence[float], wording: Any) -> str:
    """Rows of a label, a drawing and a figure, under one axis."""
    lines = "".join(
        f'<line class="grid" x1="{scale.at(tick)}%" x2="{scale.at(tick)}%" y1="0" y2="100%"/>' for tick in ticks
    )
    marks = "".join(
        f'<text x="{scale.at(tick)}%" y="12" text-anchor="{_anchor(scale.at(tick))}">{escape(wording(tick))}</text>'
        for tick in ticks
    )
    axis = f'<svg class="axis" height="16" aria-hidden="true">{marks}</svg>'
    shown_rows = [
        f'<li><span class="words">{escape(words)}</span><span class="figure">{escape(figure)}</span>'
        f'<svg height="{HEIGHT}" role="img" aria-label="{escape(words)}: {escape(figure)}">{lines}{drawing}</svg></li>'
        for words, drawing, figure in rows
    ]
    return f'<div class="plot">{axis}<ul>{"".join(shown_rows)}</ul></div>'


def _anchor(percent: float) -> str:
    return "start" if percent < 3 else "end" if percent > 97 else "middle"


def _bar(begin: float, end: float, kind: str) -> str:
    left, width = min(begin, end), abs(end - begin)
    return f'<rect class="{kind}" x="{left}%" width="{round(width, 2)}%" y="5" height="{HEIGHT - 10}" rx="2"/>'


def _whisker(scale: Scale, found: Mapping[str, float]) -> str:
    low, high = scale.at(found["low"]), scale.at(found["high"])
    ends = "".join(f'<line class="range" x1="{x}%" x2="{x}%" y1="8" y2="{HEIGHT - 8}"/>' for x in (low, high))
    return f'<line class="range" x1="{low}%" x2="{high}%" y1="{MIDDLE}" y2="{MIDDLE}"/>{ends}'


def _dots(scale: Scale, values: Sequence[float]) -> str:
    return "".join(f'<circle class="dot" cx="{scale.at(value)}%" cy="{MIDDLE}" r="2"/>' for value in values)


def _ratios(document: Document) -> str:
    ratios = list(document["ratios"].values())
    if not ratios:
        return ""
    blocks = []
    for first, title in (("cpu", "processor time"), ("rate", "requests per second")):
        chosen = [ratio for ratio in ratios if ratio["first"] == first and ratio[first] is not None]
        if not chosen:
            continue
        ticks = doublings([one for ratio in chosen for one in ratio[first]["rounds"]])
        scale = Scale(ticks[0], ticks[-1], logarithmic=True)
        rows = []
        for ratio in chosen:
            found, other = ratio[first], ratio["rate" if first == "cpu" else "cpu"]
            kind = "better" if found["median"] >= 1 else "worse"
            drawing = _bar(scale.at(1.0), scale.at(found["median"]), kind)
            drawing += _whisker(scale, found) + _dots(scale, found["rounds"])
            beside = "" if other is None else f", by {'rate' if first == 'cpu' else 'CPU'} {other['median']:.2f}"
            rows.append((ratio["title"], drawing, shown(found) + beside))
        blocks.append(f"<h3>By {title}</h3>" + _plot(rows, scale, ticks, _times))
    return _section(
        "Ratios",
        "Ratios within a round: 1 is as cheap, or as fast, as the variant after the slash; 0.5 costs twice as "
        "much. A bar is the median, a dot is a round, the line spans all rounds.",
        "".join(blocks),
    )


def _times(value: float) -> str:
    return f"{value:g}" if value >= 1 else f"1/{1 / value:g}"


def _costs(document: Document) -> str:
    known = {name: one for name, one in document["variants"].items() if one["cpu_us"] is not None}
    if not known:
        return ""
    blocks = []
    for group, title in GROUPS.items():
        members = {name: one for name, one in known.items() if one["group"] == group}
        if not members:
            continue
        # A variant that costs many times as much as all others would squeeze them into a corner.
        *_, second, highest = sorted([0.0, *(one["cpu_us"]["high"] for one in members.values())])
        ticks = steps(1.5 * second if 0 < 3 * second < highest else highest)
        scale = Scale(0.0, ticks[-1], logarithmic=False)
        rows = []
        for name, one in members.items():
            server, whole = one["server_us"]["median"], one["cpu_us"]
            drawing = _bar(0.0, scale.at(server), f"server {_kind(name)}")
            drawing += _bar(scale.at(server), scale.at(max(server, whole["median"])), f"store {_kind(name)}")
            if whole["median"] > ticks[-1]:
                drawing += f'<text class="beyond" x="99%" y="{MIDDLE + 5}" text-anchor="end">→</text>'
            else:
                drawing += _whisker(scale, whole)
            rows.append((one["title"], drawing, f"{whole['median']:.0f} µs"))
        blocks.append(f"<h3>{escape(title)}</h3>" + _plot(rows, scale, ticks, lambda tick: f"{tick:g} µs"))
    legend = (
        '<p class="legend"><i class="key ours"></i>oncekey <i class="key plain"></i>unprotected '
        '<i class="key peer"></i>other packages; strong: the server process, faint: PostgreSQL and Redis</p>'
    )
    return _section(
        "Processor time of one request",
        "Median, and the range of all rounds; each plot has its own scale.",
        legend + "".join(blocks),
    )


def _kind(name: str) -> str:
    return "peer" if name.startswith(PEERS) else "plain" if name.startswith(PLAIN) else "ours"


def _latencies(document: Document) -> str:
    variants = document["variants"]
    if not variants:
        return ""
    values = [one[which]["median"] for one in variants.values() for which in ("p50_ms", "p99_ms")]
    ticks = [tick for tick in doublings(values) if min(values) / 2 < tick < max(values) * 2]
    scale = Scale(ticks[0], ticks[-1], logarithmic=True)
    ticks = ticks[:: math.ceil(len(ticks) / 6)]
    rows = []
    for name, one in variants.items():
        half, most = one["p50_ms"]["median"], one["p99_ms"]["median"]
        drawing = _bar(scale.at(half), scale.at(most), f"store {_kind(name)}")
        drawing += f'<circle class="server {_kind(name)}" cx="{scale.at(half)}%" cy="{MIDDLE}" r="5"/>'
        rows.append((one["title"], drawing, f"{half:.1f} / {most:.1f} ms, {one['rate']['median']:.0f}/s"))
    about = (
        f"With {document['settings']['connections']} concurrent requests: from the median (the dot) to the 99th "
        "percentile, medians of all rounds. With fewer concurrent requests, waits are shorter."
    )
    return _section("Waits", about, _plot(rows, scale, ticks, lambda tick: f"{tick:g} ms"))


def _counts(document: Document) -> str:
    rows = [
        f"<tr><td>{escape(one['title'])}</td><td>{one['counts']['messages']:.1f}</td>"
        f"<td>{one['counts']['transactions']:.1f}</td><td>{one['counts']['wal_bytes']:.0f}</td></tr>"
        for one in document["variants"].values()
        if one["counts"] is not None
    ]
    if not rows:
        return ""
    head = "<tr><th>request</th><th>messages</th><th>commits</th><th>WAL bytes</th></tr>"
    return _section(
        "Work of PostgreSQL",
        "Per request, counted one by one through a relay. A message is everything sent before the next reply; "
        "resetting a connection counts as one, although no request waits for it. Commits are those that wrote.",
        f'<div class="wide"><table>{head}{"".join(rows)}</table></div>',
    )


def _about(document: Document) -> str:
    plan, machine = document["settings"], document["machine"]
    words = " ".join(f"--{name} {plan[name]:g}" for name in ("rounds", "turns", "seconds", "connections"))
    missing = "".join(
        f"<li>{escape(name)} was not measured: {escape(reason)}</li>" for name, reason in document["missing"].items()
    )
    packages = ", ".join(f"{name} {found}" for name, found in machine["packages"].items())
    return _section(
        "Again, please",
        "Rates depend on this machine and its load. Ratios depend on them less: see bench/README.md.",
        f'<pre>make bench ARGS="{escape(words)}"\nmake bench ARGS="--only local,replay --rounds 3"\n'
        'make bench ARGS="--baseline HEAD~20 --without-peers"\nmake bench ARGS="--only drain,reap --full"</pre>'
        f'<ul class="facts"><li>{escape(str(machine["processor"]))}, {escape(machine["system"])}</li>'
        f"<li>{escape(packages)}</li>"
        f"<li>load {machine['load_before']} before, {machine['load_after']} after</li>{missing}</ul>",
    )


def _section(title: str, about: str, inner: str) -> str:
    return f'<section><h2>{escape(title)}</h2><p class="quiet">{escape(about)}</p>{inner}</section>'


_STYLE = Path(__file__).with_name("page.css").read_text()

_FRAME = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>What oncekey costs</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
