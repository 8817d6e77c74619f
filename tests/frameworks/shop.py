"""An application to test with: routes of the test's own over a store in memory that the test can see and break."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

from fastapi import FastAPI, Request

from harness.asgi import Caller, Reply
from harness.ledger import BlockingLedger, Ledger
from oncekey.core.policy import Policy
from oncekey.engine.shell import AsyncEngine, Engine
from oncekey.once import Once
from oncekey.stores.memory import MemoryStore
from oncekey.testing.claims import ManualClock

KEY = "key-000000000000001"
_keys = count(1)


def new_key() -> str:
    """A key that no other test uses."""
    return f"key-{next(_keys):020}"


class LedgerOnce(Once):
    """`Once` over a ledger instead of what a URL names."""

    def __init__(self, ledger: Ledger, *, policy: Policy | None = None, clock: Any = None) -> None:
        super().__init__("memory:", policy=policy)
        self.ledger = ledger
        self.threads = BlockingLedger(ledger)
        self._store = MemoryStore(clock=clock)

    def asynchronous(self) -> AsyncEngine:
        engine = AsyncEngine(self._store, self.ledger)
        return self._engines.setdefault(asyncio.get_running_loop(), engine)

    def blocking(self) -> Engine:
        return Engine(self._store, self.threads)


class Shop:
    """An application with `once` installed, its store, its clock, and how often its handlers ran."""

    def __init__(
        self,
        *,
        policy: Policy | None = None,
        yields: bool = False,
        clock: ManualClock | None = None,
        app: Any = None,
        install: bool = True,
        **installing: Any,
    ) -> None:
        self.ledger = Ledger(yields=yields)
        self.clock = clock
        self.once = LedgerOnce(self.ledger, policy=policy, clock=clock)
        self.app = FastAPI() if app is None else app
        self.runs: list[Any] = []
        if install:
            self.once.install(self.app, **{"tenant": tenant_of, **installing})

    def caller(
        self,
        target: str,
        body: Any = None,
        *,
        key: str | None = KEY,
        method: str = "POST",
        headers: Iterable[tuple[str, str]] = (),
        **request: Any,
    ) -> Caller:
        """A request that can be watched while it runs."""
        lines = [*headers]
        if key is not None:
            lines.append(("Idempotency-Key", key))
        if body is not None and not isinstance(body, bytes | list):
            lines.append(("Content-Type", "application/json"))
            body = json.dumps(body).encode()
        return Caller(self.app, method, target, headers=lines, body=body or b"", **request)

    async def send(self, target: str, body: Any = None, **request: Any) -> Reply:
        """A request and its answer."""
        return await self.caller(target, body, **request).run()

    @property
    def state(self) -> str | None:
        """Where the only record stands; None if there is none."""
        return self.ledger.record["state"] if self.ledger.records else None

    def post(self, path: str = "/orders", **options: Any) -> Callable[[Any], Any]:
        """`@shop.post(effects=LOCAL)`: a protected route."""
        route = {name: options.pop(name) for name in ("status_code", "response_model") if name in options}

        def decorate(handler: Any) -> Any:
            return self.app.post(path, **route)(self.once.protect(**options)(handler))

        return decorate


def tenant_of(request: Request) -> str:
    """Tests have no authentication of their own: a header stands for the token."""
    return request.headers.get("x-tenant", "acme")
