"""Operations without a server, for unit tests: `await create_order(order, op=operation(connection=tx))`."""

from __future__ import annotations

from typing import Final

from oncekey.frameworks.asgi.operation import Conn, Operation, SyncOperation

KEY: Final = "test-key-0000000001"
SCOPE: Final = "test"
SEED: Final = bytes(32)
"""With the same seed `op.downstream_key` gives the same keys in every test; give another one for others."""


def operation(
    *,
    key: str | None = KEY,
    scope: str = SCOPE,
    attempt: int = 1,
    connection: Conn | None = None,
    seed: bytes = SEED,
) -> Operation[Conn]:
    """What an `async def` handler is handed. Nothing is claimed and nothing is stored.

    `connection` is whatever the handler writes through; whether its rows are kept is the test's business.
    """
    return Operation(key=key, scope=scope, attempt=attempt, connection=connection, seed=seed)


def sync_operation(
    *,
    key: str | None = KEY,
    scope: str = SCOPE,
    attempt: int = 1,
    connection: Conn | None = None,
    seed: bytes = SEED,
) -> SyncOperation[Conn]:
    """The same for a `def` handler."""
    return SyncOperation(key=key, scope=scope, attempt=attempt, connection=connection, seed=seed)
