"""A session and a connection that follow a request from transaction to transaction, for its dependencies.

Inside a step they use the step's transaction. Outside they read through a separate one, which the request releases
before it waits for another connection.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final, cast

from oncekey.core.errors import ConfigurationError, TransactionControlError
from oncekey.core.sqltext import ONLY_READS, refused_to_write
from oncekey.frameworks.asgi.transactions import NO_SESSIONS
from oncekey.ports.driver import AsyncSessions

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.engine.shell import AsyncEngine
    from oncekey.ports.store import AsyncOpenTransaction, SessionTransaction, SteppingSession

ASK_AGAIN: Final = (
    "{name} of once.connection: no connection is held between two steps; begin with a statement that is awaited, or "
    "get a connection first, with `await once.connection()`"
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
        """The class that `isinstance` sees on the connection: that of the driver's connection."""

    async def connection(self) -> FollowingConnection:
        """The connection. It opens a read-only transaction, unless it has joined one."""
        if self._within is None:
            await self._read()
        return self._connection

    def session(self) -> SteppingSession:
        """The session. It reads through a separate transaction until it joins one."""
        if self._session is None:
            driver = self._engine.driver
            if not isinstance(driver, AsyncSessions):
                raise ConfigurationError(NO_SESSIONS)
            self._session = driver.stepping_session()
            if self._within is not None:
                self._session.join(cast("SessionTransaction", self._within), afresh=True)
        return self._session

    def join(self, tx: AsyncOpenTransaction, *, afresh: bool) -> None:
        """Use this transaction from now on. The caller has released the read-only one before (`rest`)."""
        if self._session is not None:
            self._session.join(cast("SessionTransaction", tx), afresh=afresh)
        self._within = tx
        self._looks_like(tx.connection)

    def done(self) -> None:
        """Refuse further changes of the session: the step was flushed."""
        if self._session is not None:
            self._session.done()

    def part(self) -> None:
        """Only read from now on: the transaction has ended."""
        self._within = None
        if self._session is not None:
            self._session.part()

    def check(self) -> None:
        """Raise if the session has changes from outside any step, which would be lost."""
        if self._session is not None:
            self._session.check()

    async def rest(self) -> None:
        """Release the read connections."""
        reading, self._reading = self._reading, None
        if reading is not None:
            await reading.rollback()
        if self._session is not None:
            await self._session.rest()

    async def close(self) -> None:
        """Release everything at the end of the request."""
        await self.rest()
        if self._session is not None:
            await self._session.close()

    # Used by `FollowingConnection`.

    def current(self) -> Any:  # noqa: ANN401  (the driver's own type)
        """The connection in use, if there is one."""
        tx = self._within or self._reading
        return None if tx is None else tx.connection

    def attribute(self, name: str) -> Any:  # noqa: ANN401  (an attribute of the driver's)
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
    """The connection of `once.connection` that follows transactions: the step's connection, or else a read-only one."""

    __slots__ = ("_follower",)

    def __init__(self, follower: TransactionFollower) -> None:
        object.__setattr__(self, "_follower", follower)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  (an attribute of the driver's)
        if name.startswith("__"):
            raise AttributeError(name)  # Python itself looks for these names; they are not part of a connection
        return self._follower.attribute(name)

    def __setattr__(self, name: str, value: object) -> None:
        connection = self._follower.current()
        if connection is None:
            raise TransactionControlError(ASK_AGAIN.format(name=name))
        setattr(connection, name, value)

    @property  # type: ignore[misc]  # isinstance() reads it, and nothing sets it
    def __class__(self) -> Any:  # noqa: ANN401  (so that isinstance() sees the driver's class)
        return self._follower.look

    def __repr__(self) -> str:
        return f"<lent {self._follower.current()!r}>"
