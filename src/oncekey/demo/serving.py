"""Running the demo: everything that can be wrong is found before the first request, and said in one sentence."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import uvicorn

from oncekey.demo.app import create_app
from oncekey.demo.listening import CannotServeError, address_of, listen

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.core.policy import Policy

GRACE_SECONDS = 10


def serve(store: str, policy: Policy, *, host: str, port: int, announce: Callable[[str], None]) -> None:
    """Serve until a signal ends it; `announce` is told the address when everything is in order."""
    listener = listen(host, port)
    with listener:
        asyncio.run(_try_once(store, policy))
        announce(address_of(host, listener))
        config = uvicorn.Config(
            create_app(store, policy),
            log_level="warning",
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        server = uvicorn.Server(config)
        server.run(sockets=[listener])
        if not server.started:
            raise CannotServeError("the demo did not start; the lines above say why")


async def _try_once(store: str, policy: Policy) -> None:
    """Start and stop the application: a server's own report of a failed start is a page of traceback."""
    app = create_app(store, policy)
    async with app.router.lifespan_context(app):
        pass
