"""The matrix at the end of a run: which scenarios of the shipped contract passed on which store.

A class of the contract says what it runs on, `matrix = "Redis cluster"`; a fixture of tests/contract tells it with each
test's report, with whether its driver blocks. So the matrix shows what has run, and nothing else. A store of `WANTED`
that is not in a whole run, or lacks a scenario, makes the run fail: there are no silent holes. Each of
the two suites has to show its part.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, assert_never

from harness.databases import DSN_VARIABLE
from harness.postgres_binaries import preferred_installation
from harness.selection import Suite, chosen

if TYPE_CHECKING:
    import pytest

WANTED: Final[dict[str, tuple[str, ...]]] = {
    "memory": ("blocking", "asyncio"),
    "SQLite": ("blocking", "asyncio"),
    "PostgreSQL 15": ("blocking", "asyncio"),
    "PostgreSQL 18": ("blocking", "asyncio"),
    "MariaDB": ("blocking",),
    "MySQL": ("asyncio",),
    "Redis": ("blocking",),
    "Redis cluster": ("asyncio",),
    "DynamoDB: dynalite": ("blocking", "asyncio"),
}
"""What a whole run has to show: each store, by the ways in which it is driven. Two servers that are
driven in the same way share the ways between them."""
WAYS: Final = ("blocking", "asyncio")
EMBEDDED: Final = ("memory", "SQLite")
PROPERTY: Final = "contract"
LACKS: Final = "contract lacks"


def families() -> dict[str, frozenset[str]]:
    """The scenarios of the contract, by the class that they are written in."""
    from oncekey_contract import StoreContract  # not before pytest knows whose assertions it explains

    found = {
        family.__name__: frozenset(name for name in vars(family) if name.startswith("test_"))
        for family in StoreContract.__mro__
    }
    return {name: scenarios for name, scenarios in found.items() if scenarios}


class Matrix:
    """What was reported."""

    def __init__(self) -> None:
        self.passed: dict[tuple[str, str], set[str]] = defaultdict(set)
        self.failed: dict[tuple[str, str], set[str]] = defaultdict(set)
        self.lacks: dict[str, set[str]] = defaultdict(set)

    def add(self, report: Any) -> None:
        """Take a test's report."""
        told = dict(report.user_properties)
        if PROPERTY not in told:
            return
        store, way = told[PROPERTY]
        scenario = report.nodeid.rpartition("::")[2].partition("[")[0]
        if report.failed:
            self.failed[store, way].add(scenario)
        elif report.when == "call" and report.passed:
            self.passed[store, way].add(scenario)
        self.lacks[store].update(told.get(LACKS, ()))

    @property
    def stores(self) -> list[str]:
        """Those that ran, the wanted ones first."""
        ran = {store for store, _ in (*self.passed, *self.failed)}
        return [*(one for one in WANTED if one in ran), *sorted(ran - set(WANTED))]

    def lines(self) -> Iterator[str]:
        """A line for each family of scenarios, a column for each store."""
        columns = self.stores
        widths = [max(len(store), 9) for store in columns]
        yield _row("", columns, widths)
        for family, scenarios in families().items():
            yield _row(family, [self._cell(store, scenarios) for store in columns], widths)
        for store in columns:
            if self.lacks[store]:
                yield f"{store} has no {', no '.join(sorted(self.lacks[store]))}: what needs it is no scenario"

    def _cell(self, store: str, scenarios: frozenset[str]) -> str:
        return " ".join(self._count(store, way, scenarios) for way in WAYS)

    def _count(self, store: str, way: str, scenarios: frozenset[str]) -> str:
        if (store, way) not in self.passed and (store, way) not in self.failed:
            return "-"
        whole = (self.passed[store, way] - self.failed[store, way]) & scenarios
        return f"{len(whole)}" if whole == scenarios else f"{len(whole)}/{len(scenarios)}"

    def holes(self, wanted: Mapping[str, tuple[str, ...]] = WANTED) -> Iterator[str]:
        """What a whole run has to show and this one does not."""
        every = frozenset().union(*families().values())
        for store, ways in wanted.items():
            for way in ways:
                missing = every - self.passed.get((store, way), set())
                if missing:
                    named = "all" if missing == every else ", ".join(sorted(missing)[:3])
                    yield f"{store}, {way}: {len(missing)} scenarios did not pass: {named}"


def _row(head: str, cells: Sequence[str], widths: Sequence[int]) -> str:
    line = f"{head:14}" + "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return line.rstrip()


def wanted_of(suite: Suite, postgres: str) -> dict[str, tuple[str, ...]]:
    """What a suite has to show, where the tests share a server of this PostgreSQL."""
    fast = (*EMBEDDED, postgres)
    match suite:
        case Suite.ALL:
            return WANTED
        case Suite.FAST:
            return dict.fromkeys(fast, WAYS)
        case Suite.MORE:
            return {store: ways for store, ways in WANTED.items() if store not in fast}
        case _:
            assert_never(suite)


def holes_of(matrix: Matrix, config: pytest.Config) -> list[str]:
    """What this run had to show and did not; nothing if it was only a part, or on a server of any version."""
    if not is_whole(config) or DSN_VARIABLE in os.environ:
        return []
    return list(matrix.holes(wanted_of(chosen(config), f"PostgreSQL {preferred_installation().major}")))


def is_whole(config: pytest.Config) -> bool:
    """Whether the whole suite was asked for, and nothing left out."""
    narrowed = config.getoption("keyword") or config.getoption("markexpr") or config.getoption("lf", default=False)
    return not narrowed and all(str(arg).rstrip("/") in {"tests", "tests/contract", "."} for arg in config.args)


def told_by(cls: type, world: Any) -> list[tuple[str, Any]]:
    """What a test of the contract reports with itself."""
    store = getattr(cls, "matrix", None)
    if store is None:
        return []  # another version of a store that is there already
    parts = ("outbox", "audit", "upkeep", "operate", "survey", "reconcile")
    lacking = [part for part in parts if getattr(world.store, part) is None]
    return [(PROPERTY, (store, world.way)), (LACKS, lacking)]
