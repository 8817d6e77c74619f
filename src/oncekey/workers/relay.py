"""The relay: takes parcels from the outbox, calls their topics' functions, and writes down what became of it.

It claims no more than it can begin at once, so a parcel's lease never runs while the parcel waits for its turn.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, TypeVar

from oncekey.boottime import boottime
from oncekey.core.backoff import Backoff
from oncekey.core.deferred import TakenUp
from oncekey.core.errors import NotExecuted, Rejected, ResultNotStorableError, StoreError
from oncekey.core.model import ParcelKind
from oncekey.core.policy import micros
from oncekey.engine import relay
from oncekey.engine.relay import Answered, Ended, Failed, Unstorable, lease_of
from oncekey.flow import adrive
from oncekey.topics import Message, Reply, reply_of
from oncekey.workers.acks import MOST, Acks
from oncekey.workers.calling import call
from oncekey.workers.service import Pace

if TYPE_CHECKING:
    from oncekey.core.model import Duration, HeldParcel
    from oncekey.core.policy import Policy
    from oncekey.engine.relay import Ending
    from oncekey.flow import Flow, Transaction
    from oncekey.ports import Outbox
    from oncekey.topics import Topics
    from oncekey.workers.calling import Clock, Sleep

T = TypeVar("T")
log = logging.getLogger("oncekey.worker")

CONCURRENCY: Final = 10
WAITS: Final = Backoff(base=1.0, cap=300.0, floor=0.05, longest=3600.0)
"""Seconds before the next attempt; a provider that names a time is not asked sooner."""
OUTAGE: Final = Backoff(base=0.1, cap=5.0)
"""Seconds before what a call returned is offered to the store again."""
DECLINED: Final = 422
"""The status of a `Rejected` whose value is no `Reply`."""
FAILURES: Final = frozenset({Ended.POSTPONED, Ended.PARKED, Ended.BURIED, Ended.ORPHANED})
_MICROS: Final = 1_000_000


class ReplyNotFinalError(Exception):
    """A topic's function returned a `Reply` that says "not now": the attempt failed, and its effect is not known."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(f"reply_{reply.status}")
        self.status = reply.status
        self.retry_after = reply.retry_after


