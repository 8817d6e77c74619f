"""What PostgreSQL's errors and addresses mean, without a server."""

from __future__ import annotations

import pytest

from oncekey.core.errors import (
    CommitAmbiguousError,
    ConfigurationError,
    RolledBackError,
    SchemaError,
    StoreError,
    StoreUnavailableError,
)
from oncekey.core.flow import Mode
from oncekey.databases.postgres.address import PostgresAddress
from oncekey.databases.postgres.psycopg_connections import PREPARE_AFTER, threshold
from oncekey.databases.postgres.server import is_the_end, refused, refused_commit
from oncekey.databases.retries import ConflictError, LostError, lost
from oncekey.databases.slots import business_share


@pytest.mark.parametrize(
    ("sqlstate", "meaning"),
    [
        ("40001", ConflictError),
        ("40P01", ConflictError),
        ("42P01", SchemaError),
        ("42703", SchemaError),
        ("3F000", SchemaError),
        ("25006", StoreUnavailableError),
        ("25P02", RolledBackError),
        ("25P03", RolledBackError),
        ("25P04", RolledBackError),
        ("53100", StoreUnavailableError),
        ("53300", StoreUnavailableError),
        ("55P03", StoreUnavailableError),
        ("57014", StoreUnavailableError),
        ("28P01", StoreUnavailableError),
        ("3D000", StoreUnavailableError),
        ("XX001", StoreUnavailableError),
        ("0A000", StoreUnavailableError),
        ("26000", StoreUnavailableError),
        ("42P05", StoreUnavailableError),
        ("23505", StoreError),
        ("23514", StoreError),
        ("42501", StoreError),
        ("22021", StoreError),
        (None, StoreError),
    ],
)
def test_sqlstate_maps_to_the_store_error(sqlstate, meaning):
    error = refused(sqlstate, "settle", "SomeError")
    assert type(error) is meaning
    assert str(error).startswith("settle: ")
    assert meaning is SchemaError or (sqlstate or "SomeError") in str(error)


@pytest.mark.parametrize(
    ("sqlstate", "meaning"),
    [
        ("23503", RolledBackError),
        ("23505", RolledBackError),
        ("P0001", RolledBackError),
        ("42P01", RolledBackError),  # of a deferred trigger of the application: a COMMIT asks no table of ours
        ("25P02", RolledBackError),
        ("25P03", RolledBackError),
        ("25P04", RolledBackError),
        ("40001", ConflictError),
        ("53100", StoreUnavailableError),
        ("57014", StoreUnavailableError),
    ],
)
def test_sqlstate_of_a_failed_commit_maps_to_its_error(sqlstate, meaning):  # X1, F20
    error = refused_commit(sqlstate, "committing", "SomeError")
    assert type(error) is meaning
    assert sqlstate in str(error)


def test_a_pooler_that_was_not_announced_is_named():
    assert "?pgbouncer=1" in str(refused("26000", "claim", ""))


@pytest.mark.parametrize(
    ("mode", "meaning"),
    [(Mode.READ, LostError), (Mode.SINGLE, CommitAmbiguousError), (Mode.ATOMIC, LostError)],
)
def test_lost_connection_error_depends_on_the_mode(mode, meaning):
    assert type(lost(mode, "claim")) is meaning


@pytest.mark.parametrize(
    ("sqlstate", "severity", "end"),
    [
        ("57P01", "FATAL", True),
        ("57P01", None, True),
        ("25P03", "FATAL", False),  # of the handler: the store is not away
        ("08006", "ERROR", True),
        ("53300", "FATAL", True),
        ("53300", "ERROR", False),
        ("57014", "ERROR", False),
        ("40001", "ERROR", False),
        (None, None, False),
    ],
)
def test_fatal_sqlstates_end_the_connection(sqlstate, severity, end):
    assert is_the_end(sqlstate, severity) == end


@pytest.mark.parametrize(
    ("dsn", "passed_on", "pooler"),
    [
        ("postgresql://u:p@h:5/d", "postgresql://u:p@h:5/d", None),
        ("postgresql://h/d?pgbouncer=1", "postgresql://h/d", True),
        ("postgresql://h/d?application_name=a+b%20c&pgbouncer=True&x=%2B", None, True),
        ("postgresql://h/d?pgbouncer=0", "postgresql://h/d", False),
        ("host=h dbname=d", "host=h dbname=d", None),
    ],
)
def test_pgbouncer_option_is_removed_from_the_dsn(dsn, passed_on, pooler):
    address = PostgresAddress.parse(dsn)
    assert address.pooler is pooler
    assert address.dsn == (passed_on or "postgresql://h/d?application_name=a+b%20c&x=%2B")


def test_invalid_pgbouncer_option_is_rejected():
    with pytest.raises(ConfigurationError, match="must be 1, 0 or prepared"):
        PostgresAddress.parse("postgresql://h/d?pgbouncer=maybe")


@pytest.mark.parametrize(("size", "share"), [(1, 1), (2, 1), (3, 2), (5, 4), (10, 8), (100, 80)])
def test_handlers_leave_some_connections_to_claims_and_heartbeats(size, share):
    assert business_share(size) == share


@pytest.mark.parametrize(
    ("query", "kept"),
    [
        ("", "?target_session_attrs=read-write"),
        ("?sslmode=disable", "?sslmode=disable&target_session_attrs=read-write"),
        ("?pgbouncer=1", "?target_session_attrs=read-write"),
        ("?target_session_attrs=any", "?target_session_attrs=any"),
    ],
)
def test_multiple_hosts_default_to_the_writable_one(query: str, kept: str) -> None:
    address = PostgresAddress.parse(f"postgresql://u:p%2C@a:1,[::1]:2,c/db{query}")
    assert address.dsn == f"postgresql://u:p%2C@a:1,[::1]:2,c/db{kept}"
    assert address.each == tuple(f"postgresql://u:p%2C@{host}/db{kept}" for host in ("a:1", "[::1]:2", "c"))


def test_single_host_dsn_is_not_changed() -> None:
    for dsn in ("postgresql://a/db", "postgresql:///db?host=/tmp", "host=a,b"):
        assert PostgresAddress.parse(dsn).each == (dsn,)


def test_a_pooler_may_keep_statements_prepared() -> None:
    address = PostgresAddress.parse("postgresql://a/db?pgbouncer=prepared")
    assert (address.dsn, address.pooler, address.prepares) == ("postgresql://a/db", True, True)
    assert threshold(address, None) == PREPARE_AFTER
