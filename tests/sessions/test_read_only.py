"""A server that only reads is an outage, and it is found before the handler runs."""

from __future__ import annotations

import psycopg
import pytest

from harness.tables import make_tables
from sessions.ways import WAYS, Shop

READS = "?options=-c%20default_transaction_read_only%3Don"
OUTAGE = (503, "idempotency_store_unavailable")


async def refused(shop: Shop) -> None:
    shop.once._migrate = False  # the tables are there, and nobody could make them
    async with shop.open():
        reply = await shop.send(lambda _: "ran")
        assert (reply.status, reply.code) == OUTAGE
    assert shop.runs == 0


@pytest.mark.parametrize("way", ["asyncpg", "psycopg", "def", "sa-psycopg"])
async def test_a_database_that_only_reads_runs_no_handler(tables_dsn, way):
    await refused(Shop(way, tables_dsn + READS))


async def test_read_only_database_is_detected_through_sqlalchemy(tables_dsn):
    settings = {"server_settings": {"default_transaction_read_only": "on"}}
    await refused(Shop("sa-asyncpg", tables_dsn, connect_args=settings))


async def test_a_standby_runs_no_handler(crashable_postgres):
    dsn = make_tables(crashable_postgres.dsn())
    crashable_postgres.demote()
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT pg_is_in_recovery()").fetchone() == (True,)
    for way in WAYS:
        await refused(Shop(way, dsn))
