"""Diagnoses a store: findings from its reports. Pure: the caller queries the store.

Each finding states an observation, its meaning and a remedy. Only a condition that is known to be harmful is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from oncekey.core.migrations import Migration, MigrationPhase, MigrationState, MigrationStatus
from oncekey.core.model import HOUR, MINUTE, SECOND, Duration, Instant, lapse
from oncekey.core.upkeep import CLOCK_TOLERANCE, SWEEP_GRACE, Run, short_leases
from oncekey.ops.tasks import TASKS

if TYPE_CHECKING:
    from oncekey.core.enclosing import InUse
    from oncekey.ops.stats import Roll, StoreStats, Waiting


Rows = Sequence[Mapping[str, Any]]

DAY: Final = 24 * HOUR
REPORTED_SKEW: Final = 5 * SECOND
MANY_ROWS: Final = 10_000
LATE: Final = 5 * MINUTE
"""How long something may be due before it is late."""

NOT_SERVED: Final = "applications of this version refuse every request with a key"

_INDEX: Final = re.compile(
    r"(?:CREATE |^ +)(?:UNIQUE )?INDEX (?:CONCURRENTLY )?(?:IF NOT EXISTS )?(\w+)", re.IGNORECASE | re.MULTILINE
)
_DROPPED: Final = re.compile(r"DROP INDEX (?:IF EXISTS )?(?:\w+\.)?(\w+)", re.IGNORECASE)


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    level: Level
    about: str
    seen: str
    means: str = ""
    todo: str = ""


def worst(findings: Sequence[Finding]) -> Level:
    """The worst level among the findings."""
    order = list(Level)
    return max((one.level for one in findings), key=order.index, default=Level.OK)


def seals(kept: Sequence[InUse], names: frozenset[str] | None, current: str | None, unopened: int) -> Iterator[Finding]:
    """Which encryption keys are in use, and whether all are available. If `names` is None the command has no keys."""
    used: dict[str | None, list[str]] = {}
    for one in kept:
        used.setdefault(one.key_id, []).append(f"{one.found} {one.part}")
    sealed = sorted(name for name in used if name is not None)
    seen = "; ".join(f"{name}: {', '.join(used[name])}" for name in sealed)
    if names is None:
        if sealed:
            yield Finding(
                Level.NOTE,
                "seals",
                f"in the sample, encrypted with {seen}",
                "this command has no keys, so it cannot check whether the content can be decrypted",
                "set ONCEKEY_SEAL_KEYS",
            )
        return
    missing = [name for name in sealed if name not in names]
    if missing:
        yield Finding(
            Level.ERROR,
            "seals",
            f"encrypted with {seen}; the key {', '.join(missing)} is missing here",
            "retries of these requests are refused, and their deferred calls wait",
            "give the missing key to every process again",
        )
    if unopened:
        yield Finding(
            Level.ERROR,
            "seals",
            f"{unopened} records cannot be decrypted with the key that they name",
            "the key with that name was replaced, or rows were edited by hand",
            "find the key that was used; content encrypted with it is lost without it",
        )
    if None in used:
        yield Finding(
            Level.NOTE,
            "seals",
            f"not encrypted: {', '.join(used[None])}",
            "stored by a process without a seal, or before there was one",
            "oncekey rekey",
        )
    older = [name for name in sealed if name != current and name in names]
    if older:
        yield Finding(
            Level.NOTE,
            "seals",
            f"encrypted with {seen}; the current key is {current}",
            "the older keys are still needed",
            "run oncekey rekey, then remove the older keys",
        )
    if not missing and not unopened:
        yield Finding(Level.OK, "seals", f"all content can be decrypted ({seen or 'nothing is encrypted yet'})")


def schema(entries: Sequence[MigrationStatus]) -> Iterator[Finding]:
    """Whether the tables match this version."""
    if all(entry.state is MigrationState.PENDING for entry in entries):
        yield Finding(Level.ERROR, "schema", "the store has no oncekey tables", NOT_SERVED, "run `oncekey migrate up`")
        return
    bad = False
    for entry in entries:
        name = f"{entry.migration.number:04} {entry.migration.name}"
        if entry.state is MigrationState.PENDING and entry.migration.phase is MigrationPhase.POST:
            bad = True
            yield Finding(
                Level.NOTE,
                "schema",
                f"migration {name} is still pending",
                "data that only older versions need is still maintained, and costs time and space",
                "run `oncekey migrate up` when no process of an older version is left",
            )
        elif entry.state is MigrationState.PENDING:
            bad = True
            yield Finding(
                Level.ERROR,
                "schema",
                f"migration {name} is missing",
                NOT_SERVED,
                "run `oncekey migrate up`",
            )
        elif entry.state is MigrationState.CHANGED:
            bad = True
            yield Finding(
                Level.ERROR,
                "schema",
                f"migration {name} differs from the one that was applied",
                "the tables were created by statements that differ from those of this version",
                "compare `oncekey migrate sql` with the tables; use the version that created them",
            )
    if not bad:
        yield Finding(Level.OK, "schema", f"all {len(entries)} migrations are applied")


def clock(store: Instant, before: Instant, after: Instant) -> Finding:
    """Whether the store's clock agrees with this host's; the duration of the query does not count."""
    apart = max(before - store, store - after, 0)
    seen = f"the store's clock and this host's differ by {apart / SECOND:.1f} s"
    if apart > CLOCK_TOLERANCE:
        return Finding(
            Level.ERROR,
            "clock",
            seen,
            "sweeper and reaper pause, and a jump longer than a key's ttl breaks the guarantee (A3)",
            "synchronise both clocks with NTP; after a clock was wrong, reap nothing for one ttl",
        )
    if apart > REPORTED_SKEW:
        return Finding(Level.WARNING, "clock", seen, "leases use the store's clock", "synchronise both with NTP")
    return Finding(Level.OK, "clock", seen)


def indexes(migrations: Sequence[Migration], there: Rows) -> Iterator[Finding]:
    """Whether every index of the migrations exists, is valid, and is used."""
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
            "workers scan the whole table each time they look for work",
            "create them as printed by `oncekey migrate sql`",
        )
    invalid = sorted(name for name, row in by_name.items() if row.get("valid") is False)
    if invalid:
        yield Finding(
            Level.ERROR,
            "indexes",
            f"invalid: {', '.join(invalid)}",
            "PostgreSQL maintains them but does not use them; a CREATE INDEX CONCURRENTLY failed",
            "REINDEX INDEX CONCURRENTLY, or drop and create them again",
        )
    unused = sorted(
        name for name, row in by_name.items() if row.get("scans") == 0 and int(row.get("rows", 0)) >= MANY_ROWS
    )
    if unused:
        yield Finding(
            Level.NOTE,
            "indexes",
            f"not used since the statistics were reset: {', '.join(unused)}",
            "the worker that reads them has not run: sweeper, reaper, completer, reconciler or relay",
            "check that an `oncekey worker` runs",
        )
    if not missing and not invalid:
        yield Finding(Level.OK, "indexes", f"all {len(wanted)} exist")


@dataclass(frozen=True, slots=True)
class Limits:
    """How long work may wait before a note becomes a warning, and the minimum number of workers."""

    unknown: Duration = HOUR
    stale: Duration = SWEEP_GRACE + LATE
    resumable: Duration = HOUR
    expired: Duration = DAY
    due: Duration = LATE
    dead: Duration = 0
    silent: Duration | None = None
    """How long a worker may miss heartbeats; None: three of its intervals."""
    workers: int = 1


def unresolved(stats: StoreStats, limits: Limits = Limits()) -> Iterator[Finding]:  # noqa: B008  (frozen)
    """Work that waits for a worker or an operator: a note from the first one, a warning when it has waited too long."""
    now = stats.now
    for what, late, means, todo in _waiting(limits):
        line = stats.waiting_for(what)
        waits = max(0, now - (now if line.oldest is None else line.oldest))
        if line.count == 0:
            yield Finding(Level.OK, what, "none")
        elif waits >= late:
            yield Finding(Level.WARNING, what, _how_many(line, waits), means, todo)
        else:
            # A record that has just expired is not due yet: the reaper waits for a grace period.
            level = Level.OK if what == "expired" else Level.NOTE
            yield Finding(level, what, _how_many(line, waits), means, todo)


def workers(roll: Roll, stats: StoreStats, limits: Limits = Limits()) -> Iterator[Finding]:  # noqa: B008  (frozen)
    """Whether workers run, and whether every task that has work has a worker."""
    living = [one for one in roll.workers if one.is_alive(roll.now, limits.silent)]
    silent = [one for one in roll.workers if one not in living]
    named = "".join(f"; {one.name} runs {', '.join(one.tasks)}" for one in living)
    seen = f"{len(living) or 'none'} alive{named}"
    if len(living) < limits.workers:
        wanted = "" if limits.workers == 1 else f", but {limits.workers} are required"
        undone = "deferred calls are not made, keys of dead owners are not released, expired records are not removed"
        yield Finding(
            Level.WARNING,
            "workers",
            f"{seen}{wanted}",
            f"the live ones do the work; if they stop, {undone}" if living else undone,
            "run `oncekey worker --app MODULE:NAME`, or pass workers=True to Once; pass --workers "
            f"{len(living)} if there should be {'no more' if living else 'none'}",
        )
    else:
        yield Finding(Level.OK, "workers", seen)
    for one in living:
        if one.troubled:
            yield Finding(
                Level.WARNING,
                "workers",
                f"{one.name} cannot run {', '.join(one.troubled)}",
                "the last round of these tasks failed, or they ended and are being restarted",
                "check the worker's log and its /readyz",
            )
    missing = [task for task in TASKS if task.needed(stats) and not any(task.name in one.tasks for one in living)]
    if living and missing:
        yield Finding(
            Level.WARNING,
            "workers",
            f"no live worker runs {' or '.join(task.name for task in missing)}",
            "; ".join(task.undone for task in missing),
            "run `oncekey worker` without --only and --without, or another worker for these tasks",
        )
    for one in silent:
        yield Finding(
            Level.NOTE,
            "workers",
            f"{one.name} sent its last heartbeat {lapse(roll.now - one.seen_at)} ago; its interval is "
            f"{lapse(one.every)}",
            "it was killed, or cannot reach the store; its leases expire by themselves",
            "find out why it ended; its row is deleted after a day",
        )


def records(broken: Rows) -> Iterator[Finding]:
    """Whether all rows that were read are valid records, as far as the table's own constraints do not ensure it."""
    for row in broken:
        yield Finding(
            Level.ERROR,
            "records",
            f"{row['records']} in violation of the rule {row['name']}",
            "oncekey never writes such a row, so the behaviour of its key is undefined",
            "find out who changed the tables by hand; correct the rows by the table of constraints in the reference",
        )
    if not broken:
        yield Finding(Level.OK, "records", "the rows that were checked are valid")


