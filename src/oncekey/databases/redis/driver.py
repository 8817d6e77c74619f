"""The connections to Redis or Valkey, blocking and asyncio; `talk` has the commands.

A script runs alone on its server, so comparing and writing are one step. An acknowledged write is as durable as the
server is configured (`appendfsync always`), and a failover to a replica that had not received it loses it: the next
retry then executes again. So use this store for requests whose second execution does little harm.

A connection is closed after an error or a cancellation: a late reply would be taken for the reply to the next command.
Nothing is retried here, and the client library is configured not to retry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import redis
import redis.asyncio
import redis.asyncio.retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from oncekey.core.errors import CommitAmbiguousError, StoreUnavailableError
from oncekey.databases.cells import AsyncCellDriver, AsyncTalkingCells, CellDriver, TalkingCells
from oncekey.databases.redis.address import RedisAddress, parse
from oncekey.databases.redis.nodes import Node, Say
from oncekey.databases.redis.talk import RedisTalks

if TYPE_CHECKING:
    from types import ModuleType

PATIENCE: Final = 5.0
"""Timeout in seconds for a reply, in addition to the wait for replicas."""
UNREACHED: Final = "Redis cannot be reached: {}"
UNANSWERED: Final = "Redis did not reply: {}"


class RedisCells(TalkingCells[Say]):
    """The verbs for blocking code."""

    def __init__(self, url: str) -> None:
        address = parse(url)
        super().__init__(RedisTalks(address))
        self._pools = _Pools(address, redis, Retry(NoBackoff(), 0))

    def send(self, request: Say) -> list[Any]:
        """Send the commands, and read the reply to each; error replies are returned too."""
        pool = self._pools.to(request.node)
        try:
            connection = pool.get_connection()
        except (RedisError, OSError) as error:
            raise StoreUnavailableError(UNREACHED.format(type(error).__name__)) from error
        replies: list[Any] = []
        try:
            connection.send_packed_command(connection.pack_commands(request.commands))
            while len(replies) < len(request.commands):
                try:
                    replies.append(connection.read_response())
                except ResponseError as refusal:
                    replies.append(refusal)
        except (RedisError, OSError) as error:
            raise _silence(request, error) from error
        finally:
            if len(replies) < len(request.commands):
                connection.disconnect()
            pool.release(connection)
        return replies

    def close(self) -> None:
        for pool in self._pools.made.values():
            pool.disconnect()


class AsyncRedisCells(AsyncTalkingCells[Say]):
    """The verbs for asyncio."""

    def __init__(self, url: str) -> None:
        address = parse(url)
        super().__init__(RedisTalks(address))
        self._pools = _Pools(address, redis.asyncio, redis.asyncio.retry.Retry(NoBackoff(), 0))

    async def send(self, request: Say) -> list[Any]:
        """Send the commands, and read the reply to each; error replies are returned too."""
        pool = self._pools.to(request.node)
        try:
            connection = await pool.get_connection()
        except (RedisError, OSError) as error:
            raise StoreUnavailableError(UNREACHED.format(type(error).__name__)) from error
        replies: list[Any] = []
        try:
            await connection.send_packed_command(connection.pack_commands(request.commands))
            while len(replies) < len(request.commands):
                try:
                    replies.append(await connection.read_response())
                except ResponseError as refusal:
                    replies.append(refusal)
        except (RedisError, OSError) as error:
            raise _silence(request, error) from error
        finally:
            if len(replies) < len(request.commands):
                await connection.disconnect(nowait=True)
            await pool.release(connection)
        return replies

    async def close(self) -> None:
        for pool in self._pools.made.values():
            await pool.disconnect()


class RedisDriver(CellDriver):
    """The driver of a store in Redis, for blocking code."""

    def __init__(self, url: str) -> None:
        super().__init__(RedisCells(url))


class AsyncRedisDriver(AsyncCellDriver):
    """The driver of a store in Redis, for asyncio."""

    def __init__(self, url: str) -> None:
        super().__init__(AsyncRedisCells(url))


class _Pools:
    """A pool of connections to each node, with one half of the client library: `redis` or `redis.asyncio`."""

    def __init__(self, address: RedisAddress, library: ModuleType, retry: object) -> None:
        self.made: dict[Node, Any] = {}
        self._address = address
        self._library = library
        self._retry = retry

    def to(self, node: Node) -> Any:  # noqa: ANN401  (untyped in the client library)
        """The pool of a node. Sentinels get no password: the URL's password is for the servers."""
        if node not in self.made:
            address = self._address
            ours = node not in address.hosts or not address.service
            self.made[node] = self._library.BlockingConnectionPool(
                connection_class=self._library.SSLConnection if address.tls else self._library.Connection,
                max_connections=address.pool_size,
                timeout=PATIENCE,
                retry=self._retry,
                host=node[0],
                port=node[1],
                db=address.database if ours else 0,
                username=address.username if ours else None,
                password=address.password if ours else None,
                socket_timeout=PATIENCE + (address.wait_ms / 1000 if address.wait else 0),
                socket_connect_timeout=PATIENCE,
                protocol=2,
                **dict(address.files),
            )
        return self.made[node]


def _silence(request: Say, error: Exception) -> Exception:
    """The meaning of a missing reply: the write may or may not have happened."""
    kind = CommitAmbiguousError if request.writes else StoreUnavailableError
    return kind(UNANSWERED.format(type(error).__name__))
