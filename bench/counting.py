"""The work of PostgreSQL for one request: messages that wait for a reply, transactions that write, bytes of WAL.

They are counted in a separate round, request by request on one connection through a relay, without timing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Self, cast

from bench.load import HOST
from bench.serving import Stores

# Both are exact immediately, while the server's statistics lag.
_SAID = """
    SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint,
           pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint
"""


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts per request. A message is everything that the client sends before the next reply: a round trip."""

    messages: float
    transactions: float
    wal_bytes: float


class Relay:
    """Relays bytes between servers and PostgreSQL, and counts how often the client began to send."""

    def __init__(self, target: int) -> None:
        self.turns = 0
        self.target = target
        self.links: set[asyncio.Transport] = set()
        self._listener: asyncio.Server | None = None

    @classmethod
    async def open(cls, target: int) -> Self:
        """Listen in front of a port."""
        relay = cls(target)
        loop = asyncio.get_running_loop()
        relay._listener = await loop.create_server(lambda: _Client(relay), HOST, 0)
        return relay

    @property
    def port(self) -> int:
        assert self._listener is not None
        return int(self._listener.sockets[0].getsockname()[1])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        self._listener.close()
        while self.links:
            for link in self.links:
                link.abort()
            await asyncio.sleep(0)


class _Link(asyncio.Protocol):
    """One end of a relayed connection."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name
        self.relay.links.add(self.transport)

    def connection_lost(self, _: Exception | None) -> None:
        assert self.transport is not None
        self.relay.links.discard(self.transport)
        other = self.other
        if other is not None and other.transport is not None:
            other.transport.close()

    @property
    def other(self) -> _Link | None:
        raise NotImplementedError


class _Client(_Link):
    """The client's end. Bytes that arrive before PostgreSQL is connected are buffered."""

    def __init__(self, relay: Relay) -> None:
        super().__init__(relay)
        self.turn = True
        self._early = b""
        self._server: _Server | None = None
        self._connecting: asyncio.Task[None] | None = None

    @property
    def other(self) -> _Link | None:
        return self._server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        _, self._server = await loop.create_connection(lambda: _Server(self.relay, self), HOST, self.relay.target)
        assert self._server.transport is not None
        self._server.transport.write(self._early)

    def data_received(self, data: bytes) -> None:
        self.relay.turns += self.turn
        self.turn = False
        if self._server is None or self._server.transport is None:
            self._early += data
        else:
            self._server.transport.write(data)


class _Server(_Link):
    """The server's end."""

    def __init__(self, relay: Relay, client: _Client) -> None:
        super().__init__(relay)
        self._client = client

    @property
    def other(self) -> _Link | None:
        return self._client

    def data_received(self, data: bytes) -> None:
        self._client.turn = True
        if self._client.transport is not None:
            self._client.transport.write(data)


@dataclass(frozen=True, slots=True)
class Tally:
    """All counters at one moment."""

    turns: int
    transactions: int
    wal: int

    @classmethod
    def now(cls, relay: Relay, stores: Stores) -> Tally:
        transactions, wal = stores.asked(_SAID)
        return cls(relay.turns, transactions, wal)

    def per(self, before: Tally, requests: int) -> Counts:
        """The increase per request."""
        return Counts(
            messages=(self.turns - before.turns) / requests,
            transactions=(self.transactions - before.transactions) / requests,
            wal_bytes=(self.wal - before.wal) / requests,
        )
