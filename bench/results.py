"""The results of a run as one document, and as tables for the terminal."""

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
from bench.figures import Figures, Range, added_us, by_cpu, by_rate
from bench.rounds import Measured, Plan
from bench.summary import Document, shown
from bench.variants import By, Chosen

PACKAGES = ("asyncpg", "fastapi", "psycopg", "sqlalchemy", "starlette", "uvicorn", "uvloop")


def document(
    measured: Measured | None,
    plan: Plan,
    machine: Mapping[str, Any],
    commits: Mapping[str, Any],
    missing: Mapping[str, str],
    *,
    workers: Mapping[str, Any],
) -> Document:
    """All figures of all rounds, without names of hosts, users and folders."""
    measured = measured or Measured(Chosen((), (), ()), {}, {}, {})
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
        shares = {
            By.CPU.value: by_cpu(ours, base),
            By.RATE.value: by_rate(ours, base),
            "added_p50_us": added_us(ours, base, "p50_ms"),
            "added_p99_us": added_us(ours, base, "p99_ms"),
        }
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
        "settings": {**asdict(plan), "rounds": max((len(found) for found in measured.rounds.values()), default=0)},
        "machine": {**machine, **_noise(measured.rounds)},
        "missing": {**missing, **measured.missing},
        "ratios": ratios,
        "variants": variants,
        "workers": dict(workers),
    }


def machine(postgres: str) -> dict[str, Any]:
    """The machine and the versions, on which the figures depend."""
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
    """How busy other programs were, and how much the rounds of the same variant differ."""
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


def tables(document_: Document) -> str:
    """All tables for the terminal: costs first, then ratios."""
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
    if not document_["variants"]:
        return ""
    lines += ["", f"{'ratio (more is better; * is the one that counts)':<62} {'by CPU':>19} {'by requests/s':>19}"]
    for ratio in document_["ratios"].values():
        marks = {name: "*" if ratio["first"] == name else " " for name in ("cpu", "rate")}
        by = " ".join(f"{shown(ratio[name]) + marks[name]:>19}" for name in ("cpu", "rate"))
        lines.append(f"{ratio['title']:<62} {by}")
    lines += ["", f"{'added to a request, in microseconds':<62} {'median':>19} {'p99':>19}"]
    for ratio in document_["ratios"].values():
        added = " ".join(f"{shown(ratio[name], 0):>19}" for name in ("added_p50_us", "added_p99_us"))
        lines.append(f"{ratio['title']:<62} {added}")
    for name, reason in document_["missing"].items():
        lines += ["", f"missing: {name}: {reason}"]
    return "\n".join(lines)


def _median(found: Mapping[str, float] | None, width: int, digits: int) -> str:
    return f"{'?':>{width}}" if found is None else f"{found['median']:>{width}.{digits}f}"
