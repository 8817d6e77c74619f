"""What a MariaDB says about itself, and what is wrong with it."""

from __future__ import annotations

import pytest

from oncekey.databases.mariadb.diagnostics import server as mariadb
from oncekey.ops.doctor import Level

SOUND = {"version": "10.11.9-MariaDB", "innodb_flush_log_at_trx_commit": "1", "log_bin": "OFF", "sync_binlog": "0"}


def found(**changes: str) -> list[tuple[Level, str]]:
    values = {**SOUND, **changes}
    return [
        (one.level, one.seen)
        for one in mariadb([{"Variable_name": name, "Value": value} for name, value in values.items()], [])
    ]


def test_healthy_mariadb_is_reported_ok() -> None:
    assert found() == [(Level.OK, "10.11.9-MariaDB flushes each commit to disk")]
    assert found(wsrep_on="ON", wsrep_cluster_size="1") == [(Level.OK, "10.11.9-MariaDB flushes each commit to disk")]


@pytest.mark.parametrize("version", ["10.6.0-MariaDB-log", "11.8.2-MariaDB", "8.0.16", "8.0.mysql_aurora.3.05", "9.7"])
def test_supported_versions_are_reported_ok(version: str) -> None:
    assert found(version=version) == [(Level.OK, f"{version} flushes each commit to disk")]


@pytest.mark.parametrize(
    ("changes", "level", "seen"),
    [
        ({"version": "10.5.29-MariaDB"}, Level.ERROR, "10.5.29-MariaDB is older than MariaDB 10.6"),
        ({"version": "8.0.15"}, Level.ERROR, "8.0.15 is older than MySQL 8.0.16"),
        ({"innodb_flush_log_at_trx_commit": "2"}, Level.ERROR, "innodb_flush_log_at_trx_commit is 2"),
        ({"log_bin": "ON"}, Level.WARNING, "sync_binlog is 0"),
        ({"innodb_doublewrite": "OFF"}, Level.WARNING, "innodb_doublewrite is OFF"),
        ({"read_only": "ON"}, Level.ERROR, "read_only is ON"),
        ({"innodb_rollback_on_timeout": "ON"}, Level.NOTE, "innodb_rollback_on_timeout is ON"),
        ({"wsrep_on": "ON", "wsrep_cluster_size": "3"}, Level.WARNING, "this is a node of a Galera cluster of 3"),
        (
            {"wsrep_on": "ON", "wsrep_cluster_size": "1", "wsrep_cluster_status": "non-Primary"},
            Level.ERROR,
            "the node is non-Primary",
        ),
    ],
)
def test_unsafe_mariadb_settings_are_reported(changes: dict[str, str], level: Level, seen: str) -> None:
    assert found(**changes) == [(level, seen)]
