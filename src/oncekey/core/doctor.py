"""What is wrong with a store, or will be: findings from what it says about itself. Pure; nothing here asks.

Each finding says what was seen, what it means and what to do. Only what this oncekey knows to be harmful is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from oncekey.core.migrations import Phase, Standing
from oncekey.core.model import HOUR, MINUTE, SECOND
from oncekey.core.showing import lapse
from oncekey.core.upkeep import CLOCK_TOLERANCE, SWEEP_GRACE, short_leases

if TYPE_CHECKING:
    from oncekey.core.census import Census, Roll, Waiting
    from oncekey.core.migrations import Entry, Migration
    from oncekey.core.model import Duration, Instant
    from oncekey.core.upkeep import Run

Rows = Sequence[Mapping[str, Any]]

DAY: Final = 24 * HOUR
SKEW_WORTH_SAYING: Final = 5 * SECOND
LONG_IDLE: Final = MINUTE
LONG_TRANSACTION: Final = HOUR
OLD_XMIN: Final = 1_000_000
MANY_ROWS: Final = 10_000
MANY_DEAD: Final = 0.2
LATE: Final = 5 * MINUTE
"""How long something may be due before it is late."""

_INDEX: Final = re.compile(r"CREATE (?:UNIQUE )?INDEX (?:CONCURRENTLY )?(?:IF NOT EXISTS )?(\w+)", re.IGNORECASE)
_DROPPED: Final = re.compile(r"DROP INDEX (?:IF EXISTS )?(?:\w+\.)?(\w+)", re.IGNORECASE)


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    about: str
    seen: str
    means: str = ""
    todo: str = ""


def worst(findings: Sequence[Finding]) -> Level:
    """The worst of them."""
    order = list(Level)
    return max((one.level for one in findings), key=order.index, default=Level.OK)


def schema(entries: Sequence[Entry]) -> Iterator[Finding]:
    """Whether the tables are the ones that this version works with."""
    bad = False
    for entry in entries:
        name = f"{entry.migration.number:04} {entry.migration.name}"
        if entry.standing is Standing.PENDING and entry.migration.phase is Phase.POST:
            bad = True
            yield Finding(
                Level.NOTE,
                "schema",
                f"migration {name} is still to be run",
                "what only older versions need is still kept up, and costs time and space",
                "oncekey migrate up, when no process of an older version is left",
            )
        elif entry.standing is Standing.PENDING:
            bad = True
            yield Finding(
                Level.ERROR,
                "schema",
                f"migration {name} is missing",
                "applications of this version do not start on this store",
                "oncekey migrate up",
            )
        elif entry.standing is Standing.CHANGED:
            bad = True
            yield Finding(
                Level.ERROR,
                "schema",
                f"migration {name} is not the one that was applied",
                "the tables were made by other statements than this version knows",
                "compare `oncekey migrate sql` with the tables; use the version that made them",
            )
    if not bad:
        yield Finding(Level.OK, "schema", f"all {len(entries)} migrations are applied")


def clock(store: Instant, before: Instant, after: Instant) -> Finding:
    """Whether the store's clock agrees with this host's; the time of the question itself is no difference."""
    apart = max(before - store, store - after, 0)
    seen = f"the store's clock and this host's differ by {apart / SECOND:.1f} s"
    if apart > CLOCK_TOLERANCE:
        return Finding(
            Level.ERROR,
            "clock",
            seen,
            "sweeper and reaper stand still, and a jump longer than a key's life ends what was promised (A3)",
            "set both clocks by NTP; after a clock was wrong, wait for one ttl before anything is reaped",
        )
    if apart > SKEW_WORTH_SAYING:
        return Finding(Level.WARNING, "clock", seen, "leases are counted by the store's clock", "set both by NTP")
    return Finding(Level.OK, "clock", seen)


def indexes(migrations: Sequence[Migration], there: Rows) -> Iterator[Finding]:
    """Whether every index that the migrations make is there, works, and is used."""
    wanted: set[str] = set()
    for migration in migrations:
        wanted |= set(_INDEX.findall(migration.text))
        wanted -= set(_DROPPED.findall(migration.text))
    by_name = {str(row["name"]): row for row in there}
    missing = sorted(wanted - set(by_name))
    if missing:
        yield Finding(
            Level.ERROR,
            "indexes",
            f"missing: {', '.join(missing)}",
            "a worker reads the whole table for each look",
            "make them as `oncekey migrate sql` prints them",
        )
    invalid = sorted(name for name, row in by_name.items() if row.get("valid") is False)
    if invalid:
        yield Finding(
            Level.ERROR,
            "indexes",
            f"invalid: {', '.join(invalid)}",
            "PostgreSQL writes them and does not read them; a CREATE INDEX CONCURRENTLY failed",
            "REINDEX INDEX CONCURRENTLY, or drop and make them again",
        )
    unused = sorted(
        name for name, row in by_name.items() if row.get("scans") == 0 and int(row.get("rows", 0)) >= MANY_ROWS
    )
    if unused:
        yield Finding(
            Level.NOTE,
            "indexes",
            f"not used since the statistics began: {', '.join(unused)}",
            "whoever reads them has not run: sweeper, reaper, completer, resolver or relay",
            "see that an `oncekey worker` runs",
        )
    if not missing and not invalid:
        yield Finding(Level.OK, "indexes", f"all {len(wanted)} are there")


@dataclass(frozen=True, slots=True)
class Limits:
    """How long things may wait before a note becomes a warning, and how many workers there should be."""

    unknown: Duration = HOUR
    stale: Duration = SWEEP_GRACE + LATE
    resumable: Duration = HOUR
    expired: Duration = DAY
    due: Duration = LATE
    dead: Duration = 0
    silent: Duration | None = None
    """How long a worker may not be seen; None: three of its own beats."""
    workers: int = 1


def unresolved(census: Census, limits: Limits = Limits()) -> Iterator[Finding]:  # noqa: B008  (frozen)
    """What waits for somebody: a note from the first one on, a warning when it has waited for too long."""
    now = census.now
    for what, late, means, todo in _waiting(limits):
        line = census.waiting_for(what)
        waits = max(0, now - (now if line.oldest is None else line.oldest))
        if line.count == 0:
            yield Finding(Level.OK, what, "none")
        elif waits >= late:
            yield Finding(Level.WARNING, what, _how_many(line, waits), means, todo)
        else:
            # What has expired a moment ago is not due yet: the reaper leaves it alone for its grace.
            level = Level.OK if what == "expired" else Level.NOTE
            yield Finding(level, what, _how_many(line, waits), means, todo)


def workers(roll: Roll, census: Census, limits: Limits = Limits()) -> Iterator[Finding]:  # noqa: B008  (frozen)
    """Whether somebody works behind the requests, and on everything that there is."""
    living = [one for one in roll.workers if one.is_alive(roll.now, limits.silent)]
    silent = [one for one in roll.workers if one not in living]
    named = "".join(f"; {one.name} runs {', '.join(one.tasks)}" for one in living)
    seen = f"{len(living) or 'no'} living{named}"
    if len(living) < limits.workers:
        wanted = "" if limits.workers == 1 else f", and {limits.workers} are wanted"
        yield Finding(
            Level.WARNING,
            "workers",
            f"{seen}{wanted}",
            "deferred calls are not made, keys of dead owners are not swept, nothing that has expired is removed",
            "run `oncekey worker --app MODULE:NAME`, or say workers=True to Once; --workers 0 if that is meant",
        )
    else:
        yield Finding(Level.OK, "workers", seen)
    missing = [task for task in _needed(census) if not any(task in one.tasks for one in living)]
    if living and missing:
        yield Finding(
            Level.WARNING,
            "workers",
            f"no living worker runs {' or '.join(missing)}",
            "; ".join(_LEFT_UNDONE[task] for task in missing),
            "run `oncekey worker` without --only and --without, or another one for these tasks",
        )
    for one in silent:
        yield Finding(
            Level.NOTE,
            "workers",
            f"{one.name} was last seen {lapse(roll.now - one.seen_at)} ago, and promised {lapse(one.every)}",
            "it died without leaving, or does not reach the store; its leases run out by themselves",
            "see why it ended; its line goes after a day",
        )


_LEFT_UNDONE: Final = MappingProxyType(
    {
        "relay": "deferred calls are not made and messages not sent",
        "completer": "phased requests whose client is gone are not finished",
        "sweeper": "keys of dead owners are not swept",
        "reaper": "nothing that has expired is removed",
    }
)


def _needed(census: Census) -> Iterator[str]:
    """The tasks that this store has work for; sweeping and reaping is needed wherever there are keys."""
    if census.queues:
        yield "relay"
    if census.waiting_for("resumable").count:
        yield "completer"
    yield from ("sweeper", "reaper")


def records(broken: Rows) -> Iterator[Finding]:
    """Whether all rows that were looked at mean something; what the table itself refuses is not asked for."""
    for row in broken:
        yield Finding(
            Level.ERROR,
            "records",
            f"{row['records']} against the rule {row['name']}",
            "no statement of oncekey writes such a row, so what becomes of its key is not known",
            "find out who changed the tables by hand; correct the rows by the table of constraints in the reference",
        )
    if not broken:
        yield Finding(Level.OK, "records", "those that were looked at are in order")


def tables(rows: Rows, now: Instant) -> Iterator[Finding]:
    """Whether the dead rows are cleaned away."""
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
    """Whether somebody's transaction stands open: it keeps dead rows alive, and may hold locks."""
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


