"""The sessions and connections that dependencies of a route get from `once.session` and `once.connection`.

A dependency runs before the claim, and the request gives back what it got when it ends. What a dependency gets:

* LOCAL: the business transaction, which the claim and the settlement join later. If the claim has to come first, a
  read-only transaction until then.
* PHASED: a read-only transaction, and inside of a phase the transaction of the phase.
* Everywhere else: an ordinary session, or a read-only transaction.

The last one follows the steps of the request (`TransactionFollower`): inside of a step it is the step's transaction,
and outside it reads through one of its own, which the request gives back before it waits for another connection.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from oncekey.core.errors import ConfigurationError, TransactionControlError
from oncekey.core.model import Effects
from oncekey.core.sqltext import ONLY_READS, refused_to_write
from oncekey.engine.actions import Call, Flush, ReleaseConnections, ReturnReaders, Rollback
from oncekey.engine.enrolment import SAFE
from oncekey.frameworks.asgi.installation import opened_in_thread
from oncekey.frameworks.asgi.nesting import enrolment_of, request_of
from oncekey.ports import AsyncSessions
from oncekey.runtimes.aio import AsyncRuntime, flush, shielded

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.core.policy import Policy
    from oncekey.engine.actions import Action, Commit, Drop, Keep
    from oncekey.engine.enrolment import Enrolment
    from oncekey.engine.shell import AsyncEngine
    from oncekey.frameworks.asgi import Scope
    from oncekey.frameworks.asgi.installation import Installation
    from oncekey.ports import AsyncOpenTransaction, RequestSession, SessionTransaction, SteppingSession


NOT_LOCAL = (
    "once.connection would lose what is written here: the route is not enrolled with effects=LOCAL or "
    "PHASED, so it is not committed; enrol it, or use a connection of the application's own"
)
BLOCKING = "{operation} is a plain `def`: make it `async def` to use once.session or once.connection"
UNSEEN = (
    "once.session could not see that {operation} is enrolled, so its rows would not commit with the key: this "
    "framework does not name the endpoint in the ASGI scope; write through op.connection, or through the connection "
    "that op.phase hands to its function"
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
        self._follower: TransactionFollower | None = None
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

    async def connection(self) -> Any:  # noqa: ANN401  (whatever the driver's users know)
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
                self._tx, _ = await opened_in_thread(self._installation)
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
        """Release the read connections, which the claim could wait for. Raise if rows would not commit with the key."""
        if enrolment.effects is Effects.PHASED and (self._session is not None or self._reading is not None):
            raise ConfigurationError(UNSEEN.format(operation=enrolment.operation))
        await self.rest()

    async def rest(self) -> None:
        """Release the read connections, because the request is about to wait for another connection."""
        if self._follower is not None:
            await self._follower.rest()
        if self._session is not None:
            await self._session.rest()

    def joins_phase(self, tx: AsyncOpenTransaction) -> TransactionFollower:
        """Let the session and the connection use a phase's transaction, until the loan parts from it."""
        follower = self._get_follower()
        try:
            follower.join(tx, afresh=True)
        except BaseException:
            follower.part()
            raise
        return follower

    def check(self) -> None:
        """Raise if a PHASED handler has changed something in the session outside of its phases: it would be lost."""
        if self._follower is not None:
            self._follower.check()

    @property
    def business_tx(self) -> AsyncOpenTransaction | None:
        """The business transaction, if a dependency has opened it already."""
        return self._tx

    async def release(self) -> None:
        """Roll back what is not committed, and give every connection back."""
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

    def _get_follower(self) -> TransactionFollower:
        if self._follower is None:
            self._follower = TransactionFollower(self._engine)
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

    @property
    def tx(self) -> AsyncOpenTransaction | None:
        """The business transaction of the handler that is running, if it has one."""

    @property
    def enrolment(self) -> Enrolment | None:
        """The enrolment of the handler that the request was claimed for, if it was."""

    async def read_ahead(self, policy: Policy) -> None:
        """Read the whole body, so that the request holds no connection while a slow client sends it."""


def transaction_of(request: TransactionUser) -> RequestTransaction:
    """The `RequestTransaction` of a request; the first call makes it."""
    if request.transaction is None:
        request.transaction = RequestTransaction(request)
    return request.transaction


async def release(request: TransactionUser) -> None:
    """Give back what the dependencies of a request got, also if the request is cancelled meanwhile."""
    if request.transaction is None:
        return
    try:
        await request.transaction.release()
    except asyncio.CancelledError:
        await shielded(request.transaction.release())
        raise


class RequestRuntime(AsyncRuntime):
    """Performs the flows of a request whose dependencies, or whose steps, use `once.session` or `once.connection`.

    While a phase runs, both use the phase's transaction. They join it before the application's code is called, refuse
    changes once it was flushed, and part from it when it is over.
    """

    def __init__(self, shared: AsyncRuntime, request: TransactionUser) -> None:
        super().__init__(shared.engine, shared.running_work, shared.open_blocking)
        self._request = request
        self._in_phase: TransactionFollower | None = None

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
                await release(self._request)
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


NO_REQUEST = "once.session and once.connection are for requests of an application with once.install(app) of that Once"


