"""FastAPI: included routers, dependencies that end late, and what OpenAPI says (R228, R229)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Response
from pydantic import BaseModel

from frameworks.shop import KEY, Shop
from oncekey.core.keys import HeaderSyntax, KeyFormat
from oncekey.core.model import INLINE, LOCAL, OUTBOX, Effects
from oncekey.core.policy import ErrorFormat, Flavor, Policy
from oncekey.engine.operation import Operation
from oncekey.frameworks.fastapi import warn_of_late_commits
from oncekey.frameworks.starlette import routed
from oncekey.once import Once


class Item(BaseModel):
    """A body."""

    n: int


# ------------------------------------------------------------------------------------------------------ routers


def with_routers() -> Shop:
    shop = Shop()
    inner = APIRouter(prefix="/things")

    @inner.post("/{thing}", status_code=201)
    @shop.once.protect(effects=INLINE, operation="make_thing")
    async def make(thing: str, op: Operation) -> dict[str, str]:
        shop.runs.append(thing)
        return {"thing": thing, "scope": op.scope}

    @inner.get("/{thing}")
    async def show(thing: str) -> str:
        return thing

    outer = APIRouter(prefix="/v1")
    outer.include_router(inner)
    shop.app.include_router(outer, prefix="/api")
    return shop


async def test_a_route_of_an_included_router_is_protected_under_its_full_path() -> None:
    # apishape 2, 9
    shop = with_routers()
    first = await shop.send("/api/v1/things/7")
    again = await shop.send("/api/v1/things/7")
    assert (first.status, again.replayed, shop.runs) == (201, True, ["7"])
    assert (shop.ledger.record["operation"], shop.ledger.record["path"]) == ("make_thing", "/api/v1/things/7")
    assert (await shop.send("/api/v1/things/8")).status == 422
    await shop.once.start(shop.app)


def test_openapi_has_the_full_path_of_an_included_route() -> None:
    # apishape 7
    shop = with_routers()
    assert "/api/v1/things/{thing}" in {route.path for route in routed(shop.app)}
    about = shop.app.openapi()["paths"]["/api/v1/things/{thing}"]
    assert about["post"]["x-oncekey"] == {"effects": "inline", "operation": "make_thing"}
    assert [parameter["name"] for parameter in about["post"]["parameters"]] == ["thing", "Idempotency-Key"]
    assert "x-oncekey" not in about["get"]


async def test_a_router_may_be_included_twice() -> None:
    shop = Shop()
    router = APIRouter()

    @router.post("/orders")
    @shop.once.protect(effects=INLINE)
    async def create() -> str:
        return "done"

    for prefix in ("/v1", "/v2"):
        shop.app.include_router(router, prefix=prefix)
    await shop.once.start(shop.app)
    assert (await shop.send("/v1/orders")).status == 200
    assert (await shop.send("/v2/orders")).status == 422  # R26: the path belongs to the request
    paths = shop.app.openapi()["paths"]
    assert all("x-oncekey" in paths[f"{prefix}/orders"]["post"] for prefix in ("/v1", "/v2"))


async def test_a_mounted_application_is_protected_by_the_outer_installation(caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop()
    inner = FastAPI()

    @inner.post("/orders")
    @shop.once.protect(effects=LOCAL)
    async def create(op: Operation) -> str:
        op.connection.add("row")
        return "done"

    shop.app.mount("/inner", inner)
    await shop.once.start(shop.app)
    assert "no route serves it" not in caplog.text
    first = await shop.send("/inner/orders")
    assert (first.status, (await shop.send("/inner/orders")).replayed, shop.ledger.rows) == (200, True, ["row"])


async def test_a_mounted_application_with_its_own_install_claims_once() -> None:
    # the innermost installation of one Once claims, and no other
    shop = Shop()
    inner = FastAPI()
    shop.once.install(inner, tenant=lambda _: "inner")

    @inner.post("/orders")
    @shop.once.protect(effects=LOCAL)
    async def create(op: Operation) -> str:
        op.connection.add("row")
        return op.scope

    shop.app.mount("/inner", inner)
    first = await shop.send("/inner/orders")
    assert (first.status, shop.ledger.log.count("claim")) == (200, 1)
    assert "inner" in first.json()
    assert (await shop.send("/inner/orders")).replayed
    assert (await shop.send("/inner/orders", key=None)).status == 400
    assert "x-oncekey" in inner.openapi()["paths"]["/orders"]["post"]


# ------------------------------------------------------------------------------------------- headers and responses


async def test_headers_of_an_injected_response_are_replayed() -> None:
    shop = Shop()

    @shop.post(effects=INLINE, status_code=201)
    async def create(response: Response) -> str:
        response.headers["Location"] = "/orders/7"
        response.status_code = 202
        return "done"

    for _ in range(2):
        reply = await shop.send("/orders")
        assert (reply.status, reply.header("location")) == (202, "/orders/7")


# ---------------------------------------------------------------------------------------------- dependencies


async def test_dependencies_end_in_their_order_around_the_settlement() -> None:
    # apishape 1: function-scope exit, settle, bytes, background, request-scope exit
    shop = Shop()
    events: list[str] = []

    async def early() -> Any:
        yield 1
        events.append(f"function scope ends, {shop.state}")

    async def late() -> Any:
        yield 1
        events.append(f"request scope ends, {shop.state}")

    @shop.post(effects=INLINE)
    async def create(a: int = Depends(early, scope="function"), b: int = Depends(late)) -> str:
        return "done"

    await shop.caller("/orders", on_send=lambda message: events.append(message["type"])).run()
    assert events == [
        "function scope ends, in_progress",
        "http.response.start",
        "http.response.body",
        "request scope ends, completed",
    ]


async def test_a_failing_function_scoped_dependency_rolls_back() -> None:
    # apishape 3
    shop = Shop()

    async def session() -> Any:
        yield 1
        raise RuntimeError("the commit failed")

    @shop.post(effects=LOCAL)
    async def create(op: Operation, s: int = Depends(session, scope="function")) -> str:
        op.connection.add("row")
        return "done"

    assert (await shop.send("/orders")).status == 500
    assert (shop.ledger.rows, shop.state) == ([], "failed_retryable")


async def test_dependencies_finish_normally_on_a_replay() -> None:
    # apishape 1: returning beats raising
    shop = Shop()
    ends: list[str] = []

    async def session() -> Any:
        try:
            yield 1
        except BaseException:
            ends.append("rolled back")
            raise
        ends.append("committed")

    @shop.post(effects=INLINE)
    async def create(s: int = Depends(session)) -> str:
        return "done"

    for _ in range(3):
        await shop.send("/orders")
    await shop.send("/orders", key=None)
    assert ends == ["committed"] * 4


@pytest.mark.parametrize("effects", [LOCAL, OUTBOX])
async def test_a_request_scoped_dependency_warns_once_at_startup(
    caplog: pytest.LogCaptureFixture, effects: Effects
) -> None:
    # apishape 3, 9: if it commits, its rows can be lost behind a stored success
    shop = Shop()

    def settings() -> int:
        return 1

    async def classic_session() -> Any:
        yield 1

    async def repository(s: int = Depends(classic_session)) -> int:
        return s

    async def authenticate(s: int = Depends(classic_session)) -> int:
        return s

    def tidy() -> Any:
        yield 1

    router = APIRouter()

    @shop.once.protect(effects=effects, operation="create_order")
    async def create(
        op: Operation,
        r: int = Depends(repository),
        a: int = Depends(authenticate),
        t: int = Depends(tidy, scope="function"),
        s: int = Depends(settings),
    ) -> str:
        return "done"

    @shop.once.protect(effects=INLINE)
    async def mail(s: int = Depends(classic_session)) -> str:
        return "done"

    router.post("/orders")(create)
    router.post("/mails")(mail)

    shop.app.include_router(router, prefix="/v1")
    if effects is LOCAL:
        await shop.once.start(shop.app)
    else:
        warn_of_late_commits(shop.app)  # the start refuses this store, which has no outbox
    (warning,) = [record.getMessage() for record in caplog.records if "the store is memory" not in record.getMessage()]
    assert "create_order (/v1/orders) depends on" in warning
    assert "classic_session, which ends after the response was stored and sent" in warning
    assert "write through op.connection or once.session" in warning
    assert "scope=" not in warning  # its commit would be another one than the key's


async def test_a_failing_request_scoped_dependency_does_not_undo_the_response() -> None:
    # apishape 3: documented, not mended: the framework ends such a dependency after the answer
    shop = Shop()

    async def classic_session() -> Any:
        yield 1
        raise RuntimeError("the commit failed")

    @shop.post(effects=LOCAL, status_code=201)
    async def create(op: Operation, s: int = Depends(classic_session)) -> str:
        return "done"

    assert (await shop.send("/orders")).status == 201
    assert (await shop.send("/orders")).replayed


async def test_a_validation_error_leaves_nothing_behind() -> None:
    # R73, apishape 9: the wrapper is never reached
    shop = Shop()

    @shop.post(effects=LOCAL)
    async def create(item: Item, op: Operation, fail: bool = Depends(lambda: True)) -> str:
        return "done"

    caller = shop.caller("/orders", {"n": "x"})
    assert (await caller.run()).status == 422
    assert (shop.ledger.open, shop.ledger.log) == (0, [])


async def test_a_dependency_transaction_is_closed_if_validation_fails() -> None:
    # apishape 9: one connection would stay checked out for ever
    shop = Shop()

    lent = Depends(shop.once.connection)

    async def repository(connection: Any = lent) -> Any:
        return connection

    found = Depends(repository)

    @shop.post(effects=LOCAL, require_key=False)
    async def create(item: Item, op: Operation, rows: Any = found) -> str:
        assert rows is op.connection
        rows.add("row")
        return "done"

    for key in (KEY, None, "bad"):
        assert (await shop.send("/orders", {"n": "x"}, key=key)).status == 422
        assert (shop.ledger.open, shop.ledger.log.count("begin")) == (0, shop.ledger.log.count("rollback"))
    assert (await shop.send("/orders", {"n": 1})).status == 200
    assert (await shop.send("/orders", {"n": 1})).replayed
    assert (shop.ledger.rows, shop.ledger.open) == (["row"], 0)


async def test_an_outage_in_a_dependencys_function_returns_500(tmp_path: Path) -> None:
    shop, away = Shop(), Once(f"sqlite:///{tmp_path}/nowhere/shop.db")

    @away.function(key="name", effects=INLINE, operation="away")
    def ask(name: str) -> None:
        raise AssertionError

    lent = Depends(shop.once.connection)

    async def repository(connection: Any = lent) -> Any:
        await asyncio.to_thread(ask, "k-1")

    found = Depends(repository)

    @shop.post(effects=LOCAL)
    async def create(op: Operation, rows: Any = found) -> None:
        raise AssertionError

    assert (await shop.send("/orders")).status == 500
    assert (shop.ledger.open, shop.ledger.rows) == (0, [])


async def test_a_dependency_that_refuses_leaves_no_claim() -> None:
    # R73
    shop = Shop()

    def refuse() -> None:
        raise HTTPException(429)

    @shop.post(effects=INLINE)
    async def create(_: None = Depends(refuse)) -> str:
        shop.runs.append(1)
        return "done"

    assert (await shop.send("/orders")).status == 429
    assert (shop.runs, shop.ledger.log) == ([], [])


# ----------------------------------------------------------------------------------------------------- OpenAPI


def described(policy: Policy | None = None, **options: Any) -> dict[str, Any]:
    shop = Shop(policy=policy)

    @shop.post(effects=LOCAL, status_code=201, **options)
    async def create(item: Item, op: Operation) -> Item:
        return item

    about: dict[str, Any] = shop.app.openapi()["paths"]["/orders"]["post"]
    assert shop.app.openapi()["paths"]["/orders"]["post"] == about  # asked twice, written once
    return about


def parameter_of(about: dict[str, Any]) -> dict[str, Any]:
    (parameter,) = [parameter for parameter in about["parameters"] if parameter["in"] == "header"]
    found: dict[str, Any] = parameter
    return found


def test_openapi_has_the_header() -> None:
    # R228
    parameter = parameter_of(described())
    assert (parameter["name"], parameter["required"]) == ("Idempotency-Key", True)
    assert parameter["schema"] == {"type": "string", "minLength": 16, "maxLength": 255}
    assert "24 hours" in parameter["description"]
    assert "original response" in parameter["description"]
    assert "safe to retry" in parameter["description"]


def test_openapi_follows_the_policy() -> None:
    # R228: required per route, format by mode, hours as configured
    parameter = parameter_of(described(Policy(key_format=KeyFormat.UUID), require_key=False, ttl=48 * 3600))
    assert (parameter["required"], parameter["schema"]["format"]) == (False, "uuid")
    assert "48 hours" in parameter["description"]


@pytest.mark.parametrize(("syntax", "quoted"), [("strict", True), ("compat", False), ("bare", False)])
async def test_the_openapi_example_is_a_valid_key(syntax: Any, quoted: bool) -> None:
    # R228
    shop = Shop(policy=Policy(header_syntax=HeaderSyntax(syntax), key_format=KeyFormat.UUID))

    @shop.post(effects=INLINE)
    async def create() -> str:
        return "done"

    example = parameter_of(shop.app.openapi()["paths"]["/orders"]["post"])["example"]
    assert example.startswith('"') is quoted
    assert (await shop.send("/orders", key=example)).status == 200


def test_openapi_lists_every_oncekey_response() -> None:
    # R229
    responses = described()["responses"]
    for status in ("400", "409", "413", "422", "503"):
        assert "application/problem+json" in responses[status]["content"], status
    assert "Retry-After" in responses["409"]["headers"]
    assert "Retry-After" in responses["503"]["headers"]
    assert set(responses["201"]["headers"]) == {"Idempotency-Key", "Idempotency-Key-Expires", "Idempotent-Replayed"}
    # FastAPI's own description of a validation error stays.
    assert "application/json" in responses["422"]["content"]
    assert "application/json" in responses["201"]["content"]


def test_openapi_lists_202_for_accepted_duplicates() -> None:
    # R229
    accepted = described(on_in_progress="accepted")["responses"]["202"]
    assert set(accepted["headers"]) >= {"Retry-After", "Location"}
    assert "202" not in described()["responses"]


def test_openapi_media_types_follow_the_flavor() -> None:
    responses = described(Policy(flavor=Flavor.STRIPE))["responses"]
    assert "application/problem+json" in responses["400"]["content"]
    assert "application/problem+json" not in responses["422"]["content"]


@pytest.mark.parametrize("error_format", [ErrorFormat.FAULT, ErrorFormat.CODE])
def test_openapi_media_types_follow_the_error_format(error_format: ErrorFormat) -> None:
    # R229, C9
    responses = described(Policy(error_format=error_format))["responses"]
    assert set(responses["409"]["content"]) == {"application/json"}


async def test_openapi_includes_routes_added_after_install() -> None:
    # apishape 7
    shop = Shop()
    assert "/orders" not in shop.app.openapi()["paths"]

    @shop.post(effects=INLINE)
    async def create() -> str:
        return "done"

    shop.app.openapi_schema = None
    schema = (await shop.send("/openapi.json", method="GET", key=None)).json()
    assert "x-oncekey" in schema["paths"]["/orders"]["post"]
    status = schema["paths"]["/idempotency-keys/{key}"]["get"]
    assert "x-oncekey" not in status
    assert status["tags"] == ["idempotency"]


def test_openapi_omits_methods_without_a_key() -> None:
    # R14, R228
    shop = Shop()

    @shop.app.get("/orders")
    @shop.app.put("/orders")
    @shop.once.protect(effects=INLINE)
    async def create() -> str:
        return KEY

    about = shop.app.openapi()["paths"]["/orders"]
    assert "x-oncekey" in about["put"]
    assert "x-oncekey" not in about["get"]
