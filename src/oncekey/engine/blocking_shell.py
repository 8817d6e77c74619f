"""The flows bound to a store and a driver, for blocking code."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from oncekey.core.errors import ConfigurationError
from oncekey.core.flow import drive
from oncekey.engine import migrating
from oncekey.engine.migrating import identity_of
from oncekey.engine.shell import UNOPENED
from oncekey.ports.driver import Shares

if TYPE_CHECKING:
    from oncekey.ports.store import Bounded, Driver, OpenTransaction, Store


class Engine:
    """The flows for blocking code."""

    def __init__(self, store: Store, driver: Driver) -> None:
        self.store = store
        self.driver = driver
        self.identity: bytes | None = None
        """The identity of this installation's tables, once they have been checked."""
        self._shares = driver if isinstance(driver, Shares) else None
        # Looked up on the class: a property would be evaluated, and engines are created where no event loop runs.
        self._bounded = cast("Bounded", driver) if hasattr(type(driver), "is_full") else None

    @property
    def is_full(self) -> bool:
        """Whether a new business transaction would have to wait for another one to end."""
        return self._bounded is not None and self._bounded.is_full

    def open(self) -> OpenTransaction:
        """Open a business transaction."""
        if self._shares is None:
            raise ConfigurationError(UNOPENED)
        return self._shares.begin()

    def check(self) -> None:
        """Refuse a schema that this version cannot work with."""
        self.identity = identity_of(drive(migrating.check(self.store.schema), self.driver.run))

    def migrate(self) -> None:
        """Create the tables; if they exist, run the migrations that older versions can work with."""
        drive(migrating.at_start(self.store.schema), self.driver.run)

    def close(self) -> None:
        """Close the connections."""
        self.driver.close()
