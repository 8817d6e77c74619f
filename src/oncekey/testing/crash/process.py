"""One process of the proof: an application, its workers and a crasher, over a place and a world outside."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from oncekey.core.model import Code, Effects
from oncekey.core.policy import Policy
from oncekey.engine.shell import AsyncEngine
from oncekey.testing.crash.shop import OPERATION, PATHS, MortalOnce, Shop
from oncekey.testing.history import Kind
from oncekey.workers.completer import Completer
from oncekey.workers.relay import Relay

if TYPE_CHECKING:
    from oncekey.core.model import Instant
    from oncekey.testing.crash.outside import World
    from oncekey.testing.crash.places import Place
    from oncekey.testing.crasher import Crasher

AMOUNT: Final = 4200
POLICY: Final = Policy()
_NOTHING_HAPPENED: Final = frozenset({Code.STORE_UNAVAILABLE, Code.KEY_REUSED})
_NOTHING_IN_ONE_TRANSACTION: Final = frozenset({Code.IN_PROGRESS, Code.EXECUTION_FAILED})
"""Whoever has steps may have taken some before it heard this."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What a client was answered."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def code(self) -> str | None:
        """The code of a problem of ours."""
        if "json" not in self.headers.get("content-type", ""):
            return None
        said = json.loads(self.body)
        code = said.get("code") if isinstance(said, dict) else None
        return code if isinstance(code, str) else None

    @property
    def replayed(self) -> bool:
        """Whether it says that it is a replay."""
        return self.headers.get("idempotent-replayed") == "true"

    def kind(self, effects: Effects) -> Kind:
        """What a client may conclude from it."""
        if self.code is None and self.status != ACCEPTED:
            return Kind.OK if self.status < FAILED else Kind.INFO
        if self.code in _NOTHING_HAPPENED and self.status != ACCEPTED:
            return Kind.FAIL
        undone = effects is Effects.LOCAL and self.code in _NOTHING_IN_ONE_TRANSACTION
        return Kind.FAIL if undone else Kind.INFO


ACCEPTED: Final = 202
FAILED: Final = 500


class Process:
    """A server and its workers, alive until its crasher says otherwise."""

    def __init__(
        self,
        place: Place,
        crasher: Crasher,
        world: World,
        *,
        clock: Callable[[], Instant] | None,
        repeatable: bool,
        amend: Callable[[AsyncEngine], None] = lambda _: None,
    ) -> None:
        self.crasher = crasher

        def connected() -> AsyncEngine:
            inner = place.engine(clock)
            amend(inner)
            return AsyncEngine(inner.store, crasher.driver(inner.driver))

        self.once = MortalOnce(connected, POLICY)
        self.shop = Shop(self.once, place, world, crasher.outside, repeatable=repeatable)

    async def ask(self, effects: Effects, key: str, operation: str) -> Heard:
        """One request and its answer."""
        sent: list[dict[str, Any]] = []
        body = json.dumps({"amount": AMOUNT}).encode()
        headers = {"content-type": "application/json", "idempotency-key": f'"{key}"', OPERATION: operation}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": PATHS[effects],
            "raw_path": PATHS[effects].encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 50000),
            "server": ("127.0.0.1", 80),
            "state": {},
        }

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:  # noqa: ANN401  (ASGI's)
            self.crasher.alive()  # a dead server sends nothing
            sent.append(message)

        # A server logs what comes out of its application; the client has the answer that went out before.
        with suppress(Exception):
            await self.shop.app(scope, receive, send)
        start = next(message for message in sent if message["type"] == "http.response.start")
        told = {name.decode().lower(): value.decode("latin-1") for name, value in start["headers"]}
        content = b"".join(message.get("body", b"") for message in sent if message["type"] == "http.response.body")
        return Heard(start["status"], content, told)

    async def relay(self) -> None:
        """Work off the outbox, one parcel after the other."""
        engine = self.once.asynchronous()
        assert engine.store.outbox is not None
        relay = Relay(engine.store.outbox, engine.driver.run, self.once.topics, self.once.policy, concurrency=1)
        while await relay.run_once():
            await relay.drain()
        await relay.stop(0)

    async def complete(self) -> None:
        """Go on with what nobody does any more."""
        await Completer(self.once).run_once()

    async def end(self) -> None:
        """The process ends in order: everything it has is given back."""
        await self.once.stop()
        await self.crasher.bury()
