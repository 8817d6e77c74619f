"""The bench of the console renders its pages."""

from __future__ import annotations

import psycopg
from bench.console import PAGES, measured

from harness.filling import fill_postgres
from harness.tables import make_tables


async def test_every_page_is_rendered_and_timed(postgres_dsn: str) -> None:
    make_tables(postgres_dsn)
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        fill_postgres(connection, 1, 2000)
    found = await measured(postgres_dsn, 1)
    assert set(found) == {*PAGES, "one record", "a whole key", "the beginning of one"}
    assert all(0 < one["median"] <= one["worst"] for one in found.values())
