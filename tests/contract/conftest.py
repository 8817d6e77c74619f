"""Every scenario of the contract says what it ran on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.matrix import PROPERTY, told_by
from oncekey_contract import StoreContract


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Look after each scenario for rows that no move may leave, as a row of `work` without its record."""
    if request.cls is None or not issubclass(request.cls, StoreContract):
        yield
        return
    world = request.getfixturevalue("world")
    yield
    assert world.go(world.leftovers()) == {}


@pytest.fixture(autouse=True)
def on_the_matrix(request: pytest.FixtureRequest) -> None:
    """Tell the store of a scenario with its report."""
    if request.cls is None or not issubclass(request.cls, StoreContract):
        return
    for name, value in told_by(request.cls, request.getfixturevalue("world")):
        if name == PROPERTY and "{major}" in value[0]:
            major = request.getfixturevalue("postgres_major")
            request.node.user_properties.append((name, (value[0].format(major=major), value[1])))
        else:
            request.node.user_properties.append((name, value))


@pytest.fixture(scope="session")
def postgres_major(postgres_server) -> str:
    """The version of the server that tests share."""
    import psycopg

    with psycopg.connect(postgres_server.dsn()) as connection:
        return str(connection.info.server_version // 10000)
