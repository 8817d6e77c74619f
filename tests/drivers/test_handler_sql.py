"""What a handler may and may not say (L5, F16)."""

from __future__ import annotations

import pytest

from oncekey.core.errors import TransactionControlError
from oncekey.core.sqltext import Dialect, sentences
from oncekey.databases import handler_sql
from oncekey.databases.handler_sql import refuse_transaction_control

BOTH = (Dialect.SQLITE, Dialect.POSTGRES)


@pytest.mark.parametrize("dialect", BOTH)
@pytest.mark.parametrize(
    "sql",
    [
        "begin",
        "BEGIN IMMEDIATE",
        "begin isolation level serializable",
        "start transaction",
        "START /* really */ TRANSACTION",
        "commit",
        "COMMIT;",
        "commit and chain",
        "commit prepared 'x'",
        "end",
        "END TRANSACTION",
        "rollback",
        "ROLLBACK TRANSACTION",
        "rollback work",
        "rollback prepared 'x'",
        'rollback transaction "to"',
        "abort",
        "prepare transaction 'x'",
        "set transaction isolation level serializable",
        "set session characteristics as transaction read only",
        "  \t\r\n commit",
        "\ufeffcommit",
        "-- a comment\ncommit",
        "/* a comment */commit",
        "/**//**/ -- x\n /* y */ CoMmIt",
        "select 1; commit",
        "select ';'; commit",
        "; commit",
        "select 1 -- ; \n; commit",
        "attach 'other.db' as other",
        "detach other",
        "pragma journal_mode = delete",
        "PRAGMA main.journal_mode",
        "pragma 'journal_mode'(wal)",
        "pragma locking_mode = exclusive",
        "pragma synchronous = off",
    ],
)
def test_transaction_control_is_rejected_in_any_spelling(sql, dialect):  # F16
    with pytest.raises(TransactionControlError, match="ended by oncekey"):
        refuse_transaction_control(sql, dialect)


@pytest.mark.parametrize(
    "sql",
    ["select $$ $$; commit", r"select E'\''; commit", "select $a$;$a$; rollback", r"select '\'; commit"],
)
def test_postgres_quoting_does_not_hide_transaction_control(sql):
    with pytest.raises(TransactionControlError):
        refuse_transaction_control(sql)


@pytest.mark.parametrize("sql", ["select [;]; commit", "select `;`; commit", "select 1 /* /* */; commit"])
def test_sqlite_quoting_does_not_hide_transaction_control(sql):
    with pytest.raises(TransactionControlError):
        refuse_transaction_control(sql, Dialect.SQLITE)


@pytest.mark.parametrize("dialect", BOTH)
@pytest.mark.parametrize(
    "sql",
    [
        "",
        "-- commit",
        "/* commit */",
        "select 1",
        "insert into t values ('commit; rollback')",
        "select 'x; commit'",
        'select "commit" from "begin"',
        "update t set a = 1",
        "update t set a = case when b then 1 else 2 end",
        "savepoint a",
        "release savepoint a",
        "release a",
        "rollback to a",
        "rollback to savepoint a",
        "rollback transaction to savepoint a",
        "rollback work to a",
        "set local statement_timeout = 1",
        "select commit from t",
        "pragma foreign_key_check",
        "pragma table_info(journal_mode)",
        "create table commits (a int)",
        "insert into commit_log values (1); insert into endings values (2)",
    ],
)
def test_other_statements_are_allowed(sql, dialect):
    refuse_transaction_control(sql, dialect)


def test_end_of_a_trigger_body_is_allowed():
    refuse_transaction_control("create trigger t after insert on a begin select 1; end", Dialect.SQLITE)


def test_postgres_function_bodies_are_not_checked():
    refuse_transaction_control("do $$ begin perform 1; end $$")
    refuse_transaction_control("create function f() returns int begin atomic select 1; end")


