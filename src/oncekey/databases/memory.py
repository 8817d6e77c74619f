"""The driver of the memory store: a dictionary and a lock. For tests and a single process only."""

from __future__ import annotations

import threading
import time
from typing import Any, TypeVar

from oncekey.core.errors import ConfigurationError
from oncekey.core.flow import Rows, Statement, Transaction, run_body
from oncekey.databases.address import Address, Kind

T = TypeVar("T")


class MemoryDriver:
    """Runs each transaction under one lock: the GIL does not make a check and a write atomic."""

    def __init__(self) -> None:
        self.table: dict[Any, Any] = {}
        self._lock = threading.Lock()

    def run(self, transaction: Transaction[T]) -> T:
        with self._lock:
            return run_body(transaction.body(), self._execute)

    def close(self) -> None:
        """Nothing to close."""

    def _execute(self, statement: Statement) -> Rows:
        assert callable(statement.command)
        now = statement.params["now"]
        params = {**statement.params, "now": time.time_ns() // 1000 if now is None else now}
        return statement.command(self.table, **params)


class AsyncMemoryDriver:
    """The driver for asyncio: no call ever waits."""

    def __init__(self, driver: MemoryDriver | None = None) -> None:
        self._driver = driver or MemoryDriver()

    async def run(self, transaction: Transaction[T]) -> T:
        return self._driver.run(transaction)

    async def close(self) -> None:
        """Nothing to close."""


def read(_: str, rest: str, __: str | None) -> Address:
    """`memory:`, and nothing after it."""
    if rest.strip("/"):
        raise ConfigurationError("memory: has no name and no file: use memory:, without anything after it")
    return Address(Kind.MEMORY)
