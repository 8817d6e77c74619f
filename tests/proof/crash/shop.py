"""The application that is killed: a process with its workers and a crasher, over a place and a world outside.

It has one route for each kind of effects, and nothing else. No crash touches the world outside: a provider with a
ledger of its own, and the receiver of messages.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oncekey.core.model import Code, Effects
from oncekey.core.policy import Policy
from oncekey.core.topics import Message, Reply
from oncekey.engine.operation import Operation
from oncekey.engine.shell import AsyncEngine
from oncekey.once import SINGLE_TENANT, Once
from oncekey.workers.completer import Completer
from oncekey.workers.relay import Relay
from oncekey_demo.history import ClientSaw

if TYPE_CHECKING:
    from oncekey.core.model import Instant
    from proof.crash.crasher import Crasher
    from proof.crash.places import Place


class Provider(Protocol):
    """Somebody who charges cards."""

    async def charge(self, downstream_key: str, *, reference: str, amount: int) -> str:
        """Charge, and return the charge's id; the same key again is the same charge, if the provider cares."""


@dataclass(frozen=True, slots=True)
class Charge:
    """A line of the provider's ledger."""

    id: str
    downstream_key: str
    reference: str
    amount: int
    at: int


class Ledger:
    """A provider in memory. `deduplicates` is whether it recognises a key that it has seen."""

    def __init__(self, ticks: Callable[[], int], *, deduplicates: bool) -> None:
        self.charges: list[Charge] = []
        self.calls: Counter[str] = Counter()
        self._ticks = ticks
        self._deduplicates = deduplicates

    async def charge(self, downstream_key: str, *, reference: str, amount: int) -> str:
        """Charge."""
        self.calls[reference] += 1
        for known in self.charges:
            if self._deduplicates and known.downstream_key == downstream_key:
                return known.id
        made = Charge(f"ch_{len(self.charges) + 1}", downstream_key, reference, amount, self._ticks())
        self.charges.append(made)
        return made.id


class Inbox:
    """Who is told of things. Messages may come twice; their downstream key tells."""

    def __init__(self) -> None:
        self.received: list[str] = []

    def receive(self, downstream_key: str) -> None:
        """One message."""
        self.received.append(downstream_key)


@dataclass(slots=True)
class World:
    """All that there is outside of a process; a process that lives on may see another one."""

    provider: Provider
    inbox: Inbox


T = TypeVar("T")
Outside = Callable[[str, Callable[[], Awaitable[T]]], Awaitable[T]]
"""How a call to the outside is made: by its name, so that it can be died at."""

OPERATION: Final = "X-Operation"
PATHS: Final = {
    Effects.LOCAL: "/orders",
    Effects.PHASED: "/payments",
    Effects.OUTBOX: "/transfers",
    Effects.INLINE: "/notifications",
}


class MortalOnce(Once):
    """`Once` on an engine that is given to it."""

    def __init__(self, engine: Callable[[], AsyncEngine], policy: Policy) -> None:
        super().__init__("memory:", policy=policy)
        self._make = engine
        self._made: AsyncEngine | None = None

    def asynchronous(self) -> AsyncEngine:
        """The engine."""
        self._made = self._made or self._make()
        return self._made


