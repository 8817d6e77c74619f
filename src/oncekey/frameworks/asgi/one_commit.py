"""LOCAL in one commit: the lock comes first, the finished record last, and one COMMIT is all there is (L1-L6).

It has the surface of `Settling`. There is no claim to hand back and no lease to renew: what is not committed never
happened, and then the record is asked before anything is answered (L2).
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, TypeVar, assert_never

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
from oncekey.core.locks import lock_of
from oncekey.core.model import Code, Completed, Deferred, Discarded, Outcome, Refuse, Replay
from oncekey.core.onecommit import Sealed
from oncekey.core.settle import Business
from oncekey.engine import local
from oncekey.flow import adrive
from oncekey.frameworks.asgi.delivery import refusal, replayed
from oncekey.frameworks.asgi.settlement import NO_ROWS

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.core.model import Claim, Instant, Parcel
    from oncekey.core.policy import Policy
    from oncekey.core.settle import Decision
    from oncekey.engine.local import Entry, Go
    from oncekey.engine.shell import AsyncEngine
    from oncekey.flow import Flow
    from oncekey.ports import AsyncOpenTransaction, Locks

T = TypeVar("T")
log = logging.getLogger("oncekey")

SCHEMA = "oncekey"
TRIES = 4
PAUSE = 0.05
"""Seconds between two tries: a server takes a moment to notice that a connection is gone, and with it a lock."""

NOT_THERE = Refuse(Code.STORE_UNAVAILABLE, retry_after=1)


class OneCommit:
    """One operation that is written down once."""

    __slots__ = (
        "_echo",
        "_engine",
        "_go",
        "_lock",
        "_locks",
        "_policy",
        "_status_url",
        "claim",
        "expires_at",
        "parcels",
        "tx",
    )

    def __init__(
        self,
        engine: AsyncEngine,
        locks: Locks,
        claim: Claim,
        policy: Policy,
        *,
        echo: bytes | None,
        status_url: str | None,
    ) -> None:
        self._engine = engine
        self._locks = locks
        self.claim = claim
        self._policy = policy
        self._echo = echo
        self._status_url = status_url
        self._lock = lock_of(SCHEMA, claim.id, claim.fingerprint, policy.secret)
        self._go: Go | None = None
        self.tx: AsyncOpenTransaction | None = None
        self.parcels: tuple[Parcel, ...] = ()
        self.expires_at: Instant = 0

    async def enter(self, tx: AsyncOpenTransaction) -> Entry:
        """Try the lock on the business transaction, as its first statement of ours."""
        look = await tx.step(self._locks.locking(self._lock, self.claim))
        entry = local.enter(look, self.claim, self._policy)
        if isinstance(entry, local.Go):
            self._go = entry
            self.expires_at = entry.proceed.lease.expires_at
        return entry

    async def glance(self) -> Replay | Refuse | None:
        """Whether there is news for a request that waits; it takes neither the lock nor a business transaction."""
        flow = local.glance(self._engine.store, self._locks, self._lock, self.claim, self._policy)
        return await adrive(flow, self._engine.driver.run)

    async def perform(self, decision: Decision) -> Answer | None:
        """Commit the business with its record, or neither."""
        settlement = decision.settlement
        if self.tx is not None and self._go is not None and decision.business is Business.COMMIT:
            assert isinstance(settlement, Completed | Deferred)
            return await self._together(self.tx, self._go, settlement)
        return await self._apart(decision)

    async def again(self, decision: Decision) -> Answer | None:
        """After a cancellation half-way: a commit must be asked after (P7), all else may be done once more."""
        if self.tx is None or decision.business is Business.ROLLBACK:
            return await self._apart(decision)
        await self.tx.rollback()
        return await self._lost_commit()

    async def _together(self, tx: AsyncOpenTransaction, go: Go, settlement: Completed | Deferred) -> Answer | None:
        """The record is the last statement of the business transaction; no row written rolls it back (L3)."""
        try:
            outbox = self._engine.store.outbox
            sealed = await tx.step(local.sealing(self._locks, outbox, self.claim, go, settlement, parcels=self.parcels))
            if sealed is not None:
                await tx.commit()
                self._noted(sealed)
                return None
        except (TransactionControlError, RolledBackError) as error:
            await tx.rollback()
            return await self._rolled_back(settlement, error)
        except CommitAmbiguousError:
            await tx.rollback()
            return await self._lost_commit()
        except StoreError as error:
            # The server's own no, also to a COMMIT, is a roll-back (F20).
            await tx.rollback()
            log.error("oncekey: a business transaction could not be committed: %s", type(error).__name__)
            return await self._after() or self._refused(NOT_THERE)
        await tx.rollback()
        log.warning("oncekey: somebody else stored an answer first (digest %s)", key_digest(self.claim.id.key))
        return await self._after() or self._refused(local.BUSY)

    async def _apart(self, decision: Decision) -> Answer | None:
        """The business is undone; a final no is stored without it, and of all else there is nothing to store (L6)."""
        if self.tx is not None:
            await self.tx.rollback()
        match decision.settlement:
            case Completed() as settlement:
                return await self._alone(settlement)
            case Discarded():
                return None
            case _:
                return await self._after()

    async def _rolled_back(self, settlement: Completed | Deferred, error: OncekeyError) -> Answer | None:
        """The handler's rows are gone before their commit: a final no needs none of them, a success does."""
        if isinstance(settlement, Completed) and settlement.outcome is Outcome.FAILURE:
            return await self._alone(settlement)
        log.error(NO_ROWS, key_digest(self.claim.id.key), error)
        return await self._after() or self._refused(Refuse(Code.EXECUTION_FAILED))

    async def _alone(self, settlement: Completed) -> Answer | None:
        """A small transaction of its own; if it cannot be had, nothing happened and the client may come again."""
        try:
            told = await self._patiently(
                lambda: local.alone(self._locks, self._lock, self.claim, self._policy, settlement)
            )
        except RecordUnreadableError as error:
            return self._unread(error)
        except StoreError:
            return self._refused(NOT_THERE)
        if isinstance(told, Sealed):
            self._noted(told)
            return None
        return self._answer(told)

    async def _lost_commit(self) -> Answer:
        try:
            told = await self._patiently(lambda: local.lost_commit(self._locks, self._lock, self.claim, self._policy))
        except RecordUnreadableError as error:
            return self._unread(error)
        except StoreError:
            return self._in_doubt()
        return self._answer(told)

    async def _after(self) -> Answer | None:
        """What the record says wins over whatever we would have answered (L2)."""
        try:
            told = await adrive(local.after(self._engine.store, self.claim, self._policy), self._engine.driver.run)
        except RecordUnreadableError as error:
            return self._unread(error)
        except StoreError:
            return self._refused(NOT_THERE)
        return None if told is None else self._answer(told)

    async def _patiently(self, flow: Callable[[], Flow[T]]) -> T:
        """Again while the lock is taken, for a moment: perhaps by a connection of ours that the server still has."""
        for _ in range(TRIES - 1):
            told = await adrive(flow(), self._engine.driver.run)
            if told is not local.BUSY:
                return told
            await asyncio.sleep(PAUSE)
        return await adrive(flow(), self._engine.driver.run)

    def _noted(self, sealed: Sealed) -> None:
        self.expires_at = sealed.expires_at
        if not sealed.in_one_commit:
            log.error(
                "oncekey: %s ended its own transaction: had it failed then, its rows would be there without the key",
                self.claim.operation,
            )

    def _in_doubt(self) -> Answer:
        """It may have happened, and the store cannot say so yet: 503 with the outcome-unknown code (P7)."""
        return refusal(
            Refuse(Code.OUTCOME_UNKNOWN, retry_after=1),
            self._policy.override(on_unknown=503),
            echo=self._echo,
            status_url=self._status_url,
        )

    def _unread(self, error: RecordUnreadableError) -> Answer:
        """A record is there that is not ours, and whose it is cannot be read."""
        log.error("oncekey: %s", error)
        return self._refused(Refuse(Code.RECORD_UNREADABLE))

    def _refused(self, refused: Refuse) -> Answer:
        return refusal(refused, self._policy, claim=self.claim, echo=self._echo, status_url=self._status_url)

    def _answer(self, verdict: Replay | Refuse) -> Answer:
        match verdict:
            case Replay():
                return replayed(verdict, self._policy, echo=self._echo, status_url=self._status_url)
            case Refuse():
                return self._refused(verdict)
            case _:
                assert_never(verdict)
