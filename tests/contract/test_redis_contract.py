"""The shipped contracts on a real Valkey: blocking with one server, and under asyncio with a cluster of six."""

from __future__ import annotations

import pytest

from harness.valkeys import Cluster, StoringValkey
from oncekey.databases.redis.driver import AsyncRedisDriver, RedisCells, RedisDriver
from oncekey.stores.cells import CellStore
from oncekey_contract import CellsContract, StoreContract, blocking, under_asyncio


@pytest.fixture(scope="module")
def server():
    with StoringValkey() as server:
        yield server


@pytest.fixture
def url(server):
    server.say("FLUSHALL")
    return server.url


class TestCells(CellsContract):
    @pytest.fixture
    def cells(self, url):
        cells = RedisCells(url)
        yield cells
        cells.close()


class TestRedis(StoreContract):
    matrix = "Redis"

    @pytest.fixture
    def world(self, url):
        with blocking(CellStore, RedisDriver(url)) as world:
            yield world


@pytest.fixture(scope="module")
def cluster():
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster_url(cluster):
    cluster.flush()
    return cluster.url


class TestClusterCells(CellsContract):
    @pytest.fixture
    def cells(self, cluster_url):
        cells = RedisCells(cluster_url)
        yield cells
        cells.close()


class TestAsyncRedisCluster(StoreContract):
    matrix = "Redis cluster"

    @pytest.fixture
    def world(self, cluster_url):
        with under_asyncio(CellStore, AsyncRedisDriver(cluster_url)) as world:
            yield world
