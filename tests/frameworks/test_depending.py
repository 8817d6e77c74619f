"""`tenant=Depends(...)`: FastAPI's own rules hold for whoever names the tenant, also those of its tests."""

from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI, Header, HTTPException, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.applications import Starlette

from frameworks.shop import KEY, LedgerOnce, new_key
from harness.asgi import Caller, Reply
from harness.ledger import Ledger
from oncekey.core.errors import ConfigurationError
from oncekey.core.model import INLINE, LOCAL, PHASED
from oncekey.core.policy import Policy
from oncekey.engine.operation import Operation
from oncekey.once import Once

TOKENS = {"token-a": "acme", "token-b": "bolt"}
bearer = HTTPBearer(auto_error=False)
events: list[str] = []


async def authenticated(credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]) -> str:
    if credentials is None or credentials.credentials not in TOKENS:
        raise HTTPException(401, "who are you?", {"WWW-Authenticate": "Bearer"})
    return TOKENS[credentials.credentials]


def tenant_of(request: Request, name: Annotated[str, Depends(authenticated)], x_region: str = Header("eu")) -> str:
    return f"{request.app.state.prefix}:{name}:{x_region}"


class Shop:
    """An application whose tenant is a dependency."""

    def __init__(self, tenant: Any = None, policy: Policy | None = None, **installing: Any) -> None:
        self.ledger = Ledger()
        self.once = LedgerOnce(self.ledger, policy=policy)
        self.app = FastAPI()
        self.app.state.prefix = "shop"
        self.once.install(self.app, tenant=tenant or Depends(tenant_of), **installing)

        @self.app.post("/orders")
        @self.once.protect(effects=LOCAL)
        async def create(op: Operation) -> str:
            op.connection.add("row")
            return op.scope

        @self.app.post("/payments")
        @self.once.protect(effects=PHASED, complete=True)
        async def pay(op: Operation) -> str:
            return op.scope

    async def send(self, token: str | None, path: str = "/orders", method: str = "POST", **more: Any) -> Reply:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        headers |= {"Idempotency-Key": more.pop("key", KEY)} | more
        return await Caller(self.app, method, path, headers=headers).run(raising=True)


@pytest.mark.parametrize("path", ["/orders", "/payments"])
async def test_the_tenant_comes_from_the_dependency(path: str) -> None:
    # R23
    shop = Shop()
    for _ in range(2):
        for token, name in TOKENS.items():
            reply = await shop.send(token, path)
            assert (reply.status, f"shop:{name}:eu" in reply.json()) == (200, True)
    assert len(shop.ledger.records) == 2
    other = await shop.send("token-a", path, **{"X-Region": "us"})
    assert "shop:acme:us" in other.json()


async def test_http_errors_of_the_tenant_dependency_become_responses() -> None:
    # R20
    shop = Shop()
    for path, method in (("/orders", "POST"), (f"/idempotency-keys/{KEY}", "GET")):
        reply = await shop.send(None, path, method)
        assert (reply.status, reply.header("www-authenticate")) == (401, "Bearer")
        assert reply.json() == {"detail": "who are you?"}
    assert (shop.ledger.rows, shop.ledger.records, shop.ledger.open) == ([], [], 0)


async def test_tenant_dependency_errors_reach_the_exception_handlers() -> None:
    shop = Shop()

    @shop.app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Any:
        from fastapi.responses import JSONResponse

        return JSONResponse({"error": error.detail}, error.status_code)

    assert (await shop.send(None)).json() == {"error": "who are you?"}


async def test_a_missing_dependency_parameter_returns_422() -> None:
    def by_header(x_tenant: Annotated[str, Header()]) -> str:
        return x_tenant

    shop = Shop(Depends(by_header))
    reply = await shop.send("token-a")
    assert (reply.status, reply.json()["detail"][0]["loc"]) == (422, ["header", "x-tenant"])
    assert (await shop.send("token-a", **{"X-Tenant": "acme"})).status == 200


async def test_dependency_overrides_apply_to_the_tenant() -> None:
    shop = Shop()
    shop.app.dependency_overrides[authenticated] = lambda: "tester"
    assert "shop:tester:eu" in (await shop.send(None)).json()
    shop.app.dependency_overrides = {tenant_of: lambda: "somebody"}
    assert "somebody" in (await shop.send(None, key=new_key())).json()
    shop.app.dependency_overrides = {}
    assert (await shop.send(None)).status == 401


async def test_the_status_resource_is_visible_to_its_tenant_only() -> None:
    # R29
    shop = Shop()
    await shop.send("token-a")
    assert (await shop.send("token-a", f"/idempotency-keys/{KEY}", "GET")).status == 200
    assert (await shop.send("token-b", f"/idempotency-keys/{KEY}", "GET")).status == 404


async def test_a_principal_may_be_a_dependency_too() -> None:
    def user(x_user: Annotated[str, Header()]) -> str:
        return x_user

    shop = Shop(principal=Security(user), policy=Policy(bind_to="principal"))
    scopes = {(await shop.send("token-a", **{"X-User": name})).json() for name in ("ann", "bob", "ann")}
    assert len(scopes) == len(shop.ledger.records) == 2


async def test_a_yielding_tenant_dependency_is_finalized() -> None:
    ended: list[int] = []

    async def tenant() -> Any:
        yield "acme"
        ended.append(1)

    shop = Shop(Depends(tenant))
    assert (await shop.send(None)).status == 200
    assert ended == [1]


async def test_tenant_dependency_exceptions_reach_the_application() -> None:
    def tenant() -> str:
        raise LookupError("no such tenant")

    shop = Shop(Depends(tenant))
    with pytest.raises(LookupError, match="no such tenant"):
        await shop.send(None)
    assert shop.ledger.records == []


async def test_a_dependency_that_reads_the_body_is_refused() -> None:
    # R25: whoever writes the tenant could ask for somebody else's answers
    async def tenant(request: Request) -> str:
        return (await request.body()).decode()

    with pytest.raises(ConfigurationError, match="reads the body: derive the"):
        await Shop(Depends(tenant)).send(None)


async def test_dependency_errors_become_responses_for_enrolled_paths() -> None:
    once, app, runs = LedgerOnce(Ledger()), FastAPI(), []
    app.state.prefix = "shop"
    app.post("/old")(lambda: runs.append(1))
    enrolment = once.by_path(effects=INLINE, operation="old")
    once.install(app, tenant=Depends(tenant_of), enrol={"POST /old": enrolment})
    headers = {"Idempotency-Key": KEY}
    refused = await Caller(app, "POST", "/old", headers=headers).run(raising=True)
    assert (refused.status, refused.header("www-authenticate"), once.ledger.records) == (401, "Bearer", [])
    known = headers | {"Authorization": "Bearer token-a"}
    assert [(await Caller(app, "POST", "/old", headers=known).run()).replayed for _ in range(2)] == [False, True]
    assert runs == [1]


def test_starlette_rejects_a_tenant_dependency() -> None:
    with pytest.raises(ConfigurationError, match=r"takes a function of the request .* in FastAPI, Depends"):
        Once("memory:").install(Starlette(), tenant=Depends(tenant_of))
