"""A shop behind Litestar and behind aiohttp's own server, over real sockets."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web
from litestar import Litestar, Request, Response, post

from harness.patience import PATIENCE
from harness.served import Served
from oncekey import aiohttp as ours
from oncekey.core.model import INLINE, LOCAL, OUTBOX, PHASED
from oncekey.core.policy import Policy
from oncekey.engine.operation import Operation
from oncekey.litestar import OncePlugin
from oncekey.once import Once
from oncekey.topics import Message, Reply
from wsgi.shop import execute

KINDS = ("litestar", "aiohttp")
Handler = Callable[[Operation[Any], dict[str, Any]], Any]


@dataclass
class Shop:
    """What the handlers of both kinds of applications do."""

    url: str
    policy: Policy = field(default_factory=Policy)
    workers: bool = False
    entered: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released by each handler that waits."""
    go_on: threading.Event = field(default_factory=threading.Event)
    charges: list[str] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    sent: list[Any] = field(default_factory=list)
    stumbled: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.once = Once(self.url, policy=self.policy, migrate=True, workers=self.workers)
        self.once.topic("mail", repeatable=True)(self._mail)

    @property
    def sold(self) -> list[str]:
        return sorted(item for (item,) in execute(self.url, "SELECT item FROM sold"))

    async def insert(self, connection: Any, item: str) -> str:
        mark = "?" if self.url.startswith("sqlite") else "%s"
        await connection.execute(f"INSERT INTO sold VALUES ({mark})", (item,))
        return item

    async def local(self, op: Operation[Any], order: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """Rows that commit with the key."""
        self.runs.append("local")
        await self.insert(op.connection, order["item"])
        await self._does(order)
        return {"item": order["item"], "attempt": op.attempt}, order.get("status", 201)

    async def inline(self, op: Operation[Any], order: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """A call to the outside."""
        self.runs.append("inline")
        self.charges.append(op.downstream_key("charge"))
        await self._does(order)
        return {"charges": len(self.charges)}, 201

    async def phased(self, op: Operation[Any], order: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """Order, draw, charge, mark as paid."""
        self.runs.append("phased")
        item = await op.phase("ordered", lambda connection: self.insert(connection, order["item"]))
        drawn = await op.value("drawn", lambda: uuid.uuid4().hex)
        charge = await op.call("charge", self._charge, repeatable=False)
        await self._does(order)
        await op.phase("paid", lambda connection: self.insert(connection, f"{item} paid"))
        return {"drawn": drawn, "charge": charge, "attempt": op.attempt}, 201

    async def outbox(self, op: Operation[Any], order: dict[str, Any]) -> tuple[None, int]:
        """A worker does the rest."""
        self.runs.append("outbox")
        await self.insert(op.connection, order["item"])
        op.defer("mail", order)
        return None, 202

    async def _mail(self, message: Message) -> Reply:
        self.sent.append(message.payload)
        return Reply(201, {"mailed": message.payload["item"]})

    async def _charge(self, key: str) -> str:
        self.charges.append(key)
        return key

    async def _does(self, order: dict[str, Any]) -> None:
        match order.get("does"):
            case "wait":
                self.entered.release()
                assert await asyncio.to_thread(self.go_on.wait, PATIENCE)
            case "stumble" if order["item"] not in self.stumbled:
                self.stumbled.add(order["item"])
                raise ValueError("it stumbled")
            case _:
                pass

    # Applications

    @property
    def routes(self) -> dict[str, tuple[Handler, dict[str, Any]]]:
        return {
            "/local": (self.local, {"effects": LOCAL}),
            "/optional": (self.local, {"effects": LOCAL, "require_key": False}),
            "/inline": (self.inline, {"effects": INLINE}),
            "/phased": (self.phased, {"effects": PHASED}),
            "/outbox": (self.outbox, {"effects": OUTBOX}),
        }

    def application(self, kind: str) -> Any:
        """An application, protected."""
        return {"litestar": self.litestar, "aiohttp": self.aiohttp}[kind]()

    def litestar(self) -> Litestar:
        """Route handlers of Litestar."""

        def routed(path: str, handler: Handler, options: dict[str, Any]) -> Any:
            @post(path)
            @self.once.protect(operation=path, **options)
            async def view(request: Request[Any, Any, Any], op: Operation[Any]) -> Response[Any]:
                body, status = await handler(op, await request.json())
                return Response(body, status_code=status)

            return view

        handlers = [routed(path, *route) for path, route in self.routes.items()]
        plugin = OncePlugin(self.once, tenant=lambda request: request.headers.get("tenant", "acme"))
        return Litestar(handlers, plugins=[plugin], logging_config=None)

    def aiohttp(self) -> web.Application:
        """Handlers of aiohttp."""
        app = web.Application()

        def routed(handler: Handler, path: str, options: dict[str, Any]) -> Any:
            @self.once.protect(operation=path, **options)
            async def view(request: web.Request, op: Operation[Any]) -> web.Response:
                body, status = await handler(op, await request.json())
                return web.json_response(body, status=status)

            return view

        for path, (handler, options) in self.routes.items():
            app.router.add_post(path, routed(handler, path, options))
        ours.install(self.once, app, tenant=lambda request: request.headers.get("tenant", "acme"))
        return app


class Runner:
    """An application of aiohttp's behind its own server, in a thread of this process."""

    def __init__(self, app: web.Application, **options: Any) -> None:
        self._app = app
        self._options = options
        self._ready, self._ended = threading.Event(), threading.Event()
        self._stop: Callable[[], object] = lambda: None
        self._error: BaseException | None = None
        self.port = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(PATIENCE)
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        """What a SIGTERM does."""
        self._stop()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        over = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._stop = lambda: loop.is_closed() or loop.call_soon_threadsafe(over.set)
        runner = web.AppRunner(self._app, access_log=None, **self._options)
        try:
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = runner.addresses[0][1]
            self._ready.set()
            await over.wait()
        except BaseException as error:
            self._error = error
        finally:
            await runner.cleanup()
            self._ready.set()


def server_of(app: Any, **options: Any) -> Runner | Served:
    """A real server on loopback: uvicorn for ASGI, or aiohttp's own."""
    return Runner(app, **options) if isinstance(app, web.Application) else Served(app, **options)


@contextmanager
def served(app: Any, **options: Any) -> Iterator[int]:
    """The same, while it serves; its port."""
    with server_of(app, **options) as server:
        yield server.port
