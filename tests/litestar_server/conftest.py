"""Shops on SQLite and PostgreSQL, behind Litestar."""

from __future__ import annotations

from pathlib import Path

import pytest

from litestar_server.shop import Shop
from wsgi.shop import TABLE, execute


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


@pytest.fixture
def shop(url: str) -> Shop:
    return Shop(url)


@pytest.fixture
def small_shop(tmp_path: Path) -> Shop:
    """Where the store makes no difference."""
    url = f"sqlite:///{tmp_path}/shop.db"
    execute(url, TABLE)
    return Shop(url)
