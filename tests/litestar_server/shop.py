"""A shop behind Litestar, over real sockets."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from litestar import Litestar, Request, Response, post

from harness.patience import PATIENCE
from oncekey.core.model import INLINE, LOCAL, OUTBOX, PHASED
from oncekey.core.policy import Policy
from oncekey.core.topics import Message, Reply
from oncekey.engine.operation import Operation
from oncekey.litestar import OncePlugin
from oncekey.once import Once
from wsgi.shop import execute

Handler = Callable[[Operation[Any], dict[str, Any]], Any]


@dataclass
class Shop:
    """What the handlers do."""

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
        item = await op.phase("ordered", self.insert, order["item"])
        drawn = await op.value("drawn", lambda: uuid.uuid4().hex)
        charge = await op.call("charge", self._charge, repeatable=False)
        await self._does(order)
        await op.phase("paid", self.insert, f"{item} paid")
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

    @property
    def routes(self) -> dict[str, tuple[Handler, dict[str, Any]]]:
        return {
            "/local": (self.local, {"effects": LOCAL}),
            "/optional": (self.local, {"effects": LOCAL, "require_key": False}),
            "/inline": (self.inline, {"effects": INLINE}),
            "/phased": (self.phased, {"effects": PHASED}),
            "/outbox": (self.outbox, {"effects": OUTBOX}),
        }

    def application(self) -> Litestar:
        """Its route handlers, protected."""

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
