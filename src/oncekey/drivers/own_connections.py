"""Connections that a LOCAL or OUTBOX handler opens itself: what it writes there does not commit with its key.

Nothing forbids such a connection, and a test that kills no process does not notice it. So the first one of each
operation is logged.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger("oncekey.local")
"""A logger of its own, so that an application that reads by other connections on purpose can turn it down."""

APART: Final = (
    "oncekey: %s opened a connection of its own while it ran: what it writes there is not committed with its key, so a "
    "retry after a crash writes it again; write through op.connection, or through the session of once.session"
)

_running: Final[ContextVar[tuple[object, str] | None]] = ContextVar("oncekey_local_handler", default=None)
"""The owner and the operation of the handler that is running here, if it has a transaction to write through."""
_logged: Final[WeakKeyDictionary[object, set[str]]] = WeakKeyDictionary()


@contextmanager
def running(owner: object, operation: str) -> Iterator[None]:
    """A handler that was given a transaction, and should use no other."""
    token = _running.set((owner, operation))
    try:
        yield
    finally:
        _running.reset(token)


def opened(*_: Any) -> None:  # noqa: ANN401  (a listener of any kind)
    """Log that the running handler opened a connection which is not ours, once for each operation."""
    handler = _running.get()
    if handler is None:
        return
    owner, operation = handler
    logged = _logged.setdefault(owner, set())
    if operation not in logged:
        logged.add(operation)
        log.warning(APART, operation)
