"""The service as a plain ASGI application that knows nothing of keys: every route is enrolled by its path."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from oncekey.core.model import INLINE
from skins.on_starlette import Authenticated
from skins.service import ROUTES, Asked, Said, Service

BY_PATH = tuple(route for route in ROUTES if route.effects is INLINE or route.path == "/orders")
"""A handler that is handed no transaction can only be INLINE; this one's orders commit by themselves."""


def make(service: Service) -> Any:
    once = service.once
    does = {route.path: route.does for route in BY_PATH}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        tenant, lines = scope["state"]["tenant"], dict(scope["headers"])
        if scope["method"] == "GET" and scope["path"] == "/orders":
            await _answer(send, await asyncio.to_thread(service.orders, tenant))
        elif scope["method"] != "POST" or scope["path"] not in does:
            await _answer(send, Said(404 if scope["path"] not in does else 405, {}))
        else:
            asked = Asked(tenant, json.loads(await _body(receive) or b""), float(lines.get(b"x-delay", b"0")))
            key = f"{tenant} {lines[b'idempotency-key'].decode()}"
            await _answer(send, await asyncio.to_thread(service.unheld, does[scope["path"]](asked), key))

    enrol = {
        f"POST {route.path}": once.by_path(effects=INLINE, operation=route.operation, **route.options)
        for route in BY_PATH
    }
    wrapped = once.asgi(app, tenant=lambda scope: scope["state"]["tenant"], enrol=enrol)

    async def validated(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await wrapped(scope, receive, send)
            return
        body = await _body(receive)
        if body is not None and scope["path"] in does and not service.takes(scope["path"], body):
            await _answer(send, Said(422, {}))
        elif body is not None:
            given = [{"type": "http.request", "body": body, "more_body": False}]

            async def again() -> Any:
                return given.pop() if given else await receive()

            await wrapped(scope, again, send)

    return Authenticated(validated, service)


async def _body(receive: Any) -> bytes | None:
    """The whole body; None: the client has left before its end."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


async def _answer(send: Any, said: Said) -> None:
    lines = [(name.lower().encode(), value.encode()) for name, value in said.headers.items()]
    await send({"type": "http.response.start", "status": said.status, "headers": lines})
    for piece in said.pieces or (said.content,):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
