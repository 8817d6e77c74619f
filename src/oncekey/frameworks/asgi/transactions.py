"""The sessions and connections that dependencies of a route get from `once.session` and `once.connection`.

A dependency runs before the claim. The route decides what it gets, and the end of the request releases it:

* LOCAL: the business transaction, which the claim and the settlement join later. If the claim has to come first, a
  read-only transaction until then.
* PHASED: a read-only transaction, and inside a phase the transaction of the phase.
* Everywhere else: an ordinary session, or a read-only transaction.

In the first two cases, a read-only transaction comes from a `TransactionFollower`: inside a step it uses the step's
transaction; outside it reads through a separate one, which the request releases before it waits for another connection.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol, cast

from oncekey.core.errors import ConfigurationError
from oncekey.core.lazy import Lazy, load
from oncekey.core.model import Effects
from oncekey.engine.actions import Action, Call, Commit, Drop, Flush, Keep, ReleaseConnections, ReturnReaders, Rollback
from oncekey.engine.enrolment import SAFE, Enrolment
from oncekey.frameworks.asgi.requests import enrolment_of, request_of
from oncekey.ports.driver import AsyncSessions
from oncekey.runtimes.aio import AsyncRuntime, flush, shielded

if TYPE_CHECKING:
    from oncekey.core.policy import Policy
    from oncekey.frameworks import threaded
    from oncekey.frameworks.asgi import Scope
    from oncekey.frameworks.asgi import following as followers
    from oncekey.frameworks.asgi.installation import Installation
    from oncekey.ports.store import AsyncOpenTransaction, RequestSession, SessionTransaction, SteppingSession
else:
    followers = Lazy("oncekey.frameworks.asgi.following")
    threaded = Lazy("oncekey.frameworks.threaded")


NOT_LOCAL = (
    "once.connection would lose what is written here: the route is not enrolled with effects=LOCAL or PHASED, "
    "so nothing commits the rows; enrol it, or use the application's own connection"
)
BLOCKING = "{operation} is a plain `def`: make it `async def` to use once.session or once.connection"
UNSEEN = (
    "once.session could not see that {operation} is enrolled, so its rows would not commit with the key: this "
    "framework does not name the endpoint in the ASGI scope; write through op.connection, or through the connection "
    "that op.phase passes to its function"
)


class RequestTransaction:
    """The session and the connections that the dependencies of one request got."""

    __slots__ = (
        "_engine",
        "_follower",
        "_handed_over",
        "_installation",
        "_reading",
        "_request",
        "_scope",
        "_session",
        "_tx",
    )

    def __init__(self, request: TransactionUser) -> None:
        self._request = request
        self._installation = request.installation
        self._engine = request.installation.engines.asynchronous()
        self._scope = request.scope
        self._tx = request.tx
        self._follower: followers.TransactionFollower | None = None
        self._reading: AsyncOpenTransaction | None = None
        self._session: RequestSession | None = None
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
            return self._get_follower().session()
        return cast("SessionTransaction", await self.business()).session

    def following(self) -> SteppingSession:
        """A session that only reads until it joins a transaction. It opens no connection before its first use."""
        return self._get_follower().session()

    async def connection(self) -> Any:  # noqa: ANN401  (the driver's own type)
        """The connection of the business transaction or of the phase; on other routes a read-only one."""
        enrolment = await self._enrolment()
        if enrolment is not None and enrolment.effects is not Effects.INLINE:
            if self._follows(enrolment):
                return await self._get_follower().connection()
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
                self._tx, _ = await threaded.opened_in_thread(self._installation)
            else:
                self._tx = await self._engine.open()
        return self._tx

    def joins(self, tx: AsyncOpenTransaction, enrolment: Enrolment) -> None:
        """Use `tx` as the handler's transaction from now on. The flow of the request ends it, not this object."""
        if self._session is not None or self._reading is not None:
            raise ConfigurationError(UNSEEN.format(operation=enrolment.operation))
        self._tx, self._handed_over = tx, True
        if self._follower is not None:
            self._follower.join(tx, afresh=False)

    async def before_claim(self, enrolment: Enrolment) -> None:
        """Release the read connections: the claim may need one. Raise if rows would not be committed with the key."""
        if enrolment.effects is Effects.PHASED and (self._session is not None or self._reading is not None):
            raise ConfigurationError(UNSEEN.format(operation=enrolment.operation))
        await self.rest()

    async def rest(self) -> None:
        """Release the read connections, because the request is about to wait for another connection."""
        if self._follower is not None:
            await self._follower.rest()
        if self._session is not None:
            await self._session.rest()

    def joins_phase(self, tx: AsyncOpenTransaction) -> followers.TransactionFollower:
        """Let the session and the connection use a phase's transaction, until the follower parts from it."""
        follower = self._get_follower()
        try:
            follower.join(tx, afresh=True)
        except BaseException:
            follower.part()
            raise
        return follower

    def check(self) -> None:
        """Raise if a PHASED handler has changed the session outside its phases: the changes would be lost."""
        if self._follower is not None:
            self._follower.check()

    @property
    def business_tx(self) -> AsyncOpenTransaction | None:
        """The business transaction, if a dependency has opened it already."""
        return self._tx

    async def release(self) -> None:
        """Release the sessions and connections of the dependencies, even if the request is cancelled meanwhile."""
        try:
            await self._release()
        except asyncio.CancelledError:
            await shielded(self._release())
            raise

    async def _release(self) -> None:
        if self._tx is not None and not self._handed_over:
            await self._tx.rollback()
        if self._reading is not None:
            await self._reading.rollback()
        if self._follower is not None:
            await self._follower.close()
        if self._session is not None:
            await self._session.close()

    def _follows(self, enrolment: Enrolment) -> bool:
        """Whether a dependency gets a `TransactionFollower`, whose transaction changes: at a phase, or at the claim.

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

    def _get_follower(self) -> followers.TransactionFollower:
        if self._follower is None:
            self._follower = followers.TransactionFollower(self._engine)
        return self._follower

    async def _enrolment(self) -> Enrolment | None:
        """The route's enrolment by this `Once`. Reads the body first, before the request holds a connection."""
        enrolment = enrolment_of(self._scope, self._installation.engines) or self._request.enrolment
        if enrolment is not None:
            await self._request.read_ahead(enrolment.policy)
        return enrolment


