"""A limit for request bodies, kept before anything is parsed."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from oncekey.demo.problems import problem

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LENGTH: Final = b"content-length"


class BodyLimit:
    """Answers 413 to a body that is larger than `limit` bytes, announced or not."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = next((value for name, value in scope["headers"] if name == _LENGTH), None)
        if announced is None:
            await self._counted(scope, receive, send)
        elif int(announced) > self._limit:
            await self._refuse(scope, receive, send)
        else:
            # The server reads no more than was announced, so there is nothing to count.
            await self._app(scope, receive, send)

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A body in chunks: when it gets too large the application sees its client leave, and is not heard."""
        size = 0

        def over() -> bool:
            return size > self._limit

        async def counted() -> Message:
            nonlocal size
            message = {"type": "http.disconnect"} if over() else await receive()
            size += len(message.get("body", b""))
            return {"type": "http.disconnect"} if over() else message

        async def heard(message: Message) -> None:
            if not over():
                await send(message)

        try:
            await self._app(scope, counted, heard)
        except Exception:
            if not over():
                raise
        if over():
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        detail = f"A request body may have {self._limit} bytes."
        await problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body_too_large", detail)(scope, receive, send)
