"""The lifespan of a wrapped ASGI application: oncekey's lifespan runs around the application's, if it has one."""

from __future__ import annotations

import asyncio
import logging
import traceback
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from oncekey.frameworks.asgi import App, Message, Receive, Scope, Send

log = logging.getLogger("oncekey")

_LAST_WORDS: Final = 1.0
"""Seconds that an application has to return after it reported that its shutdown is complete."""


class LifespanFailedError(Exception):
    """The wrapped application reported that it could not start or stop."""


async def around(ours: AbstractAsyncContextManager[None], app: App, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve the server's lifespan with `ours`, and with the application's inside it if it has one."""
    await receive()
    step = "startup"
    inner = _Inner(app, scope)
    try:
        async with ours:
            await inner.ask("startup")
            await send({"type": "lifespan.startup.complete"})
            step = "shutdown"
            await receive()
            await inner.ask("shutdown")
    except LifespanFailedError as failed:
        await send({"type": f"lifespan.{step}.failed", "message": str(failed)})
    except BaseException:
        await send({"type": f"lifespan.{step}.failed", "message": traceback.format_exc()})
        raise
    else:
        await send({"type": "lifespan.shutdown.complete"})
    finally:
        await inner.end()


class _Inner:
    """The lifespan of the wrapped application, in a separate task."""

    def __init__(self, app: App, scope: Scope) -> None:
        self._app = app
        self._scope = scope
        self._asked: asyncio.Queue[Message] = asyncio.Queue()
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._started = False

    async def ask(self, step: str) -> None:
        """Start or stop the application. An application without a lifespan gets no message, as from a server."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._serve())
        if self._task.done():
            return
        self._asked.put_nowait({"type": f"lifespan.{step}"})
        message = asyncio.ensure_future(self._messages.get())
        try:
            await asyncio.wait({message, self._task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not message.done():
                message.cancel()
        if message.cancelled() or not message.done():
            return
        if message.result()["type"] == f"lifespan.{step}.failed":
            raise LifespanFailedError(message.result().get("message", ""))
        self._started = True

    async def end(self) -> None:
        """End the task; the application gets a moment to return."""
        if self._task is not None and not self._task.done():
            await asyncio.wait({self._task}, timeout=_LAST_WORDS)
            self._task.cancel()

    async def _serve(self) -> None:
        try:
            await self._app(self._scope, self._asked.get, self._messages.put)
        except Exception as error:  # noqa: BLE001  (ASGI: an application that raises here has no lifespan)
            if self._started:
                log.error("oncekey: the lifespan of the wrapped application ended: %s", type(error).__name__)
            else:
                log.info("oncekey: the wrapped application has no lifespan (%s)", type(error).__name__)
