"""Where a crash happens: a real database with oncekey's tables, the business's, and a diary that triggers keep."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from harness.databases import DatabaseServer
from harness.patience import PATIENCE
from oncekey import wire
from oncekey.core.flow import Mode, Statement, Transaction
from oncekey.databases.address import Kind
from oncekey.stores.statements import load

if TYPE_CHECKING:
    from oncekey.core.flow import Body, Rows
    from oncekey.core.model import Instant
    from oncekey.engine.shell import AsyncEngine, Engine


E = TypeVar("E", "AsyncEngine", "Engine")

_MAKING: Final = ("make_", "on_")
_LOOKING: Final = ("effects", "diary", "committed", "waiting", "dead", "records")
_LOSING: Final = ("lose_record", "lose_effects", "lose_parcels", "lose_diary", "lose_put")


def _patient(engine: E) -> E:
    """Wait for a connection as long as a test waits: a busy machine is no fault that was injected."""
    pool: Any = getattr(engine.driver, "_pool", None)
    if hasattr(pool, "_timeout"):
        pool._timeout = PATIENCE
    return engine


@dataclass(frozen=True)
class Place:
    """A database by its URL. It is read through the drivers, so that both kinds are read alike."""

    url: str

    @cached_property
    def kind(self) -> Kind:
        """Which store it is."""
        return wire.understand(self.url).kind

    @cached_property
    def sql(self) -> dict[str, str]:
        """What is said to it."""
        return load("proof.crash", f"{self.kind}.sql")

    def prepare(self) -> None:
        """Make all tables, and the triggers that keep the diary."""
        self._reader.migrate()
        making = [name for name in self.sql if name.startswith(_MAKING)]
        self._say(*(Statement(name, self.sql[name]) for name in making))

    @cached_property
    def _reader(self) -> Engine:
        """Kept open: a run asks twice, and there are many runs."""
        return _patient(wire.connect(self.url.replace("+asyncpg", "", 1)))

    def close(self) -> None:
        """Give the connections back."""
        self._reader.close()

    def engine(self, clock: Callable[[], Instant] | None) -> AsyncEngine:
        """A process's own way to it."""
        return _patient(wire.aconnect(self.url, clock=clock))

    def blocking(self, clock: Callable[[], Instant] | None) -> Engine:
        """A process's own way to it, in threads."""
        return _patient(wire.connect(self.url.replace("+asyncpg", "", 1), clock=clock))

    async def insert(self, connection: Any, kind: str, key: str, amount: int, operation: str | None) -> None:
        """Write a business row as a handler does, through whatever connection it was given."""
        values = (kind, key, amount, operation)
        if self._psycopg:
            await connection.execute(self.sql["insert_effect_psycopg"], values)
        elif self.kind is Kind.SQLITE:
            await connection.execute(self.sql["insert_effect"], values)
        else:
            await connection.execute(self.sql["insert_effect"], *values)

    def insert_now(self, connection: Any, kind: str, key: str, amount: int, operation: str | None) -> None:
        """`insert` for a handler in a thread."""
        name = "insert_effect" if self.kind is Kind.SQLITE else "insert_effect_psycopg"
        connection.execute(self.sql[name], (kind, key, amount, operation))

    def look(self, key: str) -> dict[str, Rows]:
        """All that is left of one key, by name."""
        return self._say(*(Statement(name, self.sql[name], {"key": key}) for name in _LOOKING))

    def has_parcel(self, key: str) -> bool:
        """Whether the call of a deferred request was ever committed. It only reads: somebody may hold the writer."""
        statement = Statement("committed", self.sql["committed"], {"key": key})

        def body() -> Body[bool]:
            return any(row["kind"] == "defer" for row in (yield statement))

        return self._reader.driver.run(Transaction("parcel", Mode.READ, body))

    def lose(self, key: str) -> None:
        """A backup from before the request is restored: the database knows nothing of it."""
        self._say(*(Statement(name, self.sql[name], {"key": key}) for name in _LOSING))

    @property
    def _psycopg(self) -> bool:
        return wire.understand(self.url).package == "psycopg"

    def _say(self, *statements: Statement) -> dict[str, Rows]:
        def body() -> Body[dict[str, Rows]]:
            said: dict[str, Rows] = {}
            for statement in statements:
                said[statement.name] = yield statement
            return said

        return self._reader.driver.run(Transaction("crash", Mode.ATOMIC, body))


def keys() -> Iterator[str]:
    """Keys, one for each run, that are the same every time."""
    number = 0
    while True:
        number += 1
        yield f"crash-proof-key-{number:06d}"


T = TypeVar("T")


@contextmanager
def a_place(kind: Kind, folder: Path, server: Callable[[], DatabaseServer], name: str) -> Iterator[Place]:
    """An empty database of that kind, prepared for the proof."""
    if kind is Kind.SQLITE:
        url = f"sqlite:///{folder / name}.db"
    else:
        url = server().create_database(name).replace("postgresql://", "postgresql+asyncpg://", 1)
    with closing(Place(url)) as place:
        place.prepare()
        yield place
    if kind is Kind.POSTGRES:
        server().drop_database(name)


def run(work: Awaitable[T]) -> T:
    """Run it in an event loop of its own."""

    async def awaited() -> T:
        return await work

    return asyncio.run(awaited())
