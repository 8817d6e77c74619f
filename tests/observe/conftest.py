"""Shops that are observed: behind ASGI and WSGI, on SQLite and PostgreSQL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from observe.shop import AsgiShop, WsgiShop

FRONTS = {"asgi": (AsgiShop, "asyncpg"), "wsgi": (WsgiShop, "psycopg")}


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """The URL of an empty store, for a driver."""
    if request.param == "sqlite":
        return lambda _: f"sqlite:///{tmp_path}/shop.db"
    dsn: str = request.getfixturevalue("tables_dsn")
    return lambda package: dsn.replace("postgresql://", f"postgresql+{package}://")


@pytest.fixture(params=sorted(FRONTS))
def front(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def make(front: str, store: Any) -> Any:
    """Makes a shop with more observers."""
    kind, package = FRONTS[front]
    return lambda *observers, **options: kind(store(package), *observers, **options)


@pytest.fixture
def shop(make: Any) -> Any:
    return make()


@pytest.fixture
def either(front: str, tmp_path: Path) -> Any:
    """Makes a shop behind either front on SQLite, where the store makes no difference."""
    kind, _ = FRONTS[front]
    return lambda **options: kind(f"sqlite:///{tmp_path}/shop.db", **options)


@pytest.fixture
def asgi_shop(store: Any) -> AsgiShop:
    """Where what is in front makes no difference."""
    return AsgiShop(store("asyncpg"))
