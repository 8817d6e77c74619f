"""The relay: claims parcels from the outbox, calls their topics' functions, and stores the results.

It claims batches, and a few long-lived tasks (senders) process them one parcel at a time. The next batch is claimed
when half of the current one is done, and delivered messages are acknowledged in batches, too. So three things run at
once: the store claims, the senders call, and the store acknowledges.

A parcel's lease runs while the parcel waits for its turn. So a batch begins with the parcels that can start at once,
and grows only while batches end within a tenth of the lease (`core.batches`); a parcel that has waited so long that its
call might outlast the lease is not started, but released. If one parcel of a batch kills the process each time, all
others of the batch lose an attempt, too. So a parcel that was attempted before is claimed like a request's own call:
never more of them than can start at once, and before all others.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import uuid
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, TypeVar, assert_never

from oncekey.core.batches import Bounds, Worked
from oncekey.core.deferred import DEAD_LETTER, TakenUp
from oncekey.core.envelopes import described, is_sealed, key_of_text
from oncekey.core.errors import NotExecutedError, RejectedError, ResultNotStorableError, StoreError
from oncekey.core.flow import Flow, Transaction, adrive
from oncekey.core.model import MINUTE, Duration, HeldParcel, ParcelKind
from oncekey.core.pacing import Backoff
from oncekey.core.policy import Policy, micros
from oncekey.core.scope import beginning_of
from oncekey.core.topics import CallBrokenError, Message, Reply, Topics, contained, reply_of
from oncekey.core.transitions import Actor
from oncekey.engine import relay
from oncekey.engine.notifying import notify_failure
from oncekey.engine.relay import MARGIN, CallAnswered, CallFailed, ParcelEnded, ParcelEnding, Unstorable, lease_of
from oncekey.observe.events import About, Buried, Delivered, Doubted, Event, Notify
from oncekey.ops.tasks import RELAY
from oncekey.runtimes import boottime
from oncekey.workers.calling import MOST, Acks, Clock, Sleep, abandon, awaits_nothing, call, call_at_once
from oncekey.workers.service import Pace

if TYPE_CHECKING:
    from oncekey.ports.store import Outbox

T = TypeVar("T")
log = logging.getLogger("oncekey.worker")

CONCURRENCY: Final = 10
BATCH: Final = 1000
"""The maximum number of parcels that a relay holds, if their calls are short."""
HEAVIEST: Final = 16 * 1024 * 1024
"""The maximum number of payload characters that it holds; a batch of at most `concurrency` parcels may exceed it."""
SHARE: Final = 10
"""A batch should end within one tenth of the lease."""
LONGEST_TURN: Final = 0.005
"""Seconds after which a sender that never had to wait yields to other tasks."""
WAITS: Final = Backoff(base=1.0, cap=300.0, floor=0.05, longest=3600.0)
"""Seconds before the next attempt; if a provider sends a delay, the relay waits at least that long."""
OUTAGE: Final = Backoff(base=0.1, cap=5.0)
"""Seconds before the result of a call is written to the store again."""
DECLINED: Final = 422
"""The status of a `RejectedError` whose value is not a `Reply`."""
DEAD_LETTERS: Final = frozenset({ParcelEnded.PARKED, ParcelEnded.BURIED, ParcelEnded.ORPHANED})
FAILURES: Final = DEAD_LETTERS | {ParcelEnded.POSTPONED}
SEALED_WITHOUT_KEY: Final = "sealed"
"""The error code of a parcel whose encryption key this process does not have."""
SEALED_WITHOUT_KEY_WAITS: Final = MINUTE
"""How long such a parcel waits for a worker that has the key."""
_MICROS: Final = 1_000_000


class ReplyNotFinalError(Exception):
    """A topic's function returned a `Reply` that is not final: the attempt failed, and its effect is unknown."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(f"reply_{reply.status}")
        self.status = reply.status
        self.retry_after = reply.retry_after


