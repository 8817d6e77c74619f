"""The application that is killed: one route for each kind of effects, and nothing else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oncekey.core.model import Effects
from oncekey.engine.operation import Operation
from oncekey.once import SINGLE_TENANT, Once
from oncekey.topics import Message, Reply

if TYPE_CHECKING:
    from oncekey.core.policy import Policy
    from oncekey.engine.shell import AsyncEngine
    from oncekey.testing.crash.outside import World
    from oncekey.testing.crash.places import Place

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
        async def create(connection: Any) -> str:  # noqa: ANN401  (the driver's own)
            await self._place.insert(connection, "payment", str(op.key), amount, by)
            return f"payment of {amount}"

        async def settle(connection: Any) -> str:  # noqa: ANN401  (the driver's own)
            await self._place.insert(connection, "settlement", str(op.key), amount, by)
            op.emit("receipt", {"amount": amount})
            return "settled"

        async def charge(downstream_key: str) -> str:
            return await self._charge(downstream_key, str(op.key), amount)

        await op.phase("payment_created", create)
        charged = await op.call("charge_created", charge, repeatable=self._repeatable, given={"amount": amount})
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
