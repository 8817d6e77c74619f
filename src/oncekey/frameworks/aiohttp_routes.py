"""The routes of an aiohttp application, views and sub-applications included, and a completer's way into it."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from aiohttp import hdrs, web
from aiohttp.http import HttpVersion11, RawRequestMessage, StreamWriter
from aiohttp.streams import StreamReader
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from oncekey.frameworks.asgi.installation import Installation
from oncekey.frameworks.listing import Served
from oncekey.frameworks.resuming import RESUMPTION

if TYPE_CHECKING:
    from oncekey.frameworks.asgi.types import App, Receive, Scope, Send

INSTALLED: Final = web.AppKey("oncekey", list[Installation])
"""Where an application has what was installed in it."""
_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"})
_PART: Final = re.compile(r"\{([^{}:]+)(?::[^{}]+(?:\{[^{}]*\}[^{}]*)*)?\}")


def listed(app: Any) -> Iterator[Served] | None:  # noqa: ANN401  (an application of any kind)
    """Every route; None: it is no application of aiohttp's."""
    return walk(app) if isinstance(app, web.Application) else None


def walk(app: web.Application) -> Iterator[Served]:
    """Every route."""
    patterns = tuple(installation.patterns for installation in app.get(INSTALLED, ()))
    for route in app.router.routes():
        resource = route.resource
        if resource is None:
            continue
        path, handler = _PART.sub(r"{\1}", resource.canonical), route.handler
        if inspect.isclass(handler):
            for method in sorted(hdrs.METH_ALL):
                answering = getattr(handler, method.lower(), None)
                if answering is not None:
                    yield Served(path, frozenset({method}), answering, patterns)
        else:
            methods = _METHODS if route.method == hdrs.METH_ANY else frozenset({route.method})
            yield Served(path, methods, getattr(handler, "__func__", handler), patterns)


def door_of(app: web.Application) -> App:
    """An application as `resume` sends a request through it: all of its middleware, and no connection."""

    async def enter(scope: Scope, receive: Receive, send: Send) -> None:
        if not app.frozen:
            app.freeze()
        request = _request(scope, (await receive())["body"])
        try:
            response = await app._handle(request)  # noqa: SLF001  (what its own server calls)
        except web.HTTPException as raised:
            response = raised
        await send({"type": "http.response.start", "status": response.status, "headers": []})

    return enter


def _request(scope: Scope, body: bytes) -> web.Request:
    lines = (*scope["headers"], (b"content-length", b"%d" % len(body)))
    headers = CIMultiDict((name.decode("latin-1"), value.decode("latin-1")) for name, value in lines)
    target = scope["raw_path"].decode("ascii") + ("?" + scope["query_string"].decode("latin-1")).rstrip("?")
    loop = asyncio.get_running_loop()
    protocol = web.RequestHandler(web.Server(_unconnected), loop=loop)
    content = StreamReader(protocol, len(body) + 1, loop=loop)
    content.feed_data(body)
    content.feed_eof()
    message = RawRequestMessage(
        scope["method"],
        target,
        HttpVersion11,
        CIMultiDictProxy(headers),
        lines,
        should_close=False,
        compression=None,
        upgrade=False,
        chunked=False,
        url=URL(target, encoded=True),
    )
    task: Any = asyncio.current_task()
    state: Any = {RESUMPTION: scope[RESUMPTION]}
    writer = StreamWriter(protocol, loop)
    return web.Request(message, content, protocol, writer, task, loop, client_max_size=0, state=state)


async def _unconnected(_: web.BaseRequest) -> web.StreamResponse:
    raise AssertionError("nothing is received here")