@dataclass(slots=True)
class Batch:
    """The parcels of one claim, and how many of them have not ended."""

    asked: int
    got: int
    claimed_at: float
    begin_by: float
    """The moment after which a call could outlast the lease."""
    weight: int
    left: int


@dataclass(slots=True, eq=False)
class InHand:
    """A parcel that this relay has claimed."""

    held: HeldParcel
    batch: Batch
    at_most_concurrency: bool
    """A request's own call, or a parcel that was attempted before: the relay holds at most `concurrency` of these."""
    error: Exception | None = None
    """Why its direct call failed."""


class Relay:
    """The task that delivers parcels, `concurrency` at a time."""

    name: Final = RELAY.name

    def __init__(
        self,
        outbox: Outbox,
        run: Callable[[Transaction[Any]], Awaitable[Any]],
        topics: Topics,
        policy: Policy,
        *,
        only: tuple[str, ...] | None = None,
        concurrency: int = CONCURRENCY,
        batch: int = BATCH,
        pace: Pace | None = None,
        waits: Backoff = WAITS,
        clock: Clock = boottime,
        sleep: Sleep = asyncio.sleep,
        chance: Callable[[], float] = random.random,
        notify: Notify | None = None,
    ) -> None:
        self.ended: Counter[ParcelEnded] = Counter()
        self._outbox = outbox
        self._run = run
        self._topics = topics
        self.topics = topics.names if only is None else only
        """The topics that it delivers."""
        self.about = f"topics {', '.join(self.topics)}"
        self._policy = policy
        self._concurrency = concurrency
        self._waits = waits
        self._clock = clock
        self._sleep = sleep
        self._chance = chance
        self._notify = notify
        self._me = uuid.uuid4().hex
        self._claims = 0
        self._lease = lease_of(policy)
        self._beginning = beginning_of(policy.namespace)
        # Within a lease every slot is released: the call has ended, or the parcel is left to its lease.
        self.pace = replace(pace or Pace(), patience=2 * self._lease / _MICROS)
        self._limit = micros(policy.call_timeout)
        target = self._lease / _MICROS / SHARE
        self._bounds = Bounds(concurrency, max(concurrency, batch), target, HEAVIEST)
        self._size = concurrency
        self._waiting: deque[InHand] = deque()
        self._urgent: deque[InHand] = deque()
        self._held: set[InHand] = set()
        self._working: set[InHand] = set()
        self._at_most_concurrency = self._ordered = 0
        self._left_behind: set[asyncio.Task[Any]] = set()
        self._senders: set[asyncio.Task[None]] = set()
        self._prompt: dict[str, bool] = {}
        self._changed = asyncio.Event()
        self._exhausted = False
        self._stopping = False
        self._acks: Acks[InHand] = Acks(self._acknowledge, sleep, MOST)
        self._broken = 0

    @property
    def done(self) -> int:
        """Parcels that were delivered."""
        return self.ended[ParcelEnded.DELIVERED]

    @property
    def failed(self) -> int:
        """Parcels whose call failed: to be retried, dead, or left to their lease."""
        return self._broken + sum(self.ended[ended] for ended in FAILURES)

    @property
    def size(self) -> int:
        """How many parcels it may hold: as many as it can start at once, or more if their calls are quick."""
        return self._size

    async def run_once(self) -> int:
        """Claim as many parcels as there are free slots, and start them; waits until there is one."""
        free = await self._free_slots()
        if not free:
            return 0
        self._claims += 1
        owner = f"{self._me}:{self._claims}"
        untaken = max(0, self._concurrency - self._at_most_concurrency)
        claimed_at = self._clock()
        due = self._outbox.due(owner, self.topics, free, self._lease, careful=untaken, beginning=self._beginning)
        held = await self._drive(due)
        if self._stopping and held:
            # The stop came during the claim, and does not wait for parcels that start now.
            await self._drive(self._outbox.hand_back(*held))
            return 0
        self._exhausted = len(held) < free
        if held:
            self._take(held, free, claimed_at)
        return len(held)

    async def shut_down(self) -> None:
        """Wait for every parcel that it holds."""
        while self._senders or self._acks.busy:
            if self._senders:
                await asyncio.wait(set(self._senders))
            await self._acks.shut_down()

    async def stop(self, grace: float) -> None:
        """Claim nothing more; open calls have `grace` seconds, and are then left to their leases (P5, F10)."""
        self._stopping = True
        self._changed.set()
        ending = asyncio.ensure_future(self._finish())
        timer = asyncio.ensure_future(self._sleep(grace))
        await asyncio.wait({ending, timer}, return_when=asyncio.FIRST_COMPLETED)
        timer.cancel()
        left = set(self._senders)
        await abandon({ending, *left})
        self._acks.close()
        if stubborn := await abandon(self._left_behind):
            log.warning("relay: %d functions ignore their cancellation; the worker exits without them", stubborn)
        if left:
            log.warning("relay: stopped with %d calls open; their leases will expire", len(left))
        if self.ended:
            log.info("relay: %s", ", ".join(f"{count} {ended}" for ended, count in sorted(self.ended.items())))

    async def _finish(self) -> None:
        unbegun = [*self._urgent, *self._waiting]
        self._urgent.clear()
        self._waiting.clear()
        await self._give_back(unbegun)
        await self.shut_down()

    async def _free_slots(self) -> int:
        """Wait until enough slots are free for a claim; returns how many parcels to claim. 0: the relay stops."""
        while not self._stopping:
            self._reclaim()
            free = self._size - len(self._held)
            # While calls are slow, every free slot is filled at once; when they are quick, half of the batch is done
            # first.
            enough = 1 if self._size == self._concurrency else self._size // 2
            self._changed.clear()
            if free < enough or self._at_most_concurrency >= self._concurrency:
                await self._changed.wait()
            elif self._exhausted and self._ordered:
                # All other due parcels may be ordered after those held here: claim again when one of these has ended.
                self._exhausted = False
                await self._wait_for_change()
            else:
                return free
        return 0

    async def _wait_for_change(self) -> None:
        changed = asyncio.ensure_future(self._changed.wait())
        timer = asyncio.ensure_future(self._sleep(self.pace.shortest))
        await asyncio.wait({changed, timer}, return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()
        timer.cancel()

    def _take(self, held: tuple[HeldParcel, ...], asked: int, claimed_at: float) -> None:
        span = (self._lease - self._limit - MARGIN) / _MICROS
        weight = sum(len(one.parcel.payload) for one in held)
        batch = Batch(asked, len(held), claimed_at, claimed_at + span, weight, left=len(held))
        for one in held:
            urgent = one.parcel.kind is ParcelKind.DEFER or one.attempts > 1
            self._at_most_concurrency += urgent
            self._ordered += one.parcel.order_by is not None
            parcel = InHand(one, batch, urgent)
            self._held.add(parcel)
            (self._urgent if urgent else self._waiting).append(parcel)
        self._add_sender()

    def _reclaim(self) -> None:
        """Find leaked slots: their parcels are not queued, not with a sender and not being acknowledged."""
        if len(self._held) == len(self._urgent) + len(self._waiting) + len(self._working) + len(self._acks):
            return
        lost = self._held.difference(self._urgent, self._waiting, self._working, self._acks)
        if lost:
            self._broken += len(lost)
            log.error("relay: %d slots were leaked; they are free again", len(lost))
        for parcel in lost:
            self._no_longer_held(parcel, None)

    def _add_sender(self) -> None:
        """Start another sender, if parcels wait and the limit allows it; a sender with a long call requests it."""
        if len(self._senders) < self._concurrency and (self._urgent or self._waiting):
            sender = asyncio.create_task(self._sender(), name="oncekey-parcels")
            self._senders.add(sender)
            sender.add_done_callback(self._let_go)

    async def _sender(self) -> None:
        """Process claimed parcels, one after the other."""
        turn_began = self._clock()
        while not self._stopping and (self._urgent or self._waiting):
            now = self._clock()
            if now - turn_began > LONGEST_TURN:
                await asyncio.sleep(0)
                turn_began = self._clock()
                continue
            parcel = (self._urgent or self._waiting).popleft()
            self._working.add(parcel)
            try:
                if now > parcel.batch.begin_by:
                    await self._too_late(parcel, now)
                elif not self._delivered_at_once(parcel):
                    await self._work(parcel)
            finally:
                self._working.discard(parcel)

    def _let_go(self, sender: asyncio.Task[None]) -> None:
        self._senders.discard(sender)
        if not sender.cancelled() and (error := sender.exception()) is not None:
            log.error("relay: a sender ended with %s; another one is started", type(error).__name__)
            self._changed.set()
        if not self._stopping:
            self._add_sender()  # for parcels that were claimed just as this sender ran out of work
        if not self._senders:
            self._acks.flush()  # no further parcel will be delivered for a while

    def _delivered_at_once(self, parcel: InHand) -> bool:
        """Deliver an ordinary message whose function awaits nothing, without a coroutine. False: `_work` does it."""
        held = parcel.held
        name = held.parcel.topic
        if parcel.at_most_concurrency or not self._is_prompt(name) or is_sealed(held.parcel.payload):
            return False
        try:
            self._final(call_at_once(self._topics[name], message_of(held)))
        except Exception as error:  # noqa: BLE001  (whatever a topic's function raises)
            parcel.error = error
            return False
        self._acks.add(parcel)
        return True

    async def _work(self, parcel: InHand) -> None:
        held = parcel.held
        ended: ParcelEnded | None = None
        try:
            if is_sealed(held.parcel.payload):
                ended = await self._wait_for_key(held)
            elif held.parcel.kind is ParcelKind.DEFER:
                self._add_sender()  # also for the time that the store takes
                ended = await self._deferred(held)
            else:
                ended = await self._message(held, parcel.error)
        except BaseException as error:  # noqa: BLE001  (of the store, or a bug: it affects this parcel only)
            if not isinstance(error, asyncio.CancelledError):
                self._leave_to_lease((parcel,), error)
            self._no_longer_held(parcel, None)
            contained(error)
            return
        if ended is None:
            self._acks.add(parcel)
        else:
            self._no_longer_held(parcel, ended)

    def _no_longer_held(self, parcel: InHand, ended: ParcelEnded | None) -> None:
        """Record that the relay no longer holds a parcel. None: it was released, or is left to its lease."""
        if parcel not in self._held:
            return
        self._held.discard(parcel)
        batch = parcel.batch
        self._at_most_concurrency -= parcel.at_most_concurrency
        self._ordered -= parcel.held.parcel.order_by is not None
        batch.left -= 1
        if batch.left == 0:
            worked = Worked(batch.asked, batch.got, self._clock() - batch.claimed_at, batch.weight)
            self._size = self._bounds.after(self._size, worked)
        self._changed.set()
        if ended is None:
            return
        self.ended[ended] += 1
        if self._notify is not None:
            event = event_of(parcel.held, ended)
            if event is not None:
                self._notify(event)
        if ended in DEAD_LETTERS:
            log.error(
                "dead letter: parcel %s of topic %s is %s after %d attempts",
                parcel.held.parcel.id,
                parcel.held.parcel.topic,
                ended,
                parcel.held.attempts,
            )

    def _leave_to_lease(self, parcels: Sequence[InHand], error: BaseException) -> None:
        self._broken += len(parcels)
        # Only the class is logged: an error's text may contain client data.
        name = type(error).__name__
        if isinstance(error, StoreError):
            notify_failure(self._notify, self.name, error)
        if len(parcels) == 1:
            log.error("relay: a parcel is left to its lease because of a %s", name)
        else:
            log.error("relay: %d parcels are left to their leases because of a %s", len(parcels), name)
        for parcel in parcels:
            self._no_longer_held(parcel, None)

    async def _too_late(self, parcel: InHand, now: float) -> None:
        """Release a parcel that has waited so long that its call could outlast its lease."""
        late = [parcel]
        for waiting in (self._urgent, self._waiting):
            late += [one for one in waiting if now > one.batch.begin_by]
            kept = [one for one in waiting if now <= one.batch.begin_by]
            waiting.clear()
            waiting.extend(kept)
        log.warning("relay: %d parcels waited too long for their turn, and are released", len(late))
        self._working.update(late)
        try:
            await self._give_back(late)
        finally:
            self._working.difference_update(late)

    async def _give_back(self, parcels: Sequence[InHand]) -> None:
        if not parcels:
            return
        try:
            await self._drive(self._outbox.hand_back(*(one.held for one in parcels)))
        except Exception as error:  # noqa: BLE001  (the store's, or a mistake of ours)
            self._leave_to_lease(parcels, error)
            return
        for one in parcels:
            self._no_longer_held(one, None)

    async def _acknowledge(self, delivered: list[InHand]) -> None:
        try:
            done = await self._drive(self._outbox.sent(*(one.held for one in delivered)))
        except Exception as error:  # noqa: BLE001  (the store's, or a mistake of ours)
            self._leave_to_lease(delivered, error)
            return
        for one in delivered:
            self._no_longer_held(one, ParcelEnded.DELIVERED if one.held.parcel.id in done else ParcelEnded.LOST)

    async def _wait_for_key(self, held: HeldParcel) -> ParcelEnded:
        """Let a parcel wait for a worker that has its key; this does not count as an attempt."""
        log.error(
            "relay: parcel %s of topic %s waits: it is %s, which this process does not have (Once(seal=...))",
            held.parcel.id,
            held.parcel.topic,
            described(key_of_text(held.parcel.payload) or "?"),
        )
        waiting = self._outbox.again(held, SEALED_WITHOUT_KEY_WAITS, SEALED_WITHOUT_KEY, counted=False)
        return ParcelEnded.POSTPONED if await self._drive(waiting) else ParcelEnded.LOST

    async def _message(self, held: HeldParcel, error: Exception | None) -> ParcelEnded | None:
        """Deliver a message, or store the error of its call. None: it has to be acknowledged."""
        failed: CallFailed | None = None
        if error is None and held.attempts > self._policy.outbox_max_attempts:
            failed = CallFailed(held.last_error or relay.SPENT)
        elif error is None:
            try:
                await self._call(held, limit=self._limit, send_by=None)
            except Exception as raised:  # noqa: BLE001  (whatever a topic's function raises)
                error = raised
        if error is not None:
            failed = self._failure(held, error)
        if failed is None:
            return None
        self._add_sender()
        return await self._drive(relay.fail_message(self._outbox, held, failed, self._policy))

    async def _deferred(self, held: HeldParcel) -> ParcelEnded:
        # Taken before the announcement, so the send window ends no later than the store assumes (U1).
        send_by = self._clock() + self._policy.send_window.total_seconds()
        owner = f"{self._me}:{held.parcel.id}:{held.fence}"
        topic = self._topics[held.parcel.topic]
        taken = await self._drive(relay.begin_call(self._outbox, held, owner, topic.repeatable, self._policy))
        if not isinstance(taken, TakenUp):
            return taken
        ending = await self._ending(taken, send_by)
        return await self._written(taken, ending)

    async def _ending(self, taken: TakenUp, send_by: float) -> ParcelEnding:
        held = taken.held
        if self._stopping:
            return CallFailed("stopped", never_sent=True, counted=False)
        rejected = False
        try:
            returned = await self._call(held, limit=taken.record.call_timeout, send_by=send_by)
        except RejectedError as final:
            rejected = True
            returned = final.value if isinstance(final.value, Reply) else Reply(DECLINED, final.value)
        except ResultNotStorableError:
            return Unstorable()
        except Exception as error:  # noqa: BLE001  (whatever a topic's function raises)
            return self._failure(held, error)
        try:
            reply = reply_of(returned)
            return CallAnswered(reply.stored(self._policy), reply.provider_id, rejected=rejected)
        except ResultNotStorableError:
            return Unstorable()

    async def _written(self, taken: TakenUp, ending: ParcelEnding) -> ParcelEnded:
        """Store the result of a call; repeated until the store accepts or refuses it: it must not be lost (P7)."""
        failures = 0
        while True:
            try:
                return await self._drive(relay.end_call(self._outbox, taken, ending, self._policy))
            except StoreError as error:
                log.warning("relay: the store did not respond (%s); retrying", error.reason)
                notify_failure(self._notify, self.name, error)
            await self._sleep(OUTAGE.wait(failures, self._chance()))
            failures += 1

    async def _call(self, held: HeldParcel, *, limit: Duration, send_by: float | None) -> object:
        message, topic = message_of(held), self._topics[held.parcel.topic]
        if send_by is None and self._is_prompt(topic.name):
            return self._final(call_at_once(topic, message))
        self._add_sender()
        seconds = limit / _MICROS
        return self._final(
            await call(
                topic,
                message,
                limit=seconds,
                send_by=send_by,
                clock=self._clock,
                sleep=self._sleep,
                left_behind=self._left_behind,
            )
        )

    def _final(self, returned: object) -> object:
        if isinstance(returned, Reply) and not returned.is_final:
            raise ReplyNotFinalError(returned)
        return returned

    def _is_prompt(self, name: str) -> bool:
        known = self._prompt.get(name)
        if known is None:
            known = self._prompt[name] = name in self._topics and awaits_nothing(self._topics[name].function)
        return known

    def _failure(self, held: HeldParcel, error: Exception) -> CallFailed:
        seconds = self._waits.wait(held.attempts - 1, self._chance(), asked=_delay_of(error))
        # Only the class is logged: an error's text may contain client data.
        name = str(error) if isinstance(error, ReplyNotFinalError | CallBrokenError) else type(error).__name__
        parcel = held.parcel
        log.warning(
            "relay: attempt %d of parcel %s of topic %s failed with %s", held.attempts, parcel.id, parcel.topic, name
        )
        return CallFailed(name, int(seconds * _MICROS), never_sent=self._proves_not_sent(error))

    def _proves_not_sent(self, error: Exception) -> bool:
        if isinstance(error, ReplyNotFinalError):
            return error.status in self._policy.not_executed_statuses
        try:
            return isinstance(error, NotExecutedError) or self._policy.is_definitely_not_executed(error)
        except Exception:  # noqa: BLE001  (a hook that fails proves nothing)
            return False

    async def _drive(self, flow: Flow[T]) -> T:
        return await adrive(flow, self._run)


def message_of(held: HeldParcel) -> Message:
    """The message that a topic's function is called with."""
    parcel = held.parcel
    return Message(
        topic=parcel.topic,
        payload=json.loads(parcel.payload),
        key=parcel.record_id.key,
        downstream_key=parcel.downstream_key,
        attempt=held.attempts,
        incarnation=parcel.incarnation,
        scope=parcel.record_id.scope,
        order_by=parcel.order_by,
    )


def event_of(held: HeldParcel, ended: ParcelEnded) -> Event | None:
    """The event about a parcel that a worker no longer holds; None: it is retried, or another worker has it."""
    parcel, about = held.parcel, About.of_parcel(held.parcel)
    match ended:
        case ParcelEnded.DELIVERED:
            return Delivered(about, parcel.kind, held.attempts)
        case ParcelEnded.PARKED:
            return Doubted(about, held.last_error or DEAD_LETTER, Actor.WORKER)
        case ParcelEnded.BURIED | ParcelEnded.ORPHANED:
            return Buried(about, parcel.kind, held.attempts, ended.value)
        case ParcelEnded.POSTPONED | ParcelEnded.LOST:
            return None
        case _:
            assert_never(ended)


def _delay_of(error: Exception) -> float | None:
    """The delay in seconds that an error carries, if it has one."""
    asked: object = getattr(error, "retry_after", None)
    if isinstance(asked, bool) or not isinstance(asked, int | float):
        return None
    return float(asked) if isfinite(asked) else None
