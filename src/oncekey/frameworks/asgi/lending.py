"""Sessions and connections for dependencies: lent before the claim, taken back with the request.

On a route that is enrolled as LOCAL the loan is the business transaction itself, which the claim and the settlement
join later, or, where the claim comes first, a transaction to read through that becomes the business transaction. On a
PHASED one it is a transaction to read through, and inside of a phase the phase's own. Everywhere else it is an ordinary
session, or a transaction to read through.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol, cast

from oncekey.core.errors import ConfigurationError
from oncekey.core.model import Effects
from oncekey.engine.effects import Call, Flush, Rest, Rollback, TakeBack
from oncekey.engine.enrolment import SAFE
from oncekey.frameworks.asgi.loans import NO_SESSIONS, Loan
from oncekey.frameworks.asgi.nesting import enrolment_of
from oncekey.frameworks.asgi.threads import opened_in_thread
from oncekey.ports import AsyncSessions
from oncekey.runtimes.aio import AsyncRuntime, flush, shielded

if TYPE_CHECKING:
    from oncekey.core.policy import Policy
    from oncekey.engine.effects import Commit, Drop, Effect, Keep
    from oncekey.engine.enrolment import Enrolment
    from oncekey.frameworks.asgi.installation import Installation
    from oncekey.frameworks.asgi.types import Scope
    from oncekey.ports import AsyncOpenTransaction, LentSession, SessionTransaction, SteppingSession

NOT_LOCAL = (
    "once.connection would lose what is written here: the route is not enrolled with effects=LOCAL or "
    "PHASED, so nobody commits; enrol it, or use a connection of the application's own"
)
BLOCKING = "{operation} is a plain `def`: make it `async def` to use once.session or once.connection"
UNSEEN = (
    "once.session could not see that {operation} is enrolled, so its rows would not commit with the key: this "
    "framework does not name the endpoint in the ASGI scope; write through op.connection, or through the connection "
    "that op.phase hands to its function"
)


class Lending:
    """What one request was lent."""

    __slots__ = (
        "_engine",
        "_handed_over",
        "_installation",
        "_loan",
        "_reading",
        "_request",
        "_scope",
        "_session",
        "_tx",
    )

    def __init__(self, request: Borrower) -> None:
        self._request = request
        self._installation = request.installation
        self._engine = request.installation.engines.asynchronous()
        self._scope = request.scope
        self._tx = request.tx
        self._loan: Loan | None = None
        self._reading: AsyncOpenTransaction | None = None
        self._session: LentSession | None = None
        self._handed_over = self._tx is not None

    async def session(self) -> Any:  # noqa: ANN401  (SQLAlchemy's AsyncSession, which we may not import)
        """The session of the business transaction or of the phase; an ordinary one where there is no such thing."""
        driver = self._engine.driver
        if not isinstance(driver, AsyncSessions):
            raise ConfigurationError(NO_SESSIONS)
        enrolment = await self._enrolment()
        if enrolment is None or enrolment.effects is Effects.INLINE:
            self._session = self._session or driver.session()
            return self._session
        if self._follows(enrolment):
            return self._loaned().session()
        return cast("SessionTransaction", await self.business()).session

    def following(self) -> SteppingSession:
        """A session that reads until there is a transaction to write through, and opens nothing before it is used."""
        return self._loaned().session()

    async def connection(self) -> Any:  # noqa: ANN401  (whatever the driver's users know)
        """The connection of the business transaction or of the phase; one to read through where there is no such."""
        enrolment = await self._enrolment()
        if enrolment is not None and enrolment.effects is not Effects.INLINE:
            if self._follows(enrolment):
                return await self._loaned().connection()
            return (await self.business()).connection
        if self._scope["method"] not in SAFE:
            raise ConfigurationError(NOT_LOCAL)
        if self._reading is None:
            self._reading = await self._engine.read()
        return self._reading.connection

    async def business(self, *, blocking: bool = False) -> AsyncOpenTransaction:
        """The business transaction, opened when it is first asked for; a `def` handler's is a blocking one."""
        if self._tx is None:
            if blocking:
                self._tx, _ = await opened_in_thread(self._installation)
            else:
                self._tx = await self._engine.open()
        return self._tx

    def joins(self, tx: AsyncOpenTransaction, enrolment: Enrolment) -> None:
        """From now on this is the handler's transaction, and somebody else ends it."""
        if self._session is not None or self._reading is not None:
            raise ConfigurationError(UNSEEN.format(operation=enrolment.operation))
        self._tx, self._handed_over = tx, True
        if self._loan is not None:
            self._loan.join(tx, afresh=False)

    async def before_claim(self, enrolment: Enrolment) -> None:
        """Hold nothing that the claim could wait for; find out who was lent what would not commit with the key."""
        if enrolment.effects is Effects.PHASED and (self._session is not None or self._reading is not None):
            raise ConfigurationError(UNSEEN.format(operation=enrolment.operation))
        await self.rest()

    async def rest(self) -> None:
        """Hold no connection to read through, because another one is about to be waited for."""
        if self._loan is not None:
            await self._loan.rest()
        if self._session is not None:
            await self._session.rest()

    def joins_phase(self, tx: AsyncOpenTransaction) -> Loan:
        """From now on everything that was lent is a phase's own transaction, until the loan parts from it."""
        loan = self._loaned()
        try:
            loan.join(tx, afresh=True)
        except BaseException:
            loan.part()
            raise
        return loan

    def check(self) -> None:
        """Refuse to lose what a phased handler has changed outside of its phases."""
        if self._loan is not None:
            self._loan.check()

    @property
    def business_tx(self) -> AsyncOpenTransaction | None:
        """The business transaction, if it is open already, because a dependency writes through it."""
        return self._tx

    async def take_back(self) -> None:
        """Undo what is not committed; no connection stays with the request."""
        if self._tx is not None and not self._handed_over:
            await self._tx.rollback()
        if self._reading is not None:
            await self._reading.rollback()
        if self._loan is not None:
            await self._loan.close()
        if self._session is not None:
            await self._session.close()

    def _follows(self, enrolment: Enrolment) -> bool:
        """Whether what is lent changes its transaction: from phase to phase, or when it becomes the one writer.

        A claim would wait for whoever writes already, and that would be its own request; a replay must not wait at all.
        """
        if enrolment.effects is Effects.PHASED:
            return True
        if enrolment.blocking:
            raise ConfigurationError(BLOCKING.format(operation=enrolment.operation))
        locks = self._engine.store.locks
        alone = locks is None or locks.one_writer
        return alone and self._engine.reads_apart and not self._handed_over

    def _loaned(self) -> Loan:
        if self._loan is None:
            self._loan = Loan(self._engine)
        return self._loan

    async def _enrolment(self) -> Enrolment | None:
        """The route's enrolment by this `Once`. Whatever is lent to it, the body comes first."""
        enrolment = enrolment_of(self._scope, self._installation.engines) or self._request.enrolment
        if enrolment is not None:
            await self._request.read_ahead(enrolment.policy)
        return enrolment