def policies(runs: Sequence[Run], lease: Duration, ttls: Rows) -> Iterator[Finding]:
    """Whether settings contradict the observed durations, or each other."""
    for operation, p99 in sorted(short_leases(runs, lease).items()):
        yield Finding(
            Level.WARNING,
            "lease",
            f"1 in 100 runs of {operation} takes {p99 / SECOND:.1f} s or more, and the lease is {lease / SECOND:.0f} s",
            "an owner that misses a heartbeat is treated as dead while it works",
            "make the lease at least twice as long",
        )
    for row in ttls:
        ttl, call = int(row["shortest_ttl"]), int(row["longest_call"])
        if 0 < ttl < DAY:
            yield Finding(
                Level.WARNING,
                "ttl",
                f"keys expire after {ttl // SECOND} s",
                "a client that retries the next day executes again",
                "set ttl to at least 24 h, unless clients never retry that late",
            )
        if 0 < ttl <= max(lease, call):
            yield Finding(
                Level.ERROR,
                "ttl",
                f"ttl is {ttl // SECOND} s, the lease {lease // SECOND} s, a call may take {call // SECOND} s",
                "the key of a client that waits for one attempt to end may have expired",
                "make ttl much longer than both",
            )


def _waiting(limits: Limits) -> tuple[tuple[str, Duration, str, str], ...]:
    """Each kind of waiting work: its limit, what it means, and what to do."""
    return (
        (
            "unknown",
            limits.unknown,
            "clients receive the response for an unknown outcome until a resolver, a webhook or an operator settles it",
            "`oncekey unknown list`, then `oncekey keys show KEY`; register a resolver, or see its worker's log",
        ),
        (
            "stale",
            limits.stale,
            "in progress, and the owners have died or are overdue",
            "a worker releases them a minute later; otherwise run `oncekey sweep --once`",
        ),
        (
            "resumable",
            limits.resumable,
            "work was started and not resumed: it needs a client's retry, or a completer if its request is stored",
            (
                "run `oncekey worker --app ...`; the log of a running one names each request that the application "
                "refuses. Only the client's retry completes a request that is not stored, as after `keys bust`: see "
                "`oncekey keys show`"
            ),
        ),
        (
            "expired",
            limits.expired,
            "the table grows, because expired records are not removed",
            "run `oncekey worker`, or `oncekey reap --once`",
        ),
        (
            "parcels_due",
            limits.due,
            "committed calls and messages are not sent yet",
            "run `oncekey worker --app ...`, with a function for each topic in `oncekey stats`",
        ),
        (
            "dead_letters",
            limits.dead,
            "they failed too often, or may have been sent and must not be repeated; no worker retries them",
            "`oncekey dlq list`; then `oncekey dlq show ID`, which prints the commands that are possible",
        ),
    )


def _how_many(line: Waiting, waits: Duration) -> str:
    return f"{line.count}, the oldest for {lapse(waits)}"
