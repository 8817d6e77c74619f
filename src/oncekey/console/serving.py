"""Serves the console by itself: checks everything before the first request, and reports a mistake in one sentence."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from contextlib import asynccontextmanager, closing, suppress
from typing import TYPE_CHECKING, Final

from oncekey.core.errors import ConfigurationError, OncekeyError
from oncekey.engine.operate import survey_of
from oncekey.ops.stats import sample_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.types import Receive, Scope, Send

    from oncekey.console.app import Console

EVERY: Final = 10.0
"""Seconds between two samples of the store's numbers, so that charts begin before an operator opens them."""
PUBLIC: Final = (
    "{host} can be reached by others: the console shows your customers' keys and moves their records. Say --public if "
    "it shall be, behind a proxy with TLS; else leave --host out, and forward the port by ssh"
)
log = logging.getLogger("oncekey.console")


def serve(console: Console, *, host: str, port: int, public: bool, announce: Callable[[str], None]) -> None:
    """Serve until a signal ends it. It calls `announce` with the address when everything is in order."""
    try:
        import uvicorn  # noqa: PLC0415  (an optional package)
    except ImportError:
        raise ConfigurationError("the console needs a server: pip install 'oncekey[console]'") from None

    check_host(host, public=public)
    asyncio.run(_try_once(console))
    with closing(listen(host, port)) as listener:
        name = f"[{host}]" if ":" in host else host
        announce(f"http://{name}:{listener.getsockname()[1]}")
        config = uvicorn.Config(Watched(console), log_level="warning", access_log=False, lifespan="on")
        uvicorn.Server(config).run(sockets=[listener])


def check_host(host: str, *, public: bool) -> None:
    """Refuse an address that other machines can reach, unless `public` allows it."""
    try:
        near = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        near = False
    if not near and not public:
        raise ConfigurationError(PUBLIC.format(host=host))


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; raises an error of one sentence if it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from None


class Watched:
    """The console, with a task that samples the store while it is served."""

    def __init__(self, console: Console) -> None:
        self._console = console

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. The task begins and ends with the server's lifespan."""
        if scope["type"] != "lifespan":
            await self._console(scope, receive, send)
            return
        async with self._watching():
            await self._console(scope, receive, send)

    @asynccontextmanager
    async def _watching(self) -> AsyncIterator[None]:
        watcher = asyncio.create_task(watch(self._console))
        try:
            yield
        finally:
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher


async def watch(console: Console, every: float = EVERY) -> None:
    """Keep a sample of the store's numbers every few seconds, until cancelled."""
    while True:
        try:
            tally = await console.ask(lambda store: survey_of(store).tally())
            roll = await console.ask(lambda store: store.upkeep.workers())
            console.history.add(sample_of(tally, roll))
        except OncekeyError as error:
            log.warning("console: a look at the store failed (%s)", type(error).__name__)
        await asyncio.sleep(every)


async def _try_once(console: Console) -> None:
    """Ask the store something, so that a mistake in its address is reported now, and not to the first operator."""
    try:
        await console.ask(lambda store: survey_of(store).tally())
    finally:
        await console.close()
