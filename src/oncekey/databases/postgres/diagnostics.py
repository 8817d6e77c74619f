"""Diagnoses a PostgreSQL server: durability, open transactions, vacuum and poolers. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from oncekey.core.model import HOUR, MINUTE, SECOND, Duration, Instant
from oncekey.ops.doctor import MANY_ROWS, Finding, Level, Rows, records

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


LONG_IDLE: Final = MINUTE
LONG_TRANSACTION: Final = HOUR
OLD_XMIN: Final = 1_000_000
MANY_DEAD: Final = 0.2


def findings(diagnostics: Mapping[str, Rows], now: Instant, lease: Duration) -> Iterator[Finding]:
    """The findings from the results of the store's statements."""
    if "diagnostic_rows" in diagnostics:
        yield from records(diagnostics["diagnostic_rows"])
    yield from tables(diagnostics.get("diagnostic_tables", ()), now)
    yield from sessions(diagnostics.get("diagnostic_sessions", ()), diagnostics.get("diagnostic_holders", ()))
    yield from settings(diagnostics.get("diagnostic_settings", ()), lease)


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
                "every query reads past them, and the table grows",
                "find what blocks vacuum (an old transaction or slot, below), or let autovacuum run more often",
            )
        else:
            yield Finding(Level.OK, "dead rows", seen)


def sessions(rows: Rows, holders: Rows) -> Iterator[Finding]:
    """Whether a session has a long open transaction, which keeps dead rows alive and may hold locks."""
    for row in rows:
        idle, longest = int(row["idle"]), int(row["longest_idle"])
        oldest, xmin = int(row["oldest_transaction"]), int(row["oldest_xmin"])
        if idle and longest > LONG_IDLE:
            yield Finding(
                Level.WARNING,
                "idle transactions",
                f"{idle} idle in a transaction, the longest for {longest // SECOND} s",
                "it holds its locks, including those of LOCAL, and blocks vacuum in all tables",
                "find it in pg_stat_activity; set idle_in_transaction_session_timeout",
            )
        else:
            yield Finding(Level.OK, "idle transactions", f"{idle} idle in a transaction")
        if oldest > LONG_TRANSACTION or xmin > OLD_XMIN:
            yield Finding(
                Level.WARNING,
                "old transactions",
                f"the oldest is open for {oldest // SECOND} s, the oldest snapshot is {xmin} transactions old",
                "rows that died since then cannot be removed",
                "end it, or move long reports to a standby",
            )
        if int(row["hidden"]):
            yield Finding(
                Level.NOTE,
                "sessions",
                f"{row['hidden']} sessions of other users cannot be seen",
                "their open transactions are not known here",
                "GRANT pg_read_all_stats to this user for a full report",
            )
    for row in holders:
        if int(row["prepared"]) or int(row["slot_xmin"]) > OLD_XMIN:
            yield Finding(
                Level.WARNING,
                "old transactions",
                f"{row['prepared']} prepared transactions, a replication slot {row['slot_xmin']} transactions behind",
                "rows that died since then cannot be removed",
                "ROLLBACK PREPARED forgotten transactions; drop the slot of a consumer that is gone",
            )


def pooler(*, stands: bool, per_transaction: bool, declared: bool | None) -> Finding:
    """Whether the store's address declares the pooler in front of the server."""
    if not stands:
        if declared:
            return Finding(
                Level.NOTE,
                "pooler",
                "the URL declares a pooler, but there is none in front of the server",
                "fewer statements stay prepared, so each one costs more",
                "remove pgbouncer= from the URL",
            )
        return Finding(Level.OK, "pooler", "there is none in front of the server")
    if declared:
        return Finding(
            Level.OK,
            "pooler",
            "there is one in front of the server, and the URL declares it",
            "nothing is kept in a session: no lock, no setting, no statement that the pooler does not keep itself",
        )
    if per_transaction:
        return Finding(
            Level.WARNING,
            "pooler",
            "one lends the server's connections per transaction, and the URL does not declare it",
            "other clients see statements and settings left in the pooled session",
            "add ?pgbouncer=1 to the URL, and server_reset_query_always = 1 to PgBouncer",
        )
    return Finding(
        Level.NOTE,
        "pooler",
        "there is one in front of the server; whether it lends connections per transaction could not be detected",
        "if it does, other clients see statements and settings left in the pooled session",
        "add ?pgbouncer=1 to the URL if its pool_mode is transaction",
    )


def settings(rows: Rows, lease: Duration) -> Iterator[Finding]:
    """Whether the server's settings break one of oncekey's guarantees."""
    settings_found = {str(row["name"]): str(row["value"]) for row in rows}
    for name in ("fsync", "full_page_writes"):
        if settings_found.get(name) == "off":
            yield Finding(
                Level.ERROR,
                "settings",
                f"{name} is off",
                "a crash of the host loses or corrupts acknowledged responses",
                f"set {name} = on",
            )
    for name in ("autovacuum", "track_counts"):
        if settings_found.get(name) == "off":
            yield Finding(
                Level.WARNING, "settings", f"{name} is off", "dead rows are never removed", f"set {name} = on"
            )
    if settings_found.get("default_transaction_read_only") == "on":
        yield Finding(
            Level.ERROR, "settings", "the server is read-only", "no key can be claimed here", "connect to the primary"
        )
    if settings_found.get("in_hot_standby") == "on":
        yield Finding(
            Level.ERROR,
            "settings",
            "this is a standby",
            "no key can be claimed here",
            "connect to the primary; with several hosts in the URL, the one that accepts writes is used",
        )
    if settings_found.get("synchronous_standby_names"):
        yield Finding(
            Level.OK,
            "standby",
            f"commits wait for {settings_found['synchronous_standby_names']}",
            "acknowledged commits survive a failover; without the standby nothing is acknowledged",
        )
    limit = int(settings_found.get("transaction_timeout", "0")) * 1000
    if 0 < limit < lease:
        yield Finding(
            Level.WARNING,
            "settings",
            f"transaction_timeout is {limit // SECOND} s, and the lease {lease // SECOND} s",
            "the server ends a LOCAL handler's transaction before its lease",
            "make transaction_timeout longer than the lease for this user",
        )
    if "server_version" in settings_found:
        yield Finding(Level.OK, "settings", f"PostgreSQL {settings_found['server_version']}")
