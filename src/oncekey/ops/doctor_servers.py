"""What is wrong with the server or file behind a store: what it could lose, what blocks it, how it is reached. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from oncekey.core.model import HOUR, MINUTE, SECOND, Duration, Instant
from oncekey.ops.doctor import MANY_ROWS, Finding, Level, Rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


LONG_IDLE: Final = MINUTE
LONG_TRANSACTION: Final = HOUR
OLD_XMIN: Final = 1_000_000
MANY_DEAD: Final = 0.2
_MIB: Final = 1024 * 1024
_LARGE_WAL: Final = 64 * _MIB


def tables(rows: Rows, now: Instant) -> Iterator[Finding]:
    """Whether the server removes dead rows in time."""
    for row in rows:
        live, dead = int(row["live"]), int(row["dead"])
        last = row["last_autovacuum"]
        ago = "never" if last is None else f"{max(0, now - int(last)) // SECOND} s ago"
        seen = f"{row['name']}: {live} rows, {dead} dead, {int(row['bytes']) // 1024} KiB, last vacuum {ago}"
        if dead >= MANY_ROWS and dead > MANY_DEAD * max(live, 1):
            yield Finding(
                Level.WARNING,
                "dead rows",
                seen,
                "every look reads past them, and the table grows",
                "find who keeps vacuum from it (an old transaction or slot, below), or let autovacuum run more often",
            )
        else:
            yield Finding(Level.OK, "dead rows", seen)


def sessions(rows: Rows, holders: Rows) -> Iterator[Finding]:
    """Whether a session's transaction stands open: it keeps dead rows alive, and may hold locks."""
    for row in rows:
        idle, longest = int(row["idle"]), int(row["longest_idle"])
        oldest, xmin = int(row["oldest_transaction"]), int(row["oldest_xmin"])
        if idle and longest > LONG_IDLE:
            yield Finding(
                Level.WARNING,
                "idle transactions",
                f"{idle} idle in a transaction, the longest for {longest // SECOND} s",
                "it holds its locks, LOCAL's own among them, and keeps vacuum from all tables",
                "find it in pg_stat_activity; set idle_in_transaction_session_timeout",
            )
        else:
            yield Finding(Level.OK, "idle transactions", f"{idle} idle in a transaction")
        if oldest > LONG_TRANSACTION or xmin > OLD_XMIN:
            yield Finding(
                Level.WARNING,
                "old transactions",
                f"the oldest is open for {oldest // SECOND} s, the oldest snapshot is {xmin} transactions old",
                "rows that died since cannot be cleaned away",
                "end it, or move long reports to a standby",
            )
        if int(row["hidden"]):
            yield Finding(
                Level.NOTE,
                "sessions",
                f"{row['hidden']} sessions of other users cannot be seen",
                "what they hold open is not known here",
                "GRANT pg_read_all_stats to this user for a full answer",
            )
    for row in holders:
        if int(row["prepared"]) or int(row["slot_xmin"]) > OLD_XMIN:
            yield Finding(
                Level.WARNING,
                "old transactions",
                f"{row['prepared']} prepared transactions, a replication slot {row['slot_xmin']} transactions behind",
                "rows that died since cannot be cleaned away",
                "ROLLBACK PREPARED what was forgotten; drop the slot of a consumer that is gone",
            )


def pooler(*, stands: bool, per_transaction: bool, declared: bool | None) -> Finding:
    """Whether the store's address says which pooler stands before the server."""
    if not stands:
        if declared:
            return Finding(
                Level.NOTE,
                "pooler",
                "the address says that there is one, and none stands before the server",
                "less is kept prepared than could be, which makes statements dearer",
                "take pgbouncer= out of the URL",
            )
        return Finding(Level.OK, "pooler", "none stands before the server")
    if declared:
        return Finding(
            Level.OK,
            "pooler",
            "one stands before the server, and the address says so",
            "nothing is kept in a session: no lock, no setting, no statement that the pooler does not keep itself",
        )
    if per_transaction:
        return Finding(
            Level.WARNING,
            "pooler",
            "one lends the server's connections by the transaction, and the address does not say so",
            "another client meets what is prepared or set in a session",
            "add ?pgbouncer=1 to the URL, and server_reset_query_always = 1 to PgBouncer",
        )
    return Finding(
        Level.NOTE,
        "pooler",
        "one stands before the server; whether it lends connections by the transaction was not seen",
        "another client meets what is prepared or set in a session if it does",
        "add ?pgbouncer=1 to the URL if its pool_mode is transaction",
    )


