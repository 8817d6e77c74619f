"""Sessions and connections for dependencies: lent before the claim, taken back with the request.

On a route that is enrolled as LOCAL the loan is the business transaction itself, which the claim and the settlement
join later, or, where the claim comes first, a transaction to read through that becomes the business transaction. On a
PHASED one it is a transaction to read through, and inside of a phase the phase's own. Everywhere else it is an ordinary
session, or a transaction to read through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, cast

from oncekey.core.errors import ConfigurationError
from oncekey.core.model import Effects
from oncekey.frameworks.asgi.enrolment import SAFE
from oncekey.frameworks.asgi.loans import NO_SESSIONS, Loan
from oncekey.frameworks.asgi.nesting import enrolment_of
from oncekey.frameworks.asgi.shield import shielded
from oncekey.frameworks.asgi.threads import opened_in_thread
from oncekey.ports import AsyncFlushes, AsyncSessions

if TYPE_CHECKING:
    from oncekey.core.policy import Policy
    from oncekey.frameworks.asgi.enrolment import Enrolment
    from oncekey.frameworks.asgi.installation import Installation
    from oncekey.frameworks.asgi.types import Scope
    from oncekey.ports import AsyncOpenTransaction, LentSession, SessionTransaction

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
        "_taken",
        "_tx",
    )

    def __init__(self, request: Borrower) -> None:
        self._request = request
        self._installation = request.installation
        self._engine = request.installation.engines.asynchronous()
        self._scope = request.scope
        self._tx: AsyncOpenTransaction | None = None
        self._loan: Loan | None = None
        self._reading: AsyncOpenTransaction | None = None
        self._session: LentSession | None = None
        self._taken = False
        self._handed_over = False

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
            self._tx = await (opened_in_thread(self._installation) if blocking else self._engine.open())
            self._taken = False
        return self._tx

    async def hand_over(self, enrolment: Enrolment) -> AsyncOpenTransaction:
        """The business transaction, for the handler's settlement to end."""
        if self._session is not None or self._reading is not None:
            raise ConfigurationError(UNSEEN.format(operation=enrolment.operation))
        await self.rest()
        tx = await self.business(blocking=enrolment.blocking)
        if self._loan is not None:
            self._loan.join(tx, afresh=False)
        self._handed_over = True
        return tx

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

    @contextmanager
    def phase(self, tx: AsyncOpenTransaction) -> Iterator[Loan]:
        """While a phase runs, everything that was lent is its own transaction."""
        loan = self._loaned()
        try:
            loan.join(tx, afresh=True)
            yield loan
        finally:
            loan.part()

    def check(self) -> None:
        """Refuse to lose what a phased handler has changed outside of its phases."""
        if self._loan is not None:
            self._loan.check()

    @property
    def lends_business(self) -> bool:
        """Whether the business transaction is open already, because a dependency writes through it."""
        return self._tx is not None

    @property
    def spent(self) -> bool:
        """Whether a business transaction was lent and taken back: no handler can write through it any more."""
        return self._taken and self._tx is not None

    def reopen(self) -> None:
        """Let another business transaction take the place of one that was taken back; a loan goes on with that."""
        self._tx = None

    async def take_back(self) -> None:
        """Undo what is not committed; no connection stays with the request."""
        self._taken = True
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
    def enrolment(self) -> Enrolment | None:
        """What it was claimed for, if it was."""

    async def read_ahead(self, policy: Policy) -> None:
        """Have the whole body here: nobody holds a connection while a client takes its time to send."""


def lend(request: Borrower) -> Lending:
    """What a request was lent so far."""
    if request.lent is None:
        request.lent = Lending(request)
    return request.lent


async def business(request: Borrower, enrolment: Enrolment) -> AsyncOpenTransaction:
    """The business transaction of a LOCAL handler: the one that a dependency opened, or a new one."""
    await request.read_ahead(enrolment.policy)
    return await lend(request).hand_over(enrolment)


async def flush(tx: AsyncOpenTransaction) -> None:
    """Write what a session holds back while the application can still answer to an error."""
    if _flushes(type(tx)):
        await cast("AsyncFlushes", tx).flush()


@cache
def _flushes(kind: type) -> bool:
    # Asking an object whether it fits a protocol is dear, and the answer is its class's.
    return issubclass(kind, AsyncFlushes)


async def take_back(request: Borrower) -> None:
    """Take back what a request was lent, whoever is cancelled meanwhile."""
    if request.lent is None:
        return
    try:
        await request.lent.take_back()
    except asyncio.CancelledError:
        await shielded(request.lent.take_back())
        raise
