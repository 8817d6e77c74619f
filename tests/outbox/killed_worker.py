"""A worker in a process of its own, which writes down each delivery at once: somebody will kill it."""

from __future__ import annotations

import asyncio
import os
import sys

from oncekey.core.policy import Policy
from oncekey.core.topics import Message, Topics
from oncekey.databases.postgres.asyncpg import AsyncpgDriver
from oncekey.databases.postgres.store import PostgresStore
from oncekey.workers.relay import Relay
from oncekey.workers.service import Service


async def work(dsn: str, topic: str, path: str, rest: float) -> None:
    """Deliver until nothing is due; `rest` seconds after each message that keeps an order."""
    topics, book = Topics(), os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    @topics.topic(topic)
    async def notify(message: Message) -> None:
        os.write(book, f"{message.order_by} {message.payload}\n".encode())
        if rest and message.payload % 7 == 0:
            await asyncio.sleep(rest)

    driver = AsyncpgDriver(dsn)
    relay = Relay(PostgresStore().outbox, driver.run, topics, Policy(), concurrency=8)
    await Service([relay]).once()
    await driver.close()


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])))