def settings(rows: Rows, lease: Duration) -> Iterator[Finding]:
    """Whether the server's own settings break a promise."""
    said = {str(row["name"]): str(row["value"]) for row in rows}
    for name in ("fsync", "full_page_writes"):
        if said.get(name) == "off":
            yield Finding(
                Level.ERROR,
                "settings",
                f"{name} is off",
                "a crash of the host loses or breaks answers that were acknowledged",
                f"set {name} = on",
            )
    for name in ("autovacuum", "track_counts"):
        if said.get(name) == "off":
            yield Finding(
                Level.WARNING, "settings", f"{name} is off", "dead rows are never cleaned away", f"set {name} = on"
            )
    if said.get("default_transaction_read_only") == "on":
        yield Finding(
            Level.ERROR, "settings", "this is read only", "no key can be claimed here", "connect to the primary"
        )
    limit = int(said.get("transaction_timeout", "0")) * 1000
    if 0 < limit < lease:
        yield Finding(
            Level.WARNING,
            "settings",
            f"transaction_timeout is {limit // SECOND} s, and the lease {lease // SECOND} s",
            "the server ends a LOCAL handler's transaction before its own time is over",
            "make transaction_timeout longer than the lease for this user",
        )
    if "server_version" in said:
        yield Finding(Level.OK, "settings", f"PostgreSQL {said['server_version']}")


