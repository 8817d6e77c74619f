"""Running the demo: everything that can be wrong is found before the first request, and said in one sentence."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import uvicorn

from oncekey.core.errors import OncekeyError
from oncekey.demo.app import create_app

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.core.policy import Policy

BACKLOG = 2048
GRACE_SECONDS = 10


class CannotServeError(OncekeyError):
    """The demo cannot start; the message says why."""


def serve(store: str, policy: Policy, *, host: str, port: int, announce: Callable[[str], None]) -> None:
    """Serve until a signal ends it; `announce` is told the address when everything is in order."""
    listener = listen(host, port)
    with listener:
        asyncio.run(_try_once(store, policy))
        announce(_address(host, listener))
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


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, or the reason why there is none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotServeError(f"{host} is no address to listen on ({error.strerror})") from error
    try:
        # Connections of a demo that just ended may linger; on Windows the option would mean something else.
        if hasattr(socket, "SO_REUSEPORT"):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        why = getattr(error, "strerror", None) or str(error)
        raise CannotServeError(f"cannot listen on {host}, port {port} ({why}): choose another one") from error
    return listener


async def _try_once(store: str, policy: Policy) -> None:
    """Start and stop the application: a server's own report of a failed start is a page of traceback."""
    app = create_app(store, policy)
    async with app.router.lifespan_context(app):
        pass


def _address(host: str, listener: socket.socket) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"
