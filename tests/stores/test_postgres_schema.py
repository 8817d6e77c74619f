"""`schema.sql` shows tables, view, types and functions of PostgreSQL as a migrated database has them."""

from __future__ import annotations

import pytest
from tools.postgres_schema import FILE, schema_of

from harness.postgres import Installation, PostgresServer, installations


@pytest.mark.parametrize("installation", installations(), ids=str)
def test_schema_file_matches_a_migrated_database(installation: Installation) -> None:
    stale = f"{FILE.name} is not what the migrations make: run `python -m tools.postgres_schema` and commit it"
    with PostgresServer(installation) as server:
        assert FILE.read_text(encoding="utf-8") == schema_of(server.create_database("shown")), stale
