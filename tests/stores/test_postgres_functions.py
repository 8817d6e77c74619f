"""`functions.sql` shows the functions of PostgreSQL as a migrated database has them."""

from __future__ import annotations

from tools.postgres_functions import FILE, functions_of


def test_the_file_shows_what_a_migrated_database_has(postgres_dsn: str) -> None:
    stale = f"{FILE.name} is not what the migrations make: run `python -m tools.postgres_functions` and commit it"
    assert FILE.read_text(encoding="utf-8") == functions_of(postgres_dsn), stale
