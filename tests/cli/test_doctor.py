"""`oncekey doctor`: healthy stores are in order, and each thing that is broken on purpose is found."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

import psycopg
import pytest

from cli.operating import oncekey
from cli.test_stats import fill
from oncekey import wire
from oncekey.core import doctor
from oncekey.core.doctor import Level
from oncekey.core.model import HOUR, MINUTE, SECOND
from oncekey.core.upkeep import Run


def examined(url, *options):
    result = oncekey("doctor", "--store", url, "--json", *options)
    said = json.loads(result.stdout)
    assert set(said) == {"level", "findings"}
    assert all(set(one) == {"level", "about", "seen", "means", "todo"} for one in said["findings"])
    assert all(one["means"] and one["todo"] for one in said["findings"] if one["level"] != "ok")
    assert result.exit_code == {"ok": 0, "note": 0, "warning": 1, "error": 2}[said["level"]]
    return said


def about(said, what, level=None):
    return [one for one in said["findings"] if one["about"] == what and level in {None, one["level"]}]


def test_a_healthy_store_is_in_order(shop, url):
    said = examined(url)
    assert said["level"] in {"ok", "note"}
    assert {one["about"] for one in said["findings"]} >= {
        "schema", "clock", "indexes", "unknown", "stale", "resumable", "expired", "parcels_due", "dead_letters",
    }  # fmt: skip
    text = oncekey("doctor", "--store", url)
    assert text.exit_code == 0
    assert "OK       schema: all" in text.stdout
    assert "schema" not in oncekey("doctor", "--store", url, "--quiet").stdout


def test_what_waits_is_found(shop, url):
    fill(shop)
    said = examined(url)
    assert said["level"] == "warning"
    assert [one["seen"].split(",")[0] for one in about(said, "dead_letters", "warning")] == ["2"]
    assert about(said, "stale", "warning")
    assert about(said, "unknown", "ok")  # not for an hour yet


def test_a_missing_index_is_an_error(tmp_path):
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    engine = wire.connect(url)
    engine.migrate()
    engine.close()
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        connection.execute("DROP INDEX oncekey_record_running")
    said = examined(url)
    assert said["level"] == "error"
    assert "oncekey_record_running" in about(said, "indexes", "error")[0]["seen"]


def test_missing_tables_are_an_error(tmp_path):
    (tmp_path / "shop.db").touch()
    said = examined(f"sqlite:///{tmp_path / 'shop.db'}")
    assert (said["level"], about(said, "schema")[0]["todo"]) == ("error", "oncekey migrate up")


def test_a_store_that_does_not_answer():
    said = examined("postgresql://nobody@127.0.0.1:1/nothing")
    assert [(one["about"], one["level"]) for one in said["findings"]] == [("store", "error")]


def test_postgresql_says_more(postgres_dsn):
    engine = wire.connect(postgres_dsn)
    engine.migrate()
    engine.close()
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute("DROP INDEX oncekey.outbox_due")
        connection.execute(
            "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'oncekey.record_running'::regclass"
        )
        connection.execute("ALTER DATABASE {} SET track_counts = off".format(postgres_dsn.rsplit("/", 1)[1]))
    said = examined(postgres_dsn)
    assert [one["seen"] for one in about(said, "indexes", "error")] == [
        "missing: outbox_due",
        "invalid: record_running",
    ]
    assert any("track_counts is off" in one["seen"] for one in about(said, "settings", "warning"))
    assert {one["seen"].partition(":")[0] for one in about(said, "dead rows")} >= {"record", "outbox", "audit"}
    assert about(said, "idle transactions", "ok")


# The rules by themselves: what no test may do to a server that others share.


@pytest.mark.parametrize(
    ("apart", "level"), [(0, Level.OK), (6 * SECOND, Level.WARNING), (-7 * SECOND, Level.WARNING), (HOUR, Level.ERROR)]
)
def test_clocks(apart, level):
    # A3, F41
    assert doctor.clock(HOUR + apart, HOUR - SECOND, HOUR).level is level


def test_a_slow_answer_is_no_skew():
    assert doctor.clock(HOUR, HOUR - MINUTE, HOUR + MINUTE).level is Level.OK


def test_leases_shorter_than_what_operations_take():
    runs = [Run("pay", 200 * SECOND)] * 30 + [Run("order", SECOND)] * 30
    (finding,) = doctor.policies(runs, 300 * SECOND, ())
    assert (finding.level, "pay" in finding.seen) == (Level.WARNING, True)


@pytest.mark.parametrize(
    ("ttl", "levels"), [(0, []), (24 * HOUR, []), (HOUR, ["warning"]), (MINUTE, ["warning", "error"])]
)
def test_ttls(ttl, levels):
    found = doctor.policies((), 300 * SECOND, [{"shortest_ttl": ttl, "longest_call": 30 * SECOND}])
    assert [one.level for one in found] == levels


@pytest.mark.parametrize(
    ("live", "dead", "level"),
    [(1_000_000, 100_000, Level.OK), (1_000_000, 300_000, Level.WARNING), (10, 9_999, Level.OK)],
)
def test_dead_rows(live, dead, level):
    row = {"name": "record", "live": live, "dead": dead, "bytes": 8192, "last_autovacuum": None}
    (finding,) = doctor.tables([row], HOUR)
    assert finding.level is level


def test_old_transactions():
    row = {"idle": 1, "longest_idle": HOUR, "oldest_transaction": 2 * HOUR, "oldest_xmin": 5, "hidden": 1}
    holders = [{"prepared": 1, "slot_xmin": 0}]
    assert [one.level for one in doctor.sessions([row], holders)] == ["warning", "warning", "note", "warning"]


def test_settings_that_break_a_promise():
    rows = [
        {"name": "fsync", "value": "off"},
        {"name": "autovacuum", "value": "off"},
        {"name": "transaction_timeout", "value": "10000"},
        {"name": "default_transaction_read_only", "value": "on"},
    ]
    assert sorted(one.level for one in doctor.settings(rows, 300 * SECOND)) == ["error", "error", "warning", "warning"]


@pytest.mark.parametrize(
    ("mode", "safe", "wal", "levels"),
    [
        ("wal", True, 0, ["ok"]),
        ("wal", False, 0, ["error"]),
        ("truncate", False, None, ["note"]),
        ("memory", True, None, ["error"]),
        ("wal", True, 1 << 30, ["ok", "warning"]),
    ],
)
def test_sqlite_files(mode, safe, wal, levels):
    file = [{"version": "3.51.3", "path": "shop.db"}]
    found = doctor.sqlite(file, [{"journal_mode": mode}], wal, wal_is_safe=safe)
    assert [one.level for one in found] == levels


def test_unused_indexes_are_only_noted():
    rows = [{"name": "a", "on_table": "record", "valid": True, "scans": 0, "rows": 20_000}]
    assert [one.level for one in doctor.indexes((), rows)] == ["note", "ok"]
