"""Which statements leave nothing behind, so that their transaction may be ended before a claim."""

import pytest

from oncekey.core.reading import plainly_reads


@pytest.mark.parametrize(
    ("sql", "reads"),
    [
        ("SELECT name FROM users WHERE token = $1", True),
        (" select count(*) from orders", True),
        ("VALUES (1)", True),
        ("SELECT id FROM orders FOR UPDATE", False),
        ("SELECT id INTO copies FROM orders", False),
        ("SELECT set_config('app.tenant', $1, true)", False),
        ("SELECT pg_advisory_xact_lock(1)", False),
        ("SELECT 1, pg_try_advisory_lock(1)", False),
        ("WITH gone AS (DELETE FROM orders RETURNING id) SELECT id FROM gone", False),
        ("INSERT INTO orders VALUES (1)", False),
    ],
)
def test_what_leaves_nothing_behind(sql: str, reads: bool) -> None:
    assert plainly_reads(sql) is reads
