"""DynamoDB: cells in one table, through boto3 for threads and aiobotocore for asyncio.

A handler with effects=LOCAL, or a phase, stages its own items (`op.connection.put(...)`); they are written with the
record in one `TransactWriteItems`, or not at all. The transaction is only that list: nothing is sent before the handler
returns, nothing is locked, and a process that dies has written nothing.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from oncekey.cells import Diagnostics, Look, Make, Page, Swap, Verb
from oncekey.core.errors import ConfigurationError, StoreUnavailableError, TransactionControlError
from oncekey.core.flow import Body, Rows, Statement, adrive, arun_body, drive, run_body
from oncekey.databases.cells import AsyncCellDriver, AsyncTalkingCells, CellDriver, TalkingCells, asking
from oncekey.databases.dynamodb.talk import MOST_ITEMS, Dialogue, Failed, Refused, Reply, Request, understood

if TYPE_CHECKING:
    from oncekey.core.model import Instant

T = TypeVar("T")

POOL_SIZE: Final = 50
"""The maximum number of connections of a process. They are cheap, and each carries one request at a time."""
PAUSES: Final = (0.05, 0.2)
"""The maximum delay in seconds before a throttled request is sent again."""
ROUNDS: Final = 40
"""How many times a transaction is sent if its record changes meanwhile, for example by a heartbeat."""
TOO_MANY: Final = (
    f"DynamoDB writes at most {MOST_ITEMS} items in one transaction, and one of them is the key's: stage "
    f"{MOST_ITEMS - 1} at most"
)
OVER: Final = "the transaction is over: stage items while the handler or the phase runs"
OUR_TABLE: Final = "{table} is oncekey's own table: use another table for the application's items"
MOVED_ON: Final = "the record changed before the transaction was sent: nothing was written"

_making = threading.Lock()
"""A boto3 session creates one client at a time."""


def _forked() -> None:
    """Create a new lock after a fork: its holder is not in this process."""
    global _making  # noqa: PLW0603  (one for the process)
    _making = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


@cache
def _session() -> Any:  # noqa: ANN401  (boto3 has no types)
    """One session for the process: loading the service's description is slow."""
    import boto3  # noqa: PLC0415  (asyncio alone can do without)

    return boto3.session.Session()


@cache
def _asyncio_session() -> Any:  # noqa: ANN401  (aiobotocore has no types)
    from aiobotocore.session import get_session  # noqa: PLC0415  (threads alone can do without)

    return get_session()