def settings(rows: Rows, lease: Duration) -> Iterator[Finding]:
    """Whether the server's own settings break a promise."""
    settings_found = {str(row["name"]): str(row["value"]) for row in rows}
    for name in ("fsync", "full_page_writes"):
        if settings_found.get(name) == "off":
            yield Finding(
                Level.ERROR,
                "settings",
                f"{name} is off",
                "a crash of the host loses or breaks answers that were acknowledged",
                f"set {name} = on",
            )
    for name in ("autovacuum", "track_counts"):
        if settings_found.get(name) == "off":
            yield Finding(
                Level.WARNING, "settings", f"{name} is off", "dead rows are never cleaned away", f"set {name} = on"
            )
    if settings_found.get("default_transaction_read_only") == "on":
        yield Finding(
            Level.ERROR, "settings", "this is read only", "no key can be claimed here", "connect to the primary"
        )
    if settings_found.get("in_hot_standby") == "on":
        yield Finding(
            Level.ERROR,
            "settings",
            "this is a standby",
            "no key can be claimed here",
            "connect to the primary; with several hosts in the URL the one that takes writes is found",
        )
    if settings_found.get("synchronous_standby_names"):
        yield Finding(
            Level.OK,
            "standby",
            f"commits wait for {settings_found['synchronous_standby_names']}",
            "what was acknowledged is there after a fail-over; without the standby nothing is acknowledged",
        )
    limit = int(settings_found.get("transaction_timeout", "0")) * 1000
    if 0 < limit < lease:
        yield Finding(
            Level.WARNING,
            "settings",
            f"transaction_timeout is {limit // SECOND} s, and the lease {lease // SECOND} s",
            "the server ends a LOCAL handler's transaction before its own time is over",
            "make transaction_timeout longer than the lease for this user",
        )
    if "server_version" in settings_found:
        yield Finding(Level.OK, "settings", f"PostgreSQL {settings_found['server_version']}")


def sqlite(file: Rows, journal: Rows, wal_bytes: int | None, *, wal_is_safe: bool) -> Iterator[Finding]:
    """Whether a SQLite file keeps what was committed."""
    version = str(file[0]["version"]) if file else "?"
    mode = str(journal[0]["journal_mode"]).lower() if journal else "?"
    seen = f"SQLite {version}, journal_mode {mode}"
    if mode == "wal" and not wal_is_safe:
        yield Finding(
            Level.ERROR,
            "sqlite",
            seen,
            "this version can lose a commit in write-ahead mode (the WAL-reset bug)",
            "stop everybody and open it by oncekey alone, or use sqlite+pysqlite3:// everywhere",
        )
    elif mode in {"off", "memory"}:
        yield Finding(Level.ERROR, "sqlite", seen, "a crash breaks the file", "PRAGMA journal_mode = PERSIST")
    elif not wal_is_safe:
        yield Finding(
            Level.NOTE,
            "sqlite",
            seen,
            "this version can lose commits in write-ahead mode, so a rollback journal is used, which is slower",
            "pip install 'oncekey[sqlite]' and use sqlite+pysqlite3:// everywhere",
        )
    else:
        yield Finding(Level.OK, "sqlite", seen)
    if wal_bytes is not None and wal_bytes > _LARGE_WAL:
        yield Finding(
            Level.WARNING,
            "sqlite",
            f"the write-ahead log has {wal_bytes // _MIB} MiB",
            "a reader that never ends keeps it from being emptied, and every look gets slower",
            "find the connection with an open transaction",
        )


def mariadb(server: Rows, cluster: Rows) -> Iterator[Finding]:
    """Whether a MariaDB or MySQL keeps what it acknowledged, and whether it is the only one that is written to."""
    values = {str(row["Variable_name"]).lower(): str(row["Value"]) for row in (*server, *cluster)}
    found = [*_aged(values.get("version", "")), *_flushing(values), *_clustered(values)]
    if values.get("read_only", "OFF").upper() == "ON":
        found.append(
            Finding(
                Level.ERROR,
                "settings",
                "read_only is ON",
                "no request can be claimed",
                "name the primary in the address",
            )
        )
    if values.get("innodb_rollback_on_timeout", "OFF").upper() == "ON":
        found.append(
            Finding(
                Level.NOTE,
                "settings",
                "innodb_rollback_on_timeout is ON",
                "a handler whose statement waited too long for a lock loses its whole transaction",
                "let handlers raise what they cannot deal with; OFF is the default",
            )
        )
    yield from found
    if not found:
        yield Finding(Level.OK, "settings", f"{values.get('version', 'the server')} flushes what it commits")


