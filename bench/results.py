"""The results of a run as one document, and as the tables that are made of it: for the terminal and for the README."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from bench import clocks
from bench.figures import BenchError, Figures, Range, by_cpu, by_rate
from bench.rounds import Measured, Plan
from bench.variants import By

Document = dict[str, Any]
PACKAGES = ("asyncpg", "fastapi", "psycopg", "sqlalchemy", "starlette", "uvicorn", "uvloop")

BEGIN, END = "<!-- figures: python -m bench --readme -->", "<!-- /figures -->"
README_ROWS = (
    ("local/stock", "A `LOCAL` write with a new key, to the same write on asyncpg's own pool without one"),
    ("sqlalchemy/stock", "The same in SQLAlchemy's session, to its own session without a key"),
    ("local/idemkit", "A `LOCAL` write with a new key, to the same write behind idemkit on PostgreSQL"),
    ("replay/bare", "A replay, to a route that does nothing"),
    ("replay-cached/bare", "A replay from the cache of answers, to a route that does nothing"),
    ("idemkit-replay/bare", "idemkit's replay, to a route that does nothing"),
    ("sqlite/unkeyed", "SQLite: a write with a new key, to the same write without one"),
    ("passing/bare", "A route that is not protected, behind the middleware, to the same without it"),
    ("phased/dbos", "`PHASED` with two phases and a call, to a DBOS workflow with as many steps"),
)


def document(
    measured: Measured, plan: Plan, machine: Mapping[str, Any], commits: Mapping[str, Any], missing: Mapping[str, str]
) -> Document:
    """All figures of all rounds. Nothing in it names a host, a user or a folder."""
    variants: dict[str, Any] = {}
    for variant in measured.chosen.variants:
        found = measured.rounds[variant.name]
        counts = measured.counts.get(variant.name)
        variants[variant.name] = {
            "title": variant.title,
            "group": variant.group,
            "sends": variant.sends.value,
            **{name: _range(found, name) for name in ("rate", "p50_ms", "p99_ms", "server_us", "store_us", "cpu_us")},
            "counts": None if counts is None else asdict(counts),
            "rounds": [asdict(one) for one in found],
        }
    ratios: dict[str, Any] = {}
    for ratio in measured.chosen.ratios:
        ours, base = measured.rounds[ratio.ours], measured.rounds[ratio.base]
        shares = {By.CPU.value: by_cpu(ours, base), By.RATE.value: by_rate(ours, base)}
        ratios[ratio.name] = {
            "title": ratio.title,
            "ours": ratio.ours,
            "base": ratio.base,
            "first": ratio.by.value,
            **{name: None if one is None else {**asdict(Range.of(one)), "rounds": one} for name, one in shares.items()},
        }
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "commits": dict(commits),
        "settings": {**asdict(plan), "rounds": max(len(found) for found in measured.rounds.values())},
        "machine": {**machine, **_noise(measured.rounds)},
        "missing": {**missing, **measured.missing},
        "ratios": ratios,
        "variants": variants,
    }


def machine(postgres: str) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "cores": os.cpu_count(),
        "processor": clocks.processor(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "postgresql": postgres,
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "load_before": _load(),
    }


def _noise(rounds: Mapping[str, Sequence[Figures]]) -> dict[str, Any]:
    """How busy others were, and how far the rounds of the same variant lay apart."""
    foreign = [one.foreign_cores for found in rounds.values() for one in found if one.foreign_cores is not None]
    spreads = []
    for found in rounds.values():
        costs = [one.cpu_us for one in found if one.cpu_us]
        if len(costs) > 1:
            spreads.append((max(costs) - min(costs)) / statistics.median(costs))
    return {
        "load_after": _load(),
        "foreign_cores": asdict(Range.of(foreign)) if foreign else None,
        "cpu_spread": statistics.median(spreads) if spreads else None,
    }


def _range(found: Sequence[Figures], name: str) -> dict[str, float] | None:
    values = [getattr(one, name) for one in found]
    return None if None in values else asdict(Range.of(values))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _load() -> float | None:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def shown(found: Mapping[str, float] | None, digits: int = 2) -> str:
    """A range for people: the median, and the lowest and the highest round in brackets."""
    if found is None:
        return "?"
    low, high = f"{found['low']:.{digits}f}", f"{found['high']:.{digits}f}"
    return f"{found['median']:.{digits}f} ({low}-{high})"


def noise_line(document_: Document) -> str:
    """One sentence about the machine."""
    machine_ = document_["machine"]
    foreign, spread = machine_["foreign_cores"], machine_["cpu_spread"]
    said = f"{machine_['cores']} cores, Python {machine_['python']}, PostgreSQL {machine_['postgresql']}"
    if foreign is not None:
        said += f"; others kept {shown(foreign)} cores busy meanwhile"
    if spread is not None:
        said += f"; the cost of a request differed by {spread:.0%} between rounds"
    return said + "."


def tables(document_: Document) -> str:
    """Everything for the terminal: costs first, then ratios."""
    head = f"{'variant':<24} {'requests/s':>20} {'CPU us':>7} {'server':>7} {'store':>7} {'p50 ms':>7} {'p99 ms':>7}"
    lines = [f"{head} {'messages':>9} {'commits':>8} {'WAL B':>7}"]
    for name, variant in document_["variants"].items():
        counts = variant["counts"] or {}
        counted = (
            f"{counts['messages']:>9.1f} {counts['transactions']:>8.1f} {counts['wal_bytes']:>7.0f}" if counts else ""
        )
        costs = " ".join(_median(variant[key], 7, 0) for key in ("cpu_us", "server_us", "store_us"))
        waits = " ".join(_median(variant[key], 7, 1) for key in ("p50_ms", "p99_ms"))
        lines.append(f"{name:<24} {shown(variant['rate'], 0):>20} {costs} {waits} {counted}".rstrip())
    lines += ["", f"{'ratio (more is better; * is the one that counts)':<62} {'by CPU':>19} {'by requests/s':>19}"]
    for ratio in document_["ratios"].values():
        marks = {name: "*" if ratio["first"] == name else " " for name in ("cpu", "rate")}
        by = " ".join(f"{shown(ratio[name]) + marks[name]:>19}" for name in ("cpu", "rate"))
        lines.append(f"{ratio['title']:<62} {by}")
    for name, reason in document_["missing"].items():
        lines += ["", f"missing: {name}: {reason}"]
    return "\n".join(lines)


def _median(found: Mapping[str, float] | None, width: int, digits: int) -> str:
    return f"{'?':>{width}}" if found is None else f"{found['median']:>{width}.{digits}f}"


def readme(document_: Document) -> str:
    """The figures as the README has them, between their markers."""
    lines = [BEGIN, "", "| | processor time | requests per second |", "| --- | --- | --- |"]
    for name, title in README_ROWS:
        ratio = document_["ratios"].get(name)
        if ratio is not None:
            lines.append(f"| {title} | {shown(ratio['cpu'])} | {shown(ratio['rate'])} |")
    plan = document_["settings"]
    lines += [
        "",
        "1.00 is as cheap, or as fast, as what it is compared with; 0.50 costs twice as much. The median of",
        f"{plan['rounds']} rounds (lowest-highest), {plan['connections']} connections, one row as the business.",
        noise_line(document_),
        "",
        END,
    ]
    return "\n".join(lines)


def between_markers(text: str) -> str:
    """The figures that a README holds now, with their markers."""
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 or end < begin:
        raise BenchError(f"the README has no figures between {BEGIN} and {END}")
    return text[begin : end + len(END)]
