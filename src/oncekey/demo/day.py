"""Writes a made-up day of the shop into a store: the lives of requests, at instants of the past, by the store's verbs.

A life is a generator. It yields statements, as every flow of the store does, and spans of time, in which other lives go
on: so claims, calls, sweeps, questions to resolvers and moves of operators come in the order of their instants, and
every row is one that a real day would have left. Requests that are not over when the day ends stay in progress.

All random draws come from one seed: the same seed, number and last instant make the same day.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from uuid import UUID

from oncekey.canonical.digests import downstream_key
from oncekey.core import model
from oncekey.core.memo import digest_of, encode, rejected
from oncekey.core.model import HOUR, MINUTE, SECOND, Duration, Instant
from oncekey.core.onecommit import WriteKind, WriteTarget
from oncekey.core.policy import micros
from oncekey.core.transitions import Actor, Mover
from oncekey.core.upkeep import SWEEP_GRACE, Page
from oncekey.demo import routes
from oncekey.demo.data import Money, Order, Payment, Transfer, datetime_of
from oncekey.demo.draws import WORKERS, Clock, Doubts, Draws, Fate, Life, busyness, money_of, present, statements_of
from oncekey.demo.problems import MEDIA_TYPE, TENANTS
from oncekey.demo.provider_ledger import Charge
from oncekey.engine import operate, relay, upkeep
from oncekey.engine.claiming import Caller, Parts, claim_of
from oncekey.engine.run import Parcels
from oncekey.flow import Body, Statement, Value
from oncekey.ops.stats import Sample, sample_of
from oncekey.topics import Reply

if TYPE_CHECKING:
    from oncekey.core.deferred import TakenUp
    from oncekey.engine.enrolment import Enrolment
    from oncekey.once import Once
    from oncekey.ports import Store

Say: TypeAlias = Callable[[str, "dict[str, Value]"], Statement]
"""A statement of the demo's own tables by its name."""

SPAN: Final = 23 * HOUR + 30 * MINUTE
"""The length of the day: short enough that none of its records has expired at its end."""
OUTAGE: Final = (9 * HOUR, 8 * HOUR + 20 * MINUTE)
"""The time in which the provider hardly answered, as spans before the end of the day."""
BUSY: Final = 4000
"""From so many requests on, single ones that took hours do not change what the others look like."""
PATIENT: Final = 0.75
"""The share of clients that retry a request that was not done; the others give up."""
SAMPLES: Final = 5 * MINUTE
BEAT: Final = 10 * MINUTE
TASKS: Final = ("relay", "sweeper", "reaper", "completer", "reconciler")
_TENANTS: Final = (*TENANTS.values(), "gamma", "delta")
_NO_ANSWER: Final = "127.0.0.1 gave no whole answer (TimeoutError)"


