"""What the shops of other packages have in common: their callers, their orders, and how they end.

Each shop runs in the environment of its package, so nothing here imports the tests or oncekey. It takes `POST /orders`
with an item and a quantity, and `GET /orders` returns how many orders the caller has. The operation itself checks the
credentials, as a dependency, a view or a handler does. `X-Slow` makes it slow; `X-Fail` makes it raise an exception.
"""

from __future__ import annotations

import os
import threading
import uuid

CALLERS = {"Bearer alpha": "alpha", "Bearer beta": "beta"}
_ORDERS: list[str] = []


def total(caller: str) -> dict[str, int]:
    """Count the orders of the caller."""
    return {"total": _ORDERS.count(caller)}


def placed(caller: str) -> dict[str, str]:
    """Take an order, which is the effect that is counted."""
    _ORDERS.append(caller)
    return {"id": str(uuid.uuid4()), "status": "placed"}


def announce(port: int) -> None:
    """Print the port, and end with standard input, so that no server outlives its test."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    print(port, flush=True)
