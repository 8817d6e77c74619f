"""What a server of Redis or Valkey can forget, as a store or in front of one. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oncekey.ops.doctor import Finding, Level, Rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from oncekey.core.model import Duration, Instant


def findings(diagnostics: Mapping[str, Rows], now: Instant, lease: Duration) -> Iterator[Finding]:  # noqa: ARG001
    """What the servers report."""
    yield from servers([row["reported"] for row in diagnostics["diagnostic_cells"]])


def servers(rows: Rows) -> Iterator[Finding]:
    """What a server of Redis or Valkey can forget: by evicting, by its disk, and by failing over."""
    for row in rows:
        node, policy = row["node"], row["maxmemory-policy"] or row["maxmemory_policy"]
        if policy != "noeviction":
            yield Finding(
                Level.ERROR,
                "eviction",
                f"{node}: maxmemory-policy is {policy or 'not reported'}",
                "a server that is full forgets keys, and their requests are executed again",
                "CONFIG SET maxmemory-policy noeviction; a full server then refuses new keys",
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
            "a restart forgets what was written since the last snapshot, and their requests are executed again",
            "CONFIG SET appendonly yes, and appendfsync always",
        )
    if fsync != "always":
        return Finding(
            Level.WARNING,
            "persistence",
            f"{node}: appendfsync is {fsync or 'not reported'}",
            "a machine that stops forgets what was acknowledged in the last second or more",
            "CONFIG SET appendfsync always, which makes every write wait for the disk",
        )
    return Finding(Level.OK, "persistence", f"{node}: every write is on the disk before it is acknowledged")


def _replication(row: Mapping[str, Any]) -> Finding:
    node, replicas, wait = row["node"], int(row["connected_slaves"] or 0), int(row["wait"])
    seen = f"{node}: {replicas} replicas, and {wait or 'none'} of them waited for"
    if wait > replicas:
        return Finding(
            Level.ERROR,
            "replication",
            seen,
            "no write is acknowledged by as many as are waited for, so every request is refused or in doubt",
            "start replicas, or say a smaller wait= in the store's URL",
        )
    if replicas and not wait:
        return Finding(
            Level.WARNING,
            "replication",
            seen,
            "a fail-over forgets what the replica had not received yet, and those requests are executed again",
            "say ?wait=1 in the store's URL; each write then waits for a replica",
        )
    return Finding(Level.OK, "replication", seen)


def front(place: str, seen: Mapping[str, Any] | None) -> Finding:
    """The state of a Redis in front of the store; a problem there costs speed only."""
    if seen is None:
        return Finding(
            Level.WARNING,
            "replay_cache",
            f"{place} does not answer",
            "every request asks the store, as it does without it",
            "see that it runs, and that its URL is right",
        )
    used, most, policy = int(seen.get("used_memory", 0)), int(seen.get("maxmemory", 0)), seen.get("maxmemory_policy")
    settings_found = f"{place} answers; {used // 1024} KiB of {f'{most // 1024} KiB' if most else 'no limit'}, {policy}"
    if not most:
        return Finding(
            Level.NOTE,
            "replay_cache",
            settings_found,
            "what it keeps goes away by itself, and until then it may take all memory of its host",
            "set maxmemory, and maxmemory-policy to allkeys-lru if it is used for nothing else",
        )
    if policy == "noeviction":
        return Finding(
            Level.NOTE,
            "replay_cache",
            settings_found,
            "when it is full it takes nothing new, and requests ask the store",
            "set maxmemory-policy to allkeys-lru if it is used for nothing else",
        )
    return Finding(Level.OK, "replay_cache", settings_found)
