"""Connections that a LOCAL or OUTBOX handler opens itself: what it writes there does not commit with its key.

Nothing forbids such a connection, and a test that kills no process does not notice it. So the first one of each
operation is logged.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Final, Protocol
from weakref import WeakKeyDictionary

log = logging.getLogger("oncekey.local")
"""A logger of its own, so that an application that reads by other connections on purpose can turn it down."""

APART: Final = (
    "oncekey: %s opened a connection of its own while it ran: what it writes there is not committed with its key, so a "
    "retry after a crash writes it again; write through op.connection, or through the session of once.session"
)


class Handled(Protocol):
    """A protected operation, as much of it as is needed here."""

    @property
    def operation(self) -> str:
        """Its name."""

    @property
    def owner(self) -> object:
        """The `Once` that protects it."""

    @property
    def transactional(self) -> bool:
        """Whether its handler gets the transaction that its key commits with."""


running: Final[ContextVar[Handled | None]] = ContextVar("oncekey_handler", default=None)
"""The operation whose handler is running here."""
_logged: Final[WeakKeyDictionary[object, set[str]]] = WeakKeyDictionary()


def opened() -> None:
    """Log that the running handler opened a connection which is not ours, once for each operation."""
    handler = running.get()
    if handler is None or not handler.transactional:
        return
    logged = _logged.setdefault(handler.owner, set())
    if handler.operation not in logged:
        logged.add(handler.operation)
        log.warning(APART, handler.operation)
