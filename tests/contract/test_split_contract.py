"""The shipped contract while the record's row is being split: after `pre`, with older processes still there."""

from __future__ import annotations

import uuid

import pytest

from contract.older import EitherStore, OlderStore
from oncekey.core.flow import drive
from oncekey.core.migrations import MigrationPhase
from oncekey.databases.postgres.generated.psycopg import PsycopgDriver
from oncekey.databases.postgres.store import PostgresStore
from oncekey.engine import migrating
from oncekey_contract import StoreContract, blocking


@pytest.fixture(scope="class")
def tables(postgres_server):
    """A database after `oncekey migrate up --phase pre`."""
    name = f"split_{uuid.uuid4().hex}"
    dsn = postgres_server.create_database(name)
    driver = PsycopgDriver(dsn, pool_size=1)
    ran = drive(migrating.up(PostgresStore().schema, only=MigrationPhase.PRE), driver.run)
    driver.close()
    assert {one.phase for one in ran} == {MigrationPhase.PRE}
    assert len(ran) < len(PostgresStore().schema.migrations)
    yield dsn
    postgres_server.drop_database(name)


class TestThisVersion(StoreContract):  # R237
    @pytest.fixture
    def world(self, tables):
        with blocking(PostgresStore, PsycopgDriver(tables)) as world:
            yield world


class Promised(StoreContract):
    """What the older version promised: it compared the version where this one also compares the table's guards."""

    test_a_sweep_ends_an_expired_lease = None
    test_a_sweep_does_not_make_a_non_repeatable_record_retryable = None
    test_handing_back_is_refused_for_a_record_that_cannot_be_resumed = None
    test_an_expired_lease_with_recovery_fail_is_left_to_an_operator = None


class TestOlderVersion(Promised):  # R237
    @pytest.fixture
    def world(self, tables):
        with blocking(OlderStore, PsycopgDriver(tables)) as world:
            yield world


class TestBothVersions(Promised):  # R237
    @pytest.fixture
    def world(self, tables, request):
        class Mixed(EitherStore):
            seed = sum(map(ord, request.node.name))  # another course for each scenario, the same one each time

        with blocking(Mixed, PsycopgDriver(tables)) as world:
            yield world
