"""PostgreSQL's own functions, asked directly: each condition in them counts."""

from __future__ import annotations

import json
import uuid
from contextlib import contextmanager
from typing import ClassVar

import psycopg
import pytest
from psycopg.rows import scalar_row, tuple_row

from contract.test_sql_guards import INTENT, LIFE, MEMO, NOW, OTHER_LIFE, OURS, Desk
from harness.tables import await_waiters, database_with_tables, empty_tables, make_tables
from oncekey.core.model import RecordId, State, StoredResponse
from oncekey.databases.placeholders import pyformat
from oncekey.databases.postgres.store import PostgresStore
from oncekey.stores.rows import memo_text

LOCK, FAMILY, MARK = (7 << 32) + 9, 70, 3
KEEP = "convert_to((ROW('s', 'k', %(life)s, %(fence)s, 'p', 1000, %(seen)s, %(memo)s)::oncekey.kept)::text, 'UTF8')"
SEALED = (
    "convert_to((ROW(%(scope)s, %(key)s, %(life)s, 'pay', 'local', 'retry', 'POST', '/', 'f', '', 'success', true, 1,"
    " 1, 1000000, 200, '[]', 1)::oncekey.sealed)::text, 'UTF8')"
)
DURABLE = [("off", "on"), ("local", "on"), ("on", "on"), ("remote_apply", "remote_apply")]
"""What a session waits for by its default, and what a transaction of ours waits for."""
GIVEN = {"life": LIFE, "fence": 3, "seen": memo_text(MEMO, None, None), "memo": "[]"}


@pytest.fixture(scope="module")
def functions_dsn(postgres_server):
    with database_with_tables(postgres_server, "functions") as dsn:
        yield dsn


@pytest.fixture(params=["psycopg"])
def dsn(functions_dsn):
    return empty_tables(functions_dsn)


@contextmanager
def session(dsn, **settings):
    """A transaction that is rolled back, in a session with these settings."""
    options = " ".join(f"-c {name}={value}" for name, value in settings.items())
    with psycopg.connect(dsn, row_factory=scalar_row, options=options) as connection:
        yield connection
        connection.rollback()


def command(name):
    """A statement of the store."""
    return pyformat(PostgresStore()._statements.statement(name, {}).command)


def setting(connection, name):
    return connection.execute("SELECT current_setting(%s, true)", [name]).fetchone()


def assert_limited(connection):
    """A client that falls silent loses its transaction."""
    assert setting(connection, "idle_in_transaction_session_timeout") == "40s"
    assert setting(connection, "statement_timeout") == "40s"
    since_17 = connection.info.server_version >= 170000
    assert setting(connection, "transaction_timeout") == ("50s" if since_17 else None)


def noticed(connection):
    """The notices from now on."""
    notices = []
    connection.add_notice_handler(lambda notice: notices.append(notice.message_primary))
    return notices


def begin(connection):
    """Try the lock of the key, and look at its record."""
    asked = """
        SELECT json_build_object('locked', look.locked, 'other', look.other, 'seen', (look.seen).incarnation,
                                 'request', convert_from((look.seen).request, 'UTF8'))
        FROM oncekey.lock_request_2(%s, %s, %s, 's', 'k', %s, 40000, 50000) AS look
    """
    return connection.execute(asked, [LOCK, FAMILY, MARK, NOW]).fetchone()


def plant(connection, **changes):
    """A record of this kind, in its rows."""
    for table, row in Desk(None, "oncekey.").record(**changes):
        columns, values = ", ".join(row), ", ".join(f"%({name})s" for name in row)
        connection.execute(f"INSERT INTO oncekey.{table} ({columns}) VALUES ({values})", row)


