"""Carrying a decision out: the record and the business rows, together or apart, and what the caller hears then.

The answer is `None` where the record now says what the handler said: then, and only then, the handler's own bytes
go out. In every other case the record's word goes out instead, or that nobody knows (P3, P7, L2).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from oncekey.core.answers import Answer
from oncekey.core.errors import (
    CommitAmbiguousError,
    OncekeyError,
    RecordUnreadableError,
    RolledBackError,
    StoreError,
    TransactionControlError,
)
from oncekey.core.keys import key_digest
from oncekey.core.model import (
    Bypass,
    Code,
    Completed,
    Deferred,
    Discarded,
    Doubtful,
    HandedBack,
    Outcome,
    Proceed,
    Refuse,
    Replay,
    Retryable,
    State,
)
from oncekey.core.rulings import answer_from
from oncekey.core.settle import Business
from oncekey.engine import testimony
from oncekey.flow import adrive
from oncekey.frameworks.asgi.delivery import refusal, replayed

if TYPE_CHECKING:
    from oncekey.core.model import Instant, Lease, Parcel, Settled, Settlement, Verdict
    from oncekey.core.policy import Policy
    from oncekey.core.settle import Decision
    from oncekey.engine.shell import AsyncEngine
    from oncekey.frameworks.asgi.shield import Drain
    from oncekey.ports import AsyncOpenTransaction

log = logging.getLogger("oncekey")

COMMIT_FAILED = "commit_failed"
NOT_ENTERED = "not_entered"
ROLLED_BACK = "rolled_back_by_handler"
NO_ROWS = "oncekey: a success is not stored, because its rows were rolled back (digest %s): %s"


class Settling:
    """One operation's end."""

    __slots__ = ("_drain", "_echo", "_engine", "_lease", "_policy", "_status_url", "expires_at", "parcels", "tx")

    def __init__(
        self,
        engine: AsyncEngine,
        drain: Drain,
        lease: Lease,
        policy: Policy,
        *,
        echo: bytes | None,
        status_url: str | None,
    ) -> None:
        self._engine = engine
        self._drain = drain
        self._lease = lease
        self._policy = policy
        self._echo = echo
        self._status_url = status_url
        self.tx: AsyncOpenTransaction | None = None
        self.parcels: tuple[Parcel, ...] = ()
        self.expires_at: Instant = lease.expires_at

    async def perform(self, decision: Decision) -> Answer | None:
        """Write the decision down."""
        if self.tx is None:
            return await self._alone(decision.settlement)
        if decision.business is Business.ROLLBACK:
            await self.tx.rollback()
            return await self._alone(decision.settlement)
        return await self._together(self.tx, decision.settlement)

    async def again(self, decision: Decision) -> Answer | None:
        """After a cancellation half-way: a settlement may be repeated, a commit must be asked after (P7)."""
        if self.tx is None:
            return await self._alone(decision.settlement)
        await self.tx.rollback()
        if decision.business is Business.ROLLBACK:
            return await self._alone(decision.settlement)
        return await self._lost_commit()

    async def _together(self, tx: AsyncOpenTransaction, settlement: Settlement) -> Answer | None:
        """The settlement is the last statement of the business transaction; nothing written rolls it back (L4)."""
        try:
            settled = await self._engine.settle_within(tx, self._lease, settlement, self.parcels)
            if settled.ours:
                await tx.commit()
                self._noted(settled)
                return None
        except (TransactionControlError, RolledBackError) as error:
            await tx.rollback()
            return await self._rolled_back(settlement, error)
        except CommitAmbiguousError:
            await tx.rollback()
            return await self._lost_commit()
        except StoreError as error:
            await tx.rollback()
            log.error("oncekey: a business transaction could not be committed: %s", type(error).__name__)
            told = await self._alone(Retryable(COMMIT_FAILED))
            return told or self._refused(Refuse(Code.STORE_UNAVAILABLE, retry_after=1))
        await tx.rollback()
        return self._record_says(settled)

    async def _rolled_back(self, settlement: Settlement, error: OncekeyError) -> Answer | None:
        """The handler's rows are gone before their commit: a final no needs none of them, a success does."""
        if isinstance(settlement, Completed) and settlement.outcome is Outcome.FAILURE:
            return await self._alone(settlement)
        log.error(NO_ROWS, self._digest, error)
        told = await self._alone(Retryable(ROLLED_BACK))
        return told or self._refused(Refuse(Code.EXECUTION_FAILED))

    async def _alone(self, settlement: Settlement) -> Answer | None:
        """A transaction of its own; a store that cannot be reached is asked again until it answers."""
        try:
            settled = await self._engine.settle(self._lease, settlement)
        except RecordUnreadableError as error:
            return self._unread(error)
        except StoreError:
            self._later(settlement)
            return self._unwritten(settlement)
        if not settled.ours and self._is_ours(settled):
            match settlement:
                case Retryable(last_error):
                    # A step was written without our hearing of it, so what is left is to be resumed.
                    return await self._alone(HandedBack(last_error))
                case Discarded():
                    return await self._alone(HandedBack(NOT_ENTERED, counted=False))
                case HandedBack(last_error):
                    # The window of its open call ended this moment, so nobody may make that call again.
                    return await self._alone(Doubtful(last_error)) or self._in_doubt()
                case _:
                    pass
        if not settled.ours:
            await self._testify(settlement)
            return self._record_says(settled)
        self._noted(settled)
        return None

    async def _testify(self, settlement: Settlement) -> None:
        """What was executed and is refused is kept as evidence, and somebody hears of it (U2)."""
        engine = self._engine
        flow = testimony.of_answer(engine.store, self._lease, settlement, self._policy)
        await adrive(flow, engine.driver.run)

    def _is_ours(self, settled: Settled) -> bool:
        record = settled.snapshot.record
        return record is not None and (record.state, record.incarnation, record.fence) == (
            State.IN_PROGRESS,
            self._lease.incarnation,
            self._lease.fence,
        )

    async def _lost_commit(self) -> Answer | None:
        try:
            settled = await self._engine.settle_lost_commit(self._lease)
        except RecordUnreadableError as error:
            return self._unread(error)
        except StoreError:
            self._drain.errand(lambda: self._engine.settle_lost_commit(self._lease), patience=self._patience)
            return self._in_doubt()
        if settled.ours:
            return self._refused(Refuse(Code.STORE_UNAVAILABLE, retry_after=1))
        return self._record_says(settled)

    def _noted(self, settled: Settled) -> None:
        if settled.snapshot.record is not None:
            self.expires_at = settled.snapshot.record.expires_at

    def _record_says(self, settled: Settled) -> Answer:
        log.warning("oncekey: a settlement was refused, the key has another owner (digest %s)", self._digest)
        return self._answer(answer_from(settled.snapshot, self._lease))

    def _unwritten(self, settlement: Settlement) -> Answer:
        if isinstance(settlement, Completed | Doubtful | Deferred):
            return self._in_doubt()
        return self._refused(Refuse(Code.STORE_UNAVAILABLE, retry_after=1))

    def _later(self, settlement: Settlement) -> None:
        async def settle() -> None:
            if not (await self._engine.settle(self._lease, settlement)).ours:
                await self._testify(settlement)

        self._drain.errand(settle, patience=self._patience)

    def _in_doubt(self) -> Answer:
        """It may have happened, and the store cannot say so yet: 503 with the outcome-unknown code (P7)."""
        return refusal(
            Refuse(Code.OUTCOME_UNKNOWN, retry_after=1),
            self._policy.override(on_unknown=503),
            echo=self._echo,
            status_url=self._status_url,
        )

    def _unread(self, error: RecordUnreadableError) -> Answer:
        """A record is there that is not ours any more, and whose it is cannot be read."""
        log.error("oncekey: %s", error)
        return self._refused(Refuse(Code.RECORD_UNREADABLE))

    def _refused(self, refused: Refuse) -> Answer:
        return refusal(refused, self._policy, echo=self._echo, status_url=self._status_url)

    def _answer(self, verdict: Verdict) -> Answer:
        match verdict:
            case Replay():
                return replayed(verdict, self._policy, echo=self._echo, status_url=self._status_url)
            case Refuse():
                return self._refused(verdict)
            case Proceed() | Bypass():
                raise AssertionError("a settled operation never proceeds")

    @property
    def _patience(self) -> float:
        # Past the lease too: until somebody else owns it, the owner's word is the best there is.
        return self._policy.deadline.total_seconds()

    @property
    def _digest(self) -> str:
        return key_digest(self._lease.id.key)
