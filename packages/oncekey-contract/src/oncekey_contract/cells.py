"""The contract of cells: the guarantees of `look`, `swap` and `page`.

`StoreContract` tests a whole store that consists of these cells. This contract tests what happens between a look and
a swap, which the other cannot observe. Provide a fixture `cells`, and run pytest:

    class TestMyCells(CellsContract):
        @pytest.fixture
        def cells(self, my_empty_database):
            yield MyCells(my_empty_database)
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from oncekey.cells import Cells, Index, Place, Seen, indexed, place_of
from oncekey.core.model import Effects, State
from oncekey.testing.claims import START
from oncekey_contract.walking import cell_of, records

if TYPE_CHECKING:
    from collections.abc import Mapping

BYTES = bytes(range(256)) + b"\x00"


def _cells(count: int = 1, state: State = State.IN_PROGRESS) -> list[dict[str, Any]]:
    """Rows of different keys, each with every column that a phased record can use."""
    phased = [one for one in records(START) if one.state is state and one.effects is Effects.PHASED]
    phased.sort(key=lambda one: one.intent is None)
    odd = {"seed": BYTES, "request": BYTES, "operation": "é \u2028 'x'", "ttl": 1 << 62}
    return [
        {**cell_of(one), **odd, "created_at": number, "expires_at": number} for number, one in enumerate(phased[:count])
    ]


def _seen(cell: Mapping[str, Any]) -> Seen:
    return Seen(cell["incarnation"], cell["version"])


def _put(cells: Cells, seen: Seen | None, cell: Mapping[str, Any]) -> bool:
    return cells.swap(cell["scope"], cell["key"], seen, cell, None)


def _look(cells: Cells, cell: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return cells.look(cell["scope"], cell["key"])[0]


def _all(cells: Cells, index: Index) -> list[Mapping[str, Any]]:
    """All cells of an index, read three at a time."""
    after: Place = (-1, "", "")
    found: list[Mapping[str, Any]] = []
    while True:
        page, _ = cells.page(index, after, 3)
        assert len(page) <= 3  # noqa: PLR2004  (as asked)
        found += page
        if len(page) < 3:  # noqa: PLR2004
            return found
        after = place_of(page[-1])


def _swap_at_once(cells: Cells, seen: Seen | None, cell: Mapping[str, Any], size: int = 8) -> list[str]:
    """The numbers of the threads whose swap was written, when `size` threads swap the same cell at once."""
    start = threading.Barrier(size)
    won: list[str] = []

    def run(owner: str) -> None:
        start.wait()
        if _put(cells, seen, {**cell, "version": cell["version"] + 1, "owner": owner}):
            won.append(owner)

    threads = [threading.Thread(target=run, args=(str(number),)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won


class CellsContract:
    """A cell is compared and replaced in one step, and read back unchanged."""

    def test_a_cell_is_read_back_unchanged(self, cells: Cells) -> None:
        """Every column is read back with its type and all its bytes."""
        (cell,) = _cells()
        assert _look(cells, cell) is None
        assert _put(cells, None, cell)
        there = _look(cells, cell)
        assert there == cell
        assert there is not None
        assert {name: type(value) for name, value in there.items()} == {name: type(cell[name]) for name in cell}

    def test_a_swap_compares_incarnation_and_version(self, cells: Cells) -> None:
        """The store writes only if the cell is unchanged since it was read, or still absent (P1)."""
        cell, other = _cells(2)
        after = {**cell, "version": cell["version"] + 1, "last_error": "after"}
        assert not _put(cells, _seen(cell), after)
        assert _put(cells, None, cell)
        for blind in (
            None,
            Seen(cell["incarnation"], cell["version"] + 1),
            Seen(cell["incarnation"], cell["version"] - 1),
            Seen(other["incarnation"], cell["version"]),
        ):
            assert not _put(cells, blind, after), blind
            if blind is not None:
                assert not cells.swap(cell["scope"], cell["key"], blind, None, None), blind
        assert _look(cells, cell) == cell
        assert _put(cells, _seen(cell), after)
        assert _look(cells, cell) == after

    def test_a_swap_replaces_every_column_of_a_cell(self, cells: Cells) -> None:
        """Columns that are None in the new cell are None."""
        (cell,) = _cells()
        bare = {**cell, "version": cell["version"] + 1, "memo": None, "intent": None, "request": None}
        assert _put(cells, None, cell)
        assert _put(cells, _seen(cell), bare)
        assert _look(cells, cell) == bare

    def test_a_cell_is_removed(self, cells: Cells) -> None:
        """A removed cell is absent, and can be written again."""
        (cell,) = _cells()
        assert _put(cells, None, cell)
        assert cells.swap(cell["scope"], cell["key"], _seen(cell), None, None)
        assert _look(cells, cell) is None
        assert not cells.swap(cell["scope"], cell["key"], _seen(cell), None, None)
        assert _put(cells, None, cell)

    def test_keys_and_scopes_are_compared_byte_by_byte(self, cells: Cells) -> None:
        """Keys that differ in case, padding, Unicode normal form or in where the scope ends are different keys."""
        names = [
            ("s", "a"),
            ("s", "A"),
            ("s", "a "),
            ("s ", "a"),
            ("s", "\u00e9"),
            ("s", "e\u0301"),
            ("sa", ""),
            ("", "sa"),
        ]
        (cell,) = _cells()
        for scope, key in names:
            assert cells.look(scope, key)[0] is None, (scope, key)
            assert cells.swap(scope, key, None, {**cell, "scope": scope, "key": key}, None)
        for scope, key in names:
            assert cells.look(scope, key)[0] == {**cell, "scope": scope, "key": key}

    def test_one_of_many_concurrent_swaps_is_written(self, cells: Cells) -> None:
        """All threads have read the same cell, or none, and only one of them writes."""
        there, new = _cells(2)
        assert _put(cells, None, there)
        for seen, cell in ((_seen(there), there), (None, new)):
            won = _swap_at_once(cells, seen, cell)
            after = _look(cells, cell)
            assert after is not None
            assert won == [after["owner"]]

    def test_a_page_has_the_cells_of_its_index_in_order(self, cells: Cells) -> None:
        """A page starts after a position, respects the limit, and contains no cells of other indexes."""
        planted = [cell for state in State for cell in _cells(7, state)]
        planted += [{**cell, "state": "roll", "key": f"{cell['key']} worker"} for cell in _cells(3)]
        for cell in reversed(planted):
            assert _put(cells, None, cell)
        for index in Index:
            meant = [cell for cell in planted if (where := indexed(cell)) is not None and where[0] is index]
            assert meant, index
            assert _all(cells, index) == sorted(meant, key=place_of), index

    def test_a_changed_cell_moves_to_the_index_of_its_new_state(self, cells: Cells) -> None:
        """A changed cell moves to another index, and a removed one disappears from all of them."""
        (cell,) = _cells()
        there: Mapping[str, Any] | None = None
        for version, state in enumerate((*State, None), cell["version"]):
            after = None if state is None else {**cell, "state": state.value, "version": version}
            seen = None if there is None else _seen(there)
            assert cells.swap(cell["scope"], cell["key"], seen, after, None)
            where = None if after is None else indexed(after)
            assert [index for index in Index if _all(cells, index)] == ([] if where is None else [where[0]]), state
            there = after

    def test_the_store_clock_never_runs_backwards(self, cells: Cells) -> None:
        """The clock counts microseconds and never runs backwards."""
        instants = [cells.look("nobody", "nothing")[1] for _ in range(3)]
        assert instants == sorted(instants)
        assert START // 2 < instants[0] < START * 2
