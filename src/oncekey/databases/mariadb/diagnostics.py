"""Diagnoses a MariaDB or MySQL server: durability, and whether it is the only writer. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from oncekey.ops.doctor import Finding, Level, Rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from oncekey.core.model import Duration, Instant


def findings(diagnostics: Mapping[str, Rows], now: Instant, lease: Duration) -> Iterator[Finding]:  # noqa: ARG001
    """The results of the store's statements."""
    yield from server(diagnostics["diagnostic_server"], diagnostics.get("diagnostic_cluster", ()))


def server(own: Rows, cluster: Rows) -> Iterator[Finding]:
    """Whether a MariaDB or MySQL server keeps acknowledged commits, and is the only one that takes writes."""
    values = {str(row["Variable_name"]).lower(): str(row["Value"]) for row in (*own, *cluster)}
    found = [*_aged(values.get("version", "")), *_flushing(values), *_clustered(values)]
    if values.get("read_only", "OFF").upper() == "ON":
        found.append(
            Finding(
                Level.ERROR,
                "settings",
                "read_only is ON",
                "no request can be claimed",
                "use the primary's host in the URL",
            )
        )
    if values.get("innodb_rollback_on_timeout", "OFF").upper() == "ON":
        found.append(
            Finding(
                Level.NOTE,
                "settings",
                "innodb_rollback_on_timeout is ON",
                "a handler whose statement waited too long for a lock loses its whole transaction",
                "let handlers raise errors that they cannot handle; OFF is the default",
            )
        )
    yield from found
    if not found:
        yield Finding(Level.OK, "settings", f"{values.get('version', 'the server')} flushes each commit to disk")


def _aged(version: str) -> Iterator[Finding]:
    """Whether the server is too old for the statements: they need SKIP LOCKED and enforced CHECK constraints."""
    name, least = ("MariaDB", (10, 6)) if "mariadb" in version.lower() else ("MySQL", (8, 0, 16))
    declared = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    numbers = () if declared is None else tuple(int(one) for one in declared.groups() if one is not None)
    if numbers < least[: len(numbers)]:
        yield Finding(
            Level.ERROR,
            "version",
            f"{version} is older than {name} {'.'.join(map(str, least))}",
            "workers and table checks use statements that it does not support",
            f"upgrade to {name} {'.'.join(map(str, least))} or newer",
        )


def _flushing(values: Mapping[str, str]) -> Iterator[Finding]:
    todo = "SET GLOBAL {} = 1, and in the server's configuration"
    if values.get("innodb_flush_log_at_trx_commit", "1") != "1":
        yield Finding(
            Level.ERROR,
            "settings",
            f"innodb_flush_log_at_trx_commit is {values['innodb_flush_log_at_trx_commit']}",
            "a power failure loses acknowledged commits, and retries of those requests execute again",
            todo.format("innodb_flush_log_at_trx_commit"),
        )
    if values.get("log_bin", "OFF").upper() == "ON" and values.get("sync_binlog", "1") != "1":
        yield Finding(
            Level.WARNING,
            "settings",
            f"sync_binlog is {values['sync_binlog']}",
            "after a power failure the binary log, and so every replica, may lack acknowledged commits",
            todo.format("sync_binlog"),
        )
    if values.get("innodb_doublewrite", "ON").upper() == "OFF":
        yield Finding(
            Level.WARNING,
            "settings",
            "innodb_doublewrite is OFF",
            "a crash during a page write may leave the page torn",
            "turn it on, unless the file system writes pages atomically",
        )


def _clustered(values: Mapping[str, str]) -> Iterator[Finding]:
    if values.get("wsrep_on", "OFF").upper() != "ON":
        return
    size = int(values.get("wsrep_cluster_size") or 1)
    if size > 1:
        yield Finding(
            Level.WARNING,
            "cluster",
            f"this is a node of a Galera cluster of {size}",
            "a duplicate on another node is not rejected early: both execute, one commits and the other is rolled "
            "back; lost updates between healthy writers are reported (MDEV-38974, MDEV-38976)",
            "send all writes to one node, and fail over as a whole; make no calls in LOCAL handlers",
        )
    if values.get("wsrep_cluster_status", "Primary") != "Primary":
        yield Finding(
            Level.ERROR,
            "cluster",
            f"the node is {values['wsrep_cluster_status']}",
            "it has lost the majority of its cluster and rejects writes",
            "use a node of the primary component in the URL",
        )
