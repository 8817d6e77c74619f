"""The provider's ledger: the charges that were made, each committed before the provider responds to its client.

Each fault has a name: it is one way in which a provider can fail, before or after it has made the charge.
"""

from __future__ import annotations

import asyncio
import math
import sqlite3
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Final, Self, TypeVar

from oncekey.core.errors import OncekeyError
from oncekey.databases.sqlite.files import wal_is_safe
from oncekey.stores.statements import load

LONGEST_DELAY: Final = 600.0


class FaultKind(StrEnum):
    """With `-after` the charge is in the ledger, but the client receives no response about it."""

    DELAY = "delay"
    HANG_AFTER = "hang-after"
    ERROR_BEFORE = "error-before"
    ERROR_AFTER = "error-after"
    DROP_BEFORE = "drop-before"
    DROP_AFTER = "drop-after"
    DECLINE = "decline"


NAMES: Final = tuple("delay:SECONDS" if kind is FaultKind.DELAY else kind.value for kind in FaultKind)
BEFORE: Final = frozenset({FaultKind.ERROR_BEFORE, FaultKind.DROP_BEFORE, FaultKind.DECLINE})
"""The faults that do not change the ledger."""


class UnknownFaultError(ValueError):
    """There is no such fault; the message lists all faults."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, as named in a header or in `POST /faults`."""

    kind: FaultKind
    seconds: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `drop-after` or `delay:2.5`."""
        name, _, rest = text.strip().partition(":")
        try:
            kind = FaultKind(name)
            seconds = float(rest) if kind is FaultKind.DELAY else 0.0
        except ValueError:
            kind, seconds = FaultKind.DELAY, math.nan
        if not 0 <= seconds <= LONGEST_DELAY or (rest and kind is not FaultKind.DELAY):
            shown = ", ".join(NAMES)
            raise UnknownFaultError(f"A fault is one of {shown} (0 to {LONGEST_DELAY:g} seconds).")
        return cls(kind, seconds)

    def __str__(self) -> str:
        return f"{self.kind.value}:{self.seconds:g}" if self.kind is FaultKind.DELAY else self.kind.value


class StandingFault:
    """The fault for requests that name none: for the next `times` requests, or until it is removed."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.times: int | None = None

    def set(self, fault: Fault | None, times: int | None = None) -> None:
        """Replace the fault, or remove it."""
        self.fault, self.times = fault, times

    def take(self) -> Fault | None:
        """The fault for one request; it counts towards `times`."""
        fault = self.fault
        if fault is not None and self.times is not None:
            self.times -= 1
            if self.times == 0:
                self.set(None)
        return fault

    def shown(self) -> dict[str, object]:
        """The standing fault for JSON, with the names of all faults."""
        return {"fault": None if self.fault is None else str(self.fault), "times": self.times, "faults": list(NAMES)}


T = TypeVar("T")

_SQL: Final = load(__package__, "sql/ledger.sql")
_BUSY_SECONDS: Final = 30.0


class LedgerUnusableError(OncekeyError):
    """The ledger's file cannot be used; the message has the reason."""


@dataclass(frozen=True, slots=True)
class ChargeOrder:
    """The charge that a client requests."""

    amount_cents: int
    currency: str
    customer_id: str


@dataclass(frozen=True, slots=True)
class Charge:
    """One row of the ledger."""

    id: str
    downstream_key: str | None
    amount_cents: int
    currency: str
    customer_id: str
    at: str

    @property
    def order(self) -> ChargeOrder:
        """The charge that was requested."""
        return ChargeOrder(self.amount_cents, self.currency, self.customer_id)

    def shown(self) -> dict[str, object]:
        """The charge for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Booking:
    """The result of a request: its charge, and whether the charge existed before."""

    charge: Charge
    repeated: bool


class Ledger:
    """A SQLite file that one thread uses, so that the event loop never waits for the disk."""

    def __init__(self, path: Path) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        try:
            self._connection = _opened(path)
        except sqlite3.Error as error:
            raise LedgerUnusableError(f"the ledger {path} cannot be used: {error}") from error

    async def book(self, order: ChargeOrder, downstream_key: str | None, *, deduplicate: bool) -> Booking:
        """Make a charge. With `deduplicate`, return the existing charge with the same key."""
        charge = Charge(
            id=f"ch_{uuid.uuid4().hex}",
            downstream_key=downstream_key,
            amount_cents=order.amount_cents,
            currency=order.currency,
            customer_id=order.customer_id,
            at=datetime.now(UTC).isoformat(),
        )
        return await self._in_thread(lambda: self._book(charge, once=deduplicate and downstream_key is not None))

    async def charges(self, downstream_key: str | None = None) -> list[Charge]:
        """All charges, or those of one key, oldest first."""
        statement, params = ("all", {}) if downstream_key is None else ("by_key", {"downstream_key": downstream_key})
        return await self._in_thread(lambda: self._read(statement, params))

    def close(self) -> None:
        """Wait for the last statement, then end the thread."""
        self._thread.submit(self._connection.close).result()
        self._thread.shutdown()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        # A booking that has begun is completed, even if the client has disconnected: a real provider does the same.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work))

    def _book(self, charge: Charge, *, once: bool) -> Booking:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            same = self._read("find_same", {"downstream_key": charge.downstream_key}) if once else []
            if not same:
                self._connection.execute(_SQL["insert_charge"], {**charge.shown(), "deduplicated": int(once)})
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")
        return Booking(same[0], repeated=True) if same else Booking(charge, repeated=False)

    def _read(self, statement: str, params: Mapping[str, str | None]) -> list[Charge]:
        return [Charge(*row) for row in self._connection.execute(_SQL[statement], params)]


def _opened(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    # A write-ahead log allows reads during a write. If this SQLite may lose commits that way, readers wait instead.
    mode = "WAL" if wal_is_safe(sqlite3.sqlite_version_info) else "TRUNCATE"
    connection.execute(f"PRAGMA journal_mode={mode}")
    connection.execute("PRAGMA synchronous=FULL")
    for statement in ("create_table", "create_once", "create_look_up"):
        connection.execute(_SQL[statement])
    return connection