class TestHeld:
    """Whether a key is locked, and by which request."""

    functions = ("lock_holder",)

    def holder(self, dsn):
        with session(dsn) as connection:
            given = {"lock": LOCK, "family": FAMILY, "mark": MARK}
            holder = connection.execute("SELECT oncekey.lock_holder(%(lock)s, %(family)s, %(mark)s)", given).fetchone()
            assert connection.execute(command("held"), given).fetchone() is (holder != "nobody")
            return holder

    def test_free_lock_has_no_holder(self, dsn):
        assert self.holder(dsn) == "nobody"

    @pytest.mark.parametrize(
        ("marked", "holder"),
        [(None, "somebody"), ((FAMILY, MARK), "somebody"), ((FAMILY, 4), "other"), ((71, 4), "somebody")],
    )
    def test_holder_is_identified_by_its_mark(self, dsn, marked, holder):
        with session(dsn) as other:
            other.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])
            if marked is not None:
                other.execute("SELECT pg_advisory_xact_lock(%s, %s)", marked)
            assert self.holder(dsn) == holder

    def test_mark_of_another_session_is_ignored(self, dsn):
        with session(dsn) as holder, session(dsn) as another:
            holder.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])
            another.execute("SELECT pg_advisory_xact_lock(%s, %s)", [FAMILY, 4])
            assert self.holder(dsn) == "somebody"

    def test_lock_with_another_number_is_ignored(self, dsn):
        with session(dsn) as other:
            other.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK + 1])
            assert self.holder(dsn) == "nobody"

    def test_two_part_lock_is_ignored(self, dsn):
        with session(dsn) as other:
            other.execute("SELECT pg_advisory_xact_lock(7, 9)")
            assert self.holder(dsn) == "nobody"

    def test_single_number_lock_is_not_a_mark(self, dsn):
        with session(dsn) as other:
            other.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])
            other.execute("SELECT pg_advisory_xact_lock(%s)", [(FAMILY << 32) + 4])
            assert self.holder(dsn) == "somebody"

    def test_lock_in_another_database_is_ignored(self, dsn, postgres_server):
        with session(postgres_server.dsn()) as elsewhere:
            elsewhere.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])
            assert self.holder(dsn) == "nobody"

    def test_mark_that_is_only_awaited_is_ignored(self, dsn):
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

    functions = ("hold",)

    @pytest.mark.parametrize("where", [("x", "k"), ("s", "x")])
    def test_hold_locks_the_record_of_its_key(self, dsn, where):
        with session(dsn) as connection:
            plant(connection)
            plant(connection, id=RecordId(*where), incarnation=OTHER_LIFE)
            found = connection.execute("SELECT incarnation::text FROM oncekey.hold('s', 'k')").fetchall()
            assert found == [LIFE]
            locked = connection.execute("SELECT count(*) FROM oncekey.record WHERE xmax::text <> '0'").fetchone()
            assert locked == 1