@dataclass(frozen=True, slots=True)
class Table:
    """The address of a table. The SDK finds the credentials; they are never in the URL."""

    name: str
    region: str | None = None
    endpoint: str | None = None
    pool_size: int = POOL_SIZE

    @property
    def client(self) -> dict[str, Any]:
        """The connection options of both SDKs' clients."""
        return {"region_name": self.region, "endpoint_url": self.endpoint}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of both SDKs: no retries, because a retry would hide that the first request was executed."""
        return {
            "retries": {"total_max_attempts": 1},
            "connect_timeout": 3,
            "read_timeout": 10,
            "max_pool_connections": self.pool_size,
        }


class DynamoCells(TalkingCells[Request]):
    """The verbs, blocking. One client, created on first use, serves all threads."""

    def __init__(self, table: Table) -> None:
        self._dialogue = Dialogue(table.name)
        super().__init__(self._dialogue)
        self._table = table
        self._client: Any = None

    def transact(self, swaps: Sequence[Swap], items: Sequence[Mapping[str, Any]]) -> bool:
        """Write records and items together."""
        return drive(self._dialogue.transact(swaps, items), self.send)

    def make(self) -> bool:
        """Create the table."""
        return drive(self._dialogue.make(), self.send)

    def send(self, request: Request) -> Reply | Refused:
        """Send a request; retry it twice if that is safe: it reads, or the service reports that nothing was done."""
        time.sleep(request.pause)
        for pause in PAUSES:
            described = self._sent(request)
            if not isinstance(described, Failed) or not described.again:
                return _reply(described)
            time.sleep(random.uniform(0, pause))  # noqa: S311  (so that a crowd does not come back as one)
        return _reply(self._sent(request))

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _sent(self, request: Request) -> Reply | Refused | Failed:
        try:
            client = self._client or self._connected()
            return cast("Reply", getattr(client, request.operation)(**request.parameters))
        except (BotoCoreError, ClientError) as error:
            return understood(error, request)

    def _connected(self) -> Any:  # noqa: ANN401  (boto3 has no types)
        with _making:
            if self._client is None:
                config = Config(**self._table.settings)
                self._client = _session().client("dynamodb", config=config, **self._table.client)
            return self._client


class AsyncDynamoCells(AsyncTalkingCells[Request]):
    """The verbs for asyncio. One client, created on first use, serves all tasks."""

    def __init__(self, table: Table) -> None:
        self._dialogue = Dialogue(table.name)
        super().__init__(self._dialogue)
        self._table = table
        self._made: Any = None
        self._client: Any = None
        self._making = asyncio.Lock()

    async def transact(self, swaps: Sequence[Swap], items: Sequence[Mapping[str, Any]]) -> bool:
        """Write records and items together."""
        return await adrive(self._dialogue.transact(swaps, items), self.send)

    async def make(self) -> bool:
        """Create the table."""
        return await adrive(self._dialogue.make(), self.send)

    async def send(self, request: Request) -> Reply | Refused:
        """Send a request, as `DynamoCells.send` does."""
        if request.pause:
            await asyncio.sleep(request.pause)
        for pause in PAUSES:
            described = await self._sent(request)
            if not isinstance(described, Failed) or not described.again:
                return _reply(described)
            await asyncio.sleep(random.uniform(0, pause))  # noqa: S311  (so that a crowd does not come back as one)
        return _reply(await self._sent(request))

    async def close(self) -> None:
        async with self._making:
            made, self._made, self._client = self._made, None, None
        if made is not None:
            await made.__aexit__(None, None, None)

    async def _sent(self, request: Request) -> Reply | Refused | Failed:
        try:
            client = self._client or await self._connected()
            return cast("Reply", await getattr(client, request.operation)(**request.parameters))
        except (BotoCoreError, ClientError) as error:
            return understood(error, request)

    async def _connected(self) -> Any:  # noqa: ANN401  (aiobotocore has no types)
        async with self._making:
            if self._client is None:
                from aiobotocore.config import AioConfig  # noqa: PLC0415  (threads alone can do without)

                config = AioConfig(**self._table.settings)
                made = _asyncio_session().create_client("dynamodb", config=config, **self._table.client)
                self._client, self._made = await made.__aenter__(), made
            return self._client


def _reply(described: Reply | Refused | Failed) -> Reply | Refused:
    """The service's reply, if there was one."""
    if isinstance(described, Failed):
        raise described.error
    return described


class Items:
    """The items that a handler stages: written with the key in one transaction, or not at all (`op.connection`).

    Each method takes the arguments of `TransactWriteItems` for such an item, with the types of the low-level interface:
    `put(TableName="orders", Item={"id": {"S": "7"}}, ConditionExpression="attribute_not_exists(id)")`. To read, use
    your own client, and confirm the read with a condition: nothing is locked.
    """

    __slots__ = ("_actions", "_over", "_table")

    def __init__(self, table: str) -> None:
        self._table = table
        self._actions: list[Mapping[str, Any]] = []
        self._over = False

    def put(self, **parameters: Any) -> None:  # noqa: ANN401  (what DynamoDB takes)
        """Write a whole item."""
        self._stage("Put", parameters)

    def update(self, **parameters: Any) -> None:  # noqa: ANN401
        """Change attributes of an item."""
        self._stage("Update", parameters)

    def delete(self, **parameters: Any) -> None:  # noqa: ANN401
        """Remove an item."""
        self._stage("Delete", parameters)

    def check(self, **parameters: Any) -> None:  # noqa: ANN401
        """Write nothing, but require an item to meet the condition."""
        self._stage("ConditionCheck", parameters)

    def _stage(self, kind: str, parameters: dict[str, Any]) -> None:
        if self._over:
            raise TransactionControlError(OVER)
        if len(self._actions) == MOST_ITEMS - 1:
            raise ConfigurationError(TOO_MANY)
        if str(parameters.get("TableName", "")).rpartition("/")[2] == self._table:
            raise ConfigurationError(OUR_TABLE.format(table=self._table))
        self._actions.append({kind: parameters})


@dataclass(frozen=True, slots=True)
class _Transact:
    """Write the gathered items; False if a record has changed since it was read."""

    swaps: tuple[Swap, ...]
    items: tuple[Mapping[str, Any], ...]


_Asked: TypeAlias = "Verb | _Transact"


