"""The walk, one move at a time on one database: `harness.mutating` tries mutants of SQL statements with it."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from contract.test_walk import postgres_world, sqlite_world
from oncekey.core.flow import Statement
from oncekey.testing.claims import START
from oncekey_contract.proving import unproved
from oncekey_contract.walking import MOVES, cell_of, misjudged, records

KINDS = tuple(records(START))
each_move = pytest.mark.parametrize("move", MOVES, ids=lambda move: move.name.replace(" ", "_"))


@pytest.fixture(scope="session", params=["sqlite", "psycopg"])
def worlds(request, tmp_path_factory):
    """An empty store, and one in which records of every kind were planted: every try is taken back."""
    with ExitStack() as stack:
        if request.param == "sqlite":
            folder = tmp_path_factory.mktemp("moves")
            bare, full = (stack.enter_context(sqlite_world(folder / name)) for name in ("bare.db", "full.db"))
        else:
            server = request.getfixturevalue("postgres_server")
            bare, full = (stack.enter_context(postgres_world(server)) for _ in range(2))
        full.plant([cell_of(record) for record in KINDS])
        yield bare, full


@pytest.fixture
def bare(worlds):
    """The empty store: a statement that lost a guard reads few rows in it."""
    world, _ = worlds
    yield world
    tables = (
        ("oncekey.record", "oncekey.work") if world.store._statements.has("diagnostic_rows") else ("oncekey_record",)
    )

    def emptied():
        for table in tables:
            yield Statement("empty", f"DELETE FROM {table}")

    world._share(emptied, True)


@each_move
def test_proofs(bare, move):
    assert not unproved(bare, move, KINDS)


@each_move
def test_guards(worlds, move):
    _, full = worlds
    assert not misjudged(full, move, KINDS[::11])


@each_move
def test_all_guards(worlds, move):
    """It is only run for mutants that a part of the records does not notice."""
    _, full = worlds
    assert not misjudged(full, move, KINDS)
