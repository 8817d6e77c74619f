"""PostgreSQL's own functions, asked directly: each condition in them counts."""

from __future__ import annotations

from contextlib import contextmanager

import psycopg
import pytest
from psycopg.rows import scalar_row

from contract.test_sql_guards import INTENT, LIFE, MEMO, NOW, OTHER_LIFE, Desk
from harness.tables import await_waiters, database_with_tables, empty_tables
from oncekey.core.model import RecordId, State
from oncekey.drivers.placeholders import pyformat
from oncekey.stores.postgres import PostgresStore
from oncekey.stores.rows import memo_text

LOCK, FAMILY, MARK = (7 << 32) + 9, 70, 3
KEEP = "convert_to((ROW('s', 'k', %(life)s, %(fence)s, 'p', 1000, %(seen)s, %(memo)s)::oncekey.kept)::text, 'UTF8')"
SEALED = (
    "convert_to((ROW(%(scope)s, %(key)s, %(life)s, 'pay', 'local', 'retry', 'POST', '/', 'f', '', 'success', true, 1,"
    " 1, 1000000, 200, '[]', 1)::oncekey.sealed)::text, 'UTF8')"
)
GIVEN = {"life": LIFE, "fence": 3, "seen": memo_text(MEMO), "memo": "[]"}


@pytest.fixture(scope="module")
def functions_dsn(postgres_server):
    with database_with_tables(postgres_server, "functions") as dsn:
        yield dsn


@pytest.fixture(params=["psycopg"])
def dsn(functions_dsn):
    return empty_tables(functions_dsn)


@contextmanager
def session(dsn):
    """A transaction that is rolled back."""
    with psycopg.connect(dsn, row_factory=scalar_row) as connection:
        yield connection
        connection.rollback()


def plant(connection, **changes):
    """A record of this kind, in its rows."""
    for table, row in Desk(None, "oncekey.").record(**changes):
        columns, values = ", ".join(row), ", ".join(f"%({name})s" for name in row)
        connection.execute(f"INSERT INTO oncekey.{table} ({columns}) VALUES ({values})", row)


class TestHeld:
    """Whether a key is locked, and by which request."""

    def holder(self, dsn):
        with session(dsn) as connection:
            given = {"lock": LOCK, "family": FAMILY, "mark": MARK}
            holder = connection.execute("SELECT oncekey.lock_holder(%(lock)s, %(family)s, %(mark)s)", given).fetchone()
            held = PostgresStore()._statements.statement("held", {})
            assert connection.execute(pyformat(held.command), given).fetchone() is (holder != "nobody")
            return holder

    def test_nobody(self, dsn):
        assert self.holder(dsn) == "nobody"

    @pytest.mark.parametrize(
        ("marked", "holder"),
        [(None, "somebody"), ((FAMILY, MARK), "somebody"), ((FAMILY, 4), "other"), ((71, 4), "somebody")],
    )
    def test_the_mark_beside_the_lock(self, dsn, marked, holder):
        with session(dsn) as other:
            other.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])
            if marked is not None:
                other.execute("SELECT pg_advisory_xact_lock(%s, %s)", marked)
            assert self.holder(dsn) == holder

    def test_a_mark_in_other_hands(self, dsn):
        with session(dsn) as holder, session(dsn) as another:
            holder.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])
            another.execute("SELECT pg_advisory_xact_lock(%s, %s)", [FAMILY, 4])
            assert self.holder(dsn) == "somebody"

    def test_a_lock_of_two_numbers_is_another_lock(self, dsn):
        with session(dsn) as other:
            other.execute("SELECT pg_advisory_xact_lock(7, 9)")
            assert self.holder(dsn) == "nobody"

    def test_a_lock_of_one_number_is_no_mark(self, dsn):
        with session(dsn) as other:
            other.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])
            other.execute("SELECT pg_advisory_xact_lock(%s)", [(FAMILY << 32) + 4])
            assert self.holder(dsn) == "somebody"

    def test_a_lock_in_another_database_is_another_lock(self, dsn, postgres_server):
        with session(postgres_server.dsn()) as elsewhere:
            elsewhere.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])
            assert self.holder(dsn) == "nobody"

    def test_a_mark_that_is_waited_for_is_none(self, dsn):
        """The holder of the lock has tried for a mark that somebody else has."""
        with session(dsn) as another, session(dsn) as holder:
            another.execute("SELECT pg_advisory_xact_lock(%s, %s)", [FAMILY, 4])
            holder.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])
            holder.pgconn.send_query(f"SELECT pg_advisory_xact_lock({FAMILY}, 4)".encode())
            await_waiters(dsn)
            assert self.holder(dsn) == "somebody"
            another.rollback()
            while holder.pgconn.get_result() is not None:
                pass


