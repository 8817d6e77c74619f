"""The sessions and connections that dependencies of a route get from `once.session` and `once.connection`.

A dependency runs before the claim, and the request gives back what it got when it ends. What a dependency gets:

* LOCAL: the business transaction, which the claim and the settlement join later. If the claim has to come first, a
  read-only transaction until then.
* PHASED: a read-only transaction, and inside of a phase the transaction of the phase.
* Everywhere else: an ordinary session, or a read-only transaction.
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
    """The session and the connections that the dependencies of one request got."""

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
        """The session of the business transaction or of the phase; on other routes an ordinary session."""
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
        """A session that only reads until it joins a transaction. It opens no connection before its first use."""
        return self._loaned().session()

    async def connection(self) -> Any:  # noqa: ANN401  (whatever the driver's users know)
        """The connection of the business transaction or of the phase; on other routes a read-only one."""
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
        """The business transaction. The first call opens it; with `blocking` in a thread, for a `def` handler."""
        if self._tx is None:
            if blocking:
                self._tx, _ = await opened_in_thread(self._installation)
            else:
                self._tx = await self._engine.open()
        return self._tx

    def joins(self, tx: AsyncOpenTransaction, enrolment: Enrolment) -> None:
        """Use `tx` as the handler's transaction from now on. The flow of the request ends it, not this object."""
        if self._session is not None or self._reading is not None:
            raise ConfigurationError(UNSEEN.format(operation=enrolment.operation))
        self._tx, self._handed_over = tx, True
        if self._loan is not None:
            self._loan.join(tx, afresh=False)

    async def before_claim(self, enrolment: Enrolment) -> None:
        """Release the read connections, which the claim could wait for. Raise if rows would not commit with the key."""
        if enrolment.effects is Effects.PHASED and (self._session is not None or self._reading is not None):
            raise ConfigurationError(UNSEEN.format(operation=enrolment.operation))
        await self.rest()

    async def rest(self) -> None:
        """Release the read connections, because the request is about to wait for another connection."""
        if self._loan is not None:
            await self._loan.rest()
        if self._session is not None:
            await self._session.rest()

    def joins_phase(self, tx: AsyncOpenTransaction) -> Loan:
        """Let the session and the connection use a phase's transaction, until the loan parts from it."""
        loan = self._loaned()
        try:
            loan.join(tx, afresh=True)
        except BaseException:
            loan.part()
            raise
        return loan

    def check(self) -> None:
        """Raise if a PHASED handler has changed something in the session outside of its phases: it would be lost."""
        if self._loan is not None:
            self._loan.check()

    @property
    def business_tx(self) -> AsyncOpenTransaction | None:
        """The business transaction, if a dependency has opened it already."""
        return self._tx

    async def take_back(self) -> None:
        """Roll back what is not committed, and give every connection back."""
        if self._tx is not None and not self._handed_over:
            await self._tx.rollback()
        if self._reading is not None:
            await self._reading.rollback()
        if self._loan is not None:
            await self._loan.close()
        if self._session is not None:
            await self._session.close()

    def _follows(self, enrolment: Enrolment) -> bool:
        """Whether a dependency gets a `Loan`, which changes its transaction: from phase to phase, or at the claim.

        The second case is a store with one writer. If a dependency had its write transaction already, the claim would
        wait for its own request; and a replay must not wait at all.
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
        """The route's enrolment by this `Once`. Reads the body first, before the request holds a connection."""
        enrolment = enrolment_of(self._scope, self._installation.engines) or self._request.enrolment
        if enrolment is not None:
            await self._request.read_ahead(enrolment.policy)
        return enrolment


class Borrower(Protocol):
    """A request, with a key (`Exchange`) or without (`Visit`)."""

    installation: Installation
    scope: Scope
    lent: Lending | None

    @property
    def tx(self) -> AsyncOpenTransaction | None:
        """The business transaction of the handler that is running, if it has one."""

    @property
    def enrolment(self) -> Enrolment | None:
        """The enrolment of the handler that the request was claimed for, if it was."""

    async def read_ahead(self, policy: Policy) -> None:
        """Read the whole body, so that the request holds no connection while a slow client sends it."""


def lend(request: Borrower) -> Lending:
    """The `Lending` of a request; the first call makes it."""
    if request.lent is None:
        request.lent = Lending(request)
    return request.lent


async def take_back(request: Borrower) -> None:
    """Give back what the dependencies of a request got, also if the request is cancelled meanwhile."""
    if request.lent is None:
        return
    try:
        await request.lent.take_back()
    except asyncio.CancelledError:
        await shielded(request.lent.take_back())
        raise


class LendingRuntime(AsyncRuntime):
    """Performs the flows of a request whose dependencies, or whose steps, use `once.session` or `once.connection`.

    While a phase runs, both use the phase's transaction. They join it before the application's code is called, refuse
    changes once it was flushed, and part from it when it is over.
    """

    def __init__(self, shared: AsyncRuntime, request: Borrower) -> None:
        super().__init__(shared.engine, shared.drain, shared.open_blocking)
        self._request = request
        self._in_phase: Loan | None = None

    async def perform(self, effect: Effect) -> Any:  # noqa: ANN401  (each effect has its own result)
        """Perform one effect, and let the session and the connection join, rest or part as it requires."""
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
        """Commit a transaction, then let the session and the connection part from it."""
        ended = await super().commit(effect)
        self._part()
        return ended

    def _part(self) -> None:
        loan, self._in_phase = self._in_phase, None
        if loan is not None:
            loan.part()
