"""One process that reads from JetStream with the program of the page: `python jetstream_consumer.py URL mortal`.

It takes one message and says how it was handled. One that is mortal is killed when it is about to acknowledge.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import nats
from jetstream import on_message, once

PATIENCE = 120.0


async def die() -> None:
    """What a crash between the commit and the acknowledgement is."""
    os.kill(os.getpid(), signal.SIGKILL)


async def main(url: str, *, mortal: bool) -> None:
    async with once.lifespan(), await nats.connect(url) as client:
        subscription = await client.jetstream().pull_subscribe("sold", durable="stock")
        (message,) = await subscription.fetch(1, timeout=PATIENCE)
        taken: Any = message
        if mortal:
            taken.ack = die
        print(await on_message(taken), message.metadata.num_delivered)


asyncio.run(main(sys.argv[1], mortal="mortal" in sys.argv))
