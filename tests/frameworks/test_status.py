"""The status resource and the page that refusals link to (R19, R29, R84)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import Response
from litestar import Litestar
from litestar.testing import TestClient

from frameworks.shop import KEY, Shop
from harness.asgi import until
from oncekey.core.errors import ConfigurationError
from oncekey.core.model import HOUR, INLINE, LOCAL
from oncekey.core.policy import Policy
from oncekey.litestar import OncePlugin
from oncekey.once import Once
from oncekey.testing.claims import ManualClock


def ordering(effects: Any = INLINE, **shopping: Any) -> Shop:
    shop = Shop(clock=ManualClock(), **shopping)

    @shop.post(effects=effects, status_code=201, operation="create_order")
    async def create(request: Request, way: str = "") -> Response:
        shop.runs.append(way)
        if way == "crash":
            raise RuntimeError("secret")
        return Response(b"\xff\xfe" if way == "binary" else '{"name":"ż"}'.encode(), 201, {"location": "/orders/7"})

    return shop


async def status(shop: Shop, key: str = KEY, **request: Any) -> Any:
    return await shop.send(f"/idempotency-keys/{key}", method="GET", key=None, **request)


async def test_a_completed_operation_shows_its_stored_response() -> None:
    # R84
    shop = ordering()
    await shop.send("/orders")
    reply = await status(shop)
    assert (reply.status, reply.header("cache-control"), reply.header("retry-after")) == (200, "no-store", None)
    said = reply.json()
    assert said["state"] == "completed"
    assert (said["outcome"], said["operation"], said["attempts"]) == ("success", "create_order", 1)
    assert (said["method"], said["path"]) == ("POST", "/orders")
    assert said["response"] == {"status": 201, "headers": [["location", "/orders/7"]], "body": '{"name":"ż"}'}
    assert said["expires_at"].endswith("Z")


async def test_a_binary_body_is_shown_in_base64() -> None:
    shop = ordering()
    await shop.send("/orders?way=binary")
    assert (await status(shop)).json()["response"]["body_base64"] == "//4="


async def test_an_oversized_response_is_shown_as_not_stored() -> None:
    # A4
    shop = ordering(policy=Policy(max_response_bytes=3))
    await shop.send("/orders")
    said = (await status(shop)).json()["response"]
    assert (said["stored"], said["status"], "body" in said) == (False, 201, False)


@pytest.mark.parametrize(("effects", "state"), [(LOCAL, "failed_retryable"), (INLINE, "unknown")])
async def test_a_failed_operation_shows_no_internal_fields(effects: Any, state: str) -> None:
    # R42, R84, R143
    shop = ordering(effects)
    await shop.send("/orders?way=crash")
    reply = await status(shop)
    assert (reply.json()["state"], reply.json()["last_error"]) == (state, "handler_raised")
    assert (reply.header("retry-after") is not None) is (state == "unknown")
    for hidden in ("fingerprint", "seed", "scope", "owner", "secret"):
        assert hidden not in reply.body.decode()


async def test_a_running_operation_has_a_retry_after_header() -> None:
    # R83, R84
    shop = Shop()
    go_on = asyncio.Event()

    @shop.post(effects=INLINE)
    async def create() -> str:
        shop.runs.append(1)
        await go_on.wait()
        return "done"

    task = asyncio.create_task(shop.send("/orders"))
    await until(lambda: shop.runs)
    reply = await status(shop)
    assert (reply.json()["state"], reply.json()["response"], reply.header("retry-after")) == ("in_progress", None, "1")
    go_on.set()
    await task


async def test_foreign_unknown_and_expired_keys_return_the_same_404() -> None:
    # R29, R84, R194, C18: foreign, unknown and expired are one and the same answer
    shop = ordering()
    await shop.send("/orders")
    foreign = await status(shop, headers=[("X-Tenant", "globex")])
    unknown = await status(shop, "nobody-knows-this-one")
    assert shop.clock is not None
    shop.clock.advance(25 * HOUR)
    expired = await status(shop)
    for reply in (foreign, unknown, expired):
        assert (reply.status, reply.code) == (404, "idempotency_key_not_found")
    assert foreign.lines == unknown.lines == expired.lines
    bodies = [{**reply.json(), "instance": "of its own"} for reply in (foreign, unknown, expired)]
    assert bodies[0] == bodies[1] == bodies[2]


async def test_the_status_url_accepts_every_key_character() -> None:
    shop = ordering()
    key = "a/b?c#d%e f+g=h\\i~j.k"
    first = await shop.send("/orders", key=f'"{key}"'.replace("\\", "\\\\"))
    assert first.status == 201
    (installation,) = shop.once._installed.values()
    place = installation.status_url("", key, "order")
    assert place is not None
    assert (await shop.send(place, method="GET", key=None)).json()["key"] == key


async def test_the_status_resource_returns_503_during_an_outage() -> None:
    # R110
    shop = ordering()
    shop.ledger.dead = True
    reply = await status(shop)
    assert (reply.status, reply.code, reply.header("retry-after")) == (503, "idempotency_store_unavailable", "1")


async def test_the_status_resource_uses_the_status_dependencies() -> None:
    # R20, R186
    def authenticate(request: Request) -> None:
        if "x-token" not in request.headers:
            raise HTTPException(401)
        request.state.tenant = request.headers["x-token"]

    shop = Shop(tenant=lambda request: request.state.tenant, status_dependencies=[Depends(authenticate)])

    @shop.post(effects=INLINE)
    async def create(_: None = Depends(authenticate)) -> str:
        return "done"

    assert (await shop.send("/orders", headers=[("X-Token", "acme")])).status == 200
    assert (await status(shop)).status == 401
    assert (await status(shop, headers=[("X-Token", "acme")])).status == 200
    assert (await status(shop, headers=[("X-Token", "globex")])).status == 404


async def test_an_unauthenticated_status_resource_names_status_dependencies() -> None:
    def authenticate(request: Request) -> None:
        request.state.tenant = "acme"

    shop = Shop(tenant=lambda request: request.state.tenant)

    @shop.post(effects=INLINE)
    async def create(_: None = Depends(authenticate)) -> str:
        return "done"

    assert (await shop.send("/orders")).status == 200
    with pytest.raises(ConfigurationError, match=r"no 'tenant' on the request: .* status_dependencies=\[Depends"):
        await shop.caller(f"/idempotency-keys/{KEY}", method="GET", key=None).run(raising=True)


def test_an_unauthenticated_status_resource_of_litestar_names_status_guards(tmp_path: Path) -> None:
    once = Once(f"sqlite:///{tmp_path}/shop.db", migrate=True)
    raised: list[str] = []

    async def note(error: Exception, _: object) -> None:
        raised.append(str(error))

    plugin = OncePlugin(once, tenant=lambda request: request.state.tenant)
    with TestClient(Litestar(plugins=[plugin], after_exception=[note])) as client:
        assert client.get(f"/idempotency-keys/{KEY}").status_code == 500
    assert "no 'tenant' on the request: the status resource" in raised[0]
    assert "status_guards=[...]" in raised[0]


async def test_the_status_path_can_be_changed_or_disabled() -> None:
    shop = Shop(status="/v1/keys/")

    @shop.post(effects=INLINE, max_response_bytes=0)
    async def create() -> str:
        return "done"

    await shop.send("/orders")
    place = (await shop.send("/orders")).header("location")
    assert place == f"/v1/keys/{KEY}"
    assert (await shop.send(place, method="GET", key=None)).status == 200
    without = Shop(status=None)

    @without.post(effects=INLINE, max_response_bytes=0)
    async def create_too() -> str:
        return "done"

    await without.send("/orders")
    assert (await without.send("/orders")).header("location") is None
    assert (await without.send(f"/idempotency-keys/{KEY}", method="GET", key=None)).status == 404


async def test_the_status_location_includes_the_root_path() -> None:
    # root_path: behind a proxy that strips a prefix
    shop = Shop()

    @shop.post(effects=INLINE, max_response_bytes=0)
    async def create() -> str:
        return "done"

    await shop.send("/api/orders", root_path="/api")
    again = await shop.send("/api/orders", root_path="/api")
    place = again.header("location")
    assert place == f"/api/idempotency-keys/{KEY}"
    assert (await shop.send(place, method="GET", key=None, root_path="/api")).status == 200


async def test_the_status_location_excludes_the_mount_path() -> None:
    # a mount changes the scope's root_path in place
    shop = Shop()
    inner = FastAPI()

    @inner.post("/orders")
    @shop.once.protect(effects=INLINE, max_response_bytes=0)
    async def create() -> str:
        return "done"

    shop.app.mount("/inner", inner)
    await shop.send("/inner/orders")
    place = (await shop.send("/inner/orders")).header("location")
    assert place == f"/idempotency-keys/{KEY}"
    assert (await shop.send(place, method="GET", key=None)).status == 200


async def test_the_status_resource_respects_principal_binding() -> None:
    # R28
    shop = Shop(policy=Policy(bind_to="principal"), principal=lambda request: request.headers["x-user"])  # type: ignore[arg-type]

    @shop.post(effects=INLINE)
    async def create() -> str:
        return "done"

    await shop.send("/orders", headers=[("X-User", "ann")])
    assert (await status(shop, headers=[("X-User", "ann")])).status == 200
    assert (await status(shop, headers=[("X-User", "bob")])).status == 404


async def test_the_page_linked_from_refusals_exists() -> None:
    # R11, R230
    shop = ordering()
    refusal = await shop.send("/orders", key=None)
    link = (refusal.header("link") or "").partition(">")[0].strip("<")
    path, _, anchor = link.partition("#")
    page = await shop.send(path, method="GET", key=None)
    assert (page.status, page.header("content-type")) == (200, "text/html; charset=utf-8")
    assert f'id="{anchor}"' in page.body.decode()
