"""Shells: the flows bound to a store and a driver, under asyncio; `Engine`, for blocking code, has its own module."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from oncekey.core.errors import ConfigurationError
from oncekey.core.flow import adrive
from oncekey.core.lazy import exports
from oncekey.engine import migrating
from oncekey.engine.migrating import identity_of
from oncekey.ports.driver import AsyncFolds, AsyncReads, AsyncShares, AsyncWaits

if TYPE_CHECKING:
    from oncekey.core.model import RecordId, Snapshot
    from oncekey.engine.blocking_shell import Engine as Engine  # noqa: PLC0414  (exported, see `exports`)
    from oncekey.ports.store import AsyncDriver, AsyncOpenTransaction, Bounded, Store
else:
    __getattr__ = exports(Engine="engine.blocking_shell")

SOON = 0.2
"""Seconds a request waits for a connection before it looks for a stored response: quick handlers are done by then."""

UNSHARED = "effects={effects} needs a store that shares the application's transactions: `oncekey stores` lists them"
UNOPENED = (
    "this store shares no transaction with the application, so there is no op.phase, op.connection or once.session: "
    "in a PHASED handler, use op.call and op.value"
)


class AsyncEngine:
    """The flows for asyncio."""

    def __init__(self, store: Store, driver: AsyncDriver) -> None:
        self.store = store
        self.driver = driver
        self.identity: bytes | None = None
        """The identity of this installation's tables, once they have been checked."""
        self._shares = driver if isinstance(driver, AsyncShares) else None
        # Looked up on the class: a property would be evaluated, and engines are created where no event loop runs.
        self._bounded = cast("Bounded", driver) if hasattr(type(driver), "is_full") else None
        self._reads = driver if isinstance(driver, AsyncReads) else None
        self._waits = driver if isinstance(driver, AsyncWaits) else None
        self.folds = driver if isinstance(driver, AsyncFolds) else None
        """The driver, if it can send a statement in the same message as BEGIN."""
        self.aside = asyncio.Lock()
        """Serialises the reads of requests that wait for a connection, so that claims still get one."""

    @property
    def is_full(self) -> bool:
        """Whether a new business transaction would have to wait for another one to end."""
        return self._bounded is not None and self._bounded.is_full

    async def wait_for_slot(self) -> bool:
        """Wait a moment for a free connection; return whether there is one. False if the driver cannot tell."""
        return self._waits is not None and await self._waits.wait_for_slot(SOON)

    async def find(self, record_id: RecordId) -> Snapshot:
        """Read a record."""
        return await adrive(self.store.find(record_id), self.driver.run)

    async def open(self) -> AsyncOpenTransaction:
        """Open a business transaction."""
        if self._shares is None:
            raise ConfigurationError(UNOPENED)
        return await self._shares.begin()

    @property
    def reads_apart(self) -> bool:
        """Whether a read-only transaction does not block the writer."""
        return self._reads is not None

    async def read(self) -> AsyncOpenTransaction:
        """Open a transaction for reading; it is rolled back at its end."""
        return await (self.open() if self._reads is None else self._reads.read())

    async def check(self) -> None:
        """Refuse a schema that this version cannot work with."""
        self.identity = identity_of(await adrive(migrating.check(self.store.schema), self.driver.run))

    async def migrate(self) -> None:
        """Create the tables; if they exist, run the migrations that older versions can work with."""
        await adrive(migrating.at_start(self.store.schema), self.driver.run)

    async def close(self) -> None:
        """Close the connections."""
        await self.driver.close()
