"""The walk, one move at a time on one database: `harness.mutating` tries mutants of SQL statements with it."""

from __future__ import annotations

import pytest

from contract.test_walk import postgres_world, sqlite_world
from oncekey.testing.contract.proving import unproved
from oncekey.testing.contract.walking import MOVES, cell_of, misjudged, records

each_move = pytest.mark.parametrize("move", MOVES, ids=lambda move: move.name.replace(" ", "_"))


@pytest.fixture(scope="session", params=["sqlite", "psycopg"])
def walked(request, tmp_path_factory):
    """A store, and the records that were planted in it: every try is taken back."""
    if request.param == "sqlite":
        made = sqlite_world(tmp_path_factory.mktemp("moves") / "keys.db")
    else:
        made = postgres_world(request.getfixturevalue("postgres_server"))
    with made as world:
        kinds = tuple(records(world.clock.now))
        world.plant([cell_of(record) for record in kinds])
        yield world, kinds


@each_move
def test_proofs(walked, move):
    world, kinds = walked
    assert not unproved(world, move, kinds)


@each_move
def test_guards(walked, move):
    world, kinds = walked
    for some in (kinds[::11], kinds):  # the first few mostly notice a mutant, and then the others are not tried
        assert not misjudged(world, move, some)