class TestKeep:
    """A finished phase in the message of its COMMIT."""

    functions = ("keep", "was_kept")

    @pytest.mark.parametrize(("default", "kept"), DURABLE)
    def test_it_is_durable(self, dsn, default, kept):
        with session(dsn, synchronous_commit=default) as connection:
            plant(connection, memo=MEMO)
            connection.execute(f"SELECT oncekey.keep({KEEP}, %(at)s)", {**GIVEN, "at": NOW})
            assert setting(connection, "synchronous_commit") == kept

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

    def test_checkpoint_is_written_if_all_conditions_hold(self, dsn):
        assert self.kept(dsn)

    def test_first_phase_of_another_incarnation_is_rejected(self, dsn):
        asked, given = f"SELECT oncekey.keep({KEEP}, NULL)", {**GIVEN, "seen": None}
        with session(dsn) as connection:
            plant(connection)
            connection.execute(asked, given)
            connection.rollback()
            plant(connection, incarnation=OTHER_LIFE)
            with pytest.raises(psycopg.Error) as refused:
                connection.execute(asked, given)
            assert refused.value.sqlstate == "OK002"

    def test_the_statement_needs_a_transaction_that_was_begun_for_it(self, dsn):
        statement = command("keep").replace("%(given)s", KEEP)
        with session(dsn) as connection:
            plant(connection, memo=MEMO)
            with pytest.raises(psycopg.errors.DivisionByZero), connection.transaction():
                connection.execute(statement, {**GIVEN, "now": NOW})
            begin(connection)
            connection.execute(statement, {**GIVEN, "now": NOW})

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
    def test_checkpoint_is_not_written_if_a_condition_fails(self, dsn, changes):
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
    def test_was_kept_requires_every_condition(self, dsn, changes):
        asked = f"SELECT oncekey.was_kept({KEEP})"
        given = {**GIVEN, "memo": memo_text((*MEMO, *MEMO), None, None)}
        with session(dsn) as connection:
            plant(connection, memo=(*MEMO, *MEMO))
            assert connection.execute(asked, given).fetchone() is True
            connection.rollback()
            plant(connection, **{"memo": (*MEMO, *MEMO), **changes})
            assert connection.execute(asked, given).fetchone() is False

    def test_the_memo_is_that_of_the_record(self, dsn):
        given = {**GIVEN, "memo": memo_text((*MEMO, *MEMO), None, None)}
        with session(dsn) as connection:
            plant(connection, memo=MEMO)
            plant(connection, id=RecordId("s", "x"), incarnation=OTHER_LIFE, memo=(*MEMO, *MEMO))
            assert connection.execute(f"SELECT oncekey.was_kept({KEEP})", given).fetchone() is False


