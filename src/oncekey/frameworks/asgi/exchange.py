"""The seam between middleware and route: one exchange per keyed, state-changing request.

It is mutable and shared, so nothing has to travel outwards through the context that it is found by.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from oncekey.boottime import boottime
from oncekey.core.answers import Answer
from oncekey.core.errors import StoreError
from oncekey.core.model import (
    Bypass,
    Code,
    Completed,
    Deferred,
    Discarded,
    Doubtful,
    Effects,
    Lease,
    Proceed,
    Refuse,
    Replay,
    Retryable,
)
from oncekey.core.resolution import Call
from oncekey.core.seed import downstream_key
from oncekey.core.settle import Business, Decision
from oncekey.engine.parcels import Parcels
from oncekey.engine.phases import Course
from oncekey.flow import adrive
from oncekey.frameworks.asgi.admission import admit, guarded
from oncekey.frameworks.asgi.capture import Capture
from oncekey.frameworks.asgi.claiming import Asked, make_claim
from oncekey.frameworks.asgi.deciding import decided
from oncekey.frameworks.asgi.delivery import fields_of, refusal, replayed, send_answer, send_captured
from oncekey.frameworks.asgi.entrance import Entrance
from oncekey.frameworks.asgi.heartbeat import Heartbeat
from oncekey.frameworks.asgi.intake import TooLargeError, TooSlowError
from oncekey.frameworks.asgi.lending import take_back
from oncekey.frameworks.asgi.nesting import check_alone, current, enclosing, enrolment_of, passage_of
from oncekey.frameworks.asgi.one_commit import OneCommit
from oncekey.frameworks.asgi.places import Phase, UnsettledError, Visit
from oncekey.frameworks.asgi.resuming import RESUMPTION, Resumption
from oncekey.frameworks.asgi.settlement import Settling
from oncekey.frameworks.asgi.shield import shielded

if TYPE_CHECKING:
    from oncekey.core.model import Claim, Instant, Record, Verdict
    from oncekey.core.policy import Policy
    from oncekey.engine.enrolment import Enrolment
    from oncekey.engine.shell import AsyncEngine
    from oncekey.frameworks.asgi.installation import Installation
    from oncekey.frameworks.asgi.lending import Lending
    from oncekey.frameworks.asgi.types import Message, Receive, Scope, Send
    from oncekey.ports import AsyncOpenTransaction

__all__ = ["Exchange", "Phase", "UnsettledError", "Visit", "current"]

log = logging.getLogger("oncekey")

SEND_PATIENCE = 2.0
"""How many seconds a cancelled request still tries to send its answer: whoever cancelled may take none any more."""


class Exchange:
    """One keyed request, from its claim to its answer."""

    __slots__ = (
        "_answer",
        "_begun",
        "_capture",
        "_counted",
        "_engine",
        "_enrolment",
        "_heartbeat",
        "_intake",
        "_lines",
        "_one_commit",
        "_root_path",
        "_send",
        "_settling",
        "_task",
        "asked",
        "course",
        "entered",
        "error",
        "installation",
        "kept",
        "lease",
        "lent",
        "outer",
        "parcels",
        "passage",
        "phase",
        "record",
        "rolled_back",
        "scope",
    )

    def __init__(
        self, installation: Installation, scope: Scope, receive: Receive, send: Send, lines: list[bytes]
    ) -> None:
        self.installation = installation
        self.scope = scope
        self.passage = passage_of(scope)
        self.outer = enclosing(self.passage)
        self.phase = Phase.OPEN
        self.error: BaseException | None = None
        self.entered = False
        self.kept = False
        self.rolled_back = False
        self.asked: Asked | None = None
        self.lease: Lease | None = None
        self.lent: Lending | None = None
        self.record: Record | None = None
        self.course: Course | None = None
        self.parcels: Parcels | None = None
        self._begun = False
        self._counted = False
        self._lines = lines
        self._root_path: str = scope.get("root_path", "")  # a mount changes it in place
        self._send = send
        self._intake = self.passage.intake(receive, installation.max_request_bytes)
        self._enrolment: Enrolment | None = None
        self._engine: AsyncEngine | None = None
        self._capture: Capture | None = None
        self._heartbeat: Heartbeat | None = None
        self._settling: Settling | OneCommit | None = None
        self._one_commit: OneCommit | None = None
        self._answer: Answer | None = None
        self._task: asyncio.Task[Any] | None = None

    # What the application is handed instead of the server's.

    async def receive(self) -> Message:
        """The next message of the request; a body that takes too long is our own answer to give."""
        enrolment = enrolment_of(self.scope, self.installation.engines) if self.phase is Phase.OPEN else None
        if enrolment is None:
            return await self._intake.receive()
        try:
            return await self._intake.receive(enrolment.policy.body_timeout.total_seconds())
        except TooSlowError:
            if not self._begun:
                self._answered(self._refusal(Refuse(Code.BODY_TOO_SLOW), enrolment.policy))
            raise

    async def read_ahead(self, policy: Policy) -> None:
        """Have the whole body here before a connection is lent; why it cannot be had is the claim's to say."""
        with suppress(TooLargeError, TooSlowError):
            await self._intake.body(policy.body_timeout.total_seconds())

    async def send(self, message: Message) -> None:
        """Pass on, capture or drop, by phase."""
        match self.phase:
            case Phase.OPEN:
                self._begun = True
                await self._send(message)
            case Phase.RUNNING:
                await self._captured(message)
            case Phase.ANSWERED:
                if _is_last(message) and self._answer is not None:
                    await self._deliver(self._answer)
            case Phase.SETTLING | Phase.DONE:
                pass

    # The claim.

    async def claim(self, enrolment: Enrolment) -> Verdict:
        """Ask for the right to execute, at the moment that the handler would be called."""
        check_alone()
        self.passage.claimed = True
        self._enrolment = enrolment
        resumption: Resumption | None = self.scope.get(RESUMPTION)
        if resumption is not None:
            asked: Asked | Refuse = resumption.asked(enrolment.policy)
        else:
            asked = await make_claim(
                self.installation, enrolment, self.scope, self._lines, self._intake, root_path=self._root_path
            )
        if isinstance(asked, Refuse):
            self._answered(self._refusal(asked, enrolment.policy))
            await take_back(self)
            return asked
        self.asked = asked
        verdict = await self._admitted(asked.claim, enrolment, resumed=resumption is not None)
        match verdict:
            case Proceed(lease, record, now):
                self._proceed(lease, enrolment)
                self._resumes(record, now, enrolment)
                if self.lent is not None and self.lent.spent:
                    # It may hold no connection while it waits (L8), and what its dependencies were lent is gone.
                    verdict = Refuse(Code.IN_PROGRESS, retry_after=1)
                    await self.withdraw(verdict)
            case Replay():
                self._answered(replayed(verdict, enrolment.policy, echo=self._echo, status_url=self._status_url))
            case Refuse():
                self._answered(self._refusal(verdict, enrolment.policy))
            case Bypass():
                pass
        if self._answer is not None:
            await take_back(self)
        return verdict

    async def _admitted(self, claim: Claim, enrolment: Enrolment, *, resumed: bool) -> Verdict:
        policy = enrolment.policy
        if self.lent is not None:
            await self.lent.before_claim(enrolment)
        if resumed:
            return await guarded(
                self.installation, self.engine, claim, policy, lambda: self.engine.resume(claim, policy)
            )
        turned_away = await self.installation.limits.admits(self.engine, self.scope, claim, policy)
        if turned_away is not None:
            return turned_away
        locks = self.engine.store.locks
        if locks is None or not enrolment.transactional:
            return await admit(self.installation, self.engine, claim, policy, lambda: take_back(self))
        entrance = Entrance(
            self, OneCommit(self.engine, locks, claim, policy, echo=self._echo, status_url=self._status_url)
        )
        verdict = await entrance.admit(enrolment)
        self._one_commit = entrance.entered
        return verdict

    def _resumes(self, record: Record, now: Instant, enrolment: Enrolment) -> None:
        """What was begun under other effects can only be gone on with by a handler that has steps (L3, F4)."""
        assert self.lease is not None
        self.record = record
        self.parcels = Parcels(self.lease, record.seed)
        if enrolment.effects is Effects.PHASED or record.memo or record.intent is not None:
            installation = self.installation
            self.course = Course.of(
                record, self.lease, enrolment.policy, now, boottime, stopping=lambda: installation.stopping
            )
            self._task = asyncio.current_task()
            self.installation.interruptible.add(self)

    def interrupt(self) -> None:
        """A stop does not wait any longer for a handler that somebody else can go on with; a call it lets be."""
        if self._task is not None and self.course is not None and self.course.intent is None:
            self.course.halted = True
            self._task.cancel()

    @property
    def enrolment(self) -> Enrolment | None:
        """What it was claimed for, if it was."""
        return self._enrolment

    @property
    def answer(self) -> Answer | None:
        """What is sent instead of whatever the application answers."""
        return self._answer

    @property
    def engine(self) -> AsyncEngine:
        """The engine of this exchange's event loop."""
        self._engine = self._engine or self.installation.engines.asynchronous()
        return self._engine

    def lost(self) -> bool:
        """Whether somebody else owns the key by now."""
        return self._heartbeat is not None and self._heartbeat.lost

    def joins(self, tx: AsyncOpenTransaction) -> None:
        """The business transaction that the settlement will be part of."""
        assert self._settling is not None
        self._settling.tx = tx

    async def withdraw(self, refused: Refuse) -> None:
        """Take the claim back: the handler could not be entered."""
        assert self._enrolment is not None
        assert self._settling is not None
        self.phase = Phase.SETTLING
        self._rest()
        _, cancelled = await self._carry_out(Decision(Discarded(), Business.ROLLBACK))
        if cancelled is not None:
            raise cancelled
        self._answered(self._refusal(refused, self._enrolment.policy))

    async def turn_away(self, error: BaseException) -> bool:
        """Answer for what failed before the claim: a body that took too long, or a store that was down."""
        if self.phase is Phase.ANSWERED and self._answer is not None:
            await self._deliver(self._answer)
            return True
        early = self.phase is Phase.OPEN and not self.passage.claimed and not self._begun
        if not early or self.lent is None or not isinstance(error, StoreError):
            return False
        log.error("oncekey: a dependency could not be lent a transaction: %s", type(error).__name__)
        await self._deliver(self._refusal(Refuse(Code.STORE_UNAVAILABLE, retry_after=1), self.installation.policy))
        return True

    # The end.

    async def finish(self, error: BaseException | None = None) -> bool:
        """Settle, then answer; whether an answer was sent. Nobody settles twice: the phase changes before we wait."""
        self.phase = Phase.SETTLING
        self._rest()
        decision, ours = self._decided(error)
        told, cancelled = await self._carry_out(decision)
        if self.parcels is not None and self.parcels.used:
            self.installation.wake()
        if told is None:
            self._remember_call(decision)
            self._say_doubt(decision)
        reply = ours if told is None else told
        if cancelled is not None:
            await shielded(self._conclude_soon(reply, error))
            raise cancelled
        await self._conclude(reply, error)
        self._leave()  # a background task may still run for long
        if reply is not None and error is None and not isinstance(decision.settlement, Deferred):
            raise UnsettledError
        return reply is not None

    async def close(self) -> None:
        """Whatever happened: no transaction, timer or file stays behind."""
        self._rest()
        self._intake.release()
        if self._capture is not None:
            self._capture.close()
        try:
            await take_back(self)
            if self._settling is not None and self._settling.tx is not None and self.phase is not Phase.DONE:
                await shielded(self._settling.tx.rollback())
        finally:
            self._leave()

    def _proceed(self, lease: Lease, enrolment: Enrolment) -> None:
        self.installation.drain.began()
        self._counted = True
        self.lease = lease
        self.phase = Phase.RUNNING
        self._intake.hold()
        self._capture = Capture(enrolment.policy)
        if self._one_commit is not None:
            self._settling = self._one_commit
            return
        self._heartbeat = Heartbeat(self.engine, lease, enrolment.policy)
        self._settling = Settling(
            self.engine,
            self.installation.drain,
            lease,
            enrolment.policy,
            echo=self._echo,
            status_url=self._status_url,
        )

    async def _captured(self, message: Message) -> None:
        assert self._capture is not None
        kind = message["type"]
        if kind == "http.response.start":
            self._capture.start(message)
        elif kind == "http.response.body":
            self._capture.body(message)
            if self._capture.refused or self._capture.complete:
                await self.finish()
        else:
            await self._send(message)  # early hints and debug information do not belong to the answer

    def _decided(self, error: BaseException | None) -> tuple[Decision, Answer | None]:
        """The decision, and our own answer where the handler's cannot be sent."""
        assert self._enrolment is not None
        assert self._capture is not None
        policy = self._enrolment.policy
        return decided(self, self._enrolment, self._capture, error, lambda refused: self._refusal(refused, policy))

    async def _carry_out(self, decision: Decision) -> tuple[Answer | None, asyncio.CancelledError | None]:
        """Settle, to the end also if we are cancelled meanwhile."""
        assert self._settling is not None
        self._settling.parcels = () if self.parcels is None else self.parcels.emitted
        try:
            return await self._settling.perform(decision), None
        except asyncio.CancelledError as cancelled:
            return await shielded(self._settling.again(decision)), cancelled

    def _say_doubt(self, decision: Decision) -> None:
        if isinstance(decision.settlement, Doubtful) and self.asked is not None:
            known = fields_of("unknown", self.asked.claim, why=decision.settlement.last_error)
            said = "oncekey: the outcome of %(operation)s is unknown: %(why)s (digest %(key_digest)s)"
            log.error(said, known, extra={"oncekey": known})

    def _remember_call(self, decision: Decision) -> None:
        """Let webhooks find the call of an INLINE record that has an answer: they may contradict it.

        The answer does not wait for it: a record in doubt is found without it, and what is missed here is an alarm.
        """
        assert self.asked is not None
        assert self.lease is not None
        claim = self.asked.claim
        if claim.effects is not Effects.INLINE or not isinstance(decision.settlement, Completed | Retryable):
            return
        desk, run = self.engine.store.reconcile, self.engine.driver.run
        phase = self.installation.inline_calls().get(claim.operation)
        if desk is None or phase is None:
            return
        name = downstream_key(claim.seed if self.record is None else self.record.seed, phase)
        call = Call(claim.id, self.lease.incarnation, claim.operation, phase, name, None, 0)
        self.installation.drain.errand(lambda: adrive(desk.add_call(call), run), patience=SEND_PATIENCE)

    async def _conclude(self, reply: Answer | None, error: BaseException | None) -> None:
        """Send our own answer or the captured one; after an exception the application's error page follows."""
        self.phase = Phase.DONE
        if reply is not None:
            await send_answer(self._send, reply)
        elif error is None:
            assert self._capture is not None
            assert self._enrolment is not None
            assert self._settling is not None
            until, policy = self._settling.expires_at, self._enrolment.policy
            await send_captured(self._send, self._capture, policy, echo=self._echo, expires_at=until)
        self._intake.release()

    async def _conclude_soon(self, reply: Answer | None, error: BaseException | None) -> None:
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(SEND_PATIENCE):
                await self._conclude(reply, error)

    async def _deliver(self, answer: Answer) -> None:
        self.phase = Phase.DONE
        await send_answer(self._send, answer)

    def _answered(self, answer: Answer) -> None:
        self._answer = answer
        self.phase = Phase.ANSWERED

    def _refusal(self, refused: Refuse, policy: Policy) -> Answer:
        claim = None if self.asked is None else self.asked.claim
        return refusal(refused, policy, claim=claim, echo=self._echo, status_url=self._status_url)

    def _leave(self) -> None:
        """From now on a stop need not wait for us."""
        self.installation.interruptible.discard(self)
        if self._counted:
            self._counted = False
            self.installation.drain.ended()

    def _rest(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()

    @property
    def _echo(self) -> bytes | None:
        return self._lines[0] if len(self._lines) == 1 else None

    @property
    def _status_url(self) -> str | None:
        return None if self.asked is None else self.installation.status_url(self._root_path, self.asked.key)


def _is_last(message: Message) -> bool:
    return message["type"] == "http.response.body" and not message.get("more_body", False)
