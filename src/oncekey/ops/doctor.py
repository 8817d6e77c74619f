"""What is wrong with a store, or will be: findings from what the store reports. Pure: the caller asks the store.

Each finding says what was seen, what it means and what to do. Only what is known to be harmful is an error.
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
SKEW_WORTH_SAYING: Final = 5 * SECOND
MANY_ROWS: Final = 10_000
LATE: Final = 5 * MINUTE
"""How long something may be due before it is late."""

_INDEX: Final = re.compile(
    r"(?:CREATE |^ +)(?:UNIQUE )?INDEX (?:CONCURRENTLY )?(?:IF NOT EXISTS )?(\w+)", re.IGNORECASE | re.MULTILINE
)
_DROPPED: Final = re.compile(r"DROP INDEX (?:IF EXISTS )?(?:\w+\.)?(\w+)", re.IGNORECASE)


class Level(StrEnum):
    """How bad it is."""

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
    """Which keys content is sealed under, and whether all are there. `names` of None: the command has no keys."""
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
                f"among what was looked at, sealed under {seen}",
                "this command has no keys, so it shows none of it, and cannot tell whether it can be opened",
                "put the keys into ONCEKEY_SEAL_KEYS",
            )
        return
    missing = [name for name in sealed if name not in names]
    if missing:
        yield Finding(
            Level.ERROR,
            "seals",
            f"sealed under {seen}, and there is no key {', '.join(missing)} here",
            "a repeat of these requests is refused, and their parcels wait",
            "give every process the missing key again",
        )
    if unopened:
        yield Finding(
            Level.ERROR,
            "seals",
            f"{unopened} records do not open with the key of their name",
            "the key is another one by that name, or rows were changed by hand",
            "find the key that was used; what it sealed is lost without it",
        )
    if None in used:
        yield Finding(
            Level.NOTE,
            "seals",
            f"not sealed: {', '.join(used[None])}",
            "it was stored by a process without a seal, or before there was one",
            "oncekey rekey",
        )
    older = [name for name in sealed if name != current and name in names]
    if older:
        yield Finding(
            Level.NOTE,
            "seals",
            f"sealed under {seen}; the current key is {current}",
            "the older keys are still needed",
            "oncekey rekey, and then take them away",
        )
    if not missing and not unopened:
        yield Finding(Level.OK, "seals", f"all can be opened ({seen or 'nothing is sealed yet'})")


def schema(entries: Sequence[MigrationStatus]) -> Iterator[Finding]:
    """Whether the tables are the ones that this version works with."""
    bad = False
    for entry in entries:
        name = f"{entry.migration.number:04} {entry.migration.name}"
        if entry.state is MigrationState.PENDING and entry.migration.phase is MigrationPhase.POST:
            bad = True
            yield Finding(
                Level.NOTE,
                "schema",
                f"migration {name} is still to be run",
                "what only older versions need is still kept up, and costs time and space",
                "oncekey migrate up, when no process of an older version is left",
            )
        elif entry.state is MigrationState.PENDING:
            bad = True
            yield Finding(
                Level.ERROR,
                "schema",
                f"migration {name} is missing",
                "applications of this version do not start on this store",
                "oncekey migrate up",
            )
        elif entry.state is MigrationState.CHANGED:
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
    """Whether the store's clock agrees with this host's; the duration of the question itself does not count."""
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
            "the worker that reads them has not run: sweeper, reaper, completer, resolver or relay",
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
    """How long a worker may send no heartbeat; None: three of its own intervals."""
    workers: int = 1


def unresolved(stats: StoreStats, limits: Limits = Limits()) -> Iterator[Finding]:  # noqa: B008  (frozen)
    """What waits for a worker or an operator: a note from the first one on, a warning when it has waited too long."""
    now = stats.now
    for what, late, means, todo in _waiting(limits):
        line = stats.waiting_for(what)
        waits = max(0, now - (now if line.oldest is None else line.oldest))
        if line.count == 0:
            yield Finding(Level.OK, what, "none")
        elif waits >= late:
            yield Finding(Level.WARNING, what, _how_many(line, waits), means, todo)
        else:
            # A record that has just expired is not due yet: the reaper waits for its grace.
            level = Level.OK if what == "expired" else Level.NOTE
            yield Finding(level, what, _how_many(line, waits), means, todo)


def workers(roll: Roll, stats: StoreStats, limits: Limits = Limits()) -> Iterator[Finding]:  # noqa: B008  (frozen)
    """Whether workers run, and whether every task that has work has a worker."""
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
    for one in living:
        if one.troubled:
            yield Finding(
                Level.WARNING,
                "workers",
                f"{one.name} cannot run {', '.join(one.troubled)}",
                "the last look of these tasks failed, or they ended and are started again",
                "see the worker's log and its /readyz",
            )
    missing = [task for task in TASKS if task.needed(stats) and not any(task.name in one.tasks for one in living)]
    if living and missing:
        yield Finding(
            Level.WARNING,
            "workers",
            f"no living worker runs {' or '.join(task.name for task in missing)}",
            "; ".join(task.undone for task in missing),
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


def records(broken: Rows) -> Iterator[Finding]:
    """Whether all rows that were read are valid records; what the table's own constraints refuse is not looked for."""
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


def policies(runs: Sequence[Run], lease: Duration, ttls: Rows) -> Iterator[Finding]:
    """Whether settings contradict the observed run times, or each other."""
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


def _waiting(limits: Limits) -> tuple[tuple[str, Duration, str, str], ...]:
    """Each kind of what waits: how long it may, what it means, and what to do."""
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
