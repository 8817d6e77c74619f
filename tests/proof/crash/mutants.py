"""Mutants: the real code, or the statements of a real store, with one rule broken.

The proof must catch each, or it proves nothing: the hunt leads a mutant through it until a point gives it away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast
from uuid import uuid5

from oncekey.core import answers, rulings
from oncekey.core.flow import Mode, Transaction
from oncekey.core.model import UNAVAILABLE, Effects, State
from oncekey.core.rulings import TakeOver
from oncekey.databases.address import Kind
from oncekey.databases.sqlite.store import SqliteStore
from oncekey.engine import local, request, settle
from oncekey.engine.deciding import refused
from oncekey.engine.phases import PhasedRun
from oncekey.engine.relay import ParcelEnded
from oncekey.frameworks.asgi import middleware
from oncekey.runtimes.aio import AsyncRuntime
from oncekey.stores.phases import PhaseStore
from oncekey.stores.statements import execute, load
from oncekey.workers.relay import Relay
from oncekey_demo.checker import Rule
from proof.crash.crasher import Fault, Manner, Point
from proof.crash.proof import ACCEPTED_IS_COMMITTED, ONE_RUNNER, Case, Rescue, Variant, faults, prove
from proof.patching import patched

if TYPE_CHECKING:
    from collections.abc import Iterator

    from oncekey.core.answers import Answer
    from oncekey.core.flow import Flow
    from oncekey.core.model import Announcement, Claim, HeldParcel, Lease, MemoEntry, Snapshot
    from oncekey.core.policy import Policy
    from oncekey.engine.actions import Life
    from oncekey.engine.run import Run
    from oncekey.engine.shell import AsyncEngine
    from oncekey.workers.relay import InHand
    from proof.crash.places import Place


@dataclass(frozen=True, slots=True)
class Breaking:
    """In the named statements (all, if none is named) `piece` is replaced by `instead`, a text or a block's name.

    Without a piece the block of the statement's own name stands for the whole of it.
    """

    statements: tuple[str, ...]
    piece: Mapping[Kind, str]
    instead: str = ""


def amended(engine: AsyncEngine, *breakings: Breaking) -> None:
    """Break the store of an engine that nobody else uses."""
    kind = Kind.SQLITE if isinstance(engine.store, SqliteStore) else Kind.POSTGRES
    statements = cast("Any", engine.store)._statements
    commands: dict[str, str] = dict(statements._commands)
    for breaking in breakings:
        names = [name for name in breaking.statements or tuple(commands) if name in commands]
        changed = {name: _broken(commands[name], name, breaking, kind) for name in names}
        if changed == {name: commands[name] for name in names}:
            raise AssertionError(f"nothing was broken in {', '.join(names)}: the mutant is out of date")
        commands |= changed
    statements._commands = commands


def _broken(command: str, name: str, breaking: Breaking, kind: Kind) -> str:
    blocks = _blocks()
    if not breaking.piece:
        return blocks[name]
    instead = blocks.get(breaking.instead) or blocks.get(f"{breaking.instead}_{kind}") or breaking.instead
    return command.replace(breaking.piece[kind], instead)


@cache
def _blocks() -> dict[str, str]:
    return load("proof.crash", "broken.sql")


BOTH: Final = (Kind.SQLITE, Kind.POSTGRES)
POSTGRES: Final = (Kind.POSTGRES,)

OWNED: Final = (
    "settle_completed",
    "settle_alone",
    "settle_retryable",
    "settle_unknown",
    "settle_handed_back",
    "discard",
)
STEPS: Final = ("checkpoint", "announce", "result", "withdraw")
FENCE: Final = {Kind.SQLITE: " AND fence = :fence", Kind.POSTGRES: " AND record.fence = :fence::bigint"}
PROOF: Final = {
    Kind.SQLITE: "AND incarnation = :incarnation AND fence = :fence",
    Kind.POSTGRES: "AND record.incarnation = :incarnation::uuid AND record.fence = :fence::bigint",
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One broken rule: what is broken, what comes of it, and where it shows."""

    name: str
    what: str
    harm: str
    breaks: str
    """The promise that breaks with it: a rule of the checker's, or the lock's own."""
    case: Case
    fault: Fault
    """A fault that gives it away; the real code survives the same."""
    variant: Variant
    stores: tuple[Kind, ...] = BOTH


def _code(*changes: tuple[Any, str, Any]) -> Variant:
    def patch() -> AbstractContextManager[None]:
        return patched(*changes)

    return Variant(patched=patch)


