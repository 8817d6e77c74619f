"""Cells in Redis or Valkey: connections, blocking and under asyncio. `redis_saying` has the commands.

A script runs alone on its server, so comparing and writing are one step. An acknowledged write is as durable as the
server is configured (`appendfsync always`), and a fail-over to a replica that had not received it loses it: the next
retry then executes again. So this is a store for requests of which a second execution does little harm.

A connection is closed after an error or a cancellation: a reply that is still on its way would be taken for the reply
to the next command. Nothing is repeated here, and the client library is configured to repeat nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import redis
import redis.asyncio
import redis.asyncio.retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from oncekey.core.errors import CommitAmbiguousError, StoreUnavailableError
from oncekey.drivers.cells import AsyncCellDriver, CellDriver
from oncekey.drivers.redis_address import RedisAddress, parse
from oncekey.drivers.redis_saying import Node, Roads, Say, Saying, looking, paging, swapping, vitals
from oncekey.flow import adrive, drive

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from oncekey.cells import Index, Line, Place, Seen

T = TypeVar("T")

PATIENCE: Final = 5.0
"""Seconds that a reply may take, besides the wait for replicas."""
UNREACHED: Final = "Redis cannot be reached: {}"
UNANSWERED: Final = "Redis did not answer: {}"


class RedisCells:
    """For blocking code."""

    def __init__(self, url: str) -> None:
        self._address = parse(url)
        self._roads = Roads(self._address)
        self._pools: dict[Node, Any] = {}

    def look(self, scope: str, key: str) -> tuple[Line | None, int]:
        """The line of this key, or None, and the server's clock."""
        return self._do(looking(self._roads, scope, key))

    def swap(self, scope: str, key: str, seen: Seen | None, line: Line | None, keep_until: int | None) -> bool:
        """Replace the line that was `seen` by `line`."""
        return self._do(swapping(self._roads, (scope, key), seen, line, keep_until))

    def page(self, index: Index, after: Place, limit: int) -> tuple[Sequence[Line], int]:
        """Lines of an index after a place, from all buckets."""
        return self._do(paging(self._roads, index, after, limit))

    def vitals(self) -> tuple[Mapping[str, Any], ...]:
        """What each primary reports about itself."""
        return self._do(vitals(self._roads))

    def close(self) -> None:
        """Close all connections."""
        for pool in self._pools.values():
            pool.disconnect()

    def _do(self, saying: Saying[T]) -> T:
        return drive(cast("Any", saying), cast("Any", self._say))  # type: ignore[no-any-return]

    def _say(self, say: Say) -> list[Any]:
        pool = self._pool(say.node)
        try:
            connection = pool.get_connection()
        except (RedisError, OSError) as error:
            raise StoreUnavailableError(UNREACHED.format(type(error).__name__)) from error
        whole = False
        try:
            connection.send_packed_command(connection.pack_commands(say.commands))
            replies = [_received(connection) for _ in say.commands]
            whole = True
        except (RedisError, OSError) as error:
            raise _silence(say, error) from error
        finally:
            if not whole:
                connection.disconnect()
            pool.release(connection)
        return replies

    def _pool(self, node: Node) -> Any:  # noqa: ANN401  (untyped in the client library)
        made = self._pools.get(node)
        if made is None:
            made = self._pools[node] = cast("Any", redis.BlockingConnectionPool)(
                max_connections=self._address.pool_size,
                timeout=PATIENCE,
                connection_class=redis.SSLConnection if self._address.tls else redis.Connection,
                retry=Retry(NoBackoff(), 0),
                **_settings(self._address, node),
            )
        return made


class AsyncRedisCells:
    """For asyncio."""

    def __init__(self, url: str) -> None:
        self._address = parse(url)
        self._roads = Roads(self._address)
        self._pools: dict[Node, Any] = {}

    async def look(self, scope: str, key: str) -> tuple[Line | None, int]:
        """The line of this key, or None, and the server's clock."""
        return await self._do(looking(self._roads, scope, key))

    async def swap(self, scope: str, key: str, seen: Seen | None, line: Line | None, keep_until: int | None) -> bool:
        """Replace the line that was `seen` by `line`."""
        return await self._do(swapping(self._roads, (scope, key), seen, line, keep_until))

    async def page(self, index: Index, after: Place, limit: int) -> tuple[Sequence[Line], int]:
        """Lines of an index after a place, from all buckets."""
        return await self._do(paging(self._roads, index, after, limit))

    async def vitals(self) -> tuple[Mapping[str, Any], ...]:
        """What each primary reports about itself."""
        return await self._do(vitals(self._roads))

    async def close(self) -> None:
        """Close all connections."""
        for pool in self._pools.values():
            await pool.disconnect()

    async def _do(self, saying: Saying[T]) -> T:
        return await adrive(cast("Any", saying), cast("Any", self._say))

    async def _say(self, say: Say) -> list[Any]:
        pool = self._pool(say.node)
        try:
            connection = await pool.get_connection()
        except (RedisError, OSError) as error:
            raise StoreUnavailableError(UNREACHED.format(type(error).__name__)) from error
        whole = False
        try:
            await connection.send_packed_command(connection.pack_commands(say.commands))
            replies = [await _areceived(connection) for _ in say.commands]
            whole = True
        except (RedisError, OSError) as error:
            raise _silence(say, error) from error
        finally:
            if not whole:
                await connection.disconnect(nowait=True)
            await pool.release(connection)
        return replies

    def _pool(self, node: Node) -> Any:  # noqa: ANN401
        made = self._pools.get(node)
        if made is None:
            tls = redis.asyncio.SSLConnection if self._address.tls else redis.asyncio.Connection
            made = self._pools[node] = redis.asyncio.BlockingConnectionPool(
                max_connections=self._address.pool_size,
                timeout=PATIENCE,
                connection_class=tls,
                retry=redis.asyncio.retry.Retry(NoBackoff(), 0),
                **_settings(self._address, node),
            )
        return made


class RedisDriver(CellDriver):
    """The driver of a store in Redis, for blocking code."""

    def __init__(self, url: str) -> None:
        super().__init__(RedisCells(url))


class AsyncRedisDriver(AsyncCellDriver):
    """The same for asyncio."""

    def __init__(self, url: str) -> None:
        super().__init__(AsyncRedisCells(url))


def _settings(address: RedisAddress, node: Node) -> dict[str, Any]:
    """The options of a connection. Sentinels get no password: it is that of the servers."""
    ours = node not in address.hosts or not address.service
    return {
        "host": node[0],
        "port": node[1],
        "db": address.database if ours else 0,
        "username": address.username if ours else None,
        "password": address.password if ours else None,
        "socket_timeout": PATIENCE + (address.wait_ms / 1000 if address.wait else 0),
        "socket_connect_timeout": PATIENCE,
        "protocol": 2,
        **dict(address.files),
    }


def _received(connection: redis.Connection) -> Any:  # noqa: ANN401  (a reply)
    """One reply; an error reply is returned, too."""
    try:
        return connection.read_response()
    except ResponseError as refusal:
        return refusal


async def _areceived(connection: Any) -> Any:  # noqa: ANN401
    try:
        return await connection.read_response()
    except ResponseError as refusal:
        return refusal


def _silence(say: Say, error: Exception) -> Exception:
    """The meaning of a missing reply: whether it was written is not known."""
    kind = CommitAmbiguousError if say.writes else StoreUnavailableError
    return kind(UNANSWERED.format(type(error).__name__))