def _aged(version: str) -> Iterator[Finding]:
    """Whether the server is older than the statements need: SKIP LOCKED, and checks that are checked."""
    name, least = ("MariaDB", (10, 6)) if "mariadb" in version.lower() else ("MySQL", (8, 0, 16))
    declared = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    numbers = () if declared is None else tuple(int(one) for one in declared.groups() if one is not None)
    if numbers < least[: len(numbers)]:
        yield Finding(
            Level.ERROR,
            "version",
            f"{version} is older than {name} {'.'.join(map(str, least))}",
            "workers and checks of the tables need statements that it does not know",
            f"run {name} {'.'.join(map(str, least))} or newer",
        )


def _flushing(values: Mapping[str, str]) -> Iterator[Finding]:
    todo = "SET GLOBAL {} = 1, and in the server's configuration"
    if values.get("innodb_flush_log_at_trx_commit", "1") != "1":
        yield Finding(
            Level.ERROR,
            "settings",
            f"innodb_flush_log_at_trx_commit is {values['innodb_flush_log_at_trx_commit']}",
            "a power failure takes back what was acknowledged, and the retry of such a request is executed again",
            todo.format("innodb_flush_log_at_trx_commit"),
        )
    if values.get("log_bin", "OFF").upper() == "ON" and values.get("sync_binlog", "1") != "1":
        yield Finding(
            Level.WARNING,
            "settings",
            f"sync_binlog is {values['sync_binlog']}",
            "after a power failure the binary log, and with it every replica, may lack what was acknowledged here",
            todo.format("sync_binlog"),
        )
    if values.get("innodb_doublewrite", "ON").upper() == "OFF":
        yield Finding(
            Level.WARNING,
            "settings",
            "innodb_doublewrite is OFF",
            "a crash in the middle of a page may leave it torn",
            "switch it on, unless the file system writes pages as a whole",
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
            "a duplicate on another node is not refused early: both execute, one commits and the other is rolled back; "
            "and lost updates between healthy writers are reported (MDEV-38974, MDEV-38976)",
            "let all processes write to one node, and fail over as a whole; keep calls out of LOCAL handlers",
        )
    if values.get("wsrep_cluster_status", "Primary") != "Primary":
        yield Finding(
            Level.ERROR,
            "cluster",
            f"the node is {values['wsrep_cluster_status']}",
            "it has lost the majority of its cluster and refuses to write",
            "name a node of the primary component",
        )


def redis(servers: Rows) -> Iterator[Finding]:
    """What a server of Redis or Valkey can forget: by evicting, by its disk, and by failing over."""
    for row in servers:
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


def dynamodb(tables: Rows) -> Iterator[Finding]:
    """Whether DynamoDB keeps records, expires what may go, and has the capacity to write. None: it does not say."""
    for table in tables:
        name = table["table"]
        if table["expiry"] is False:
            yield Finding(
                Level.WARNING,
                "dynamodb",
                f"time to live is off on {name}",
                "what has expired is removed by the reaper alone, item by item",
                f"aws dynamodb update-time-to-live --table-name {name} "
                "--time-to-live-specification Enabled=true,AttributeName=forget_at",
            )
        if table["recovery"] is False:
            yield Finding(
                Level.WARNING,
                "dynamodb",
                f"point-in-time recovery is off on {name}",
                "a table that is deleted or overwritten by mistake forgets every key, and retries execute again",
                f"aws dynamodb update-continuous-backups --table-name {name} "
                "--point-in-time-recovery-specification PointInTimeRecoveryEnabled=true",
            )
        if table["billing"] != "PAY_PER_REQUEST":
            yield Finding(
                Level.NOTE,
                "dynamodb",
                f"{name} has provisioned {table['writes']} writes a second",
                "above that DynamoDB throttles, and requests are answered 503; each takes about three writes",
                "see that it scales by itself, or make it pay per request",
            )
        yield Finding(Level.OK, "dynamodb", f"{name} is {table['status'].lower()}, billed as {table['billing']}")


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