class TestHold:
    """The record, locked."""

    @pytest.mark.parametrize("where", [("x", "k"), ("s", "x")])
    def test_it_is_the_record_of_the_key(self, dsn, where):
        with session(dsn) as connection:
            plant(connection)
            plant(connection, id=RecordId(*where), incarnation=OTHER_LIFE)
            found = connection.execute("SELECT incarnation::text FROM oncekey.hold('s', 'k')").fetchall()
            assert found == [LIFE]
            locked = connection.execute("SELECT count(*) FROM oncekey.record WHERE xmax::text <> '0'").fetchone()
            assert locked == 1


class TestKeep:
    """A finished phase in the message of its COMMIT."""

    def kept(self, dsn, *, hot=None, cold=None, **changes):
        with session(dsn) as connection:
            plant(connection, **{"memo": MEMO, **changes})
            if hot is not None:
                connection.execute("UPDATE oncekey.record SET memo_version = %s", [hot])
            if cold is not None:
                connection.execute("UPDATE oncekey.work SET memo_version = %s", [cold])
            plant(connection, id=RecordId("s", "y"), incarnation=OTHER_LIFE, memo=MEMO)
            try:
                connection.execute(f"SELECT oncekey.keep({KEEP}, %(at)s)", {**GIVEN, "at": NOW})
            except psycopg.Error as error:
                if error.sqlstate != "OK002":
                    raise
                return False
            found = connection.execute("SELECT memo FROM oncekey.work WHERE incarnation = %s", [LIFE]).fetchone()
            was = connection.execute(f"SELECT oncekey.was_kept({KEEP})", GIVEN).fetchone()
            others = connection.execute(
                "SELECT count(*) FROM oncekey.record WHERE version = 7 AND incarnation = %s", [OTHER_LIFE]
            ).fetchone()
            assert (found, was, others) == ("[]", True, 1)
            return True

    def test_it_is_written(self, dsn):
        assert self.kept(dsn)

    @pytest.mark.parametrize(
        "changes",
        [
            {"id": RecordId("x", "k")},
            {"id": RecordId("s", "x")},
            {"incarnation": "00000000-0000-0000-0000-000000000013"},
            {"fence": 4},
            {"state": State.UNKNOWN, "lease_until": None},
            {"intent": INTENT},
            {"memo": ()},
            {"hot": 6},
            {"cold": 6},
        ],
        ids=lambda changes: next(iter(changes)),
    )
    def test_it_is_not_written(self, dsn, changes):
        assert not self.kept(dsn, **changes)

    @pytest.mark.parametrize(
        "changes",
        [
            {"id": RecordId("x", "k")},
            {"id": RecordId("s", "x")},
            {"incarnation": OTHER_LIFE},
            {"fence": 4},
            {"memo": MEMO},
        ],
        ids=lambda changes: next(iter(changes)),
    )
    def test_what_was_not_kept(self, dsn, changes):
        asked = f"SELECT oncekey.was_kept({KEEP})"
        given = {**GIVEN, "memo": memo_text((*MEMO, *MEMO))}
        with session(dsn) as connection:
            plant(connection, memo=(*MEMO, *MEMO))
            assert connection.execute(asked, given).fetchone() is True
            connection.rollback()
            plant(connection, **{"memo": (*MEMO, *MEMO), **changes})
            assert connection.execute(asked, given).fetchone() is False

    def test_the_memo_is_that_of_the_record(self, dsn):
        given = {**GIVEN, "memo": memo_text((*MEMO, *MEMO))}
        with session(dsn) as connection:
            plant(connection, memo=MEMO)
            plant(connection, id=RecordId("s", "x"), incarnation=OTHER_LIFE, memo=(*MEMO, *MEMO))
            assert connection.execute(f"SELECT oncekey.was_kept({KEEP})", given).fetchone() is False


@pytest.mark.parametrize(
    "changes", [{"id": RecordId("x", "k")}, {"id": RecordId("s", "x")}, {"incarnation": OTHER_LIFE}]
)
def test_what_was_not_sealed(dsn, changes):
    asked = f"SELECT oncekey.was_sealed({SEALED})"
    given = {"scope": "s", "key": "k", "life": LIFE}
    with session(dsn) as connection:
        plant(connection, state=State.COMPLETED)
        assert connection.execute(asked, given).fetchone() is True
        connection.rollback()
        plant(connection, **{"state": State.COMPLETED, **changes})
        assert connection.execute(asked, given).fetchone() is False