def _sql(*breakings: Breaking, own_clock: bool = False) -> Variant:
    return Variant(amend=lambda engine: amended(engine, *breakings), own_clock=own_clock)


def _answers_first(real: Callable[..., Any]) -> Callable[..., Any]:
    tasks: set[asyncio.Task[Any]] = set()

    async def finish(self: Any, *args: Any) -> tuple[None, None]:
        task = asyncio.create_task(real(self, *args))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return None, None

    return finish


def _lets_it_be(_run: Run, _life: object, *, entered: bool) -> Life[None]:
    """The exchange is over before its settlement, which goes on in a task of its own."""
    yield from ()


def _takes_it_for_failure(run: Run) -> Life[Answer]:
    yield from ()
    return refused(run, UNAVAILABLE)


def _announces_nothing(
    self: PhaseStore, lease: Lease, _seen: tuple[MemoEntry, ...], _memo: tuple[MemoEntry, ...], _call: Announcement
) -> Flow[Snapshot]:
    return (yield from execute(Transaction("announce", Mode.READ, lambda: self._find(lease))))


def _another_key(derive: Callable[[Lease, str], str]) -> Callable[..., Announcement]:
    real = PhasedRun.announcement

    def announcement(self: PhasedRun, name: str, **given: Any) -> Announcement:
        return replace(real(self, name, **given), downstream_key=derive(self.lease, name))

    return announcement


def _runs_pending(snapshot: Snapshot, claim: Claim, policy: Policy) -> rulings.Next:
    record = snapshot.record
    if record is not None and record.state is State.PENDING:
        return TakeOver(record)
    return rulings.rule(snapshot, claim, policy)


def _runs_and_takes_pending() -> Variant:
    """The statement looks at the state once more, so it has to be as wrong as the ruling."""
    failed = "state = 'failed_retryable'"
    blind = Breaking(
        ("take_over",), {Kind.SQLITE: failed, Kind.POSTGRES: failed}, "state IN ('failed_retryable', 'pending')"
    )
    return replace(_code((request, "rule", _runs_pending), (local, "rule", _runs_pending)), amend=_sql(blind).amend)


def _never_at_once(_self: Relay, _parcel: InHand) -> bool:
    return False


async def _acknowledges_first(self: Relay, held: HeldParcel, _error: Exception | None) -> ParcelEnded:
    await self._drive(self._outbox.sent(held))
    await self._call(held, limit=1_000_000, send_by=None)
    return ParcelEnded.DELIVERED


_PHASED: Final = Case(Effects.PHASED)
_BLIND: Final = Case(Effects.PHASED, deduplicates=False, repeatable=False)
_LOCAL: Final = Case(Effects.LOCAL)
_OUTBOX: Final = Case(Effects.OUTBOX)

