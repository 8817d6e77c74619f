"""Diagnoses what a Redis or Valkey server can lose, as a store or as a cache in front of one. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oncekey.ops.doctor import Finding, Level, Rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from oncekey.core.model import Duration, Instant


def findings(diagnostics: Mapping[str, Rows], now: Instant, lease: Duration) -> Iterator[Finding]:  # noqa: ARG001
    """The reports of the servers."""
    yield from servers([row["reported"] for row in diagnostics["diagnostic_cells"]])


def servers(rows: Rows) -> Iterator[Finding]:
    """What a Redis or Valkey server can lose: by eviction, by a crash, and by failover."""
    for row in rows:
        node, policy = row["node"], row["maxmemory-policy"] or row["maxmemory_policy"]
        if policy != "noeviction":
            yield Finding(
                Level.ERROR,
                "eviction",
                f"{node}: maxmemory-policy is {policy or 'not reported'}",
                "a full server evicts keys, and retries of their requests execute again",
                "CONFIG SET maxmemory-policy noeviction; a full server then rejects new keys",
            )
        else:
            yield Finding(Level.OK, "eviction", f"{node}: maxmemory-policy is noeviction")
        yield _persistence(row)
        yield _replication(row)


def _persistence(row: Mapping[str, Any]) -> Finding:
    node, fsync = row["node"], row["appendfsync"]
    if row["appendonly"] != "yes" and row["aof_enabled"] != "1":
        return Finding(
            Level.WARNING,
            "persistence",
            f"{node}: appendonly is no",
            "a restart loses all writes since the last snapshot, and retries of those requests execute again",
            "CONFIG SET appendonly yes, and appendfsync always",
        )
    if fsync != "always":
        return Finding(
            Level.WARNING,
            "persistence",
            f"{node}: appendfsync is {fsync or 'not reported'}",
            "a machine that crashes loses the writes of the last second or more, although they were acknowledged",
            "CONFIG SET appendfsync always; every write then waits for the disk",
        )
    return Finding(Level.OK, "persistence", f"{node}: every write is on disk before it is acknowledged")


def _replication(row: Mapping[str, Any]) -> Finding:
    node, replicas, wait = row["node"], int(row["connected_slaves"] or 0), int(row["wait"])
    seen = f"{node}: {replicas} replicas, writes wait for {wait or 'none'}"
    if wait > replicas:
        return Finding(
            Level.ERROR,
            "replication",
            seen,
            "writes wait for more replicas than there are, so every request is refused or its outcome is unknown",
            "start replicas, or lower wait= in the store's URL",
        )
    if replicas and not wait:
        return Finding(
            Level.WARNING,
            "replication",
            seen,
            "a failover loses writes that the replica had not received, and retries of those requests execute again",
            "add ?wait=1 to the store's URL; each write then waits for a replica",
        )
    return Finding(Level.OK, "replication", seen)


def front(place: str, seen: Mapping[str, Any] | None) -> Finding:
    """The state of a Redis cache in front of the store; a problem there only costs speed."""
    if seen is None:
        return Finding(
            Level.WARNING,
            "replay_cache",
            f"{place} does not respond",
            "every request reads the store, as it does without a cache",
            "check that it runs and that its URL is right",
        )
    used, most, policy = int(seen.get("used_memory", 0)), int(seen.get("maxmemory", 0)), seen.get("maxmemory_policy")
    settings_found = (
        f"{place} responds; {used // 1024} KiB of {f'{most // 1024} KiB' if most else 'no limit'}, {policy}"
    )
    if not most:
        return Finding(
            Level.NOTE,
            "replay_cache",
            settings_found,
            "entries expire, but until then they may fill all memory of its host",
            "set maxmemory, and maxmemory-policy to allkeys-lru if it has no other use",
        )
    if policy == "noeviction":
        return Finding(
            Level.NOTE,
            "replay_cache",
            settings_found,
            "when it is full it stores nothing new, and requests read the store",
            "set maxmemory-policy to allkeys-lru if it has no other use",
        )
    return Finding(Level.OK, "replay_cache", settings_found)