class TestSeal:
    """A finished record in the message of its COMMIT."""

    functions = ("seal", "was_sealed")
    GIVEN: ClassVar = {"scope": "s", "key": "k", "life": LIFE}

    def sealed(self, connection, *, guess=(NOW + 1_000_000) // 1_000_000):
        """What it reports."""
        notices = noticed(connection)
        connection.execute(f"SELECT oncekey.seal({SEALED}, NULL, {NOW}, {guess})", self.GIVEN)
        return notices

    def test_seal_reports_values_that_differ_from_the_guess(self, dsn):
        with session(dsn) as connection:
            begin(connection)
            assert self.sealed(connection) == []
        with session(dsn) as connection:
            begin(connection)
            assert self.sealed(connection, guess=0) == [f'{{"expires_at":{NOW + 1_000_000},"begun":{LOCK}}}']
        with session(dsn) as connection:
            assert self.sealed(connection) == [f'{{"expires_at":{NOW + 1_000_000},"begun":null}}']

    @pytest.mark.parametrize(("default", "kept"), DURABLE)
    def test_it_is_durable(self, dsn, default, kept):
        with session(dsn, synchronous_commit=default) as connection:
            self.sealed(connection)
            assert setting(connection, "synchronous_commit") == kept

    def test_the_statement_needs_a_transaction_that_was_begun_for_it(self, dsn):
        statement = command("seal").replace("%(given)s", SEALED)
        given = {**self.GIVEN, "response_body": None, "now": NOW, "guess": 0}
        with session(dsn) as connection:
            begin(connection)
            connection.execute(statement, given)
        with session(dsn) as connection, pytest.raises(psycopg.errors.DivisionByZero):
            connection.execute(statement, given)

    @pytest.mark.parametrize(
        "changes", [{"id": RecordId("x", "k")}, {"id": RecordId("s", "x")}, {"incarnation": OTHER_LIFE}]
    )
    def test_was_sealed_requires_every_condition(self, dsn, changes):
        asked = f"SELECT oncekey.was_sealed({SEALED})"
        with session(dsn) as connection:
            plant(connection, state=State.COMPLETED)
            assert connection.execute(asked, self.GIVEN).fetchone() is True
            connection.rollback()
            plant(connection, **{"state": State.COMPLETED, **changes})
            assert connection.execute(asked, self.GIVEN).fetchone() is False


class TestEnter:
    """The lock of a key in the message of its BEGIN."""

    functions = ("enter_2",)
    GIVEN: ClassVar = {
        "lock": LOCK,
        "family": FAMILY,
        "mark": MARK,
        "scope": b"s",
        "key": b"k",
        "now": NOW,
        "lease_ms": 40_000,
        "deadline_ms": 50_000,
    }

    def entered(self, connection):
        """Whether the key is new and locked."""
        return connection.cursor(row_factory=tuple_row).execute(command("enter"), self.GIVEN).rowcount == 1

    def test_what_it_sets(self, dsn):
        with session(dsn) as connection:
            assert self.entered(connection)
            assert setting(connection, "oncekey.begun") == str(LOCK)
            assert_limited(connection)

    @pytest.mark.parametrize(("default", "kept"), DURABLE)
    def test_it_is_durable(self, dsn, default, kept):
        with session(dsn, synchronous_commit=default) as connection:
            assert self.entered(connection)
            assert setting(connection, "synchronous_commit") == kept

    def test_a_key_that_has_a_record_is_not_new(self, dsn):
        with session(dsn) as connection:
            plant(connection, id=RecordId("x", "k"))
            plant(connection, id=RecordId("s", "x"), incarnation=OTHER_LIFE)
            assert self.entered(connection)
            plant(connection, incarnation=OURS)
            assert not self.entered(connection)

    @pytest.mark.parametrize("there", [False, True])
    def test_locked_key_without_record_sends_a_notice(self, dsn, there):
        """What a client is told of a key without a record is a notice; a record is read by another statement."""
        with session(dsn) as other, session(dsn) as connection:
            other.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])
            notices = noticed(connection)
            if there:
                plant(connection)
            assert not self.entered(connection)
            told = f'{{"scope":null,"locked":false,"other":false,"begun":{LOCK},"now":{NOW}}}'
            assert notices == ([] if there else [told])

    def told(self, dsn, settings=None, **changes):
        """The notices about a record that a request finds under its lock."""
        with session(dsn, **(settings or {})) as connection:
            notices = noticed(connection)
            plant(connection, **{"state": State.COMPLETED, **changes})
            assert not self.entered(connection)
            return [json.loads(notice) for notice in notices]

    def test_notice_contains_the_stored_response(self, dsn):
        (notice,) = self.told(dsn)
        record = notice.pop("record")
        assert notice == {"locked": True, "other": False, "begun": LOCK, "now": NOW}
        assert (record["scope"], record["key"], record["incarnation"]) == ("s", "k", LIFE)

    def test_notice_contains_the_server_time(self, dsn):
        with session(dsn) as connection:
            plant(connection, state=State.COMPLETED)
            notices = noticed(connection)
            connection.cursor(row_factory=tuple_row).execute(command("enter"), {**self.GIVEN, "now": None})
            assert json.loads(notices[0])["now"] != NOW

    @pytest.mark.parametrize(
        "settings",
        [{"log_min_messages": "info"}, {"log_min_messages": "debug1"}, {"bytea_output": "escape"}],
        ids=str,
    )
    def test_loggable_or_unsafe_responses_are_not_sent_as_notice(self, dsn, settings):
        assert self.told(dsn, settings) == []

    @pytest.mark.parametrize("level", ["notice", "warning", "error", "log", "fatal", "panic"])
    def test_notice_is_sent_if_the_server_does_not_log_it(self, dsn, level):
        assert len(self.told(dsn, {"log_min_messages": level})) == 1

    @pytest.mark.parametrize(
        ("changes", "sent"),
        [
            ({"response_body": b"x" * 8192}, True),
            ({"response_body": b"x" * 8193}, False),
            ({"path": "/\N{LATIN SMALL LETTER E WITH ACUTE}"}, False),
            ({"state": State.FAILED_RETRYABLE}, False),
        ],
    )
    def test_notice_is_sent_only_for_suitable_records(self, dsn, changes, sent):
        body = changes.pop("response_body", b"")
        answer = {"response": StoredResponse(201, (), body)}
        assert bool(self.told(dsn, **answer, **changes)) is sent

    def test_no_notice_is_sent_in_another_encoding(self, postgres_server):
        name = f"latin_{uuid.uuid4().hex}"
        made = f"CREATE DATABASE {name} ENCODING 'LATIN1' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'"
        with psycopg.connect(postgres_server.dsn("postgres"), autocommit=True) as connection:
            connection.execute(made)
        try:
            assert self.told(make_tables(postgres_server.dsn(name))) == []
        finally:
            postgres_server.drop_database(name)

    def test_read_only_server_raises_read_only_error(self, dsn):
        reader = session(dsn, default_transaction_read_only="on")
        with reader as connection, pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            self.entered(connection)


