"""The demo's workers, in its own process: what `oncekey worker` does for an application that is larger than this."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from oncekey.workers.service import Service
from oncekey.workers.tasks import tasks_for

if TYPE_CHECKING:
    from oncekey.once import Once

GRACE_SECONDS: Final = 5.0


@asynccontextmanager
async def housework(once: Once) -> AsyncIterator[None]:
    """Work as long as the application serves."""
    service = Service(tasks_for(once), grace=GRACE_SECONDS)
    working = asyncio.create_task(service.run())
    try:
        yield
    finally:
        service.stop()
        await working
