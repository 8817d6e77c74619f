"""`oncekey migrate`, as it is typed."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import psycopg
import pytest

from oncekey import wire
from oncekey.core.migrations import MigrationPhase, plan

ONCEKEY = Path(sys.executable).with_name("oncekey")
LABEL = wire.migrations_for("sqlite:///any.db").migrations[0].label


def oncekey(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "200", **variables}
    return subprocess.run([ONCEKEY, *arguments], capture_output=True, text=True, check=False, cwd=cwd, env=environment)


def test_from_nothing_to_up_to_date(tmp_path):
    before = oncekey("migrate", "status", "--store", "sqlite:///shop.db", cwd=tmp_path)
    up = oncekey("migrate", "up", "--store", "sqlite:///shop.db", cwd=tmp_path)
    again = oncekey("migrate", "up", "--store", "sqlite:///shop.db", cwd=tmp_path)
    after = oncekey("migrate", "status", "--store", "sqlite:///shop.db", cwd=tmp_path)

    assert (before.returncode, before.stdout.splitlines()[1].split()) == (1, ["0001", "pre", "records", "pending"])
    assert (up.returncode, up.stdout.splitlines()[0]) == (0, f"applied {LABEL}.sql")
    assert (again.returncode, again.stdout) == (0, "nothing to do\n")
    assert (after.returncode, after.stdout.splitlines()[1].split()) == (0, ["0001", "pre", "records", "applied"])
    assert [result.stderr for result in (before, up, again, after)] == [""] * 4


def test_migrate_status_json_lists_pending_migrations(tmp_path):
    result = oncekey("migrate", "status", "--json", cwd=tmp_path, ONCEKEY_STORE="sqlite:///shop.db")

    assert result.returncode == 1
    assert json.loads(result.stdout)["items"][0] == {
        "number": 1,
        "phase": "pre",
        "name": "records",
        "status": "pending",
    }


def test_migrate_up_applies_the_pre_phase_before_the_post_phase(tmp_path):
    result = oncekey("migrate", "up", "--phase", "pre", "--store", "sqlite:///shop.db", cwd=tmp_path)
    assert (result.returncode, result.stdout.splitlines()[0]) == (0, f"applied {LABEL}.sql")

    result = oncekey("migrate", "up", "--phase", "post", "--store", "sqlite:///shop.db", cwd=tmp_path)
    assert result.returncode == 2
    assert "--phase pre" in result.stderr


@pytest.mark.parametrize("url", ["sqlite:///any.db", "postgresql://any", "mysql://any/any"])
def test_migrate_up_of_the_pre_phase_runs_no_post_migration_on_an_empty_database(tmp_path, url):
    ran = plan(wire.migrations_for(url).migrations, (), only=MigrationPhase.PRE)
    assert {one.phase for one in ran} == {MigrationPhase.PRE}
    teaches = " ".join(oncekey("migrate", "up", "--help", cwd=tmp_path, COLUMNS="400").stdout.split())
    assert "run only migrations that older code can work with" in teaches


def test_migrate_reports_a_changed_checksum(tmp_path):
    oncekey("migrate", "up", "--store", "sqlite:///shop.db", cwd=tmp_path)
    with closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as connection:
        connection.execute("UPDATE oncekey_migration SET checksum = 'tampered'")

    status = oncekey("migrate", "status", "--store", "sqlite:///shop.db", cwd=tmp_path)
    up = oncekey("migrate", "up", "--store", "sqlite:///shop.db", cwd=tmp_path)

    assert status.returncode == 1
    assert "changed" in status.stdout
    assert up.returncode == 2
    assert "is not the one" in up.stderr


@pytest.fixture(params=["sqlite", "postgres_dsn", "mariadb_url", "mysql_url"])
def ledger(request, tmp_path):
    """A store without tables, and a function that changes the checksum of one of its migrations."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/shop.db"
        table, connect = "oncekey_migration", partial(sqlite3.connect, tmp_path / "shop.db", isolation_level=None)
    elif request.param == "postgres_dsn":
        url = request.getfixturevalue(request.param)
        table, connect = "oncekey.migration", partial(psycopg.connect, url, autocommit=True)
    else:
        url = request.getfixturevalue(request.param)
        server = request.getfixturevalue(request.param.replace("url", "server"))
        table, connect = "oncekey_migration", partial(server.connect, url.rpartition("/")[2])

    def change(number, checksum):
        with closing(connect()) as connection, closing(connection.cursor()) as cursor:
            cursor.execute(f"UPDATE {table} SET checksum = '{checksum}' WHERE number = {number}")

    return url, change


def test_a_store_with_the_checksums_of_an_earlier_version_is_up_to_date(ledger, tmp_path):
    url, change = ledger
    oncekey("migrate", "up", "--store", url, cwd=tmp_path)
    known = wire.migrations_for(url).migrations
    for one in known:
        change(one.number, one.former)

    status = oncekey("migrate", "status", "--json", "--store", url, cwd=tmp_path)
    up = oncekey("migrate", "up", "--store", url, cwd=tmp_path)
    assert [one["status"] for one in json.loads(status.stdout)["items"]] == ["applied"] * len(known)
    assert (up.returncode, up.stdout) == (0, "nothing to do\n")

    change(1, "0" * 64)
    assert oncekey("migrate", "up", "--store", url, cwd=tmp_path).returncode == 2


