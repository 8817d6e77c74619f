"""The shop's tables in the store's own database, through whichever driver it is reached by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oncekey.core.errors import ConfigurationError
from oncekey.demo.speaking import speaker_for
from oncekey.flow import Mode, Statement, Transaction
from oncekey.stores.postgres import PostgresStore
from oncekey.stores.queries import load
from oncekey.stores.sqlite import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from oncekey.demo.speaking import Speaker
    from oncekey.engine.shell import AsyncEngine
    from oncekey.flow import Rows, Steps, Value


class Tables:
    """Rows are written through the connection that a handler is handed, and read by themselves."""

    def __init__(self, engine: Callable[[], AsyncEngine]) -> None:
        self._engine = engine
        self._statements: dict[str, str] | None = None
        self._speaker: Speaker | None = None

    async def create(self) -> None:
        """Make what is missing."""
        first = [name for name in ("one_at_a_time",) if name in self._sql]
        await self._run(Mode.ATOMIC, *((name, {}) for name in [*first, *self._named("create_")]))

    async def say(self, connection: Any, statement: str, params: Mapping[str, Value]) -> None:  # noqa: ANN401
        """Write as part of the transaction that `connection` has open."""
        self._speaker = self._speaker or speaker_for(self._engine().driver)
        await self._speaker.say(connection, self._sql[statement], params)

    def statement(self, name: str, params: dict[str, Value]) -> Statement:
        """A statement by its name, for a transaction that somebody else runs."""
        return Statement(f"demo.{name}", self._sql[name], params)

    async def write(self, statement: str, params: dict[str, Value]) -> None:
        """Write in a transaction of its own."""
        await self._run(Mode.ATOMIC, (statement, params))

    async def read(self, statement: str, params: dict[str, Value] | None = None) -> Rows:
        """The rows that a statement finds; it raises when the store cannot be asked."""
        return await self._run(Mode.READ, (statement, params or {}))

    async def _run(self, mode: Mode, *statements: tuple[str, dict[str, Value]]) -> Rows:
        """The rows of the last statement."""
        sql = self._sql  # known here: a driver may run the body in a thread, where there is no event loop

        def body() -> Steps[Rows]:
            rows: Rows = ()
            for name, params in statements:
                rows = yield Statement(f"demo.{name}", sql[name], params)
            return rows

        return await self._engine().driver.run(Transaction(f"demo.{statements[-1][0]}", mode, body))

    def _named(self, prefix: str) -> list[str]:
        return [name for name in self._sql if name.startswith(prefix)]

    @property
    def _sql(self) -> dict[str, str]:
        if self._statements is None:
            self._statements = load(__package__, _dialect(self._engine()))
        return self._statements


def _dialect(engine: AsyncEngine) -> str:
    match engine.store:
        case SqliteStore():
            return "sql/sqlite.sql"
        case PostgresStore():
            return "sql/postgres.sql"
        case _:
            raise ConfigurationError("the demo needs SQLite or PostgreSQL")