class TransactionDependency:
    """The dependencies of one `Once`: they use its database, also if the request passed other installations."""

    def __init__(self, owner: object) -> None:
        self._owner = owner

    async def session(self) -> Any:  # noqa: ANN401  (SQLAlchemy's AsyncSession, which we may not import)
        """The session of this request."""
        return await self._transaction().session()

    async def connection(self) -> Any:  # noqa: ANN401  (whatever the driver's users know)
        """The connection of this request."""
        return await self._transaction().connection()

    def _transaction(self) -> RequestTransaction:
        request = request_of(self._owner)
        if request is None:
            raise RuntimeError(NO_REQUEST)
        return transaction_of(request)


NO_SESSIONS: Final = (
    "once.session needs a SQLAlchemy engine: make it Once(create_async_engine(...)), or depend on once.connection"
)
ASK_AGAIN: Final = (
    "{name} of once.connection: no connection is held between two steps; begin with a statement that is awaited, or "
    "ask for it again by `await once.connection()`"
)
_ENDINGS: Final = frozenset({"commit", "executescript"})


class TransactionFollower:
    """A session and a connection that follow one request from transaction to transaction."""

    __slots__ = ("_connection", "_engine", "_kind", "_reading", "_session", "_within", "look")

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._within: AsyncOpenTransaction | None = None
        self._reading: AsyncOpenTransaction | None = None
        self._session: SteppingSession | None = None
        self._connection = FollowingConnection(self)
        self._kind: type = object
        self.look: type = FollowingConnection
        """The class that `isinstance` sees on the connection: that of the driver's own."""

    async def connection(self) -> FollowingConnection:
        """The connection. It opens a read-only transaction, unless it has joined one."""
        if self._within is None:
            await self._read()
        return self._connection

    def session(self) -> SteppingSession:
        """The session. It reads through a transaction of its own until it joins one."""
        if self._session is None:
            driver = self._engine.driver
            if not isinstance(driver, AsyncSessions):
                raise ConfigurationError(NO_SESSIONS)
            self._session = driver.stepping_session()
            if self._within is not None:
                self._session.join(cast("SessionTransaction", self._within), afresh=True)
        return self._session

    def join(self, tx: AsyncOpenTransaction, *, afresh: bool) -> None:
        """Use this transaction from now on. The caller has given the read-only one back before (`rest`)."""
        if self._session is not None:
            self._session.join(cast("SessionTransaction", tx), afresh=afresh)
        self._within = tx
        self._looks_like(tx.connection)

    def done(self) -> None:
        """The step was flushed: the session refuses further changes."""
        if self._session is not None:
            self._session.done()

    def part(self) -> None:
        """The transaction is over: session and connection only read from now on."""
        self._within = None
        if self._session is not None:
            self._session.part()

    def check(self) -> None:
        """Raise if the session holds changes from outside of any step, which would be lost."""
        if self._session is not None:
            self._session.check()

    async def rest(self) -> None:
        """Give the read connections back."""
        reading, self._reading = self._reading, None
        if reading is not None:
            await reading.rollback()
        if self._session is not None:
            await self._session.rest()

    async def close(self) -> None:
        """The request is over: give everything back."""
        await self.rest()
        if self._session is not None:
            await self._session.close()

    # Used by `FollowingConnection`.

    def current(self) -> Any:  # noqa: ANN401  (whatever the driver's users know)
        """The connection in use, if there is one."""
        tx = self._within or self._reading
        return None if tx is None else tx.connection

    def attribute(self, name: str) -> Any:  # noqa: ANN401  (whatever the driver has there)
        """A method or a value of the connection. A coroutine method may open the read-only transaction first."""
        if self._within is not None:
            return getattr(self._within.connection, name)
        if name in _ENDINGS:
            raise TransactionControlError(ONLY_READS)
        waits = inspect.iscoroutinefunction(getattr(self._kind, name, None))
        if self._reading is not None and not waits:
            return getattr(self._reading.connection, name)
        if not waits:
            raise TransactionControlError(ASK_AGAIN.format(name=name))
        return self._awaited(name)

    def _awaited(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            connection = (self._within or await self._read()).connection
            try:
                return await getattr(connection, name)(*args, **kwargs)
            except Exception as error:
                if self._within is None and refused_to_write(error):
                    await self.rest()
                    raise TransactionControlError(ONLY_READS) from error
                raise

        return call

    async def _read(self) -> AsyncOpenTransaction:
        if self._reading is None:
            self._reading = await self._engine.read()
            self._looks_like(self._reading.connection)
        return self._reading

    def _looks_like(self, connection: object) -> None:
        self._kind, self.look = type(connection), connection.__class__


class FollowingConnection:
    """What `once.connection` returns in a PHASED handler: the connection of the step, or else a read-only one."""

    __slots__ = ("_follower",)

    def __init__(self, follower: TransactionFollower) -> None:
        object.__setattr__(self, "_follower", follower)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  (whatever the driver has there)
        if name.startswith("__"):
            raise AttributeError(name)  # Python itself looks for these names; they are no part of a connection
        return self._follower.attribute(name)

    def __setattr__(self, name: str, value: object) -> None:
        connection = self._follower.current()
        if connection is None:
            raise TransactionControlError(ASK_AGAIN.format(name=name))
        setattr(connection, name, value)

    @property  # type: ignore[misc]  # isinstance() reads it, and nothing sets it
    def __class__(self) -> Any:  # noqa: ANN401  (so that isinstance() takes it for what it stands for)
        return self._follower.look

    def __repr__(self) -> str:
        return f"<lent {self._follower.current()!r}>"
