"""`oncekey doctor`: healthy stores are in order, and each thing that is broken on purpose is found."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

import psycopg
import pytest

from cli.operating import oncekey
from cli.test_stats import fill
from harness import flows
from oncekey import wire
from oncekey.core.flow import drive
from oncekey.core.migrations import MigrationPhase
from oncekey.core.model import HOUR, MINUTE, SECOND, ParcelKind
from oncekey.core.policy import Policy
from oncekey.core.upkeep import Run
from oncekey.databases.postgres import diagnostics as postgres
from oncekey.databases.sqlite import diagnostics as sqlite
from oncekey.engine import migrating
from oncekey.ops import doctor
from oncekey.ops.doctor import Level
from oncekey.ops.stats import Queue, Roll, StoreStats, Waiting, Worker, troubled
from oncekey.testing.claims import a_claim


def examined(url, *options):
    result = oncekey("doctor", "--store", url, "--json", *options)
    said = json.loads(result.stdout)
    assert set(said) == {"now", "items", "next", "level"}
    assert all(set(one) == {"level", "about", "seen", "means", "todo"} for one in said["items"])
    assert all(one["means"] and one["todo"] for one in said["items"] if one["level"] != "ok")
    assert result.exit_code == {"ok": 0, "note": 0, "warning": 1, "error": 2}[said["level"]]
    return said


def about(said, what, level=None):
    return [one for one in said["items"] if one["about"] == what and level in {None, one["level"]}]


def beat(shop, name="host:7:aa", tasks=("relay", "completer", "sweeper", "reaper"), every=15 * SECOND):
    """A worker that was just seen."""
    drive(shop.store.upkeep.beat(name, tasks, every), shop.driver.run)


def test_doctor_reports_a_healthy_store_as_ok(shop, url):
    beat(shop)
    said = examined(url)
    assert said["level"] in {"ok", "note"}
    assert {one["about"] for one in said["items"]} >= {
        "schema", "clock", "indexes", "workers", "unknown", "stale", "resumable", "expired", "parcels_due",
        "dead_letters",
    }  # fmt: skip
    text = oncekey("doctor", "--store", url)
    assert "\x1b" not in text.stdout
    assert text.exit_code == 0
    assert "OK       schema: all" in text.stdout
    assert "schema" not in oncekey("doctor", "--store", url, "--quiet").stdout


def test_doctor_reports_unresolved_work_beyond_its_thresholds(shop, url):
    fill(shop)
    said = examined(url)
    assert said["level"] == "warning"
    assert [one["seen"].split(",")[0] for one in about(said, "dead_letters", "warning")] == ["2"]
    assert about(said, "stale", "warning")
    assert about(said, "unknown", "note")  # not for an hour yet
    patient = examined(url, "--workers", "0", "--dead-after", "1h", "--stale-after", "90d", "--expired-after", "90d")
    assert patient["level"] == "note"
    assert about(patient, "dead_letters", "note")
    assert about(examined(url, "--unknown-after", "0"), "unknown", "warning")


def test_doctor_warns_if_no_worker_is_alive(shop, url):
    (finding,) = about(examined(url), "workers")
    assert (finding["level"], finding["seen"]) == ("warning", "none alive")
    assert "oncekey worker" in finding["todo"]
    assert finding["means"].startswith("deferred calls are not made, ")
    assert about(examined(url, "--workers", "0"), "workers", "ok")
    beat(shop)
    (finding,) = about(examined(url), "workers")
    assert (finding["level"], finding["seen"]) == ("ok", "1 alive; host:7:aa runs relay, completer, sweeper, reaper")
    (finding,) = about(examined(url, "--workers", "2"), "workers", "warning")
    assert finding["means"].startswith("the live ones do the work; if they stop, deferred calls are not made, ")
    assert finding["todo"].endswith("pass --workers 1 if there should be no more")


def test_doctor_reports_dead_workers_and_tasks_without_a_worker(shop, url):
    beat(shop, "host:7:dead", every=-HOUR)  # it promised to be seen an hour ago
    beat(shop, "host:8:aa", tasks=("relay",))
    said = about(examined(url), "workers")
    assert [one["level"] for one in said] == ["ok", "warning", "note"]
    assert said[1]["seen"] == "no live worker runs sweeper or reaper"
    assert said[2]["seen"].startswith("host:7:dead sent its last heartbeat")
    assert [one["level"] for one in about(examined(url, "--silent-after", "1h"), "workers")] == ["ok"]


def test_doctor_reports_a_worker_task_that_cannot_run(shop, url):
    beat(shop, tasks=("relay", "completer", troubled("sweeper", "ended with PanicException"), "reaper"))
    said = about(examined(url), "workers", "warning")
    assert [one["seen"] for one in said] == [
        "host:7:aa cannot run sweeper (ended with PanicException)",
        "no live worker runs sweeper",
    ]


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
    assert (said["level"], about(said, "schema")[0]["todo"]) == ("error", "run `oncekey migrate up`")


def test_doctor_reports_an_unreachable_store_as_an_error():
    said = examined("postgresql://nobody@127.0.0.1:1/nothing")
    assert [(one["about"], one["level"]) for one in said["items"]] == [("store", "error")]


def test_doctor_checks_postgresql_indexes_settings_and_dead_rows(postgres_dsn):
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


BROKEN = {
    "state = 'done'": "state_known",
    "effects = 'magic'": "effects_known",
    "recovery = 'hope'": "recovery_known",
    "fence = 0": "counts_up",
    "version = 0": "counts_up",
    "attempts = -1": "counts_up",
    "outcome = 'perhaps', state = 'expired', owner = NULL, lease_until = NULL": "outcome_known",
    "response_status = 200": "answer_only_when_done",
    "outcome = 'success'": "answer_only_when_done",
    "owner = NULL": "owned_in_progress",
    "lease_until = NULL": "owned_in_progress",
    "state = 'failed_retryable'": "owned_only_in_progress",
    "state = 'unknown', owner = NULL, lease_until = NULL": "unknown_has_ticket",
    "state = 'completed', owner = NULL, lease_until = NULL": "completed_has_answer",
    "state = 'completed', owner = NULL, lease_until = NULL, outcome = 'success', response_status = 200, "
    "response_headers = '[]', response_schema = 1": "completed_has_answer",
    "memo_version = 9": "work_fits",
    "incarnation = gen_random_uuid()": "work_has_record",
    "state = 'completed', owner = NULL, lease_until = NULL, outcome = 'success', response_status = 200, "
    "response_headers = '[]', response_schema = 1, finished_at = 1": "completed_has_no_intent",
}
BESIDE = {
    "intent = NULL": "memo_has_version",
    "memo_version = 0": "memo_has_version",
    "reconcile_tries = -1": "tries_count_up",
}


def test_doctor_reports_inconsistent_records_as_errors(postgres_dsn):
    """What the table does not refuse by itself; each alone, and nothing about a row that is as it should be."""
    with closing(wire.connect(postgres_dsn)) as engine, psycopg.connect(postgres_dsn, autocommit=True) as raw:
        engine.migrate()
        rules = {}
        for change in (*BROKEN, *BESIDE):
            claim = a_claim(request=b"kept")
            flows.begin(engine, claim, Policy())
            raw.execute("UPDATE oncekey.work SET intent = '{}', memo_version = 1")
            raw.execute("UPDATE oncekey.record SET memo_version = 1")
            assert [one["level"] for one in about(examined(postgres_dsn), "records")] == ["ok"]
            raw.execute(f"UPDATE oncekey.{'record' if change in BROKEN else 'work'} SET {change}".encode())
            rules[change] = {one["seen"] for one in about(examined(postgres_dsn), "records", "error")}
            raw.execute("TRUNCATE oncekey.record, oncekey.work")
    for change, rule in {**BROKEN, **BESIDE}.items():
        assert f"1 in violation of the rule {rule}" in rules[change], change


def test_doctor_notes_a_pending_post_migration(postgres_dsn):
    with closing(wire.connect(postgres_dsn)) as engine:
        drive(migrating.up(engine.store.schema, only=MigrationPhase.PRE), engine.driver.run)
        beat(engine)
    said = examined(postgres_dsn)
    findings = about(said, "schema")
    assert findings
    assert {said["level"], *(finding["level"] for finding in findings)} == {"note"}
    assert about(said, "records", "ok")


# The rules by themselves: what no test may do to a server that others share.


@pytest.mark.parametrize(
    ("apart", "level"), [(0, Level.OK), (6 * SECOND, Level.WARNING), (-7 * SECOND, Level.WARNING), (HOUR, Level.ERROR)]
)
def test_doctor_grades_the_clock_skew(apart, level):
    # A3, F41
    assert doctor.clock(HOUR + apart, HOUR - SECOND, HOUR).level is level


def test_doctor_does_not_count_a_slow_query_as_clock_skew():
    assert doctor.clock(HOUR, HOUR - MINUTE, HOUR + MINUTE).level is Level.OK


def test_doctor_warns_if_operations_run_longer_than_the_lease():
    runs = [Run("pay", 200 * SECOND)] * 30 + [Run("order", SECOND)] * 30
    (finding,) = doctor.policies(runs, 300 * SECOND, ())
    assert (finding.level, "pay" in finding.seen) == (Level.WARNING, True)


@pytest.mark.parametrize(
    ("ttl", "levels"), [(0, []), (24 * HOUR, []), (HOUR, ["warning"]), (MINUTE, ["warning", "error"])]
)
def test_doctor_grades_the_shortest_record_ttl(ttl, levels):
    found = doctor.policies((), 300 * SECOND, [{"shortest_ttl": ttl, "longest_call": 30 * SECOND}])
    assert [one.level for one in found] == levels


@pytest.mark.parametrize(
    ("live", "dead", "level"),
    [(1_000_000, 100_000, Level.OK), (1_000_000, 300_000, Level.WARNING), (10, 9_999, Level.OK)],
)
def test_doctor_grades_the_share_of_dead_rows(live, dead, level):
    row = {"name": "record", "live": live, "dead": dead, "bytes": 8192, "last_autovacuum": None}
    (finding,) = postgres.tables([row], HOUR)
    assert finding.level is level


def test_doctor_reports_old_transactions_and_held_back_vacuum():
    row = {"idle": 1, "longest_idle": HOUR, "oldest_transaction": 2 * HOUR, "oldest_xmin": 5, "hidden": 1}
    holders = [{"prepared": 1, "slot_xmin": 0}]
    assert [one.level for one in postgres.sessions([row], holders)] == ["warning", "warning", "note", "warning"]


def test_doctor_reports_unsafe_postgresql_settings():
    rows = [
        {"name": "fsync", "value": "off"},
        {"name": "autovacuum", "value": "off"},
        {"name": "transaction_timeout", "value": "10000"},
        {"name": "default_transaction_read_only", "value": "on"},
    ]
    assert sorted(one.level for one in postgres.settings(rows, 300 * SECOND)) == [
        "error",
        "error",
        "warning",
        "warning",
    ]


def test_doctor_works_with_a_pool_of_one_connection(postgres_dsn):
    assert oncekey("migrate", "up", "--store", postgres_dsn).exit_code == 0
    assert about(examined(postgres_dsn, "--workers", "0"), "pooler", "ok")
    assert not about(examined(f"{postgres_dsn}?pool_size=1", "--workers", "0"), "store")


def test_doctor_reports_a_standby_and_synchronous_commits():
    found = {
        value: list(postgres.settings([{"name": "in_hot_standby", "value": value}], SECOND)) for value in ("on", "off")
    }
    assert ([one.level for one in found["on"]], found["off"]) == (["error"], [])
    (waits,) = postgres.settings([{"name": "synchronous_standby_names", "value": "db2"}], SECOND)
    assert (waits.level, waits.seen) == ("ok", "commits wait for db2")


@pytest.mark.parametrize(
    ("mode", "safe", "wal", "levels"),
    [
        ("wal", True, 0, ["ok"]),
        ("wal", False, 0, ["error"]),
        ("truncate", False, None, ["note"]),
        ("persist", False, None, ["note"]),
        ("memory", True, None, ["error"]),
        ("wal", True, 1 << 30, ["ok", "warning"]),
    ],
)
def test_doctor_grades_sqlite_journal_mode_and_version(mode, safe, wal, levels):
    file = [{"version": "3.51.3", "path": "shop.db"}]
    found = sqlite.kept(file, [{"journal_mode": mode}], wal, safe=safe)
    assert [one.level for one in found] == levels


def test_unused_indexes_are_only_noted():
    rows = [{"name": "a", "on_table": "record", "valid": True, "scans": 0, "rows": 20_000}]
    assert [one.level for one in doctor.indexes((), rows)] == ["note", "ok"]


@pytest.mark.parametrize(
    ("what", "fresh", "limit"),
    [
        ("unknown", Level.NOTE, HOUR),
        ("stale", Level.NOTE, doctor.Limits().stale),
        ("resumable", Level.NOTE, HOUR),
        ("expired", Level.OK, 24 * HOUR),
        ("parcels_due", Level.NOTE, 5 * MINUTE),
        ("dead_letters", Level.WARNING, 0),
    ],
)
def test_doctor_warns_once_unresolved_work_reaches_its_age_limit(what, fresh, limit):
    def level(age):
        stats = StoreStats(100 * HOUR, (), (), (), (Waiting(what, 1, 100 * HOUR - age),))
        return next(one.level for one in doctor.unresolved(stats) if one.about == what)

    assert level(0) is fresh
    assert level(max(0, limit - 1)) is (fresh if limit else Level.WARNING)
    assert level(limit) is Level.WARNING


def test_doctor_requires_relay_and_completer_only_if_they_have_work():
    queue = Queue("charge", ParcelKind.DEFER, 1, 0, 0)
    roll = Roll(0, (Worker("host:1:aa", ("sweeper", "reaper"), 0, 0, SECOND),))
    idle = StoreStats(0, (), (), (), ())
    busy = StoreStats(0, (), (queue,), (), (Waiting("resumable", 1, 0),))
    assert [one.level for one in doctor.workers(roll, idle)] == [Level.OK]
    assert [one.seen for one in doctor.workers(roll, busy)][1] == "no live worker runs relay or completer"
