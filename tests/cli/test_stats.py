"""`oncekey stats`, on SQLite and PostgreSQL; and `oncekey reap --once`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid
from contextlib import contextmanager

import psycopg

from cli.operating import SCOPE, oncekey
from cli.test_dlq import deferred, emitted
from console.trouble import fill as fill_with_trouble
from console.trouble import opened
from harness import flows
from harness.postgres import PostgresServer
from oncekey.core.model import HOUR, SECOND, Doubtful, Effects, RecordId, Recovery
from oncekey.core.policy import Policy
from oncekey.testing.claims import a_claim, answered


def fill(shop):
    """Two answers, one of which has expired, one in doubt, one left behind, and two dead letters."""

    def own(**changes):
        return flows.begin(shop, a_claim(id=RecordId(SCOPE, uuid.uuid4().hex), **changes), Policy()).lease

    flows.settle(shop, own(operation="pay"), answered())
    flows.settle(shop, own(operation="pay", ttl=-HOUR), answered())
    flows.settle(shop, own(effects=Effects.INLINE, recovery=Recovery.UNKNOWN, operation="notify"), Doubtful("time_out"))
    own(lease=-HOUR, operation="order")
    deferred(shop)
    emitted(shop)


def test_stats_json_counts_records_by_state_effects_and_operation(shop, url):
    fill(shop)
    said = json.loads(oncekey("stats", "--store", url, "--json").stdout)
    assert said["keys"] == 5
    assert said["by_state"] == {"completed": 2, "in_progress": 1, "unknown": 2}
    assert said["by_effects"] == {"local": 3, "inline": 1, "outbox": 1}
    assert said["by_operation"]["pay"] == {"completed": 2}
    (left,) = [group for group in said["items"] if group["operation"] == "order"]
    assert (left["keys"], left["stale"], left["expired"]) == (1, 1, 0)
    assert {what: line["count"] for what, line in said["waiting"].items()} == {
        "unknown": 2, "stale": 1, "resumable": 0, "expired": 1, "parcels_due": 0, "dead_letters": 2,
    }  # fmt: skip
    assert said["waiting"]["stale"]["age_seconds"] >= 3600
    assert (said["outbox"]["depth"], said["dead_letters"]["count"]) == (0, 2)
    assert {line["topic"] for line in said["dead_letters"]["by_topic"]} == {"charge", "receipts"}
    assert said["duplicates"] is None
    assert "cannot be counted" in said["duplicates_note"]


def test_stats_prints_a_table_of_record_counts(shop, url):
    empty = oncekey("stats", "--store", url).stdout
    assert empty.startswith("no keys\n")
    fill(shop)
    text = oncekey("stats", "--store", url).stdout
    assert "cannot be counted" in text
    assert any(line.split()[:4] == ["completed", "local", "pay", "2"] for line in text.splitlines())


def test_reap_once_runs_one_round_and_reports_counts(shop, url):
    fill(shop)
    said = json.loads(oncekey("reap", "--once", "--store", url, "--json").stdout)
    assert said == {"moved": 1, "by": {"purged": 1, "marked": 0, "parked": 0, "abandoned": 0, "notes": 0, "workers": 0}}
    assert "0 moved" in oncekey("reap", "--once", "--store", url).stdout


@contextmanager
def watching(url, *options):
    """`oncekey stats --watch` in a process of its own, which Ctrl-C ends without a complaint."""
    command = [sys.executable, "-c", "from oncekey.cli import main; main()", "stats", "--watch", "0.1"]
    with subprocess.Popen(
        [*command, "--store", url, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            complaint = process.stderr.read()
    assert (process.returncode, complaint) == (0, "")


def until(process, wanted):
    """The first reading that fits."""
    for line in process.stdout:
        reading = json.loads(line)
        if wanted(reading):
            return reading
    raise AssertionError(process.stderr.read())


def test_stats_watch_reports_the_console_overview_and_its_changes(url):
    with opened(url) as world, watching(url, "--json") as process:
        assert "No worker is alive" in until(process, lambda reading: reading["level"] == "bad")["headline"]
        fill_with_trouble(world, finished=4)
        seen = until(process, lambda reading: reading["counts"]["dead"]["count"] == 4)
        seen = until(process, lambda reading: len(reading["workers"]) == 2)
        counts = {what: one["count"] for what, one in seen["counts"].items()}
        assert counts == {
            "unknown": 3, "dead": 4, "stuck": 1, "failed_retryable": 7, "in_progress": 2, "pending": 1, "due": 0,
        }  # fmt: skip
        assert seen["headline"] == "3 unknown outcomes and 4 dead letters need attention."


def test_stats_watch_escapes_control_characters_in_worker_names(tmp_path):
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    with opened(url) as world:
        world.go(world.store.upkeep.beat("\x1b[2Jevil", ["relay"], 3600 * SECOND))
        with watching(url) as process:
            lines = [process.stdout.readline() for _ in range(15)]
    assert lines[1] == "Nothing needs attention.\n"
    assert any(line.split()[:2] == ["unknown", "0"] for line in lines)
    assert any("evil" in line and "alive" in line and "relay" in line for line in lines)
    assert "\x1b" not in "".join(lines)


def test_stats_watch_resumes_after_a_store_outage():
    with PostgresServer() as server:
        url = server.create_database("shop")
        with opened(url) as world:
            world.go(world.store.upkeep.beat("worker-z:7", ["relay"], 3600 * SECOND))
        with watching(url, "--json") as process:
            until(process, lambda reading: reading.get("level") == "good")
            server.stop()
            until(process, lambda reading: "error" in reading)
            server.start()
            until(process, lambda reading: reading.get("level") == "good")


def test_stats_watch_exits_with_code_2_if_the_store_is_missing(tmp_path):
    missing = oncekey("stats", "--watch", "1", "--store", f"sqlite:///{tmp_path / 'none.db'}")
    nobody = oncekey("stats", "--watch", "1", "--store", "postgresql://nobody@127.0.0.1:1/none")
    assert (missing.exit_code, nobody.exit_code) == (2, 2)
    assert not (tmp_path / "none.db").exists()


def test_stats_watch_works_with_a_read_only_database_role(operated_dsn):
    with psycopg.connect(operated_dsn, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS oncekey_reader")
        connection.execute("CREATE ROLE oncekey_reader LOGIN")
        connection.execute("GRANT USAGE ON SCHEMA oncekey TO oncekey_reader")
        connection.execute("GRANT SELECT ON ALL TABLES IN SCHEMA oncekey TO oncekey_reader")
        connection.execute("ALTER ROLE oncekey_reader SET default_transaction_read_only = on")
    try:
        reader = f"{operated_dsn}{'&' if '?' in operated_dsn else '?'}user=oncekey_reader"
        with watching(reader, "--json") as process:
            assert "dead" in json.loads(process.stdout.readline())["counts"]
    finally:
        with psycopg.connect(operated_dsn, autocommit=True) as connection:
            connection.execute("DROP OWNED BY oncekey_reader")
            connection.execute("DROP ROLE oncekey_reader")