class Borrower(Protocol):
    """A request, with a key or without."""

    installation: Installation
    scope: Scope
    lent: Lending | None

    @property
    def tx(self) -> AsyncOpenTransaction | None:
        """The business transaction of the handler that is running, if it has one."""

    @property
    def enrolment(self) -> Enrolment | None:
        """What it was claimed for, if it was."""

    async def read_ahead(self, policy: Policy) -> None:
        """Have the whole body here: nobody holds a connection while a client takes its time to send."""


def lend(request: Borrower) -> Lending:
    """What a request was lent so far."""
    if request.lent is None:
        request.lent = Lending(request)
    return request.lent


async def take_back(request: Borrower) -> None:
    """Take back what a request was lent, whoever is cancelled meanwhile."""
    if request.lent is None:
        return
    try:
        await request.lent.take_back()
    except asyncio.CancelledError:
        await shielded(request.lent.take_back())
        raise


class LendingRuntime(AsyncRuntime):
    """Performs the flows of a request that may have been lent something: before its claim, or in its steps.

    While a phase runs, everything that was lent is the phase's own transaction. It joins before the application's code
    is called, it takes no more once it was flushed, and it parts only when the transaction is over.
    """

    def __init__(self, shared: AsyncRuntime, request: Borrower) -> None:
        super().__init__(shared.engine, shared.drain, shared.open_blocking)
        self._request = request
        self._in_phase: Loan | None = None

    async def perform(self, effect: Effect) -> Any:  # noqa: ANN401  (each effect has its own result)
        """Perform one effect, and do with what was lent as it says."""
        match effect:
            case Rest():
                if self._request.lent is not None:
                    await self._request.lent.rest()
            case Call():
                if effect.within is not None:
                    self._in_phase = lend(self._request).joins_phase(effect.within)
                return await self.call(effect)
            case Flush():
                await flush(effect.tx)
                if self._in_phase is not None:
                    self._in_phase.done()
            case Rollback():
                try:
                    await effect.tx.rollback()
                finally:
                    self._part()
            case TakeBack():
                await take_back(self._request)
            case _:
                return await super().perform(effect)
        return None

    async def commit(self, effect: Commit) -> Keep | Drop:
        """Commit a transaction; what was lent parts from it."""
        ended = await super().commit(effect)
        self._part()
        return ended

    def _part(self) -> None:
        loan, self._in_phase = self._in_phase, None
        if loan is not None:
            loan.part()
