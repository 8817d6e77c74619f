"""The shipped contract on stores that are made of look, swap and page."""

from __future__ import annotations

import inspect
import threading
import time
from dataclasses import replace

import pytest

from oncekey.cells import Index, Seen, indexed, place_of
from oncekey.databases.cells import AsyncCellDriver, CellDriver
from oncekey.stores.cells import CellStore
from oncekey_contract import CellsContract, StoreContract, Walk, blocking, planting, under_asyncio


class DictCells:
    """Cells in a dictionary."""

    def __init__(self):
        self.cells = {}
        self._lock = threading.Lock()

    def look(self, scope, key):
        cell = self.cells.get((scope, key))
        return (None if cell is None else dict(cell)), time.time_ns() // 1000

    def swap(self, scope, key, seen, cell, keep_until):
        with self._lock:
            there = self.cells.get((scope, key))
            if (seen and (seen.incarnation, seen.version)) != (there and (there["incarnation"], there["version"])):
                return False
            if cell is None:
                del self.cells[scope, key]
            else:
                self.cells[scope, key] = dict(cell)
            return True

    def page(self, index, after, limit):
        with self._lock:
            cells = [cell for cell in self.cells.values() if (where := indexed(cell)) and where[0] is index]
        behind = sorted((cell for cell in cells if place_of(cell) > after), key=place_of)
        return [dict(cell) for cell in behind[:limit]], time.time_ns() // 1000

    def close(self):
        pass


class AsyncDictCells:
    """The same for asyncio."""

    def __init__(self, cells):
        self._cells = cells

    async def look(self, *args):
        return self._cells.look(*args)

    async def swap(self, *args):
        return self._cells.swap(*args)

    async def page(self, *args):
        return self._cells.page(*args)

    async def close(self):
        self._cells.close()


class TestAsyncCells(StoreContract):
    matrix = "cells in a dictionary"

    @pytest.fixture
    def world(self):
        with under_asyncio(CellStore, AsyncCellDriver(AsyncDictCells(DictCells()))) as world:
            yield world


class TestWalk(Walk):
    @pytest.fixture
    def world(self):
        cells = DictCells()
        with blocking(CellStore, CellDriver(cells), plant=planting(cells)) as world:
            yield world


class ComparesNothing(DictCells):
    def swap(self, scope, key, seen, cell, keep_until):
        there = self.cells.get((scope, key))
        found = there and Seen(there["incarnation"], there["version"])
        return super().swap(scope, key, found, cell, keep_until)


class ComparesNoIncarnation(DictCells):
    def swap(self, scope, key, seen, cell, keep_until):
        there = self.cells.get((scope, key))
        found = seen and there and replace(seen, incarnation=there["incarnation"])
        return super().swap(scope, key, found, cell, keep_until)


class ForgetsBytes(DictCells):
    def look(self, scope, key):
        cell, now = super().look(scope, key)
        return (cell and {**cell, "request": cell["request"] and cell["request"].split(b"\0")[0]}), now


class PagesNothing(DictCells):
    def page(self, index, after, limit):
        return [], super().page(index, after, limit)[1]


class PagesOneIndex(DictCells):
    def page(self, index, after, limit):
        return super().page(Index.UNFINISHED, after, limit)


@pytest.mark.parametrize("broken", [ComparesNothing, ComparesNoIncarnation, ForgetsBytes, PagesNothing, PagesOneIndex])
def test_contract_rejects_defective_cell_stores(broken):
    def fails(scenario):
        try:
            scenario(broken())
        except Exception:
            return True
        return False

    made = CellsContract()
    scenarios = [run for name, run in inspect.getmembers(made, inspect.ismethod) if name.startswith("test_")]
    assert any(fails(scenario) for scenario in scenarios)


class TestCells(CellsContract):
    @pytest.fixture
    def cells(self):
        return DictCells()
