"""An application with everything that a store keeps content of, on any store and under any seal."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from fastapi import FastAPI, Response

from harness.asgi import Reply, call
from oncekey import INLINE, LOCAL, OUTBOX, PHASED, SINGLE_TENANT, Once, Operation
from oncekey.core.errors import NotExecutedError
from oncekey.core.resolution import Executed, sign
from oncekey.core.resolvers import Sighting
from oncekey.core.topics import Message
from oncekey.workers.tasks import tasks_for

MARK = "MARK-of-a-customer-4711"
"""What no column may show."""
SECRET = b"a secret of webhooks"
OLD, NEW = bytes(range(32)), bytes(range(32, 64))


class Shop:
    """One process of the application."""

    def __init__(self, url: str, seal: Any, **options: Any) -> None:
        self.once = once = Once(url, migrate=True, seal=seal, **options)
        self.app = app = FastAPI(lifespan=once.lifespan)
        self.runs: list[str] = []
        self.told: list[Any] = []
        self.hold: asyncio.Event | None = None
        self.in_step: Any = None
        self.provider_down = False
        once.install(app, tenant=SINGLE_TENANT)
        once.webhook(app, "/hooks", secret=SECRET, parse=lambda event: Sighting(Executed(event), "a-downstream-key"))

        @app.post("/local")
        @once.protect(effects=LOCAL)
        async def local(body: dict[str, Any], op: Operation, response: Response) -> dict[str, Any]:
            self.runs.append("local")
            response.headers["Location"] = f"/things/{MARK}"
            op.emit("told", body)
            return body

        @app.post("/inline")
        @once.protect(effects=INLINE)
        async def inline(body: dict[str, Any]) -> dict[str, Any]:
            self.runs.append("inline")
            if body.get("fail"):
                raise ConnectionResetError
            return body

        @app.post("/outbox")
        @once.protect(effects=OUTBOX)
        async def outbox(body: dict[str, Any], op: Operation) -> dict[str, Any]:
            self.runs.append("outbox")
            op.defer("charge", body)
            return {"accepted": body}

        @app.post("/phased")
        @once.protect(effects=PHASED)
        async def phased(body: dict[str, Any], op: Operation) -> dict[str, Any]:
            self.runs.append("phased")

            async def first(_: Any) -> dict[str, Any]:
                self.runs.append("first")
                return {"made": body}

            made = await op.phase("first", first)
            seen = await op.value("seen", lambda: body)
            if self.in_step is not None:
                await self.in_step()
            charged = await op.call("charge", self._charge, body, repeatable=True)
            return {"made": made, "seen": seen, "charged": charged}

        @once.topic("charge", repeatable=True)
        async def charge(message: Message) -> dict[str, Any]:
            self.runs.append("charge")
            return {"charged": message.payload}

        @once.topic("told")
        async def told(message: Message) -> None:
            self.told.append(message.payload)

    async def _charge(self, body: dict[str, Any], *, key: str) -> dict[str, Any]:
        if self.provider_down:
            raise NotExecutedError("no connection")
        self.runs.append("charged")
        return {"charge": body}

    def lifespan(self) -> Any:
        """Started, and stopped after it."""
        return self.app.router.lifespan_context(self.app)

    async def post(self, path: str, key: str, **more: Any) -> Reply:
        """One request, whose body has the mark."""
        body = json.dumps({"name": MARK, **more}).encode()
        lines = [("Idempotency-Key", f'"{key}"'), ("Content-Type", "application/json")]
        return await call(self.app, "POST", path, headers=lines, body=body)

    async def hear(self, event_id: str) -> Reply:
        """A webhook, whose body has the mark."""
        body = json.dumps({"id": event_id, "name": MARK}).encode()
        lines = [("Oncekey-Signature", sign(body, SECRET, int(time.time())))]
        return await call(self.app, "POST", "/hooks", headers=lines, body=body)

    async def work(self) -> None:
        """One round of the relay and of the completer."""
        for task in tasks_for(self.once):
            if task.name in {"relay", "completer"}:
                await task.run_once()
                shut_down = getattr(task, "shut_down", None)
                if shut_down is not None:
                    await shut_down()
