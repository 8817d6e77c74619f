"""What is said to a connection of SQLAlchemy: statements, a commit, and the way back to the pool."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Final, cast

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from oncekey.drivers.placeholders import escaped
from oncekey.drivers.sqlalchemy_errors import FAILURES, commit_failed

if TYPE_CHECKING:
    from sqlalchemy.sql.elements import TextClause

    from oncekey.flow import Rows, Statement


OWN: Final = "oncekey_own"
"""The option of statements that are oncekey's own, and not the handler's."""


async def execute(connection: AsyncConnection, statement: Statement) -> Rows:
    """Execute one statement."""
    assert isinstance(statement.command, str)
    result = await connection.execute(_spoken(statement.command), statement.params)
    return cast("Rows", result.mappings().all()) if result.returns_rows else ()


@lru_cache(maxsize=512)
def _spoken(command: str) -> TextClause:
    return text(escaped(command)).execution_options(**{OWN: True})


async def committed(connection: AsyncConnection, what: str) -> None:
    """Commit. SQLAlchemy keeps the answer to itself, so whoever calls has to know that there is something to commit."""
    try:
        await AsyncConnection.commit(connection)
    except FAILURES as error:
        raise commit_failed(error, what) from error


async def closed(connection: AsyncConnection, *, clean: Callable[[], Awaitable[bool]] | None = None) -> None:
    """Undo what is open, clean up if that is asked for, and give the connection back to its pool."""
    try:
        if connection.get_transaction() is not None:
            # Closing alone skips the roll-back where SQLAlchemy believes that a failed commit ended the transaction.
            await AsyncConnection.rollback(connection)
        if clean is not None and not await clean():
            await discarded(connection)
            return
        await AsyncConnection.close(connection)
    except FAILURES:
        # Nothing can be said on it any more, so there is nothing left to undo.
        await discarded(connection)


async def discarded(connection: AsyncConnection) -> None:
    """Close the connection instead of giving it back."""
    with suppress(*FAILURES):
        await AsyncConnection.invalidate(connection)
    await AsyncConnection.close(connection)
