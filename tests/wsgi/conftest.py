"""Shops on SQLite and PostgreSQL, behind plain WSGI and Flask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.patience import PATIENCE
from wsgi.shop import TABLE, Shop, execute


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database with the shop's own table."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/shop.db"
    else:
        dsn: str = request.getfixturevalue("tables_dsn")
        url = dsn.replace("postgresql://", "postgresql+psycopg://")
    execute(url, TABLE)
    return url


@pytest.fixture(params=["plain", "flask"])
def kind(request: pytest.FixtureRequest) -> str:
    """Which application serves."""
    name: str = request.param
    return name


@pytest.fixture
def shop(url: str) -> Iterator[Shop]:
    shop = Shop(url)
    yield shop
    for installation in shop.once._threaded.values():
        assert installation.stop(PATIENCE)
    shop.once.blocking().close()


@pytest.fixture
def small_shop(tmp_path: Path) -> Iterator[Shop]:
    """Where the store makes no difference."""
    url = f"sqlite:///{tmp_path}/shop.db"
    execute(url, TABLE)
    shop = Shop(url)
    yield shop
    for installation in shop.once._threaded.values():
        assert installation.stop(PATIENCE)
    shop.once.blocking().close()