class TestLockRequest:
    """The lock of a key, and its record."""

    functions = ("lock_request_2",)

    def test_what_it_sets(self, dsn):
        with session(dsn) as connection:
            assert begin(connection)["locked"]
            assert setting(connection, "oncekey.begun") == str(LOCK)
            assert_limited(connection)

    @pytest.mark.parametrize(("default", "kept"), DURABLE)
    def test_it_is_durable(self, dsn, default, kept):
        with session(dsn, synchronous_commit=default) as connection:
            assert begin(connection)["locked"]
            assert setting(connection, "synchronous_commit") == kept

    @pytest.mark.parametrize("locked", [True, False])
    @pytest.mark.parametrize(
        "state", [{}, {"state": State.COMPLETED}, {"state": State.COMPLETED, "expires_at": NOW}], ids=str
    )
    def test_it_reads_the_record_of_the_key(self, dsn, locked, state):
        with session(dsn) as other, session(dsn) as connection:
            if not locked:
                other.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])
            plant(connection, id=RecordId("a", "k"), incarnation=OTHER_LIFE, **state)
            plant(connection, id=RecordId("s", "a"), incarnation=OURS, **state)
            assert begin(connection)["seen"] is None
            plant(connection, **state)
            assert begin(connection)["seen"] == LIFE

    @pytest.mark.parametrize(("state", "read"), [(State.COMPLETED, None), (State.FAILED_RETRYABLE, "r")])
    def test_stored_response_is_read_without_the_work_row(self, dsn, state, read):
        with session(dsn) as connection:
            plant(connection, state=state, lease_until=None, owner=None, request=b"r", expires_at=NOW + 1)
            assert begin(connection)["request"] == read

    def test_request_without_the_lock_takes_no_mark(self, dsn):
        with session(dsn) as other, session(dsn) as connection:
            other.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])
            assert not begin(connection)["locked"]
            modes = "SELECT mode FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
            assert connection.execute(modes).fetchall() == ["ShareLock"]

    @pytest.mark.parametrize(("changes", "other"), [(None, True), ({}, False), ({"expires_at": NOW}, True)])
    def test_other_request_is_detected_only_without_a_record(self, dsn, changes, other):
        with session(dsn) as holder, session(dsn) as connection:
            holder.execute("SELECT pg_advisory_xact_lock(%s), pg_advisory_xact_lock(%s, 4)", [LOCK, FAMILY])
            if changes is not None:
                plant(connection, **changes)
            assert begin(connection)["other"] is other

    def test_identical_waiting_request_is_not_another_request(self, dsn):
        """Its mark is taken, so it cannot be told from the holder of the lock."""
        with session(dsn) as holder, session(dsn) as twin, session(dsn) as connection:
            holder.execute("SELECT pg_advisory_xact_lock(%s), pg_advisory_xact_lock(%s, 4)", [LOCK, FAMILY])
            twin.execute("SELECT pg_advisory_xact_lock(%s, %s)", [FAMILY, MARK])
            assert begin(connection)["other"] is False
