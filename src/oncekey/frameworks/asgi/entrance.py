"""Entering LOCAL in one commit: the business transaction comes first, and the lock is taken on that very one (L1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, assert_never

from oncekey.core.errors import StoreBusyError, StoreError
from oncekey.core.model import Refuse, Replay
from oncekey.engine.local import ClaimFirst, Go
from oncekey.frameworks.asgi.admission import guarded, patiently
from oncekey.frameworks.asgi.lending import Borrower, lend, take_back

if TYPE_CHECKING:
    from oncekey.core.model import Bypass, Proceed, Verdict
    from oncekey.engine.shell import AsyncEngine
    from oncekey.frameworks.asgi.enrolment import Enrolment
    from oncekey.frameworks.asgi.one_commit import OneCommit
    from oncekey.ports import AsyncOpenTransaction


class Comer(Borrower, Protocol):
    """A request that asks to be let in."""

    @property
    def engine(self) -> AsyncEngine:
        """The engine of its event loop."""


class Entrance:
    """One request's way in. What a dependency was lent is entered with; what we opened ourselves, we may open anew."""

    __slots__ = ("_claimed_first", "_comer", "_lent", "_one", "entered")

    def __init__(self, comer: Comer, one: OneCommit) -> None:
        self._comer = comer
        self._one = one
        self._lent = comer.lent is not None and comer.lent.lends_business
        self._claimed_first = False
        self.entered: OneCommit | None = None

    async def admit(self, enrolment: Enrolment) -> Verdict:
        """The verdict on a claim; in wait mode nobody holds a connection while it waits (L8)."""
        comer, claim, policy = self._comer, self._one.claim, enrolment.policy

        async def ask() -> Verdict:
            return await patiently(lambda: self._ask(enrolment), policy, lambda: take_back(comer))

        verdict = await guarded(
            comer.installation, comer.engine, claim, policy, ask, may_have_claimed=lambda: self._claimed_first
        )
        if isinstance(verdict, Replay | Refuse) or self.entered is not None or self._claimed_first:
            return verdict
        await self._close()  # it runs without protection, in a transaction that nothing has failed in
        return verdict

    async def _ask(self, enrolment: Enrolment) -> Proceed | Replay | Refuse | Bypass:
        if self._comer.lent is not None and self._comer.lent.spent:
            news = await self._one.glance()
            if news is not None:
                return news
            if self._lent:
                return await self._look_only(enrolment)
            self._comer.lent.reopen()
        if self._would_wait(enrolment):
            news = await self._glance_aside()
            if news is not None:
                return news
        try:
            tx = await lend(self._comer).business(blocking=enrolment.blocking)
        except StoreError as error:
            return await self._news_instead(error)
        try:
            return await self._enter(tx, enrolment)
        except StoreBusyError as error:
            if self._claimed_first:
                raise
            return await self._news_instead(error)

    async def _news_instead(self, error: StoreError) -> Replay | Refuse:
        """All places are in handlers' hands: there is no way in, but an answer that is stored can be had."""
        news = await self._one.glance()
        if news is None:
            raise error
        return news

    async def _glance_aside(self) -> Replay | Refuse | None:
        """Look without a place of one's own; where that is crowded, too, waiting for the place is all there is."""
        try:
            async with self._comer.engine.aside:
                return await self._one.glance()
        except StoreBusyError:
            return None

    def _would_wait(self, enrolment: Enrolment) -> bool:
        """Whether handlers hold all the connections that they may: an answer that is stored needs none of those."""
        if self._comer.lent is not None and self._comer.lent.lends_business:
            return False
        return self._comer.installation.engines.blocking().crowded if enrolment.blocking else self._comer.engine.crowded

    async def _look_only(self, enrolment: Enrolment) -> Proceed | Replay | Refuse | Bypass:
        """The dependencies' own transaction is gone, so the handler cannot run; but an answer can be had."""
        tx = await self._comer.engine.open()
        try:
            return await self._enter(tx, enrolment)
        finally:
            await tx.rollback()

    async def _enter(self, tx: AsyncOpenTransaction, enrolment: Enrolment) -> Proceed | Replay | Refuse | Bypass:
        entry = await self._one.enter(tx)
        match entry:
            case Go(proceed):
                self.entered = self._one
                return proceed
            case Replay() | Refuse():
                return entry
            case ClaimFirst():
                self._claimed_first = True
                await self._stop_writing(tx)
                return await self._comer.engine.begin(self._one.claim, enrolment.policy)
            case _:
                assert_never(entry)

    async def _stop_writing(self, tx: AsyncOpenTransaction) -> None:
        """A claim is a write of its own: where there is one writer, it would wait for its own request's transaction."""
        locks, lent = self._comer.engine.store.locks, self._comer.lent
        if locks is not None and locks.one_writer and lent is not None:
            await tx.rollback()
            lent.reopen()

    async def _close(self) -> None:
        await take_back(self._comer)
        if self._comer.lent is not None and not self._lent:
            self._comer.lent.reopen()