def test_error_names_the_statement_without_its_data():
    with pytest.raises(TransactionControlError) as caught:
        refuse_transaction_control("insert into t values ('4111111111111111'); COMMIT")

    assert "COMMIT is refused" in str(caught.value)
    assert "SAVEPOINT" in str(caught.value)
    assert "4111" not in str(caught.value)


@pytest.mark.parametrize(
    "sql",
    [
        "set role tenant_7",
        "SET SESSION search_path = x",
        "set search_path to x",
        "reset all",
        "discard all",
    ],
)
def test_session_wide_statements_are_rejected(sql):
    with pytest.raises(TransactionControlError, match="SET LOCAL"):
        refuse_transaction_control(sql)


@pytest.mark.parametrize(
    "sql", ["set local role tenant_7", "SET CONSTRAINTS ALL DEFERRED", "update x set y = 1", "select 'set role x'"]
)
def test_transaction_local_statements_are_allowed(sql):
    refuse_transaction_control(sql)


@pytest.mark.parametrize(
    ("sql", "instead"), [("listen x", "a separate connection"), ("prepare q as select 1", "frequent statements")]
)
def test_error_suggests_the_transaction_local_alternative(sql, instead):
    with pytest.raises(TransactionControlError, match=instead):
        refuse_transaction_control(sql)


def test_a_text_is_read_once(monkeypatch):
    # Every UPDATE has SET in it, and lexing one takes longer than executing it.
    read = []
    monkeypatch.setattr(handler_sql, "sentences", lambda sql, dialect: read.append(sql) or sentences(sql, dialect))
    handler_sql._remembered.cache_clear()
    for _ in range(3):
        refuse_transaction_control("UPDATE orders SET item = $1")
        with pytest.raises(TransactionControlError, match="COMMIT"):
            refuse_transaction_control("UPDATE orders SET item = $1; COMMIT")
    assert read == ["UPDATE orders SET item = $1", "UPDATE orders SET item = $1; COMMIT"]
    # What is remembered is bounded, in number and in length.
    assert handler_sql._remembered.cache_info().maxsize == 1000
    long = f"UPDATE orders SET item = '{'x' * 5000}'; COMMIT"
    for _ in range(2):
        with pytest.raises(TransactionControlError):
            refuse_transaction_control(long)
    assert read[2:] == [long, long]


def test_each_dialect_has_its_own_verdict():
    refuse_transaction_control("SET x = 1", Dialect.SQLITE)
    with pytest.raises(TransactionControlError):
        refuse_transaction_control("SET x = 1", Dialect.POSTGRES)


@pytest.mark.parametrize(
    "sql",
    [
        "SET timestamp = 1000",
        "set session SQL_SELECT_LIMIT=0",
        "SET @@session.max_statement_time := 0.001",
        "SET @mine = 1, LOCAL timestamp = 5",
    ],
)
def test_a_setting_of_mariadb_that_the_record_cannot_be_stored_with_is_refused(sql):
    with pytest.raises(TransactionControlError, match="refused here"):
        refuse_transaction_control(sql, Dialect.MARIADB)


@pytest.mark.parametrize(
    "sql", ["SET @timestamp = 1", "SET STATEMENT max_statement_time=1 FOR SELECT 1", "UPDATE t SET timestamp = 1"]
)
def test_similar_mariadb_settings_are_allowed(sql):
    refuse_transaction_control(sql, Dialect.MARIADB)


@pytest.mark.parametrize(
    ("sql", "sets"),
    [
        ("SET LOCAL ROLE tenant", True),
        ("set local  role to 'tenant'", True),
        ("SELECT set_config('role', $1, true)", True),
        ("SELECT set_config($1, $2, true)", True),
        ("SET LOCAL statement_timeout = 5", True),
        ("SET LOCAL app.tenant = 'acme'", False),
        ("SELECT set_config('app.tenant', $1, true)", False),
        ("UPDATE users SET role = 'admin'", False),
    ],
)
def test_a_text_that_may_set_a_role_is_noticed(sql, sets):
    assert refuse_transaction_control(sql) is sets
