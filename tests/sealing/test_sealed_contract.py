"""The shipped contract on stores whose content is sealed: sealing changes nothing of what a store does."""

from __future__ import annotations

from functools import partial

import pytest

from contract.test_cells import DictCells
from oncekey.core.flow import drive
from oncekey.databases.cells import CellDriver
from oncekey.databases.memory import MemoryDriver
from oncekey.databases.sqlite.blocking import SqliteDriver
from oncekey.databases.sqlite.store import SqliteStore
from oncekey.engine import migrating
from oncekey.sealing import AesGcm
from oncekey.stores.cells import CellStore
from oncekey.stores.memory import MemoryStore
from oncekey.stores.sealed_content import SealedContent
from oncekey_contract import StoreContract, blocking

SEAL = AesGcm({"k1": bytes(range(32))}, current="k1")


def _sealed(make, *, clock=None):
    store = make(clock=clock)
    store.seal_with(SealedContent(SEAL))
    return store


class TestSealedMemory(StoreContract):  # R195
    @pytest.fixture
    def world(self):
        with blocking(partial(_sealed, MemoryStore), MemoryDriver()) as world:
            yield world


class TestSealedCells(StoreContract):  # R195
    @pytest.fixture
    def world(self):
        with blocking(partial(_sealed, CellStore), CellDriver(DictCells())) as world:
            yield world


class TestSealedSqlite(StoreContract):  # R195
    @pytest.fixture
    def world(self, tmp_path):
        driver = SqliteDriver(tmp_path / "keys.db")
        drive(migrating.up(SqliteStore().schema), driver.run)
        with blocking(partial(_sealed, SqliteStore), driver) as world:
            yield world
