"""The shipped contracts on DynamoDB: the contract of cells on moto and on dynalite, by boto3 and by aiobotocore.

The contract of stores runs on dynalite, which is four times as fast: what a store of cells adds to its cells are pure
functions.
"""

from __future__ import annotations

from itertools import islice

import pytest

from oncekey.databases.dynamodb.driver import AsyncDynamoDriver, DynamoCells, DynamoDriver, Table
from oncekey.stores.cells import DynamoStore
from oncekey_contract import CellsContract, StoreContract, Walk, blocking, planting, under_asyncio, walking


@pytest.fixture
def table_on(dynamo_table):
    return lambda server: Table(dynamo_table(server), "us-east-1", server.endpoint)


class TestCells(CellsContract):
    @pytest.fixture(params=["moto", "dynalite"])
    def cells(self, request, table_on):
        cells = DynamoCells(table_on(request.getfixturevalue(request.param)))
        yield cells
        cells.close()


class TestBoto3OnDynalite(StoreContract):
    matrix = "DynamoDB: dynalite"

    @pytest.fixture
    def world(self, dynalite, table_on):
        with blocking(DynamoStore, DynamoDriver(table_on(dynalite))) as world:
            yield world


class TestAiobotocoreOnDynalite(StoreContract):
    matrix = "DynamoDB: dynalite"

    @pytest.fixture
    def world(self, dynalite, table_on):
        with under_asyncio(DynamoStore, AsyncDynamoDriver(table_on(dynalite))) as world:
            yield world


class TestWalk(Walk):
    """Every 241st record goes over the wire: the moves are the pure functions of every store of cells, and
    `test_cells.py` walks over all of them. On dynalite, which is four times as fast as moto."""

    @pytest.fixture
    def world(self, dynalite, table_on, monkeypatch):
        table = table_on(dynalite)
        every = walking.records
        monkeypatch.setattr(walking, "records", lambda now: islice(every(now), 0, None, 241))
        cells = DynamoCells(table)
        with blocking(DynamoStore, DynamoDriver(table), plant=planting(cells)) as world:
            yield world
        cells.close()
