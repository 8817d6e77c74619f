"""The reconciler: checks unknown outcomes with providers, and applies evidence that arrived meanwhile.

It settles a record with the same move as a webhook or an operator (`engine.reconcile`).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

from oncekey.core.errors import ResultNotStorableError, StoreError
from oncekey.core.flow import Flow, Transaction, adrive
from oncekey.core.keys import key_digest
from oncekey.core.model import SECOND, Instant, Record, State
from oncekey.core.operate import Moved
from oncekey.core.pacing import Backoff
from oncekey.core.policy import Policy, micros
from oncekey.core.resolution import (
    EXHAUSTED,
    Evidence,
    Executed,
    NotExecuted,
    Patience,
    Rejected,
    Resolution,
    Sight,
    Undecided,
    has_waited,
    still_to_wait,
)
from oncekey.core.resolvers import Resolver, Resolvers, called_by, question_of
from oncekey.core.scope import is_in
from oncekey.core.topics import CallBrokenError, Message, Topic
from oncekey.core.transitions import Actor, Mover, Note, Trigger
from oncekey.engine import reconcile
from oncekey.engine.reconcile import EvidenceEffect, EvidenceTarget
from oncekey.observe.events import About, GivenUp, Notify
from oncekey.ops.tasks import RECONCILER
from oncekey.workers.calling import Sleep, abandon, call
from oncekey.workers.service import Pace, boot, this_process

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from uuid import UUID

    from oncekey.ports.store import Store

log = logging.getLogger("oncekey.worker")
T = TypeVar("T")

PAGE: Final = 100
CONCURRENCY: Final = 8
"""How many resolver calls run at a time."""
LONGEST_PAUSE: Final = 3600.0
"""The maximum delay in seconds between two checks of one record."""
REMEMBERED: Final = 10_000
"""How many records it remembers, with the time when each was first seen unknown; any other waits again."""
FORGET_EVERY: Final = 100
"""The number of rounds between two deletions of old calls and evidence."""


class Policies(Protocol):
    """A lookup of an operation's policy."""

    def __call__(self, operation: str) -> Policy:
        """The policy under which its records are settled."""


@dataclass(frozen=True, slots=True)
class UnknownCall:
    """Identifies one unknown outcome of a record; after a new owner or another send it is a different one."""

    incarnation: UUID
    fence: int
    phase: str | None
    sends: int

    @classmethod
    def of(cls, record: Record) -> UnknownCall:
        """The current unknown call of a record."""
        intent = record.intent
        open_call = (None, 0) if intent is None else (intent.phase, intent.sends)
        return cls(record.incarnation, record.fence, *open_call)


@dataclass(frozen=True, slots=True)
class ResolverAnswer:
    """A resolver's result, and when the check began."""

    resolution: Resolution
    asked: Sight