class _Gathered:
    """The writes of an open transaction: pure, for both kinds of drivers.

    Its reads see its own writes. A statement is kept with its writes: if the record changes before the transaction is
    sent, for example by a heartbeat, the statement runs again on the new record.
    """

    def __init__(self, table: str) -> None:
        self.items = Items(table)
        self._swaps: dict[tuple[str, str], Swap] = {}
        self._statements: list[Statement] = []
        self._now: Instant = 0

    def saying(self, statement: Statement) -> Generator[_Asked, Any, Rows]:
        """Run a statement: its reads see the gathered writes, and its swaps are gathered."""
        verbs = cast("Generator[Verb, Any, Rows]", asking(statement))
        answer: Any = None
        writes = False
        try:
            verb = next(verbs)
            while True:
                match verb:
                    case Look(scope, key) if (scope, key) in self._swaps:
                        answer = self._swaps[scope, key].cell, self._now
                    case Look():
                        answer = yield verb
                        self._now = answer[1]
                    case Swap():
                        self._gather(verb)
                        answer = writes = True
                    case _:
                        answer = yield verb
                verb = verbs.send(answer)
        except StopIteration as stop:
            if writes:
                self._statements.append(statement)
            return cast("Rows", stop.value)

    def committing(self) -> Generator[_Asked, Any, None]:
        """Send all writes. They are sent again only if the service reports that nothing was written."""
        for _ in range(ROUNDS):
            swaps, items = tuple(self._swaps.values()), tuple(self.items._actions)  # noqa: SLF001
            self.over()
            if not swaps and not items:
                return
            if (yield _Transact(swaps, items) if items or len(swaps) > 1 else swaps[0]):
                return
            again, self._statements = self._statements, []
            self._swaps.clear()
            for statement in again:
                if not (yield from self.saying(statement)):
                    raise StoreUnavailableError(MOVED_ON)
        raise StoreUnavailableError(MOVED_ON)

    def over(self) -> None:
        """Reject further items."""
        self.items._over = True  # noqa: SLF001

    def _gather(self, swap: Swap) -> None:
        before = self._swaps.get((swap.scope, swap.key))
        seen = swap.seen if before is None else before.seen
        self._swaps[swap.scope, swap.key] = Swap(swap.scope, swap.key, seen, swap.cell, swap.keep_until)


class DynamoTransaction:
    """A business transaction for blocking code: a list of items that is sent at its end."""

    def __init__(self, driver: DynamoDriver) -> None:
        self._driver = driver
        self._gathered = _Gathered(driver.table)

    @property
    def connection(self) -> Items:
        return self._gathered.items

    def run(self, body: Body[T]) -> T:
        return run_body(body, lambda statement: self._carried(self._gathered.saying(statement)))

    def commit(self) -> None:
        self._carried(self._gathered.committing())

    def rollback(self) -> None:
        self._gathered.over()

    def _carried(self, asked: Generator[_Asked, Any, T]) -> T:
        return run_body(cast("Body[T]", asked), cast("Any", self._driver.answer))


class AsyncDynamoTransaction:
    """A business transaction for asyncio: a list of items that is sent at its end."""

    def __init__(self, driver: AsyncDynamoDriver) -> None:
        self._driver = driver
        self._gathered = _Gathered(driver.table)

    @property
    def connection(self) -> Items:
        return self._gathered.items

    async def run(self, body: Body[T]) -> T:
        return await arun_body(body, lambda statement: self._carried(self._gathered.saying(statement)))

    async def commit(self) -> None:
        await self._carried(self._gathered.committing())

    async def rollback(self) -> None:
        self._gathered.over()

    async def _carried(self, asked: Generator[_Asked, Any, T]) -> T:
        return await arun_body(cast("Body[T]", asked), cast("Any", self._driver.answer))


class DynamoDriver(CellDriver):
    """Cells in DynamoDB, with transactions over the application's items, for blocking code."""

    def __init__(self, table: Table) -> None:
        self._dynamo = DynamoCells(table)
        super().__init__(self._dynamo)
        self.table = table.name

    def begin(self) -> DynamoTransaction:
        return DynamoTransaction(self)

    def answer(self, verb: _Asked) -> object:
        """Perform a verb."""
        match verb:
            case _Transact(swaps, items):
                return self._dynamo.transact(swaps, items)
            case Make():
                return self._dynamo.make()
            case Look() | Swap() | Page() | Diagnostics():
                return super().answer(verb)


class AsyncDynamoDriver(AsyncCellDriver):
    """Cells in DynamoDB, with transactions over the application's items, for asyncio."""

    def __init__(self, table: Table) -> None:
        self._dynamo = AsyncDynamoCells(table)
        super().__init__(self._dynamo)
        self.table = table.name

    async def begin(self) -> AsyncDynamoTransaction:
        return AsyncDynamoTransaction(self)

    async def answer(self, verb: _Asked) -> object:
        """Perform a verb."""
        match verb:
            case _Transact(swaps, items):
                return await self._dynamo.transact(swaps, items)
            case Make():
                return await self._dynamo.make()
            case Look() | Swap() | Page() | Diagnostics():
                return await super().answer(verb)
