"""The matrix shows what ran, and a whole run with a hole has not passed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from harness.matrix import LACKS, PROPERTY, WANTED, WAYS, Matrix, families, is_whole, wanted_of
from harness.selection import Suite

EVERY = sorted(name for scenarios in families().values() for name in scenarios)


def report(store, way, scenario, *, passed=True, lacks=()):
    return SimpleNamespace(
        user_properties=[(PROPERTY, (store, way)), (LACKS, list(lacks))],
        nodeid=f"tests/contract/test_x.py::TestX::{scenario}[a]",
        when="call",
        passed=passed,
        failed=not passed,
    )


@pytest.fixture
def whole():
    matrix = Matrix()
    for store, ways in WANTED.items():
        for way in ways:
            for scenario in EVERY:
                matrix.add(report(store, way, scenario))
    return matrix


def test_a_whole_run_has_no_holes(whole):
    assert list(whole.holes()) == []
    head, *lines = whole.lines()
    assert head.split("  ")[-1] == list(WANTED)[-1]
    assert [line.split()[0] for line in lines] == list(families())
    size = str(len(families()["Claiming"]))
    assert lines[0].split()[1:] == [size if way in ways else "-" for ways in WANTED.values() for way in WAYS]


def test_a_store_that_did_not_run_is_a_hole():
    matrix = Matrix()
    matrix.add(report("memory", "blocking", EVERY[0]))
    holes = list(matrix.holes())
    assert f"memory, blocking: {len(EVERY) - 1} scenarios did not pass" in holes[0]
    assert holes[-1].endswith(f"{len(EVERY)} scenarios did not pass: all")


@pytest.mark.parametrize("postgres", ["PostgreSQL 15", "PostgreSQL 18"])
def test_both_suites_together_cover_every_store(postgres):
    fast, more = wanted_of(Suite.FAST, postgres), wanted_of(Suite.MORE, postgres)
    assert list(fast) == ["memory", "SQLite", postgres]
    assert {**fast, **more} == wanted_of(Suite.ALL, postgres) == WANTED
    assert not set(fast) & set(more)


def test_a_suite_is_checked_only_for_its_stores(whole):
    assert list(whole.holes(wanted_of(Suite.FAST, "PostgreSQL 18"))) == []
    assert next(Matrix().holes(wanted_of(Suite.MORE, "PostgreSQL 18"))).startswith("PostgreSQL 15, blocking")


def test_a_scenario_that_failed_once_does_not_count(whole):
    whole.add(report("DynamoDB: dynalite", "asyncio", "test_a_line", passed=False))
    name = min(families()["Claiming"])
    whole.add(report("DynamoDB: dynalite", "asyncio", name, passed=False))
    size = len(families()["Claiming"])
    assert f"{size} {size - 1}/{size}" in next(line for line in whole.lines() if line.startswith("Claiming"))


def test_an_additional_store_gets_its_own_column(whole):
    whole.add(report("a new one", "blocking", EVERY[0], lacks=["outbox"]))
    assert whole.stores == [*WANTED, "a new one"]
    assert list(whole.lines())[-1] == "a new one has no outbox: what needs it is no scenario"


@pytest.mark.parametrize(
    ("args", "keyword", "whole"),
    [(["tests"], "", True), (["tests/contract/"], "", True), (["tests"], "redis", False), (["tests/cli"], "", False)],
)
def test_only_a_complete_run_is_checked_for_holes(args, keyword, whole):
    options = {"keyword": keyword, "markexpr": "", "lf": False}
    config = SimpleNamespace(args=args, getoption=lambda name, default=None: options.get(name, default))
    assert is_whole(config) is whole
