"""How long the store takes: reports each transaction of a driver with its name and its seconds.

Only a driver that is observed is changed, and only in `run`; the engine still sees everything else that it can do. The
begin and the commit of a LOCAL handler do not pass there; `Reserved.seconds` and `Settled.settling` have those times.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from oncekey.core.errors import StoreError
from oncekey.observe.events import Asked

if TYPE_CHECKING:
    from oncekey.flow import Transaction
    from oncekey.observe.events import Notify
    from oncekey.ports import AsyncDriver, Driver


def watch(driver: AsyncDriver, notify: Notify) -> None:
    """Report each transaction from now on."""
    run = driver.run

    async def timed(transaction: Transaction[Any]) -> Any:  # noqa: ANN401  (what the transaction returns)
        with _measured(transaction.name, notify):
            return await run(transaction)

    setattr(driver, "run", timed)  # noqa: B010  (a method of one object)


def watch_blocking(driver: Driver, notify: Notify) -> None:
    """The same for threads."""
    run = driver.run

    def timed(transaction: Transaction[Any]) -> Any:  # noqa: ANN401  (what the transaction returns)
        with _measured(transaction.name, notify):
            return run(transaction)

    setattr(driver, "run", timed)  # noqa: B010


@contextmanager
def _measured(name: str, notify: Notify) -> Iterator[None]:
    began, failed = time.perf_counter(), None
    try:
        yield
    except StoreError as error:
        failed = type(error).__name__
        raise
    finally:
        notify(Asked(name, time.perf_counter() - began, failed))
