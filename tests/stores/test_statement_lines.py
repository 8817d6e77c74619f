"""Every SQL statement has a line that says what it is for, the same in each dialect, and no such line is sent."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from oncekey.stores.moves import MOVES
from oncekey.stores.sql import FILES, ONE_ROW
from oncekey.stores.statements import load

ROOT = Path(__file__).resolve().parents[2]
SQL = sorted(
    path
    for path in (*ROOT.glob("src/**/*.sql"), *ROOT.glob("packages/*/src/**/*.sql"))
    if "migrations" not in path.parts
)
SENTENCE = re.compile(r"-- [A-Z][^.]*\.")
LONGEST_LINE = 120
WRITTEN = {"mark": "mark_expired", "purge": "purge_expired"}
"""Moves of a store of cells whose statement in SQL moves a batch."""


def statements(text: str) -> dict[str, str]:
    """The line after the title of each statement."""
    return dict(re.findall(r"^-- name: (\w+)\n(.*)", text, re.MULTILINE))


def purposes() -> dict[tuple[str, str], set[str]]:
    """What is said of each statement, by its file and name, in all dialects.

    The stores have files of the same names; the demo and the torture run have a file for each database.
    """
    found = defaultdict(set)
    for path in SQL:
        family = path.name if {"stores", "databases"} & set(path.parts) else str(path.parent.relative_to(ROOT))
        for name, line in statements(path.read_text("utf-8")).items():
            found[family, name].add(line)
    return found


@pytest.mark.parametrize("path", SQL, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_sql_statement_has_a_description(path: Path) -> None:
    lines = statements(path.read_text("utf-8"))
    wrong = {name: line for name, line in lines.items() if not SENTENCE.fullmatch(line) or len(line) > LONGEST_LINE}
    assert wrong == {}


def test_missing_description_is_detected() -> None:
    assert statements("-- name: find\nSELECT 1;\n\n-- name: lost\n-- Read it.\nSELECT 2;\n") == {
        "find": "SELECT 1;",
        "lost": "-- Read it.",
    }
    assert not SENTENCE.fullmatch("SELECT 1;")


def test_descriptions_match_in_every_dialect() -> None:
    assert len(purposes()) > 200
    assert {named: lines for named, lines in purposes().items() if len(lines) > 1} == {}


def test_descriptions_cite_the_transition_rows() -> None:
    said = {name: line for (_, name), lines in purposes().items() for line in lines}
    cited = {name: {int(one) for one in re.findall(r"\d+", said[WRITTEN.get(name, name)])} for name in MOVES}
    assert cited == {name: {row.number for row in move.rows} for name, move in MOVES.items()}


@pytest.mark.parametrize("store", ["postgres", "sqlite", "mariadb"])
def test_descriptions_are_not_sent_to_the_server(store: str) -> None:
    package = f"oncekey.databases.{store}"
    shared = None if store == "postgres" else "oncekey.stores.onerow"
    loaded = load(package, *(FILES if shared is None else ONE_ROW), shared=shared)
    lines = {line for lines in purposes().values() for line in lines}
    assert [name for name, text in loaded.items() if any(line in text for line in lines)] == []
