"""The flows bound to a store and a driver, for blocking code."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from oncekey.core.errors import ConfigurationError
from oncekey.driver_ports import Shares
from oncekey.engine import migrating, request
from oncekey.engine.migrating import identity_of
from oncekey.engine.shell import UNOPENED
from oncekey.flow import drive

if TYPE_CHECKING:
    from oncekey.core.model import (
        Claim,
        Duration,
        Instant,
        Lease,
        Parcel,
        RecordId,
        Settled,
        Settlement,
        Snapshot,
        Verdict,
    )
    from oncekey.core.policy import Policy
    from oncekey.driver_ports import Crowds
    from oncekey.ports import Driver, OpenTransaction, Store


class Engine:
    """The flows, blocking."""

    def __init__(self, store: Store, driver: Driver) -> None:
        self.store = store
        self.driver = driver
        self.identity: bytes | None = None
        """The identity of this installation's tables, once they were checked."""
        self._shares = driver if isinstance(driver, Shares) else None
        # Looked up on the class: a property would be evaluated, and engines are made where no event loop runs.
        self._crowds = cast("Crowds", driver) if hasattr(type(driver), "crowded") else None

    @property
    def crowded(self) -> bool:
        """Whether a new business transaction would have to wait for another one to end."""
        return self._crowds is not None and self._crowds.crowded

    def begin(self, claim: Claim, policy: Policy) -> Verdict:
        """Ask for the right to execute."""
        return drive(request.begin(self.store, claim, policy), self.driver.run)

    def renew(self, lease: Lease, span: Duration) -> Instant | None:
        """The heartbeat: the lease's new end, or None when it is lost."""
        return drive(request.renew(self.store, lease, span), self.driver.run)

    def settle(self, lease: Lease, settlement: Settlement) -> Settled:
        """Write the outcome of the operation."""
        return drive(request.settle(self.store, lease, settlement), self.driver.run)

    def settle_within(
        self, tx: OpenTransaction, lease: Lease, settlement: Settlement, parcels: tuple[Parcel, ...] = ()
    ) -> Settled:
        """Write the outcome and the handler's parcels, as the last statements of the business transaction."""
        return tx.run(request.settling(self.store, lease, settlement, parcels))

    def settle_lost_commit(self, lease: Lease) -> Settled:
        """Find out whether a COMMIT that got no reply was executed."""
        return drive(request.settle_lost_commit(self.store, lease), self.driver.run)

    def find(self, record_id: RecordId) -> Snapshot:
        """Read a record."""
        return drive(self.store.find(record_id), self.driver.run)

    def open(self) -> OpenTransaction:
        """Open a business transaction."""
        if self._shares is None:
            raise ConfigurationError(UNOPENED)
        return self._shares.begin()

    def check(self) -> None:
        """Refuse a schema that this version cannot work with."""
        self.identity = identity_of(drive(migrating.check(self.store.schema), self.driver.run))

    def migrate(self) -> None:
        """Create the tables; on a store that has some, run the migrations that older versions can work with."""
        drive(migrating.at_start(self.store.schema), self.driver.run)

    def close(self) -> None:
        """Close the connections."""
        self.driver.close()
