"""Fixtures for all tests: real PostgreSQL databases, emulators of DynamoDB, and tests that are coroutines."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings, strategies

from harness import flaky, matrix, room, selection
from harness.databases import DSN_VARIABLE, DatabaseServer, ForeignServer
from harness.mariadb import MariadbServer, MysqlInstallation, emptied, mariadb_with_tables
from harness.postgres import Installation, PostgresMissingError, PostgresServer, installations
from harness.postgres_binaries import MISSING
from harness.sharing import Sharing, turn_of
from harness.spare import SpareDatabases

pytest.register_assert_rewrite("oncekey_contract")  # before any test imports it
room.settle()

# Tests start hundreds of processes, and each would compile the package anew; so would each worker its tests.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell starts what it runs in the background deaf to Ctrl-C, and so would be all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the suite that `make test` and `make test-more` ask for."""
    parser.addoption(
        "--suite", choices=list(selection.Suite), default=selection.Suite.ALL, help="which tests (harness/selection.py)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Leave the width of a terminal to the tests that are about it: pytest-xdist tells its workers one."""
    os.environ.pop("COLUMNS", None)
    config.pluginmanager.register(flaky.Flaky())
    config.pluginmanager.register(selection.Selection())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let tests that share something expensive share it."""
    return Sharing(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest tests, and leave the short ones to the end."""
    items.sort(key=lambda item: turn_of(item.nodeid))


@settings(max_examples=1, database=None)
@given(strategies.none())
def one_example(_: None) -> None:
    """Let Hypothesis make its random numbers: it asks who refers to them, and what is frozen is not found."""


def pytest_collection_finish() -> None:
    """Spare the collector what stays to the end: twenty thousand tests and every framework, half a second each time."""
    one_example()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run `async def test_…` in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
    return True


def pytest_runtest_teardown() -> None:
    """Take back what a command or a page's program has set up for its log, as if the process were its own."""
    for name, level in ((None, logging.WARNING), ("oncekey", logging.NOTSET), ("oncekey.events", logging.NOTSET)):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.propagate = True
        for handler in [one for one in logger.handlers if type(one) is logging.StreamHandler]:
            logger.removeHandler(handler)


_matrix = matrix.Matrix()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember what ran on which store."""
    _matrix.add(report)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A whole run that leaves a store out has not passed."""
    here = not hasattr(session.config, "workerinput")
    if here and session.exitstatus == 0 and matrix.holes_of(_matrix, session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Which scenarios of the contract passed on which store."""
    if not _matrix.stores:
        return
    terminalreporter.section("the contract, store by store: blocking, asyncio")
    for line in _matrix.lines():
        terminalreporter.line(line)
    for hole in matrix.holes_of(_matrix, config):
        terminalreporter.line(f"MISSING {hole}", red=True)


@pytest.fixture(scope="session")
def dynamo_credentials() -> Iterator[None]:
    """What the SDKs find instead of anybody's own."""
    from harness.dynamo import CREDENTIALS

    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def moto(dynamo_credentials: None) -> Iterator[Any]:
    """One emulator of DynamoDB per worker process, started when the first test asks for it."""
    from harness.dynamo import Moto

    with Moto() as server:
        yield server


@pytest.fixture(scope="session")
def dynalite(dynamo_credentials: None) -> Iterator[Any]:
    """The other one."""
    from harness.dynamo import Dynalite

    with Dynalite() as server:
        yield server


@pytest.fixture(scope="session")
def dynamo_clients() -> dict[int, Any]:
    """Clients of the tests' own, by the port of the emulator: making one takes longer than a test."""
    return {}


@pytest.fixture(scope="session")
def dynamo_table(dynamo_clients: dict[int, Any]) -> Callable[[Any], str]:
    """Makes a table of oncekey's on an emulator, and tells its name."""
    from oncekey.databases.dynamodb.items import table_of

    def make(server: Any) -> str:
        client = dynamo_clients.get(server.port) or dynamo_clients.setdefault(server.port, server.client())
        name = f"t{uuid.uuid4().hex}"
        client.create_table(**table_of(name))
        return name

    return make


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[DatabaseServer]:
    """One server per worker process, started when the first test asks for it.

    It is shared: a test that wants to kill one asks for `crashable_postgres`.
    """
    foreign = os.environ.get(DSN_VARIABLE)
    if foreign:
        yield ForeignServer(foreign)
        return
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="session")
def spare_databases(postgres_server: DatabaseServer) -> SpareDatabases:
    """Databases on that server which tests hand on to each other."""
    return SpareDatabases(postgres_server)


@pytest.fixture
def postgres_dsn(spare_databases: SpareDatabases) -> Iterator[str]:
    """The address of an empty database of the test's own."""
    dsn = spare_databases.empty()
    yield dsn
    spare_databases.give_back(dsn)


@pytest.fixture
def tables_dsn(spare_databases: SpareDatabases) -> Iterator[str]:
    """The address of a database of the test's own that has oncekey's tables, all empty."""
    dsn = spare_databases.with_tables()
    yield dsn
    spare_databases.give_back(dsn)


@pytest.fixture(scope="session")
def mariadb_server() -> Iterator[MariadbServer]:
    """One server per worker process, started when the first test asks for it; it is shared, so nobody kills it."""
    with MariadbServer() as server:
        yield server


@pytest.fixture(scope="session")
def mysql_server() -> Iterator[MariadbServer]:
    """The same of MySQL, which has the same store."""
    with MariadbServer(kind=MysqlInstallation) as server:
        yield server


def _own_database(server: MariadbServer) -> Iterator[str]:
    name = f"oncekey_{uuid.uuid4().hex}"
    yield server.create_database(name)
    server.drop_database(name)


@pytest.fixture
def mariadb_url(mariadb_server: MariadbServer) -> Iterator[str]:
    """The address of an empty database of the test's own."""
    yield from _own_database(mariadb_server)


@pytest.fixture
def mysql_url(mysql_server: MariadbServer) -> Iterator[str]:
    """The same on MySQL."""
    yield from _own_database(mysql_server)


@pytest.fixture(scope="session")
def mariadb_tables(mariadb_server: MariadbServer) -> Iterator[str]:
    """One database with the tables, for all who empty them first."""
    with mariadb_with_tables(mariadb_server, "shared") as url:
        yield url


@pytest.fixture(scope="session")
def mysql_tables(mysql_server: MariadbServer) -> Iterator[str]:
    """The same on MySQL."""
    with mariadb_with_tables(mysql_server, "shared") as url:
        yield url


@pytest.fixture
def empty_mariadb(mariadb_server: MariadbServer, mariadb_tables: str) -> str:
    """The same, empty."""
    return emptied(mariadb_server, mariadb_tables)


@pytest.fixture
def empty_mysql(mysql_server: MariadbServer, mysql_tables: str) -> str:
    """The same, empty."""
    return emptied(mysql_server, mysql_tables)


@pytest.fixture(scope="session", params=["mariadb", "mysql"])
def either(request: pytest.FixtureRequest) -> str:
    """What is promised of both is tried on both."""
    return str(request.param)


@pytest.fixture(scope="session")
def either_server(either: str, request: pytest.FixtureRequest) -> Any:
    """A server of either."""
    return request.getfixturevalue(f"{either}_server")


@pytest.fixture
def either_url(either: str, request: pytest.FixtureRequest) -> Any:
    """The address of an empty database on either."""
    return request.getfixturevalue(f"{either}_url")


@pytest.fixture
def empty_either(either: str, request: pytest.FixtureRequest) -> Any:
    """The address of empty tables on either."""
    return request.getfixturevalue(f"empty_{either}")


@pytest.fixture(params=installations() or (None,), ids=str)
def crashable_postgres(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    """A server for one test to kill, of every version that this machine has."""
    installation: Installation | None = request.param
    if installation is None:
        raise PostgresMissingError(MISSING)
    with PostgresServer(installation) as server:
        yield server
