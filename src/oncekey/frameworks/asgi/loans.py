"""What is lent where the transaction changes under way: between the steps of a phased handler, and before a claim.

Whoever holds such a session or connection reads through a transaction of its own, which is given back before anybody
waits for another connection. Inside of a step it is the step's own transaction.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final, cast

from oncekey.core.errors import ConfigurationError, TransactionControlError
from oncekey.core.sqltext import ONLY_READS, refused_to_write
from oncekey.ports import AsyncSessions

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.engine.shell import AsyncEngine
    from oncekey.ports import AsyncOpenTransaction, SessionTransaction, SteppingSession

NO_SESSIONS: Final = (
    "once.session needs a SQLAlchemy engine: make it Once(create_async_engine(...)), or depend on once.connection"
)
ASK_AGAIN: Final = (
    "{name} of once.connection: no connection is held between two steps; begin with a statement that is awaited, or "
    "ask for it again by `await once.connection()`"
)
_ENDINGS: Final = frozenset({"commit", "executescript"})


class Loan:
    """A session and a connection that follow one request from transaction to transaction."""

    __slots__ = ("_connection", "_engine", "_kind", "_reading", "_session", "_within", "look")

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._within: AsyncOpenTransaction | None = None
        self._reading: AsyncOpenTransaction | None = None
        self._session: SteppingSession | None = None
        self._connection = LentConnection(self)
        self._kind: type = object
        self.look: type = LentConnection
        """What the connection passes for."""

    async def connection(self) -> LentConnection:
        """The connection: one to read through, until a transaction is joined."""
        if self._within is None:
            await self._read()
        return self._connection

    def session(self) -> SteppingSession:
        """The session: it reads by itself, until a transaction is joined."""
        if self._session is None:
            driver = self._engine.driver
            if not isinstance(driver, AsyncSessions):
                raise ConfigurationError(NO_SESSIONS)
            self._session = driver.stepping_session()
            if self._within is not None:
                self._session.join(cast("SessionTransaction", self._within), afresh=True)
        return self._session

    def join(self, tx: AsyncOpenTransaction, *, afresh: bool) -> None:
        """From now on everything goes through this transaction; what was read before has been given back."""
        if self._session is not None:
            self._session.join(cast("SessionTransaction", tx), afresh=afresh)
        self._within = tx
        self._looks_like(tx.connection)

    def done(self) -> None:
        """All of a step was written."""
        if self._session is not None:
            self._session.done()

    def part(self) -> None:
        """The transaction is over."""
        self._within = None
        if self._session is not None:
            self._session.part()

    def check(self) -> None:
        """Refuse to lose what was changed outside of any step."""
        if self._session is not None:
            self._session.check()

    async def rest(self) -> None:
        """Hold no connection."""
        reading, self._reading = self._reading, None
        if reading is not None:
            await reading.rollback()
        if self._session is not None:
            await self._session.rest()

    async def close(self) -> None:
        """The request is over."""
        await self.rest()
        if self._session is not None:
            await self._session.close()

    # What the connection is made of.

    def current(self) -> Any:  # noqa: ANN401  (whatever the driver's users know)
        """The connection in use, if there is one."""
        tx = self._within or self._reading
        return None if tx is None else tx.connection

    def attribute(self, name: str) -> Any:  # noqa: ANN401  (whatever the driver has there)
        """A method or a value of the connection; what is awaited may open the transaction to read through first."""
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


class LentConnection:
    """What `once.connection` is in a PHASED handler: the connection of the step, or one to read through."""

    __slots__ = ("_loan",)

    def __init__(self, loan: Loan) -> None:
        object.__setattr__(self, "_loan", loan)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  (whatever the driver has there)
        if name.startswith("__"):
            raise AttributeError(name)  # what Python itself looks for is no part of a connection
        return self._loan.attribute(name)

    def __setattr__(self, name: str, value: object) -> None:
        connection = self._loan.current()
        if connection is None:
            raise TransactionControlError(ASK_AGAIN.format(name=name))
        setattr(connection, name, value)

    @property  # type: ignore[misc]  # isinstance() reads it, nobody writes it
    def __class__(self) -> Any:  # noqa: ANN401  (so that isinstance() takes it for what it stands for)
        return self._loan.look

    def __repr__(self) -> str:
        return f"<lent {self._loan.current()!r}>"
