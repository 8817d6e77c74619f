"""A process of the shop that says that it is in the middle of its steps, and is killed there."""

from __future__ import annotations

import asyncio
import sys

from oncekey.sealing import AesGcm
from sealing.shop import OLD, Shop


async def main(url: str, key: str) -> None:
    """Send one request, whose handler never comes back."""
    shop = Shop(url, AesGcm({"k1": OLD}, current="k1"))

    async def stay() -> None:
        print("in the middle", flush=True)
        await asyncio.Event().wait()

    shop.in_step = stay
    async with shop.lifespan():
        await shop.post("/phased", key)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
