"""The bench of the console renders its pages."""

from __future__ import annotations

import psycopg
from bench.console import PAGES, measured

from harness.filling import fill_postgres


async def test_every_page_is_rendered_and_timed(tables_dsn: str) -> None:
    with psycopg.connect(tables_dsn, autocommit=True) as connection:
        fill_postgres(connection, 1, 2000)
    found = await measured(tables_dsn, 1)
    assert set(found) == {*PAGES, "one record", "a whole key", "the beginning of one"}
    assert all(0 < one["median"] <= one["worst"] for one in found.values())