class TransactionUser(Protocol):
    """A request, with a key (`Exchange`) or without (`UnkeyedRequest`)."""

    installation: Installation
    scope: Scope
    transaction: RequestTransaction | None
    unkeyed_tx: AsyncOpenTransaction | None

    @property
    def tx(self) -> AsyncOpenTransaction | None:
        """The business transaction of the handler that is running, if it has one."""

    @property
    def enrolment(self) -> Enrolment | None:
        """The enrolment of the handler that the request was claimed for, if it was."""

    async def read_ahead(self, policy: Policy) -> None:
        """Read the whole body, so that the request holds no connection while a slow client sends it."""


def transaction_of(request: TransactionUser) -> RequestTransaction:
    """The `RequestTransaction` of a request; the first call creates it."""
    if request.transaction is None:
        request.transaction = RequestTransaction(request)
    return request.transaction


class RequestRuntime(AsyncRuntime):
    """Performs the flows of a request whose dependencies, or whose steps, use `once.session` or `once.connection`.

    While a phase runs, both use the phase's transaction. They join it before the application's code is called, refuse
    changes once it was flushed, and part from it when it ends.
    """

    def __init__(self, shared: AsyncRuntime, request: TransactionUser) -> None:
        super().__init__(shared.engine, shared.running_work, shared.open_blocking)
        self._request = request
        self._in_phase: followers.TransactionFollower | None = None

    async def perform(self, action: Action) -> Any:  # noqa: ANN401  (each action has its own result)
        """Perform one action, and let the session and the connection join, rest or part as it requires."""
        match action:
            case ReturnReaders():
                if self._request.transaction is not None:
                    await self._request.transaction.rest()
            case Call():
                if action.within is not None:
                    self._in_phase = transaction_of(self._request).joins_phase(action.within)
                return await self.call(action)
            case Flush():
                await flush(action.tx)
                if self._in_phase is not None:
                    self._in_phase.done()
            case Rollback():
                try:
                    await action.tx.rollback()
                finally:
                    self._part()
            case ReleaseConnections():
                if self._request.transaction is not None:
                    await self._request.transaction.release()
            case _:
                return await super().perform(action)
        return None

    async def commit(self, action: Commit) -> Keep | Drop:
        """Commit a transaction, then let the session and the connection part from it."""
        ended = await super().commit(action)
        self._part()
        return ended

    def _part(self) -> None:
        follower, self._in_phase = self._in_phase, None
        if follower is not None:
            follower.part()


NO_SESSIONS = (
    "once.session needs a SQLAlchemy engine: make it Once(create_async_engine(...)), or depend on once.connection"
)
NO_REQUEST = "once.session and once.connection are for requests of an application with once.install(app) of that Once"


class TransactionDependency:
    """The dependencies of one `Once`: they use its database, even if the request passed other installations."""

    def __init__(self, owner: object) -> None:
        load("frameworks.asgi.following")
        self._owner = owner

    async def session(self) -> Any:  # noqa: ANN401  (SQLAlchemy's AsyncSession, which we may not import)
        """The session of this request."""
        return await self._transaction().session()

    async def connection(self) -> Any:  # noqa: ANN401  (the driver's own type)
        """The connection of this request."""
        return await self._transaction().connection()

    def _transaction(self) -> RequestTransaction:
        request = request_of(self._owner)
        if request is None:
            raise RuntimeError(NO_REQUEST)
        return transaction_of(request)