_ALL: Final = (
    Mutant(
        "no_fence",
        "the owner proves its incarnation, but not its fence",
        "a zombie writes to a record that its successor owns",
        Rule.FENCED,
        _PHASED,
        Fault(Point.parse("after:claim"), Manner.OVERTAKE),
        _sql(Breaking((*OWNED, *STEPS), FENCE, "")),
    ),
    Mutant(
        "unconditional_unlock_of_calls",
        "a settlement after a call to a provider proves nothing",
        "a zombie ends another owner's request",
        Rule.FENCED,
        _PHASED,
        Fault(Point.parse("after:claim"), Manner.OVERTAKE),
        _sql(Breaking(OWNED, PROOF, "")),
    ),
    Mutant(
        "ack_before_commit",
        "the client receives a success before it is committed",
        "a crash loses a response that the client has received",
        Rule.ONE_ANSWER,
        _LOCAL,
        Fault(Point.parse("before:commit"), Manner.DIE),
        _code(
            (AsyncRuntime, "finish", _answers_first(AsyncRuntime.finish)),
            (middleware, "end_after_bug", _lets_it_be),
        ),
    ),
    Mutant(
        "now_for_leases",
        "leases are counted from now(), which does not advance within a transaction",
        "a new lease has already ended, and a live owner is taken over",
        Rule.LEGAL,
        _PHASED,
        Fault(Point.parse("after:commit"), Manner.LOSE),
        _sql(Breaking((), {Kind.POSTGRES: "clock_timestamp()"}, "now()"), own_clock=True),
        POSTGRES,
    ),
    Mutant(
        "intent_not_recorded",
        "a call is made without being recorded first",
        "the next owner has no record of it, and makes it again",
        Rule.ONE_EFFECT,
        _BLIND,
        Fault(Point.parse("after:charge"), Manner.DIE),
        _code((PhaseStore, "announce", _announces_nothing)),
    ),
    Mutant(
        "key_from_the_attempt",
        "the downstream key changes with each attempt",
        "the provider treats a repetition as another charge",
        Rule.ONE_EFFECT,
        _PHASED,
        Fault(Point.parse("after:charge"), Manner.DIE),
        _code((PhasedRun, "announcement", _another_key(lambda lease, name: f"{name}-{lease.attempt}"))),
    ),
    Mutant(
        "key_from_the_incarnation",
        "the downstream key changes with each life of the record",
        "after a restored backup the provider charges again",
        Rule.ONE_EFFECT,
        Case(Effects.PHASED, rescue=Rescue.RESTORED),
        Fault(Point.parse("after:charge"), Manner.DIE),
        _code((PhasedRun, "announcement", _another_key(lambda lease, name: str(uuid5(lease.incarnation, name))))),
    ),
    Mutant(
        "lock_in_the_select_list",
        "the lock is taken while the record is selected, and a new key has none",
        "a duplicate runs next to the owner, up to the primary key",
        ONE_RUNNER,
        _LOCAL,
        Fault(Point.parse("before:business"), Manner.PAUSE),
        _sql(Breaking(("lock", "enter"), {})),
        POSTGRES,
    ),
    Mutant(
        "upsert",
        "a claim overwrites an existing row",
        "the record of the first run is lost, and it runs again",
        Rule.FENCED,
        _BLIND,
        Fault(Point.parse("after:claim"), Manner.DIE),
        _sql(Breaking(("claim", "claim_kept"), {Kind.POSTGRES: "DO NOTHING"}, "upsert")),
        POSTGRES,
    ),
    Mutant(
        "accepted_by_the_route",
        "a request is accepted because its route is OUTBOX, not because its deferred call is committed",
        "the client receives 202, and after a crash no worker makes the call",
        ACCEPTED_IS_COMMITTED,
        Case(Effects.OUTBOX, claims_first=True),
        Fault(Point.parse("after:claim"), Manner.DIE),
        _code((answers, "is_accepted", lambda record: record is not None and record.effects is Effects.OUTBOX)),
    ),
    Mutant(
        "reruns_pending",
        "a request that waits for its worker is run again",
        "the business rows exist twice",
        Rule.ONE_EFFECT,
        _OUTBOX,
        Fault(Point.parse("after:commit"), Manner.DIE),
        _runs_and_takes_pending(),
    ),
    Mutant(
        "lost_commit_is_failure",
        "an error at COMMIT is treated as a rollback",
        'the client receives "nothing happened", although it happened',
        Rule.NO_PHANTOM,
        _LOCAL,
        Fault(Point.parse("after:commit"), Manner.LOSE),
        _code((settle, "_lost_commit", _takes_it_for_failure)),
    ),
    Mutant(
        "relay_by_cursor",
        "the relay reads each message once, and continues behind it",
        "messages that a dead worker had claimed are never delivered",
        Rule.PROGRESS,
        _OUTBOX,
        Fault(Point.parse("after:due"), Manner.DIE),
        _sql(
            Breaking(
                ("due",),
                {
                    Kind.SQLITE: "AND parcel.aggregatetype IN",
                    Kind.POSTGRES: "AND parcel.aggregatetype = ANY",
                },
                "cursor",
            )
        ),
    ),
    Mutant(
        "ack_before_delivery",
        "a message is acknowledged before it is delivered",
        "a worker that dies in between loses the message",
        Rule.OUTBOX,
        _LOCAL,
        Fault(Point.parse("before:receive"), Manner.DIE),
        _code((Relay, "_delivered_at_once", _never_at_once), (Relay, "_message", _acknowledges_first)),
    ),
)

MUTANTS: Final = MappingProxyType({mutant.name: mutant for mutant in _ALL})
"""All of them by name."""


@dataclass(frozen=True, slots=True)
class Catch:
    """Where a mutant was caught, and by which sentence."""

    mutant: Mutant
    store: Kind
    fault: Fault
    sentence: str


async def hunt(place: Place, mutant: Mutant, keys: Iterator[str]) -> Catch | None:
    """The first point at which the mutant is caught; None means that the proof is blind to it."""
    seen = await prove(place, mutant.case, next(keys), None)
    for fault in faults(seen):
        if fault.manner is not mutant.fault.manner:
            continue
        verdict = await prove(place, mutant.case, next(keys), fault, mutant.variant)
        caught = [sentence for sentence in verdict.broken if sentence.startswith(mutant.breaks)]
        if caught:
            return Catch(mutant, place.kind, fault, caught[0])
    return None
