"""Stores to measure on: SQLite in a temporary folder, PostgreSQL on a private server, or on a configured one."""

from __future__ import annotations

import os
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STORES = ("sqlite", "asyncpg", "psycopg")

AS_SHIPPED = {"max_wal_size": "1GB"}
"""PostgreSQL's default. The tests use a smaller WAL, which would cause a checkpoint every few seconds."""

NewStore = Callable[[], str]
"""Creates an empty store and returns its URL."""


@contextmanager
def places(stores: tuple[str, ...]) -> Iterator[dict[str, NewStore]]:
    """For each kind of store, a function that creates an empty one; everything is removed afterwards."""
    with ExitStack() as stack:
        made: dict[str, NewStore] = {}
        if "sqlite" in stores:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="oncekey-bench-")))
            made["sqlite"] = lambda: f"sqlite:///{folder}/{uuid.uuid4().hex}.db"
        if {"asyncpg", "psycopg"} & set(stores):
            new_database = stack.enter_context(_postgres())
            made["asyncpg"] = _through("asyncpg", new_database)
            made["psycopg"] = _through("psycopg", new_database)
        yield {store: made[store] for store in stores}


def _through(driver: str, new_database: NewStore) -> NewStore:
    return lambda: new_database().replace("postgresql:", f"postgresql+{driver}:", 1)


@contextmanager
def _postgres() -> Iterator[NewStore]:
    """Uses the server harness of the tests."""
    sys.path.insert(0, str(ROOT / "tests"))
    from harness.databases import DSN_VARIABLE, DatabaseServer, ForeignServer  # noqa: PLC0415
    from harness.postgres import PostgresServer  # noqa: PLC0415

    def databases(server: DatabaseServer) -> Iterator[NewStore]:
        names: list[str] = []

        def new() -> str:
            names.append(f"oncekey_bench_{uuid.uuid4().hex}")
            return server.create_database(names[-1])

        yield new
        for name in names:
            server.drop_database(name)

    foreign = os.environ.get(DSN_VARIABLE)
    if foreign:
        yield from databases(ForeignServer(foreign))
    else:
        with PostgresServer(settings=AS_SHIPPED) as server:
            yield from databases(server)