class Reconciler:
    """The task that reconciles. Several may run at once: each record is settled by one of them."""

    name: Final = RECONCILER.name

    def __init__(
        self,
        store: Store,
        run: Callable[[Transaction[object]], Awaitable[object]],
        resolvers: Resolvers,
        policy: Policy,
        *,
        policy_of: Policies | None = None,
        clock: Callable[[], Instant] = boot,
        sleep: Sleep = asyncio.sleep,
        chance: Callable[[], float] = random.random,
        page: int = PAGE,
        who: str | None = None,
        notify: Notify | None = None,
    ) -> None:
        self._store = store
        self._port = reconcile.reconcile_of(store)
        self._run = run
        self._resolvers = resolvers
        self._policy = policy
        self._policy_of = policy_of or (lambda _: policy)
        self._clock = clock
        self._sleep = sleep
        self._chance = chance
        self._page = page
        self._mover = Mover(Actor.RESOLVER, who or this_process())
        self._notify = notify
        self._first: OrderedDict[UnknownCall, Sight] = OrderedDict()
        self._rounds = 0
        self._stopped = False
        self._left_behind: set[asyncio.Task[Any]] = set()
        self.counts: Counter[str] = Counter()
        """Records by what was done: `settled`, `postponed`, `waiting`, `exhausted`; `contradictions`."""
        self.failed = 0
        """Checks in which a resolver failed, and results that match nothing."""
        seconds = policy.reconcile_interval.total_seconds()
        self.pace = Pace(shortest=seconds, longest=seconds)
        self._backoff = Backoff(
            base=seconds, cap=max(seconds, LONGEST_PAUSE), floor=min(1.0, seconds), longest=max(seconds, LONGEST_PAUSE)
        )

    @property
    def about(self) -> str:
        """The resolvers that it calls."""
        names = self._resolvers.names
        return f"resolvers {', '.join(names)}" if names else ""

    @property
    def done(self) -> int:
        """Records that were settled."""
        return self.counts["settled"]

    async def run_once(self) -> int:
        """Check everything that is due; returns how many records were settled."""
        before = self.done
        after: Record | None = None
        while not self._stopped:
            page = await self._go(self._port.due(self._page, after))
            at = Sight(page.now, self._clock())
            for start in range(0, len(page.records), CONCURRENCY):
                some = page.records[start : start + CONCURRENCY]
                ends = await asyncio.gather(*(self._tend(record, at) for record in some), return_exceptions=True)
                for record, error in zip(some, ends, strict=True):
                    if isinstance(error, StoreError):
                        raise error
                    if error is not None:
                        self.failed += 1
                        # Only the class is logged: an error's text may contain client data.
                        facts = (record.operation, key_digest(record.id.key), type(error).__name__)
                        log.error("reconciler: %s (digest %s) failed with %s; the others continue", *facts)
            if len(page.records) < self._page:
                break
            after = page.records[-1]
        await self._compare()
        if self._rounds % FORGET_EVERY == 0:
            await self._go(self._port.forget(micros(self._policy.audit_ttl), self._policy.reap_batch))
        self._rounds += 1
        return self.done - before

    async def shut_down(self) -> None:
        """No-op: a round leaves nothing open."""

    async def stop(self, grace: float) -> None:  # noqa: ARG002  (the service bounds the round that is under way)
        """Start no further page."""
        self._stopped = True
        await abandon(self._left_behind)

    async def _tend(self, record: Record, at: Sight) -> None:
        """Settle one record by its evidence, or by its resolver's result; not another application's."""
        if not is_in(self._policy.namespace, record.id.scope):
            return
        first = self._seen(record, at)
        resolver = self._resolvers.get(record.operation)
        name = called_by(record, None if resolver is None else resolver.call)
        if await self._by_evidence(record, name) or resolver is None:
            return
        answer = await self._ask(record, resolver)
        if isinstance(answer.resolution, Undecided):
            await self._later(record, answer.resolution.why)
        elif isinstance(answer.resolution, NotExecuted) and not (
            answer.resolution.closed or has_waited(record, self._patience(record), first, answer.asked)
        ):
            # The result of a check that came too early is ignored, and the check is not counted as a try.
            wait = still_to_wait(record, self._patience(record), first, answer.asked)
            self.counts["waiting"] += 1
            await self._go(self._port.later(record, max(wait, SECOND), counted=False))
        else:
            await self._settle(record, name, answer.resolution)

    async def _settle(self, record: Record, name: str | None, resolution: Executed | Rejected | NotExecuted) -> None:
        phase = record.intent.phase if record.intent is not None else ""
        target = EvidenceTarget(record.id, record.incarnation, phase, name or "")
        settling = reconcile.settle(
            self._store,
            target,
            resolution,
            self._mover,
            self._policy_of,
            why="the resolver's result",
            waited=True,
            notify=self._notify,
        )
        try:
            done = await self._go(settling)
        except ResultNotStorableError as error:
            self.failed += 1
            await self._later(record, f"result_not_storable: {error}")
            return
        if not isinstance(done, Moved):
            current = (await self._go(self._store.find(record.id))).record
            # Another actor, or the owner, settled the record first: that settlement holds (U2).
            if current is not None and current.version == record.version:
                self.failed += 1
                await self._later(record, f"not_allowed: {done.why}")
            return
        self._done(record, done)
        if not isinstance(resolution, NotExecuted) and resolution.provider_id is not None and name is not None:
            for one in await self._go(self._port.calls_of(name, None)):
                if one.incarnation == record.incarnation:
                    await self._go(self._port.name(one, resolution.provider_id))

    async def _by_evidence(self, record: Record, name: str | None) -> bool:
        for evidence in await self._go(self._port.about(record, name)):
            resolver = self._resolvers.get(record.operation)
            phase = record.intent.phase if record.intent is not None else (resolver and resolver.call) or ""
            key = evidence.report.downstream_key
            if key is None:
                named = await self._go(reconcile.target_of(self._store, evidence.report, {}))
                if not isinstance(named, EvidenceTarget) or named.downstream_key != name:
                    continue  # the provider's id belongs to another account, or to several calls
                key = named.downstream_key
            target = EvidenceTarget(record.id, record.incarnation, phase, key)
            mover = Mover(Actor.WEBHOOK, self._mover.who)
            became = await self._applied(evidence, target, mover)
            if became is EvidenceEffect.SETTLED:
                self.counts["settled"] += 1
                self._forget(record)
                return True
        return False

    async def _compare(self) -> None:
        """Compare evidence with records that are now settled: they agree, or an operator must decide (U3)."""
        after = 0
        while not self._stopped:
            page = await self._go(self._port.undecided(self._page, after))
            for evidence in page:
                target = await self._go(reconcile.target_of(self._store, evidence.report, {}))
                if isinstance(target, EvidenceTarget):
                    await self._applied(evidence, target, Mover(Actor.WEBHOOK, self._mover.who))
            if len(page) < self._page:
                return
            after = page[-1].id

    async def _applied(self, evidence: Evidence, target: EvidenceTarget, mover: Mover) -> EvidenceEffect:
        try:
            applying = reconcile.apply(
                self._store, evidence, target, mover, self._policy_of, self._resolvers, notify=self._notify
            )
            became = await self._go(applying)
        except ResultNotStorableError as error:
            self.failed += 1
            log.error("reconciler: evidence %d cannot be applied: %s", evidence.id, error)
            return EvidenceEffect.KEPT
        if became is EvidenceEffect.CONTRADICTS:
            self.counts["contradictions"] += 1
            self.failed += 1
            alarm(evidence.report.source, evidence.report.event_id, target)
        return became

    async def _ask(self, record: Record, resolver: Resolver) -> ResolverAnswer:
        payload = await self._go(reconcile.payload_of(self._store, record))
        now = (await self._go(self._store.find(record.id))).now
        asked = Sight(now, self._clock())
        question = question_of(record, resolver, payload, now)
        function = Topic(record.operation, cast("Callable[[Message], Any]", resolver.function), None, resolver.blocking)
        limit = record.call_timeout / SECOND
        try:
            resolution = await call(
                function,
                cast("Message", question),
                limit=limit,
                send_by=None,
                clock=_never,
                sleep=self._sleep,
                left_behind=self._left_behind,
            )
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001  (any error of a provider's client means: not known yet)
            self.failed += 1
            # Only the class is logged: an error's text may contain client data.
            name = str(error) if isinstance(error, CallBrokenError) else type(error).__name__
            log.warning(
                "reconciler: the resolver of %s failed with %s; it will be called again", record.operation, name
            )
            resolution = Undecided(name)
        if not isinstance(resolution, Executed | Rejected | NotExecuted | Undecided):
            self.failed += 1
            log.error("reconciler: the resolver of %s returned a %s", record.operation, type(resolution).__name__)
            resolution = Undecided("no_resolution")
        return ResolverAnswer(resolution, asked)

    async def _later(self, record: Record, why: str) -> None:
        """Check again, at growing intervals, and finally give up: an operator must resolve it (row 23)."""
        last = record.reconcile_tries + 1 >= self._policy.reconcile_max_tries
        reason = f"{EXHAUSTED}: {why}" if last else why

        def noting(seen: Record) -> Note:
            return Note.of(seen, State.UNKNOWN, Trigger.STILL_UNKNOWN, self._mover, reason)

        pause = self._backoff.wait(record.reconcile_tries, self._chance())
        after = None if last else round(pause * SECOND)
        audited = noting if self._policy.audit or last else None
        if await self._go(self._port.later(record, after, noting=audited)):
            self.counts["exhausted" if last else "postponed"] += 1
            if last:
                facts = (record.operation, key_digest(record.id.key), record.reconcile_tries + 1, why)
                log.error("reconciler: %s (digest %s) needs an operator after %d checks: %s", *facts)
                if self._notify is not None:
                    self._notify(GivenUp(About.of(record), record.reconcile_tries + 1, why))
                self._forget(record)

    def _patience(self, record: Record) -> Patience:
        policy = self._policy_of(record.operation)
        lag = micros(policy.provider_lag)
        return Patience(lag=lag, send_window=micros(policy.send_window), lease=micros(policy.lease))

    def _seen(self, record: Record, at: Sight) -> Sight:
        first = self._first.setdefault(UnknownCall.of(record), at)
        if len(self._first) > REMEMBERED:
            self._first.popitem(last=False)
        return first

    def _forget(self, record: Record) -> None:
        self._first.pop(UnknownCall.of(record), None)

    def _done(self, record: Record, moved: Moved) -> None:
        self.counts["settled"] += 1
        self._forget(record)
        facts = (record.operation, key_digest(record.id.key), moved.move.row.to)
        log.info("reconciler: %s (digest %s) is %s now", *facts)

    async def _go(self, flow: Flow[T]) -> T:
        return await adrive(flow, self._run)


def alarm(source: str, event_id: str, target: EvidenceTarget) -> None:
    """Log that the provider and the record disagree: nothing is changed automatically; an operator must decide."""
    facts = (source, event_id, target.phase, key_digest(target.id.key))
    log.error("oncekey: %s %s contradicts the stored outcome of %r (digest %s); nothing was changed", *facts)


def _never() -> float:
    return 0.0
