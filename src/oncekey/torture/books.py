"""What a run keeps in the store's own database, and what it reads there when everything is over."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from oncekey.core.errors import ConfigurationError
from oncekey.demo.speaking import speaker_for
from oncekey.flow import Mode, Statement, Transaction
from oncekey.stores.mariadb import MariadbStore
from oncekey.stores.postgres import PostgresStore
from oncekey.stores.queries import load
from oncekey.stores.sqlite import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.demo.speaking import Speaker
    from oncekey.engine.shell import AsyncEngine
    from oncekey.flow import Rows, Steps, Value

_CLEARED: Final = ("clear_parcels", "clear_dead_letters", "clear_records")


def now() -> int:
    """Microseconds of this machine's clock: the one line on which everything that happens is put."""
    return time.time_ns() // 1000


class Books:
    """Rows are written through the connection that a handler is handed, and read by themselves."""

    def __init__(self, engine: Callable[[], AsyncEngine]) -> None:
        self._engine = engine
        self._statements: dict[str, str] | None = None
        self._speaker: Speaker | None = None

    async def open(self) -> None:
        """Make the tables and the log anew; what an earlier run left behind goes."""
        await self._run(Mode.ATOMIC, {}, *self._named("drop_"), *self._named("create_"))

    async def close(self, scope: str) -> None:
        """Leave the store as it was: no table, no trigger and no record of ours."""
        await self._run(Mode.ATOMIC, {"scope": scope}, *self._named("drop_"), *_CLEARED)

    async def add_row(self, connection: Any, route: str, key: str, wanted: str) -> str:  # noqa: ANN401
        """Write a business row as part of the transaction that `connection` has open."""
        self._speaker = self._speaker or speaker_for(self._engine().driver)
        made = uuid4().hex
        params: dict[str, Value] = {"id": made, "route": route, "key": key, "wanted": wanted, "at": now()}
        await self._speaker.say(connection, self._sql["add_row"], params)
        return made

    async def add_delivery(self, key: str, downstream_key: str) -> None:
        """Write down that a message arrived."""
        await self._run(Mode.ATOMIC, {"key": key, "downstream_key": downstream_key}, "add_delivery")

    async def read(self, statement: str, **params: Value) -> Rows:
        """The rows that a statement finds."""
        return await self._run(Mode.READ, params, statement)

    async def _run(self, mode: Mode, params: dict[str, Value], *names: str) -> Rows:
        """The rows of the last statement; each is given those parameters that it names."""
        # Made here: a driver may run the body in a thread, where there is no event loop to ask for the engine of.
        statements = [self._statement(name, params) for name in names]

        def body() -> Steps[Rows]:
            rows: Rows = ()
            for statement in statements:
                rows = yield statement
            return rows

        return await self._engine().driver.run(Transaction(f"torture.{names[-1]}", mode, body))

    def _statement(self, name: str, params: dict[str, Value]) -> Statement:
        sql = self._sql[name]
        return Statement(f"torture.{name}", sql, {word: value for word, value in params.items() if f":{word}" in sql})

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
        case MariadbStore():
            return "sql/mariadb.sql"
        case _:
            raise ConfigurationError(
                "torture needs SQLite, PostgreSQL or MariaDB: what is only in memory cannot survive"
            )
