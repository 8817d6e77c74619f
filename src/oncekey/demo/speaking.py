"""How a statement is said through `op.connection`, which is each driver's own kind of connection.

An application has one driver and simply uses it. The demo runs on any, so it has one speaker for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from oncekey.core.errors import ConfigurationError, StoreUnavailableError
from oncekey.drivers.placeholders import numbered, pyformat

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oncekey.flow import Value


class Speaker(Protocol):
    """Says one statement; a database that does not take it is an outage here, because ours are all valid."""

    async def say(self, connection: Any, sql: str, params: Mapping[str, Value]) -> None:  # noqa: ANN401
        """Execute the statement, whose parameters are written `:name`."""


class SqliteSpeaker:
    """`:name`, as SQLite reads it."""

    async def say(self, connection: Any, sql: str, params: Mapping[str, Value]) -> None:  # noqa: ANN401
        """Execute the statement."""
        try:
            await connection.execute(sql, params)
        except connection.Error as error:
            raise StoreUnavailableError("SQLite did not take the row") from error


class PsycopgSpeaker:
    """`%(name)s`, as psycopg reads it."""

    async def say(self, connection: Any, sql: str, params: Mapping[str, Value]) -> None:  # noqa: ANN401
        """Execute the statement."""
        import psycopg  # noqa: PLC0415  (an optional package)

        try:
            await connection.execute(pyformat(sql), params)
        except psycopg.Error as error:
            raise StoreUnavailableError("PostgreSQL did not take the row") from error


class AsyncpgSpeaker:
    """`$1`, as asyncpg reads it."""

    async def say(self, connection: Any, sql: str, params: Mapping[str, Value]) -> None:  # noqa: ANN401
        """Execute the statement."""
        import asyncpg  # noqa: PLC0415  (an optional package)

        statement = numbered(sql)
        try:
            await connection.execute(statement.text, *statement.arguments(params))
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:
            raise StoreUnavailableError("PostgreSQL did not take the row") from error


class AiomysqlSpeaker:
    """`%(name)s`, as aiomysql reads it."""

    async def say(self, connection: Any, sql: str, params: Mapping[str, Value]) -> None:  # noqa: ANN401
        """Execute the statement."""
        import pymysql  # noqa: PLC0415  (an optional package)

        try:
            async with connection.cursor() as cursor:
                await cursor.execute(pyformat(sql), params)
        except (pymysql.MySQLError, OSError) as error:
            raise StoreUnavailableError("MariaDB did not take the row") from error


def speaker_for(driver: object) -> Speaker:
    """The speaker for a driver's connections."""
    match type(driver).__name__:  # by its name, because importing every driver would need every package
        case "AsyncSqliteDriver":
            return SqliteSpeaker()
        case "AsyncPsycopgDriver":
            return PsycopgSpeaker()
        case "AsyncpgDriver":
            return AsyncpgSpeaker()
        case "AiomysqlDriver":
            return AiomysqlSpeaker()
        case other:
            raise ConfigurationError(f"the demo has no words for {other}")