class Relay:
    """A task that works off the outbox, `concurrency` parcels at a time."""

    name: Final = "relay"

    def __init__(
        self,
        outbox: Outbox,
        run: Callable[[Transaction[Any]], Awaitable[Any]],
        topics: Topics,
        policy: Policy,
        *,
        only: tuple[str, ...] | None = None,
        concurrency: int = CONCURRENCY,
        pace: Pace | None = None,
        waits: Backoff = WAITS,
        clock: Clock = boottime,
        sleep: Sleep = asyncio.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.pace = pace or Pace()
        self.ended: Counter[Ended] = Counter()
        self._outbox = outbox
        self._run = run
        self._topics = topics
        self.topics = topics.names if only is None else only
        """What it works on."""
        self._policy = policy
        self._concurrency = concurrency
        self._waits = waits
        self._clock = clock
        self._sleep = sleep
        self._chance = chance
        self._me = uuid.uuid4().hex
        self._claims = 0
        self._working: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._stopping = False
        self._acks = Acks(self._acknowledge, sleep, min(MOST, concurrency))
        self._broken = 0

    @property
    def failed(self) -> int:
        """Parcels whose call did not go well: tried again later, dead, or left to their lease."""
        return self._broken + sum(self.ended[ended] for ended in FAILURES)

    async def run_once(self) -> int:
        """Claim what there is room for, and begin it; waits until there is room."""
        room = await self._room()
        if not room:
            return 0
        self._claims += 1
        owner = f"{self._me}:{self._claims}"
        held = await self._drive(self._outbox.due(owner, self.topics, room, lease_of(self._policy)))
        if self._stopping and held:
            # The stop came while we asked: nobody would wait for what is begun now.
            await self._drive(self._outbox.hand_back(*held))
            return 0
        for one in held:
            task = asyncio.create_task(self._work(one), name="oncekey-parcel")
            self._working.add(task)
            task.add_done_callback(self._done)
        return len(held)

    async def drain(self) -> None:
        """Wait for every parcel in work."""
        while self._working:
            await asyncio.wait(set(self._working))

    async def stop(self, grace: float) -> None:
        """Claim nothing more; open calls have `grace` seconds, and are then left to their leases (P5, F10)."""
        self._stopping = True
        self._changed.set()
        await asyncio.sleep(0)
        await self._acks.close()
        drained = asyncio.ensure_future(self.drain())
        timer = asyncio.ensure_future(self._sleep(grace))
        await asyncio.wait({drained, timer}, return_when=asyncio.FIRST_COMPLETED)
        timer.cancel()
        drained.cancel()
        left = set(self._working)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
            log.warning("relay: stopped with %d calls open; their leases run out", len(left))
        if self.ended:
            log.info("relay: %s", ", ".join(f"{count} {ended}" for ended, count in sorted(self.ended.items())))

    async def _room(self) -> int:
        while not self._stopping:
            free = self._concurrency - len(self._working)
            if free > 0:
                return free
            self._changed.clear()
            await self._changed.wait()
        return 0

    def _done(self, task: asyncio.Task[None]) -> None:
        self._working.discard(task)
        self._changed.set()
        if not task.cancelled() and task.exception() is not None:
            self._broken += 1
            # The class alone: an error's text may quote what a client sent.
            log.error("relay: a parcel is left to its lease, because of a %s", type(task.exception()).__name__)

    async def _work(self, held: HeldParcel) -> None:
        if self._stopping:
            await self._drive(self._outbox.hand_back(held))
            return
        deferred = held.parcel.kind is ParcelKind.DEFER
        ended = await (self._deferred(held) if deferred else self._message(held))
        self.ended[ended] += 1
        if ended in FAILURES - {Ended.POSTPONED}:
            log.error(
                "dead letter: parcel %s of topic %s is %s after %d attempts",
                held.parcel.id,
                held.parcel.topic,
                ended,
                held.attempts,
            )

    async def _message(self, held: HeldParcel) -> Ended:
        if held.attempts > self._policy.outbox_max_attempts:
            spent = Failed(held.last_error or relay.SPENT)
            return await self._drive(relay.fail_message(self._outbox, held, spent, self._policy))
        try:
            await self._call(held, limit=micros(self._policy.call_timeout), send_by=None)
        except Exception as error:  # noqa: BLE001  (whatever a topic's function raises)
            failed = self._failure(held, error)
            return await self._drive(relay.fail_message(self._outbox, held, failed, self._policy))
        return Ended.DELIVERED if await self._acks.add(held) else Ended.LOST

    async def _deferred(self, held: HeldParcel) -> Ended:
        # From before the announcement: the store's waiting rule counts from no earlier (U1).
        send_by = self._clock() + self._policy.send_window.total_seconds()
        owner = f"{self._me}:{held.parcel.id}:{held.fence}"
        topic = self._topics[held.parcel.topic]
        taken = await self._drive(relay.begin_call(self._outbox, held, owner, topic.repeatable, self._policy))
        if not isinstance(taken, TakenUp):
            return taken
        ending = await self._ending(taken, send_by)
        return await self._written(taken, ending)

    async def _ending(self, taken: TakenUp, send_by: float) -> Ending:
        held = taken.held
        if self._stopping:
            return Failed("stopped", never_sent=True, counted=False)
        rejected = False
        try:
            returned = await self._call(held, limit=taken.record.call_timeout, send_by=send_by)
        except Rejected as final:
            rejected = True
            returned = final.value if isinstance(final.value, Reply) else Reply(DECLINED, final.value)
        except ResultNotStorableError:
            return Unstorable()
        except Exception as error:  # noqa: BLE001  (whatever a topic's function raises)
            return self._failure(held, error)
        try:
            reply = reply_of(returned)
            return Answered(reply.stored(self._policy), reply.provider_id, rejected=rejected)
        except ResultNotStorableError:
            return Unstorable()

    async def _written(self, taken: TakenUp, ending: Ending) -> Ended:
        """What a call returned must not be lost to an outage: it is offered until it is written or refused (P7)."""
        failures = 0
        while True:
            try:
                return await self._drive(relay.end_call(self._outbox, taken, ending, self._policy))
            except StoreError as error:
                log.warning("relay: the store did not answer (%s); trying again", type(error).__name__)
            await self._sleep(OUTAGE.wait(failures, self._chance()))
            failures += 1

    async def _call(self, held: HeldParcel, *, limit: Duration, send_by: float | None) -> object:
        parcel = held.parcel
        message = Message(
            topic=parcel.topic,
            payload=json.loads(parcel.payload),
            key=parcel.record_id.key,
            downstream_key=parcel.downstream_key,
            attempt=held.attempts,
            incarnation=parcel.incarnation,
            scope=parcel.record_id.scope,
            order_by=parcel.order_by,
        )
        topic, seconds = self._topics[parcel.topic], limit / _MICROS
        returned = await call(topic, message, limit=seconds, send_by=send_by, clock=self._clock, sleep=self._sleep)
        if isinstance(returned, Reply) and not returned.is_final:
            raise ReplyNotFinalError(returned)
        return returned

    def _failure(self, held: HeldParcel, error: Exception) -> Failed:
        seconds = self._waits.wait(held.attempts - 1, self._chance(), asked=_asked(error))
        # The class alone: an error's text may quote what a client sent.
        name = str(error) if isinstance(error, ReplyNotFinalError) else type(error).__name__
        return Failed(name, int(seconds * _MICROS), never_sent=self._proven(error))

    def _proven(self, error: Exception) -> bool:
        if isinstance(error, ReplyNotFinalError):
            return error.status in self._policy.not_executed_statuses
        try:
            return isinstance(error, NotExecuted) or self._policy.is_definitely_not_executed(error)
        except Exception:  # noqa: BLE001  (a hook that fails proves nothing)
            return False

    async def _acknowledge(self, held: tuple[HeldParcel, ...]) -> frozenset[uuid.UUID]:
        return await self._drive(self._outbox.sent(*held))

    async def _drive(self, flow: Flow[T]) -> T:
        return await adrive(flow, self._run)


def _asked(error: Exception) -> float | None:
    """The seconds that an error asks to wait, if it has such a number."""
    asked: object = getattr(error, "retry_after", None)
    if isinstance(asked, bool) or not isinstance(asked, int | float):
        return None
    return float(asked) if isfinite(asked) else None