class Shop:
    """Handlers for all four kinds, over one place and one world."""

    def __init__(
        self,
        once: Once,
        place: Place,
        world: World,
        outside: Outside[Any],
        *,
        repeatable: bool = True,
    ) -> None:
        self.once = once
        self.entered: list[str] = []
        self._place = place
        self.world = world
        self._outside = outside
        self._repeatable = repeatable
        routes = [
            self._route(Effects.LOCAL, self._order),
            self._route(Effects.PHASED, self._payment),
            self._route(Effects.OUTBOX, self._transfer),
            self._route(Effects.INLINE, self._notification),
        ]
        self.app = Starlette(routes=routes)
        once.topic("receipt")(self._receipt)
        once.topic("transfer", repeatable=repeatable)(self._charged)
        once.install(self.app, tenant=SINGLE_TENANT, keep_headers=(OPERATION,))

    def _route(self, effects: Effects, handler: Callable[..., Awaitable[Response]]) -> Route:
        async def endpoint(request: Request, op: Operation) -> Response:
            self.entered.append(request.headers.get(OPERATION, ""))
            asked = await request.json()
            return await handler(op, int(asked["amount"]), request.headers.get(OPERATION))

        protect: Any = self.once.protect
        return Route(PATHS[effects], protect(effects=effects, operation=effects.value)(endpoint), methods=["POST"])

    async def _order(self, op: Operation, amount: int, by: str | None) -> Response:
        await self._place.insert(op.connection, "order", str(op.key), amount, by)
        op.emit("receipt", {"amount": amount})
        return JSONResponse({"order": op.key, "by": by}, 201)

    async def _payment(self, op: Operation, amount: int, by: str | None) -> Response:
        async def create(connection: Any) -> str:
            await self._place.insert(connection, "payment", str(op.key), amount, by)
            return f"payment of {amount}"

        async def settle(connection: Any) -> str:
            await self._place.insert(connection, "settlement", str(op.key), amount, by)
            op.emit("receipt", {"amount": amount})
            return "settled"

        async def charge(*, key: str) -> str:
            return await self._charge(key, str(op.key), amount)

        await op.phase("payment_created", create)
        charged = await op.call("charge_created", charge, repeatable=self._repeatable, parameters={"amount": amount})
        await op.phase("payment_settled", settle)
        return JSONResponse({"charge": charged, "amount": amount}, 201)

    async def _transfer(self, op: Operation, amount: int, by: str | None) -> Response:
        await self._place.insert(op.connection, "transfer", str(op.key), amount, by)
        op.defer("transfer", {"amount": amount})
        return Response(status_code=202)

    async def _notification(self, op: Operation, amount: int, by: str | None) -> Response:
        charged = await self._charge(op.downstream_key("notify"), str(op.key), amount)
        return JSONResponse({"charge": charged, "by": by}, 201)

    async def _charged(self, message: Message) -> Reply:
        charged = await self._charge(message.downstream_key, message.key, int(message.payload["amount"]))
        return Reply(201, {"charge": charged}, provider_id=charged)

    async def _receipt(self, message: Message) -> None:
        async def receive() -> None:
            self.world.inbox.receive(message.downstream_key)

        await self._outside("receive", receive)

    async def _charge(self, downstream_key: str, key: str, amount: int) -> str:
        async def charge() -> str:
            return await self.world.provider.charge(downstream_key, reference=key, amount=amount)

        made: str = await self._outside("charge", charge)
        return made


AMOUNT: Final = 4200
POLICY: Final = Policy()
_NOTHING_HAPPENED: Final = frozenset({Code.STORE_UNAVAILABLE, Code.KEY_REUSED})
_NOTHING_IN_ONE_TRANSACTION: Final = frozenset({Code.IN_PROGRESS, Code.EXECUTION_FAILED})
"""Whoever has steps may have taken some before it heard this."""


@dataclass(frozen=True, slots=True)
class CallReport:
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

    def kind(self, effects: Effects) -> ClientSaw:
        """What a client may conclude from it."""
        if self.code is None and self.status != ACCEPTED:
            return ClientSaw.OK if self.status < FAILED else ClientSaw.INFO
        if self.code in _NOTHING_HAPPENED and self.status != ACCEPTED:
            return ClientSaw.FAIL
        undone = effects is Effects.LOCAL and self.code in _NOTHING_IN_ONE_TRANSACTION
        return ClientSaw.FAIL if undone else ClientSaw.INFO


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

    async def ask(self, effects: Effects, key: str, operation: str) -> CallReport:
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

        async def send(message: Any) -> None:
            self.crasher.alive()  # a dead server sends nothing
            sent.append(message)

        # A server logs what comes out of its application; the client has the answer that went out before.
        with suppress(Exception):
            await self.shop.app(scope, receive, send)
        start = next(message for message in sent if message["type"] == "http.response.start")
        told = {name.decode().lower(): value.decode("latin-1") for name, value in start["headers"]}
        content = b"".join(message.get("body", b"") for message in sent if message["type"] == "http.response.body")
        return CallReport(start["status"], content, told)

    async def relay(self) -> None:
        """Work off the outbox, one parcel after the other."""
        engine = self.once.asynchronous()
        assert engine.store.outbox is not None
        relay = Relay(engine.store.outbox, engine.driver.run, self.once.topics, self.once.policy, concurrency=1)
        while await relay.run_once():
            await relay.shut_down()
        await relay.stop(0)

    async def complete(self) -> None:
        """Go on with what nobody does any more."""
        await Completer(self.once).run_once()

    async def end(self) -> None:
        """The process ends in order: everything it has is given back."""
        await self.once.stop()
        await self.crasher.bury()