@pytest.mark.parametrize("dialect", ["sqlite", "postgres"])
def test_sql_is_printed_without_a_database(tmp_path, dialect):
    url = {"sqlite": "sqlite:///nowhere/shop.db", "postgres": "postgresql://nobody@127.0.0.1:1/nothing"}[dialect]

    by_dialect = oncekey("migrate", "sql", "--dialect", dialect, cwd=tmp_path)
    by_url = oncekey("migrate", "sql", "--store", url, cwd=tmp_path)

    assert by_dialect.returncode == 0
    assert by_dialect.stdout == by_url.stdout == wire.migrations_for(url).script()
    assert list(tmp_path.iterdir()) == []


def test_the_printed_sql_is_all_that_is_needed(tmp_path):
    script = oncekey("migrate", "sql", "--dialect", "sqlite", cwd=tmp_path).stdout
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        connection.executescript(script)

    assert oncekey("migrate", "status", "--store", "sqlite:///shop.db", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["up", "--store", "memory:"], "nothing to migrate"),
        (["status", "--store", "memory:"], "nothing to migrate"),
        (["up", "--store", "mongodb://h/d"], "no store for mongodb"),
        (["sql"], "no store was given: pass --store URL"),
        (["up", "--store", "sqlite:///nowhere/shop.db"], "cannot be opened"),
        (["up"], "--store"),
        (["sql", "--dialect", "oracle"], "oracle"),
    ],
)
def test_migrate_usage_error_is_one_line_without_traceback(tmp_path, arguments, sentence):
    result = oncekey("migrate", *arguments, cwd=tmp_path)

    assert result.returncode == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+asyncpg", "postgresql+psycopg"])
def test_migrate_up_creates_the_tables_in_postgresql(tmp_path, postgres_dsn, scheme):
    url = postgres_dsn.replace("postgresql", scheme, 1)

    assert oncekey("migrate", "status", "--store", url, cwd=tmp_path).returncode == 1
    up = oncekey("migrate", "up", "--store", url, cwd=tmp_path)
    assert (up.returncode, up.stdout.splitlines()[0], up.stderr) == (0, f"applied {LABEL}.sql", "")
    assert oncekey("migrate", "status", "--store", url, cwd=tmp_path).returncode == 0


KEPT = {
    "a URL": 'from oncekey import Once\nonce = Once("sqlite:///shop.db")\n',
    "an engine": (
        "from oncekey import Once\nfrom sqlalchemy.ext.asyncio import create_async_engine\n"
        'once = Once(create_async_engine("sqlite+aiosqlite:///shop.db"))\n'
    ),
    "a blocking engine": (
        "from oncekey import Once\nfrom sqlalchemy import create_engine\n"
        'once = Once(create_engine("sqlite:///shop.db"))\n'
    ),
}


@pytest.mark.parametrize("kept", KEPT)
def test_migrate_uses_the_store_of_an_application(kept, tmp_path):
    (tmp_path / "shop.py").write_text(KEPT[kept])
    app = ("--app", "shop:once")
    up = oncekey("migrate", "up", *app, cwd=tmp_path)
    status = oncekey("migrate", "status", *app, cwd=tmp_path)
    sql = oncekey("migrate", "sql", *app, cwd=tmp_path)
    doctor = oncekey("doctor", "--workers", "0", *app, cwd=tmp_path)
    assert (up.returncode, up.stdout.splitlines()[0]) == (0, f"applied {LABEL}.sql"), up.stderr
    assert (status.returncode, sql.returncode, doctor.returncode) == (0, 0, 0), doctor.stdout + doctor.stderr
    assert "CREATE TABLE oncekey_record" in sql.stdout
    assert "OK       schema: all" in doctor.stdout
    assert (tmp_path / "shop.db").is_file()


@pytest.mark.parametrize("command", [("migrate", "up"), ("migrate", "status"), ("doctor",)], ids=" ".join)
def test_a_command_without_a_store_names_the_options(command, tmp_path):
    (tmp_path / "shop.py").write_text(
        "from flask_sqlalchemy import SQLAlchemy\nfrom oncekey import Once\nfrom oncekey.flask import database\n"
        "once = Once(database(SQLAlchemy()))\n"
    )
    nothing, unnamed = oncekey(*command, cwd=tmp_path), oncekey(*command, "--app", "shop:once", cwd=tmp_path)
    assert (nothing.returncode, unnamed.returncode) == (2, 2)
    assert "pass --store URL or --app MODULE:NAME, or set ONCEKEY_STORE" in nothing.stderr
    assert "pass --store URL" in unnamed.stderr


def test_doctor_uses_the_lease_of_the_application(tmp_path):
    (tmp_path / "shop.py").write_text(
        "from oncekey import INLINE, Once, Policy\n"
        'once = Once("sqlite:///shop.db", policy=Policy(lease=90))\n'
        "@once.protect(effects=INLINE, lease=7)\ndef quick(): ...\n"
    )
    read = "from oncekey.cli.doctor import _lease_of; print(_lease_of('shop:once'), _lease_of(None))"
    said = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert said.stdout == "7000000 300000000\n"
