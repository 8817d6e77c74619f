"""Fixtures for all tests: real PostgreSQL databases, and tests that are coroutines."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from harness import room
from harness.databases import DSN_VARIABLE, DatabaseServer, ForeignServer
from harness.postgres import Installation, PostgresMissingError, PostgresServer, installations
from harness.postgres_binaries import MISSING
from harness.sharing import Sharing

pytest.register_assert_rewrite("oncekey.testing.contract")  # before any test imports it
room.settle()

# Tests start hundreds of processes, and each would compile the package anew; so would each worker its tests.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell starts what it runs in the background deaf to Ctrl-C, and so would be all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure() -> None:
    """Leave the width of a terminal to the tests that are about it: pytest-xdist tells its workers one."""
    os.environ.pop("COLUMNS", None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let tests that share something expensive share it."""
    return Sharing(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run `async def test_…` in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
    return True


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


@pytest.fixture
def postgres_dsn(postgres_server: DatabaseServer) -> Iterator[str]:
    """The address of an empty database of the test's own."""
    name = f"oncekey_{uuid.uuid4().hex}"
    yield postgres_server.create_database(name)
    postgres_server.drop_database(name)


@pytest.fixture(params=installations() or (None,), ids=str)
def crashable_postgres(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    """A server for one test to kill, of every version that this machine has."""
    installation: Installation | None = request.param
    if installation is None:
        raise PostgresMissingError(MISSING)
    with PostgresServer(installation) as server:
        yield server
