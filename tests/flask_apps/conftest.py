"""Shops on SQLite and PostgreSQL, whose tables Flask-SQLAlchemy knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from flask_apps.shop import TABLES, Shop
from harness.patience import PATIENCE


def with_tables(url: str) -> str:
    engine = create_engine(url)
    with engine.begin() as connection:
        for sql in TABLES:
            connection.execute(text(sql.format(key="INTEGER" if url.startswith("sqlite") else "serial")))
    engine.dispose()
    return url


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    """Where the store makes no difference."""
    return with_tables(f"sqlite:///{tmp_path}/shop.db")


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "sqlite":
        found: str = request.getfixturevalue("file_url")
        return found
    dsn: str = request.getfixturevalue("tables_dsn")
    return with_tables(dsn.replace("postgresql:", "postgresql+psycopg:"))


@pytest.fixture
def open_shop() -> Iterator[Callable[..., Shop]]:
    """Makes shops; at the end none of their connections may be out."""
    shops: list[Shop] = []

    def make(url: str, **options: Any) -> Shop:
        shop = Shop(url, **options)
        shops.append(shop)
        return shop

    yield make
    for shop in shops:
        for threads in shop.once._threaded.values():
            assert threads.stop(PATIENCE)
        with shop.app.app_context():
            engines = list(shop.db.engines.values())
        for engine in engines:
            assert engine.pool.checkedout() == 0
            engine.dispose()


@pytest.fixture
def shop(url: str, open_shop: Callable[..., Shop]) -> Shop:
    return open_shop(url)


@pytest.fixture
def small_shop(file_url: str, open_shop: Callable[..., Shop]) -> Shop:
    return open_shop(file_url)
