"""Answers that never come: a connection that closes without a word, and one that stays open without one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

DROP: Final = "oncekey.drop"


class DroppingProtocol(HttpToolsProtocol):
    """HTTP as uvicorn speaks it, which lends applications the means to hang up."""

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self.scope["extensions"] = {DROP: {"hang_up": self.transport.abort}}


class Hung(Response):
    """No answer, for as long as the client cares to wait."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait until the client is gone."""
        del scope, send
        while (await receive())["type"] != "http.disconnect":
            pass


class Dropped(Hung):
    """No answer, and no connection either."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hang up."""
        scope["extensions"][DROP]["hang_up"]()
        await super().__call__(scope, receive, send)
