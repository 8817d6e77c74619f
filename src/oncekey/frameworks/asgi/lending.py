"""Sessions and connections for dependencies: lent before the claim, taken back with the request.

On a route that is enrolled as LOCAL the loan is the business transaction itself, which the claim and the settlement
join later. Everywhere else it is an ordinary session, or a transaction to read through.
"""

from __future__ import annotations

import asyncio
import inspect
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, cast

from oncekey.core.errors import ConfigurationError
from oncekey.frameworks.asgi.shield import shielded
from oncekey.frameworks.asgi.threads import opened_in_thread
from oncekey.ports import AsyncFlushes, AsyncSessions

if TYPE_CHECKING:
    from oncekey.core.policy import Policy
    from oncekey.frameworks.asgi.enrolment import Enrolment
    from oncekey.frameworks.asgi.installation import Installation
    from oncekey.frameworks.asgi.types import Scope
    from oncekey.ports import AsyncOpenTransaction, SessionTransaction

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
NO_SESSIONS = (
    "once.session needs a SQLAlchemy engine: make it Once(create_async_engine(...)), or depend on once.connection"
)
NOT_LOCAL = (
    "once.connection would lose what is written here: the route is not enrolled with effects=LOCAL, so nobody "
    "commits; enrol it, or use a connection of the application's own"
)
BLOCKING = "{operation} is a plain `def`: make it `async def` to use once.session or once.connection"
UNSEEN = (
    "once.session could not see that {operation} is enrolled, so its rows would not commit with the key: this "
    "framework does not name the endpoint in the ASGI scope; write through op.connection"
)


class Lending:
    """What one request was lent."""

    __slots__ = (
        "_engine",
        "_handed_over",
        "_installation",
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
        self._reading: AsyncOpenTransaction | None = None
        self._session: Any = None
        self._taken = False
        self._handed_over = False

    async def session(self) -> Any:  # noqa: ANN401  (SQLAlchemy's AsyncSession, which we may not import)
        """The session of the business transaction; an ordinary one where there is no such transaction."""
        driver = self._engine.driver
        if not isinstance(driver, AsyncSessions):
            raise ConfigurationError(NO_SESSIONS)
        await self._read_ahead()
        if self._is_local():
            return cast("SessionTransaction", await self.business()).session
        if self._session is None:
            self._session = driver.session()
        return self._session

    async def connection(self) -> Any:  # noqa: ANN401  (whatever the driver's users know)
        """The connection of the business transaction; one to read through where there is no such transaction."""
        await self._read_ahead()
        if self._is_local():
            return (await self.business()).connection
        if self._scope["method"] not in SAFE:
            raise ConfigurationError(NOT_LOCAL)
        if self._reading is None:
            self._reading = await self._engine.open()
        return self._reading.connection

    async def business(self, *, blocking: bool = False) -> AsyncOpenTransaction:
        """The business transaction, opened when it is first asked for; a `def` handler's is a blocking one."""
        if self._tx is None:
            self._tx = await (opened_in_thread(self._installation) if blocking else self._engine.open())
        return self._tx

    async def hand_over(self, enrolment: Enrolment) -> AsyncOpenTransaction:
        """The business transaction, for the handler's settlement to end."""
        if self._session is not None or self._reading is not None:
            raise ConfigurationError(UNSEEN.format(operation=enrolment.operation))
        tx = await self.business(blocking=enrolment.blocking)
        self._handed_over = True
        return tx

    @property
    def lends_business(self) -> bool:
        """Whether the business transaction is open already, because a dependency writes through it."""
        return self._tx is not None

    @property
    def spent(self) -> bool:
        """Whether a business transaction was lent and taken back: no handler can write through it any more."""
        return self._taken and self._tx is not None

    async def take_back(self) -> None:
        """Undo what is not committed; no connection stays with the request."""
        self._taken = True
        if self._tx is not None and not self._handed_over:
            await self._tx.rollback()
        if self._reading is not None:
            await self._reading.rollback()
        if self._session is not None:
            await self._session.close()

    async def _read_ahead(self) -> None:
        enrolment = enrolment_of(self._scope)
        if enrolment is not None:
            await self._request.read_ahead(enrolment.policy)

    def _is_local(self) -> bool:
        enrolment = enrolment_of(self._scope)
        if enrolment is None or not enrolment.transactional:
            return False
        if enrolment.blocking:
            raise ConfigurationError(BLOCKING.format(operation=enrolment.operation))
        return True


class Borrower(Protocol):
    """A request, with a key or without."""

    installation: Installation
    scope: Scope
    lent: Lending | None

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


def enrolment_of(scope: Scope) -> Enrolment | None:
    """The enrolment of the endpoint that was routed to; a class answers by its methods."""
    endpoint = scope.get("endpoint")
    if inspect.isclass(endpoint):
        endpoint = getattr(endpoint, scope["method"].lower(), None)
    return getattr(endpoint, "__oncekey__", None)
