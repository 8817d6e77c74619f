"""An engine that gets no connection: the error names the database that the engine is for."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import flask
import pytest
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from drivers.speaking import saying
from oncekey.core.errors import StoreUnavailableError
from oncekey.core.flow import Mode
from oncekey.databases.sqlalchemy.flask import Database, FlaskSqlalchemyDriver
from oncekey.databases.sqlalchemy.generated.driver import BlockingSqlalchemyDriver
from oncekey.wire.given import aconnect_sqlalchemy

SQLITE = "the SQLite file cannot be opened"
POSTGRESQL = "no connection to PostgreSQL"
MARIADB = "no connection to MariaDB"
LOOK = saying(Mode.SINGLE, "SELECT 1 AS one")


def nowhere(scheme: str, folder: Path) -> str:
    return f"{scheme}:///{folder}/missing/shop.db" if "sqlite" in scheme else f"{scheme}://nobody@127.0.0.1:1/nothing"


@pytest.mark.parametrize(("scheme", "named"), [("postgresql+psycopg", POSTGRESQL), ("sqlite", SQLITE)])
def test_blocking_engine_error_names_the_database(scheme: str, named: str, tmp_path: Path) -> None:
    driver = BlockingSqlalchemyDriver(create_engine(nowhere(scheme, tmp_path)))
    for asked in (lambda: driver.run(LOOK), driver.begin):
        with pytest.raises(StoreUnavailableError, match=named):
            asked()


@pytest.mark.parametrize(
    ("scheme", "named"),
    [
        ("postgresql+psycopg", POSTGRESQL),
        ("postgresql+asyncpg", POSTGRESQL),
        ("sqlite+aiosqlite", SQLITE),
        ("mysql+aiomysql", MARIADB),
        ("mariadb+aiomysql", MARIADB),
    ],
)
async def test_asyncio_engine_error_names_the_database(scheme: str, named: str, tmp_path: Path) -> None:
    engine = create_async_engine(nowhere(scheme, tmp_path))
    driver = aconnect_sqlalchemy(engine).driver
    for asked in (lambda: driver.run(LOOK), driver.begin):
        with pytest.raises(StoreUnavailableError, match=named):
            await asked()
    await driver.close()
    await engine.dispose()
    for thread in threading.enumerate():  # aiosqlite's thread still reports to the loop
        if "_connection_worker_thread" in thread.name:
            await asyncio.to_thread(thread.join)


@pytest.mark.parametrize(("scheme", "named"), [("postgresql+psycopg", POSTGRESQL), ("sqlite", SQLITE)])
def test_flask_engine_error_names_the_database(scheme: str, named: str, tmp_path: Path) -> None:
    db, app = SQLAlchemy(), flask.Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = nowhere(scheme, tmp_path)
    db.init_app(app)
    with app.app_context():
        driver = FlaskSqlalchemyDriver(Database(db))
        for asked in (lambda: driver.run(LOOK), driver.begin):
            with pytest.raises(StoreUnavailableError, match=named):
                asked()