def policies(runs: Sequence[Run], lease: Duration, ttls: Rows) -> Iterator[Finding]:
    """Whether settings contradict what was observed, or each other."""
    for operation, p99 in sorted(short_leases(runs, lease).items()):
        yield Finding(
            Level.WARNING,
            "lease",
            f"1 in 100 runs of {operation} takes {p99 / SECOND:.1f} s or more, and the lease is {lease / SECOND:.0f} s",
            "an owner that misses a heartbeat looks dead while it works",
            "make the lease at least twice as long",
        )
    for row in ttls:
        ttl, call = int(row["shortest_ttl"]), int(row["longest_call"])
        if 0 < ttl < DAY:
            yield Finding(
                Level.WARNING,
                "ttl",
                f"keys are remembered for {ttl // SECOND} s",
                "a client that retries the next day executes again",
                "make ttl at least 24 h, unless clients never do that",
            )
        if 0 < ttl <= max(lease, call):
            yield Finding(
                Level.ERROR,
                "ttl",
                f"ttl is {ttl // SECOND} s, the lease {lease // SECOND} s, a call may take {call // SECOND} s",
                "a client that waits for one attempt to end finds its key forgotten",
                "make ttl much longer than both",
            )


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


_MIB: Final = 1024 * 1024
_LARGE_WAL: Final = 64 * _MIB


def _waiting(limits: Limits) -> tuple[tuple[str, Duration, str, str], ...]:
    """What waits, how long it may, what it means, and what to do."""
    return (
        (
            "unknown",
            limits.unknown,
            "their clients hear that the outcome is unknown, and nothing retries them",
            "`oncekey unknown list`, then `oncekey keys show KEY`; or register a resolver, which asks by itself",
        ),
        (
            "stale",
            limits.stale,
            "in progress, and their owners did not come back in time",
            "a worker sweeps them a minute after; else `oncekey sweep --once`",
        ),
        (
            "resumable",
            limits.resumable,
            "work was begun and is not gone on with: a client retries, or a completer does it",
            "run `oncekey worker --app ...`; see `oncekey keys list --state failed_retryable --effects phased`",
        ),
        (
            "expired",
            limits.expired,
            "the table grows, because what has expired is not removed",
            "run `oncekey worker`, or `oncekey reap --once`",
        ),
        (
            "parcels_due",
            limits.due,
            "what was committed is not sent yet",
            "run `oncekey worker --app ...`, with a function for each topic that `oncekey stats` shows",
        ),
        (
            "dead_letters",
            limits.dead,
            "they were tried too often, or may have been sent and may not be repeated; no worker tries them again",
            "`oncekey dlq list`; then `oncekey dlq retry` or `oncekey dlq discard`",
        ),
    )


def _how_many(line: Waiting, waits: Duration) -> str:
    return f"{line.count}, the oldest for {lapse(waits)}"