class Day:
    """The day, which `forward` writes in portions."""

    def __init__(self, store: Store, once: Once, say: Say, clock: Clock, *, requests: int, seed: int) -> None:
        assert store.locks is not None
        assert store.outbox is not None
        assert store.reconcile is not None
        assert store.upkeep is not None
        self._store, self._once, self._say, self._clock = store, once, say, clock
        self._locks, self._outbox = store.locks, store.outbox
        self._port, self._upkeep = store.reconcile, store.upkeep
        self._policy = once.policy
        self._draw = Draws(seed, clock)
        self._end = clock.now
        self._lives: list[tuple[Instant, int, Life[None]]] = []
        self._started = 0
        self._fates: dict[UUID, Fate] = {}
        self.begun = 0
        """How many requests have begun."""
        self.charges: list[tuple[Charge, bool]] = []
        """The provider's charges, each with whether the provider deduplicates by its key."""
        self.samples: list[Sample] = []
        """What waited, every few minutes."""
        self._doubts = Doubts(store, once, self._draw, clock)
        self._plan(requests)

    def forward(self, requests: int) -> Body[bool]:
        """Go on until so many requests have begun; returns whether the day goes on after that."""
        while self._lives and self._lives[0][0] <= self._end:
            if self.begun >= requests:
                return True
            self._clock.now, _, life = heapq.heappop(self._lives)
            try:
                yielded = next(life)
                while isinstance(yielded, Statement):
                    yielded = life.send((yield yielded))
            except StopIteration:
                continue
            self._begin(life, yielded)
        self._clock.now = self._end
        yield from statements_of(self._upkeep.leave(WORKERS[0]))
        return False

    # The plan

    def _plan(self, requests: int) -> None:
        """Plan when requests begin: by the hour of the day, and some fixed ones, so that every trouble occurs."""
        certain = self._certain(requests)
        minutes = SPAN // MINUTE
        weights = [busyness((self._end - SPAN + number * MINUTE) // MINUTE) for number in range(minutes)]
        for minute in self._draw.random.choices(range(minutes), weights, k=max(0, requests - len(certain))):
            at = self._end - SPAN + minute * MINUTE + self._draw.between(0, MINUTE)
            self._start(at, self._somebody(self._is_out(at)))
        for ago, life in certain:
            self._start(self._end - ago, life)
        self._start(self._end - SPAN, self._watching())
        self._start(self._end - 2 * HOUR, self._strangers())

    def _certain(self, requests: int) -> list[tuple[Duration, Life[None]]]:
        draw, (began, ended) = self._draw, OUTAGE
        # An answer that was found hours later counts as a run of hours: `oncekey doctor`, which measures the lease
        # by the last thousand runs, must not meet one of them among too few others.
        late = 2 if requests >= BUSY else 0

        def then() -> Duration:
            return draw.between(ended, began)

        return [
            *((then(), self._payment(Fate.GIVEN_UP)) for _ in range(3)),
            *((then(), self._payment(Fate.BY_HAND)) for _ in range(2)),
            *((then(), self._payment(Fate.DOUBT_ENDS)) for _ in range(2)),
            *((then(), self._payment(Fate.KILLED)) for _ in range(2)),
            *((then(), self._transfer(Fate.GIVEN_UP)) for _ in range(2)),
            *((then(), self._transfer(Fate.BY_HAND)) for _ in range(late)),
            *((then(), self._notification(Fate.GIVEN_UP)) for _ in range(2)),
            *((then(), self._notification(Fate.DOUBT_ENDS)) for _ in range(late)),
            *((then(), self._payment(Fate.WELL, receipt=Fate.GIVEN_UP)) for _ in range(2)),
            (
                self._held_for() + 2 * SECOND,
                self._payment(Fate.KILLED),
            ),  # its lease is over, and it is not swept yet
            (9 * SECOND, self._payment(Fate.SLOW)),
            (4 * SECOND, self._payment(Fate.SLOW)),
            (6 * SECOND, self._notification(Fate.SLOW)),
            (3 * SECOND, self._transfer(Fate.SLOW)),
            *((draw.between(MINUTE, 3 * HOUR), self._notification(Fate.UNREACHABLE)) for _ in range(2)),
            *((draw.between(MINUTE, 3 * HOUR), self._notification(Fate.ABANDONED)) for _ in range(2)),
        ]

    def _somebody(self, out: bool) -> Life[None]:  # noqa: FBT001  (drawn at random, no caller chooses it)
        kind = self._draw.random.choices(("order", "payment", "transfer", "notification"), (52, 26, 13, 9))[0]
        if kind == "order":
            return self._order()
        fates = (Fate.WELL, Fate.DECLINED, Fate.UNREACHABLE, Fate.SILENT, Fate.KILLED, Fate.DOUBT_ENDS)
        weights = (40.0, 3.0, 20.0, 36.0, 0.5, 0.5) if out else (93.0, 4.5, 1.0, 0.5, 0.5, 0.2)
        fate = self._draw.random.choices(fates, weights)[0]
        match kind:
            case "payment":
                return self._payment(fate)
            case "transfer":
                return self._transfer(Fate.WELL if fate in {Fate.KILLED, Fate.DOUBT_ENDS} else fate)
            case _:
                # No retry may send it again, so a call without an answer is in doubt.
                doubtful = fate in {Fate.SILENT, Fate.KILLED, Fate.DOUBT_ENDS}
                return self._notification(Fate.UNREACHABLE if doubtful else fate)

    def _held_for(self) -> Duration:
        """How long an owner that has announced a call and then fell silent holds its record."""
        call = micros(self._policy.send_window) + micros(self._policy.call_timeout) + relay.MARGIN
        return max(call, micros(self._policy.lease))

    def _is_out(self, at: Instant) -> bool:
        began, ended = OUTAGE
        return self._end - began <= at < self._end - ended

    def _start(self, at: Instant, life: Life[None]) -> None:
        self._started += 1
        heapq.heappush(self._lives, (at, self._started, life))

    def _begin(self, life: Life[None], after: Duration = 0) -> None:
        self._start(self._clock.now + after, life)

    # Requests

    def _order(self) -> Life[None]:
        items = self._draw.items()
        wanted = {"customer_id": self._draw.customer(), "items": [item.model_dump() for item in items]}
        claim, tenant = self._claim("create_order", "/orders", wanted)
        new_id = self._draw.new_id()
        order = Order(
            id=new_id,
            status="placed",
            customer_id=str(wanted["customer_id"]),
            items=items,
            created_at=datetime_of(self._clock.now),
        )
        params: dict[str, Value] = {
            "tenant": tenant,
            "id": str(new_id),
            "status": order.status,
            "customer_id": order.customer_id,
            "items": json.dumps([item.model_dump() for item in items], separators=(",", ":")),
            "created_at": self._clock.now,
        }
        yield self._say("insert_order", params)
        answer = _answer(201, order.model_dump_json(), f"/orders/{new_id}")
        yield from self._locks.completing(claim, WriteTarget(WriteKind.NEW), answer, None)

    def _payment(self, fate: Fate, receipt: Fate = Fate.WELL) -> Life[None]:
        money = self._draw.money()
        claim, tenant = self._claim("create_payment", "/payments", money.model_dump())
        record = present((yield from statements_of(self._store.claim(claim))).record)
        lease = model.Lease.of(record)
        yield self._draw.about(3_000)
        repeatable = fate not in {Fate.DOUBT_ENDS, Fate.BY_HAND, Fate.GIVEN_UP}
        created = Payment(
            id=self._draw.new_id(), status="created", created_at=datetime_of(self._clock.now), **money.model_dump()
        )
        yield self._say("insert_payment", self._row(tenant, created))
        memo: tuple[model.MemoEntry, ...] = (
            self._entry("how", model.EntryKind.VALUE, {"deduplicate": True, "repeatable": repeatable}),
            self._entry("payment_created", model.EntryKind.PHASE, created.model_dump(mode="json")),
        )
        span = micros(self._policy.lease)
        yield from self._store.phases.checkpointing(lease, (), memo, span)
        yield self._draw.about(2_000)
        call = model.Announcement(
            phase=routes.CHARGE,
            downstream_key=downstream_key(record.seed, routes.CHARGE),
            digest=digest_of(money.model_dump(), self._policy.max_result_bytes),
            sends=1,
            repeatable=20 * HOUR if repeatable else None,
            send_window=micros(self._policy.send_window),
            call_timeout=micros(self._policy.call_timeout),
        )
        yield from statements_of(self._store.phases.announce(lease, memo, memo, call))
        if fate is not Fate.WELL and fate is not Fate.DECLINED:
            charge = yield from self._trouble(fate, claim, lease, money, call)
            if charge is None:
                return
            lease, again = yield from self._next_owner(claim, call, memo)
            result = self._entry(routes.CHARGE, model.EntryKind.CALL, charge.shown())
            if again:
                yield self._answers_after()
                yield from statements_of(self._store.phases.result(lease, memo, (*memo, result), span))
        elif fate is Fate.WELL:
            charge = self._charge(money, call.downstream_key)
            yield self._answers_after()
            result = self._entry(routes.CHARGE, model.EntryKind.CALL, charge.shown())
            yield from statements_of(self._store.phases.result(lease, memo, (*memo, result), span))
        else:
            yield self._answers_after()
            no = rejected(
                self._entry(
                    routes.CHARGE, model.EntryKind.CALL, {"detail": "The card was declined; nothing was charged."}
                )
            )
            yield from statements_of(self._store.phases.result(lease, memo, (*memo, no), span))
            yield self._say(
                "end_payment", {"tenant": tenant, "id": str(created.id), "status": "declined", "charge_id": None}
            )
            over: tuple[model.MemoEntry, ...] = (
                *memo,
                no,
                self._entry("payment_declined", model.EntryKind.PHASE, None),
            )
            yield from self._store.phases.checkpointing(lease, over[:-1], over, span)
            yield from statements_of(self._store.settle(lease, _no()))
            return
        memo = (*memo, result)
        yield self._draw.about(3_000)
        settled = created.model_copy(update={"status": "settled", "charge_id": charge.id})
        parcels = Parcels(lease, record.seed)
        parcels.emit(routes.RECEIPT, {"tenant": tenant, "payment_id": str(settled.id)}, None, "payment_settled")
        yield self._say(
            "end_payment", {"tenant": tenant, "id": str(settled.id), "status": "settled", "charge_id": charge.id}
        )
        yield from self._put(parcels.take(), receipt)
        ended = (*memo, self._entry("payment_settled", model.EntryKind.PHASE, settled.model_dump(mode="json")))
        yield from self._store.phases.checkpointing(lease, memo, ended, span)
        yield self._draw.about(1_500)
        answer = _answer(201, settled.model_dump_json(), f"/payments/{settled.id}")
        yield from statements_of(self._store.settle(lease, answer))

    def _trouble(
        self, fate: Fate, claim: model.Claim, lease: model.Lease, money: Money, call: model.Announcement
    ) -> Life[Charge | None]:
        """The trouble between a payment's announced call and its next owner; returns the charge, if one was made."""
        timeout = micros(self._policy.call_timeout)
        match fate:
            case Fate.SLOW:
                yield 2 * micros(self._policy.lease)
                return None
            case Fate.UNREACHABLE:
                yield self._draw.about(4_000)
                yield from statements_of(self._store.phases.withdraw(lease))
                yield from statements_of(self._store.settle(lease, model.HandedBack("not_executed")))
                yield self._draw.between(2 * SECOND, 40 * SECOND)
            case Fate.SILENT:
                yield timeout
                yield from statements_of(self._store.settle(lease, model.HandedBack("handler_raised")))
                yield self._draw.between(2 * SECOND, 90 * SECOND)
            case Fate.KILLED:
                found = present((yield from statements_of(self._store.find(claim.id))).record)
                over = present(found.lease_until) - self._clock.now
                yield over + SWEEP_GRACE + self._draw.between(SECOND, 30 * SECOND)
                mover, page = Mover(Actor.SWEEPER, WORKERS[0]), Page(self._clock.now, (found,))
                moved = yield from statements_of(upkeep.sweep(self._upkeep, page, self._policy, mover))
                assert moved, "a sweeper does not find a dead owner's record"
                yield self._draw.between(SECOND, 20 * SECOND)
            case _:
                yield timeout
                yield from statements_of(self._store.settle(lease, model.Doubtful("call_uncertain")))
                # A doubt that is still open may have been charged, or not.
                made = fate is not Fate.GIVEN_UP or self._draw.tossed()
                charge = self._charge(money, call.downstream_key) if made else None
                if not (yield from self._doubts.last(fate, claim.id, routes.CHARGE, call.downstream_key, charge)):
                    return None
                yield self._draw.between(5 * SECOND, 30 * SECOND)
                return charge
        return self._charge(money, call.downstream_key)

    def _next_owner(
        self, claim: model.Claim, call: model.Announcement, memo: tuple[model.MemoEntry, ...]
    ) -> Life[tuple[model.Lease, bool]]:
        """Take a payment over, and announce its call once more if it has no result yet."""
        seen = present((yield from statements_of(self._store.find(claim.id))).record)
        heir = replace(claim, owner=self._draw.owner("web"), incarnation=self._draw.uuid())
        taken = present(present((yield from statements_of(self._store.take_over(heir, seen)))).record)
        lease = model.Lease.of(taken)
        if len(taken.memo) > len(memo):
            return lease, False
        sends = 1 if taken.intent is None else taken.intent.sends + 1
        yield self._draw.about(2_000)
        yield from statements_of(self._store.phases.announce(lease, memo, memo, replace(call, sends=sends)))
        return lease, True

    def _transfer(self, fate: Fate) -> Life[None]:
        money = self._draw.money()
        claim, tenant = self._claim("create_transfer", "/transfers", money.model_dump())
        asked = Transfer(
            id=self._draw.new_id(), status="requested", created_at=datetime_of(self._clock.now), **money.model_dump()
        )
        lease = model.Lease(claim.id, claim.incarnation, 1, 1, claim.effects, 0, 0, 0)
        topic = routes.UNREPEATABLE if fate in {Fate.BY_HAND, Fate.GIVEN_UP} else routes.REPEATABLE
        parcels = Parcels(lease, claim.seed)
        parcels.defer(topic, {"transfer": asked.model_dump(mode="json"), "deduplicate": True, "fault": None})
        yield self._say("insert_transfer", self._row(tenant, asked))
        parcel = parcels.deferred[0]
        yield from self._locks.completing(claim, WriteTarget(WriteKind.NEW), model.Deferred(parcel), None)
        self._fates[parcel.id] = fate
        self._begin(self._relay(), MINUTE if fate is Fate.SLOW else self._draw.between(50_000, 900_000))

    def _notification(self, fate: Fate) -> Life[None]:
        money = self._draw.money()
        claim, _ = self._claim("send_notification", "/notifications", money.model_dump())
        record = present((yield from statements_of(self._store.claim(claim))).record)
        lease, name = model.Lease.of(record), downstream_key(record.seed, routes.CALL)
        match fate:
            case Fate.WELL:
                charge = self._charge(money, name)
                yield self._answers_after()
                yield from statements_of(self._store.settle(lease, _answer(201, self._doubts.sent(money, charge))))
            case Fate.DECLINED:
                yield self._answers_after()
                yield from statements_of(self._store.settle(lease, _no()))
            case Fate.SLOW:
                yield 2 * micros(self._policy.lease)
            case Fate.DOUBT_ENDS | Fate.GIVEN_UP:
                yield micros(self._policy.call_timeout)
                yield from statements_of(self._store.settle(lease, model.Doubtful("handler_raised")))
                made = fate is Fate.DOUBT_ENDS or self._draw.tossed()
                yield from self._doubts.last(
                    fate, claim.id, routes.CALL, name, self._charge(money, name) if made else None
                )
            case _:
                yield self._draw.about(4_000)
                yield from statements_of(self._store.settle(lease, model.Retryable("not_executed")))
                if fate is not Fate.ABANDONED and self._draw.random.random() < PATIENT:
                    yield self._draw.between(2 * SECOND, 40 * SECOND)
                    yield from self._repeated(claim, money)

    def _repeated(self, claim: model.Claim, money: Money) -> Life[None]:
        """The client's retry of a notification that was not sent."""
        seen = present((yield from statements_of(self._store.find(claim.id))).record)
        heir = replace(claim, owner=self._draw.owner("web"), incarnation=self._draw.uuid())
        taken = present(present((yield from statements_of(self._store.take_over(heir, seen)))).record)
        charge = self._charge(money, downstream_key(taken.seed, routes.CALL))
        yield self._answers_after()
        yield from statements_of(
            self._store.settle(model.Lease.of(taken), _answer(201, self._doubts.sent(money, charge)))
        )

    # Workers, resolvers, people

    def _watching(self) -> Life[None]:
        """The workers' signs of life, and samples of the numbers as a console takes them; one worker dies at night."""
        assert self._store.survey is not None
        while True:
            out = self._clock.now >= self._end - OUTAGE[1]
            for name in WORKERS[:1] if out else WORKERS:
                yield from statements_of(self._upkeep.beat(name, TASKS, BEAT, {"send_notification": [routes.CALL]}))
            tally, roll = yield from statements_of(operate.pulse(self._store))
            self.samples.append(sample_of(tally, roll))
            yield SAMPLES

    def _strangers(self) -> Life[None]:
        """Charges in the provider's books that the store lacks: one made twice, and one of another customer."""
        yield SECOND
        twice = next(charge for charge, _ in reversed(self.charges) if charge.downstream_key is not None)
        self._charge(money_of(twice), twice.downstream_key, deduplicate=False)
        self._charge(self._draw.money(), str(self._draw.uuid()))

    def _put(self, parcels: Sequence[model.Parcel], fate: Fate) -> Life[None]:
        yield from self._outbox.putting(tuple(parcels))
        self._fates |= {one.id: fate for one in parcels}
        self._begin(self._relay(), self._draw.between(50_000, 900_000))

    def _relay(self) -> Life[None]:
        """One round of the relay over the outbox; each parcel that it finds has a life of its own."""
        topics = (routes.RECEIPT, routes.REPEATABLE, routes.UNREPEATABLE)
        owner = self._draw.owner(WORKERS[0])
        for held in (yield from statements_of(self._outbox.due(owner, topics, 20, relay.lease_of(self._policy)))):
            fate = self._fates.get(held.parcel.id, Fate.WELL)
            self._begin(
                self._message(held, fate) if held.parcel.kind is model.ParcelKind.EMIT else self._call(held, fate)
            )

    def _message(self, held: model.HeldParcel, fate: Fate) -> Life[None]:
        yield self._draw.about(4_000)
        if fate is Fate.GIVEN_UP:
            failed = relay.CallFailed("TimeoutError: the mail server does not answer", self._draw.pause(held.attempts))
            if (
                yield from statements_of(relay.fail_message(self._outbox, held, failed, self._policy))
            ) is relay.ParcelEnded.POSTPONED:
                self._begin(self._relay(), failed.after + SECOND)
            return
        message = json.loads(held.parcel.payload)
        yield self._say("insert_receipt", {**message, "sent_at": self._clock.now})
        yield from statements_of(self._outbox.sent(held))

    def _call(self, held: model.HeldParcel, fate: Fate) -> Life[None]:
        topic = held.parcel.topic
        repeatable = 20 * HOUR if topic == routes.REPEATABLE else None
        taken = yield from statements_of(
            relay.begin_call(self._outbox, held, self._draw.owner(WORKERS[0]), repeatable, self._policy)
        )
        if isinstance(taken, relay.ParcelEnded):
            return
        asked = Transfer.model_validate(json.loads(held.parcel.payload)["transfer"])
        silent = fate in {Fate.BY_HAND, Fate.GIVEN_UP} or (fate is Fate.SILENT and held.attempts < 3)  # noqa: PLR2004
        if silent or (fate is Fate.UNREACHABLE and held.attempts < 3):  # noqa: PLR2004  (the third try gets through)
            yield from self._no_reply(taken, held, fate, asked)
            return
        yield self._answers_after()
        if fate is Fate.DECLINED:
            reply = Reply(402, json.loads(bytes(routes.declined().answer.body)), (("content-type", MEDIA_TYPE),))
        else:
            charge = self._charge(asked.money, held.parcel.downstream_key)
            reply = self._doubts.done(asked, charge)
        answered = relay.CallAnswered(reply.stored(self._policy), reply.provider_id, rejected=fate is Fate.DECLINED)
        yield from statements_of(relay.end_call(self._outbox, taken, answered, self._policy))

    def _no_reply(self, taken: TakenUp, held: model.HeldParcel, fate: Fate, asked: Transfer) -> Life[None]:
        never_sent = fate is Fate.UNREACHABLE
        yield self._draw.about(4_000) if never_sent else micros(self._policy.call_timeout)
        error = "NotExecuted: the provider cannot be reached" if never_sent else f"ProviderFailedError: {_NO_ANSWER}"
        failed = relay.CallFailed(error, self._draw.pause(held.attempts), never_sent=never_sent)
        ended = yield from statements_of(relay.end_call(self._outbox, taken, failed, self._policy))
        if ended is relay.ParcelEnded.POSTPONED:
            self._begin(self._relay(), failed.after + SECOND)
        elif ended is relay.ParcelEnded.PARKED:
            name = held.parcel.downstream_key
            made = fate is Fate.BY_HAND or self._draw.tossed()
            charge = self._charge(asked.money, name) if made else None
            yield from self._doubts.last(fate, held.parcel.record_id, held.parcel.topic, name, charge, asked)

    # The parts of these lives

    def _claim(self, operation: str, path: str, body: dict[str, Any]) -> tuple[model.Claim, str]:
        """The claim of a request as the shop would make it, with names that are drawn from the seed."""
        self.begun += 1
        tenant = self._draw.random.choices(_TENANTS, (50, 30, 14, 6))[0]
        enrolment: Enrolment = present(self._once.enrolment_of(operation))
        sent = json.dumps(body).encode()
        kind = b"application/json"
        parts = Parts("POST", path, b"", ((b"content-type", kind),), kind, sent)
        claim = claim_of([f'"{self._draw.uuid()}"'.encode()], parts, enrolment, Caller(tenant))
        assert isinstance(claim, model.Claim), claim
        return replace(claim, incarnation=self._draw.uuid(), owner=self._draw.owner("web")), tenant

    def _charge(self, money: Money, name: str | None, *, deduplicate: bool = True) -> Charge:
        at = datetime_of(self._clock.now).isoformat()
        charge = Charge(f"ch_{self._draw.uuid().hex}", name, money.amount_cents, money.currency, money.customer_id, at)
        self.charges.append((charge, deduplicate))
        return charge

    def _row(self, tenant: str, moved: Payment | Transfer) -> dict[str, Value]:
        return {
            "tenant": tenant,
            "id": str(moved.id),
            "status": moved.status,
            "customer_id": moved.customer_id,
            "amount_cents": moved.amount_cents,
            "currency": moved.currency,
            "created_at": self._clock.now,
        }

    def _answers_after(self) -> Duration:
        """How long the provider takes to answer, if it does."""
        slow = 4.0 if self._is_out(self._clock.now) else 1.0
        return min(self._draw.about(round(180_000 * slow)), micros(self._policy.call_timeout) - SECOND)

    def _entry(self, name: str, kind: model.EntryKind, value: object) -> model.MemoEntry:
        return model.MemoEntry(name, kind, encode(value, self._policy.max_result_bytes))


def _answer(status: int, body: str, location: str | None = None) -> model.Completed:
    headers: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"application/json"),)
    if location is not None:
        headers = ((b"location", location.encode()), *headers)
    return model.Completed(model.StoredResponse(status, headers, body.encode()), model.Outcome.SUCCESS)


def _no() -> model.Completed:
    """The provider's final no, as the shop passes it on."""
    headers = ((b"content-type", MEDIA_TYPE.encode()),)
    return model.Completed(
        model.StoredResponse(402, headers, bytes(routes.declined().answer.body)), model.Outcome.FAILURE
    )
