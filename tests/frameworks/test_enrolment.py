"""Enrolling a handler: what the framework sees of it, and the sentence that fixes each wrong use."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ClassVar

import pytest
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from flask.views import MethodView
from litestar import post as litestar_post
from starlette.authentication import requires
from starlette.endpoints import HTTPEndpoint

from frameworks import plain_annotations, postponed_annotations
from frameworks.shop import KEY, LedgerOnce, Shop, new_key
from harness.ledger import Ledger
from oncekey.core.errors import ConfigurationError
from oncekey.core.model import INLINE, LOCAL, OUTBOX, PHASED, Effects
from oncekey.engine.operation import Operation, SyncOperation
from oncekey.frameworks.asgi.middleware import OncekeyMiddleware
from oncekey.once import SINGLE_TENANT, Once


def a_once() -> Any:
    """For calls that the type checker would refuse."""
    return LedgerOnce(Ledger())


# ------------------------------------------------------------------------------------------- what is seen of it


WAYS = ["typed", "aliased", "named", "dotted", "quoted", "optional", "first", "keyword", "blocking"]


@pytest.mark.parametrize("module", [plain_annotations, postponed_annotations])
@pytest.mark.parametrize("way", WAYS)
async def test_every_annotation_style_injects_the_operation(module: Any, way: str) -> None:
    # apishape 2, 9: `from __future__ import annotations` included
    shop = Shop()
    module.serve(shop.app, shop.once)
    first = await shop.send(f"/{way}", {"n": 7})
    assert (first.status, first.json()) == (200, [KEY, 7])
    assert (await shop.send(f"/{way}", {"n": 7})).replayed
    about = shop.app.openapi()["paths"][f"/{way}"]["post"]
    assert [parameter["name"] for parameter in about["parameters"]] == ["Idempotency-Key"]
    assert "op" not in str(about["requestBody"]).replace("opera", "")


async def test_a_handler_without_op_is_protected() -> None:
    shop = Shop()

    @shop.post(effects=INLINE)
    async def create(n: int) -> int:
        """What it does."""
        shop.runs.append(n)
        return n

    for _ in range(2):
        assert (await shop.send("/orders?n=7")).json() == 7
    assert shop.runs == [7]


def test_a_protected_handler_keeps_its_name_and_shows_no_operation() -> None:
    once = a_once()

    @once.protect(effects=INLINE)
    async def create(n: int, op: Operation) -> int:
        """What it does."""
        return n

    assert (create.__name__, create.__doc__, create.__module__) == ("create", "What it does.", __name__)
    assert list(inspect.signature(create).parameters) == ["n"]
    assert "op" not in create.__annotations__
    assert inspect.iscoroutinefunction(create)
    assert create.__oncekey__.operation.endswith("<locals>.create")


# --------------------------------------------------------------------------------------------- in a unit test


async def test_a_unit_test_may_pass_an_operation_to_a_handler() -> None:
    once = a_once()

    @once.protect(effects=LOCAL)
    async def create(n: int, op: Operation[list[int]]) -> int:
        op.connection.append(n)
        return n

    @once.protect(effects=LOCAL)
    def create_too(n: int, op: SyncOperation[list[int]]) -> int:
        op.connection.append(n)
        return n

    written: list[int] = []
    assert await create(7, op=Operation(key="k", scope="s", connection=written)) == 7
    assert await create(8, Operation(key="k", scope="s", connection=written)) == 8
    assert await create_too(9, SyncOperation(key="k", scope="s", connection=written)) == 9
    assert written == [7, 8, 9]


async def test_calling_a_handler_outside_a_request_raises() -> None:
    once = a_once()

    @once.protect(effects=INLINE)
    async def create(op: Operation) -> None: ...

    @once.protect(effects=INLINE)
    def create_too(op: SyncOperation) -> None: ...

    with pytest.raises(RuntimeError, match="create is protected, and was called outside of a request, or"):
        await create()
    with pytest.raises(RuntimeError, match="create_too is protected, and was called outside of a request"):
        create_too()


async def test_a_protected_handler_calling_another_raises() -> None:
    # L7
    shop = Shop()

    @shop.post("/inner", effects=INLINE)
    async def inner() -> str:
        return "inner"

    @shop.post("/outer", effects=INLINE)
    async def outer() -> Any:
        return await inner()

    with pytest.raises(
        RuntimeError, match="a protected handler was called by another one: one request is one operation"
    ):
        await shop.caller("/outer").run(raising=True)
    assert shop.state == "unknown"


async def test_a_handler_may_pass_its_operation_to_another_handler() -> None:
    shop = Shop()

    @shop.post("/inner", effects=LOCAL)
    async def inner(op: Operation) -> str:
        op.connection.add("row")
        return "inner"

    @shop.post("/outer", effects=LOCAL)
    async def outer(op: Operation) -> str:
        return await inner(op=op)

    assert (await shop.send("/outer")).json() == "inner"
    assert (shop.ledger.rows, len(shop.ledger.records)) == (["row"], 1)


async def test_a_blocking_handler_sees_the_context_of_its_request() -> None:
    # apishape 1: context variables are copied into the thread
    shop = Shop()
    user: ContextVar[str] = ContextVar("user", default="nobody")

    async def authenticate(request: Request) -> None:
        user.set(request.headers["x-user"])

    @shop.post(effects=INLINE, require_key=False)
    def create(_: None = Depends(authenticate)) -> str:
        return user.get()

    for key in (KEY, None):
        assert (await shop.send("/orders", key=key, headers=[("X-User", "ann")])).json() == "ann"


# ------------------------------------------------------------------------------------------------ wrong use


@pytest.mark.parametrize(
    "misuse", [lambda once: once.protect, lambda once: once.protect(), lambda once: once.protect(LOCAL)]
)
def test_effects_have_no_default(misuse: Any) -> None:
    # the error says what the four mean
    with pytest.raises(TypeError, match="declare the handler's side effects") as raised:

        @misuse(a_once())
        async def create() -> None: ...

    for word in ("effects=LOCAL (", "effects=PHASED (", "effects=OUTBOX (", "effects=INLINE ("):
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"effects": LOCAL, "leese": 3}, "leese is not a setting; the closest one is lease"),
        ({"effects": LOCAL, "require_key": "maybe"}, "require_key: 'maybe' is not allowed; allowed is True | False"),
        ({"effects": LOCAL, "on_5xx": "store"}, "on_5xx='store' with effects='local' is refused"),
        ({"effects": LOCAL, "ttl": 60}, "set allow_short_ttl=True if that is intended"),
        ({"effects": INLINE, "on_lease_expired": "retry"}, "set naturally_idempotent=True"),
        ({"effects": INLINE, "on_store_error": "fail_open"}, "set naturally_idempotent=True"),
        ({"effects": LOCAL, "lease": 10, "deadline": 5}, "make the lease shorter or the deadline longer"),
        ({"effects": LOCAL, "in_progress": "queue"}, "on_in_progress"),
        ({"effects": "locale"}, "declare the handler's side effects"),
        (
            {"effects": PHASED, "require_key": False},
            "with effects=PHASED a request is resumed by its key, so every request needs one",
        ),
        (
            {"effects": OUTBOX, "require_key": False},
            "with effects=OUTBOX a request is resumed by its key, so every request needs one",
        ),
    ],
)
def test_a_wrong_option_raises_with_a_suggestion(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ConfigurationError, TypeError)) as raised:

        @a_once().protect(**options)
        async def create() -> None: ...

    assert sentence in str(raised.value)


def test_effects_may_be_given_by_their_name() -> None:
    @a_once().protect(effects="inline")
    async def create() -> None: ...

    assert create.__oncekey__.effects is Effects.INLINE


def test_two_handlers_of_one_name_are_refused() -> None:
    once = a_once()

    @once.protect(effects=INLINE, operation="create")
    async def one() -> None: ...

    with pytest.raises(
        ConfigurationError,
        match=re.escape("two handlers have the name create: name one with @once.protect(operation=...)"),
    ):

        @once.protect(effects=INLINE, operation="create")
        async def two() -> None: ...


def test_a_generator_is_refused_when_it_is_decorated() -> None:
    # apishape 2
    once = a_once()
    with pytest.raises(ConfigurationError, match="return a StreamingResponse or the whole response"):

        @once.protect(effects=INLINE)
        async def stream() -> Any:
            yield 1

    with pytest.raises(ConfigurationError, match="return a StreamingResponse or the whole response"):

        @once.protect(effects=INLINE)
        def stream_too() -> Any:
            yield 1

    assert once.enrolled == {}


def test_the_wrong_operation_annotation_is_rejected_at_decoration() -> None:
    # apishape 4
    with pytest.raises(ConfigurationError, match="is `async def`, so annotate op as Operation, not SyncOperation"):

        @a_once().protect(effects=INLINE)
        async def create(op: SyncOperation) -> None: ...

    with pytest.raises(ConfigurationError, match="is `def`, so annotate op as SyncOperation, not Operation"):

        @a_once().protect(effects=INLINE)
        def create_too(op: Operation) -> None: ...


@pytest.mark.parametrize("thing", [HTTPEndpoint, "create", 7, None])
def test_only_a_function_can_be_protected(thing: Any) -> None:
    with pytest.raises(ConfigurationError, match=re.escape("@once.protect(...) goes above a function")):
        a_once().protect(effects=INLINE)(thing)


def _of_django(once: Once) -> type:
    @method_decorator(once.protect(effects=INLINE), name="post")
    class Orders(View):
        def post(self, request: Any) -> None: ...

    return Orders


def _of_django_for_all_methods(once: Once) -> type:
    @method_decorator([csrf_exempt, once.protect(effects=INLINE, operation="orders")], name="dispatch")
    class Orders(View):
        def post(self, request: Any) -> None: ...

    return Orders


def _of_django_above_the_method(once: Once) -> type:
    class Orders(View):
        @method_decorator(once.protect(effects=INLINE))
        async def post(self, request: Any) -> None: ...

    return Orders


def _of_flask(once: Once) -> Any:
    class Orders(MethodView):
        decorators: ClassVar = [once.protect(effects=INLINE, operation="orders")]

        def post(self) -> None: ...

    return Orders.as_view("orders")


@pytest.mark.parametrize("make", [_of_django, _of_django_for_all_methods, _of_django_above_the_method, _of_flask])
def test_a_decorator_of_a_class_cannot_protect_its_methods(make: Callable[[Once], Any]) -> None:
    # Django would decorate each request anew; and routes, which are listed by method, would count as open
    with pytest.raises(ConfigurationError, match="in a class directly above the method, without method_decorator"):
        make(a_once())


async def test_a_def_handler_that_returns_an_awaitable_raises() -> None:
    # a decorator that forgot to be `async def` would run in a thread and never be awaited
    shop = Shop()

    def sloppy(handler: Any) -> Any:
        @functools.wraps(handler)
        def call(*args: Any, **kwargs: Any) -> Any:
            return handler(*args, **kwargs)

        return call

    @shop.post(effects=INLINE)
    @sloppy
    async def create() -> str:
        shop.runs.append(1)
        return "done"

    with pytest.raises(TypeError, match="returned an awaitable: make it `async def`"):
        await shop.caller("/orders").run(raising=True)
    assert shop.runs == []


async def test_op_connection_is_for_local_handlers() -> None:
    shop = Shop()

    @shop.post(effects=INLINE)
    async def create(op: Operation) -> Any:
        return op.connection

    with pytest.raises(ConfigurationError, match=r"op\.connection is for effects=LOCAL"):
        await shop.caller("/orders").run(raising=True)


# ------------------------------------------------------------------------------------------------- installing


def test_install_without_a_tenant_is_rejected() -> None:
    # R23
    with pytest.raises(ConfigurationError, match="pass a function that returns the tenant of an authenticated request"):
        a_once().install(FastAPI())


async def test_single_tenant_shares_keys_between_all_clients() -> None:
    shop = Shop(tenant=SINGLE_TENANT)

    @shop.post(effects=INLINE)
    async def create() -> str:
        return "done"

    assert (await shop.send("/orders")).status == 200
    assert (await shop.send("/orders", headers=[("X-Tenant", "globex")])).replayed


def test_install_rejects_other_asgi_applications() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    with pytest.raises(ConfigurationError, match=re.escape("wrap others in once.asgi")):
        a_once().install(app, tenant=SINGLE_TENANT)


def test_installing_an_application_twice_is_rejected() -> None:
    shop = Shop()
    with pytest.raises(ConfigurationError, match=re.escape("once.install(app) was called twice for one application")):
        shop.once.install(shop.app, tenant=SINGLE_TENANT)


async def test_install_after_the_first_request_is_rejected() -> None:
    shop = Shop(install=False)
    await shop.send("/", key=None)
    with pytest.raises(
        ConfigurationError, match=re.escape("once.install(app) must come before the application's first request")
    ):
        shop.once.install(shop.app, tenant=SINGLE_TENANT)


@pytest.mark.parametrize("pattern", ["/orders", "post /orders", "POST orders", "", "POST"])
def test_an_enrolment_pattern_needs_a_method_and_a_path(pattern: str) -> None:
    once = a_once()
    enrolment = once.by_path(effects=INLINE, operation="x")
    with pytest.raises(ConfigurationError, match=re.escape("an enrolment pattern: write it as 'POST /path/{name}'")):
        once.install(FastAPI(), tenant=SINGLE_TENANT, enrol={pattern: enrolment})


def test_a_path_can_only_be_enrolled_as_inline() -> None:
    # adr 0007
    with pytest.raises(ConfigurationError, match="so its effects can only be INLINE"):
        a_once().by_path(effects=LOCAL, operation="x")


def checked_by(name: str) -> Any:
    """A decorator of this name that decides who may call."""

    def decorator(handler: Any) -> Any:
        @functools.wraps(handler)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            return await handler(*args, **kwargs)

        wrapper.__code__ = wrapper.__code__.replace(co_qualname=f"{name}.<locals>.decorator.<locals>.wrapper")
        return wrapper

    return decorator


async def secret(request: Request) -> Response:
    return Response("salaries")


def plain_secret(request: Request) -> Response:
    return Response("salaries")


@pytest.mark.parametrize("handler", [secret, plain_secret])
@pytest.mark.parametrize("framework", ["starlette", "fastapi", "litestar"])
def test_protection_above_an_authorization_decorator_is_rejected(handler: Any, framework: str) -> None:
    # R23: a clerk would get the stored answer of an admin. It is refused where it is decorated, in every framework.
    once = a_once()
    route: Any = {"starlette": lambda view: view, "fastapi": FastAPI().post("/x"), "litestar": litestar_post("/x")}
    with pytest.raises(ConfigurationError, match=r"is above requires, .* directly above the function"):
        route[framework](once.protect(effects=INLINE)(requires("admin")(handler)))
    requires("admin")(once.protect(effects=INLINE)(handler))  # as it should be


@pytest.mark.parametrize(
    "name", ["require_role", "has_permission", "admin_only", "roles_accepted", "fresh_jwt_required", "authenticated"]
)
def test_protection_above_a_custom_check_is_rejected(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"is above {name}, "):
        a_once().protect(effects=INLINE)(checked_by(name)(secret))


@pytest.mark.parametrize("name", ["logged", "retry", "require_POST", "author", "timed"])
def test_other_decorators_below_protection_are_accepted(name: str) -> None:
    a_once().protect(effects=INLINE)(checked_by(name)(secret))


# ------------------------------------------------------------------------------------------------ at start-up


async def test_protection_above_the_route_is_rejected_at_startup() -> None:
    # apishape 2, 9: without `op` nothing else would notice
    shop = Shop()

    @shop.once.protect(effects=INLINE)
    @shop.app.post("/orders")
    async def create() -> str:
        return "done"

    with pytest.raises(ConfigurationError, match=r"is served without its protection: move @once\.protect"):
        await shop.once.start(shop.app)


def test_protection_above_the_route_with_op_is_rejected_at_import() -> None:
    # apishape 2, 9
    shop = Shop()
    with pytest.raises(ConfigurationError, match="below the route decorator"):

        @shop.once.protect(effects=INLINE)
        @shop.app.post("/orders")
        async def create(op: Operation) -> str:
            return "done"


async def test_protection_above_an_included_route_is_rejected() -> None:
    shop = Shop()
    router = APIRouter(prefix="/v1")

    @shop.once.protect(effects=INLINE)
    @router.post("/orders")
    async def create() -> str:
        return "done"

    shop.app.include_router(router, prefix="/api")
    with pytest.raises(ConfigurationError, match="is served without its protection"):
        await shop.once.start(shop.app)


async def test_a_decorator_between_route_and_protection_is_accepted(caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop()

    def traced(handler: Any) -> Any:
        @functools.wraps(handler)
        async def call(*args: Any, **kwargs: Any) -> Any:
            return await handler(*args, **kwargs)

        return call

    @shop.app.post("/orders")
    @traced
    @shop.once.protect(effects=INLINE)
    async def create() -> str:
        return "done"

    await shop.once.start(shop.app)
    assert "no route serves it" not in caplog.text
    assert not (await shop.send("/orders")).replayed
    assert (await shop.send("/orders")).replayed


async def test_a_protected_handler_without_a_route_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop()

    @shop.once.protect(effects=INLINE)
    async def forgotten() -> None: ...

    await shop.once.start(shop.app)
    assert "forgotten is protected, but no route serves it" in caplog.text


async def test_middleware_inside_oncekeys_is_rejected_at_startup() -> None:
    # apishape 1: an inner compression's bytes would be stored
    shop = Shop()
    shop.app.user_middleware.append(shop.app.user_middleware[0])
    with pytest.raises(ConfigurationError, match="must be installed once and be the innermost"):
        await shop.once.start(shop.app)
    other = Shop()
    other.app.add_middleware(OncekeyMiddleware, installation=None)
    with pytest.raises(ConfigurationError, match=r"use app\.add_middleware for everything else"):
        await other.once.start(other.app)


async def test_local_needs_a_store_that_shares_transactions() -> None:
    # L8, F21
    once = Once("memory:")

    @once.protect(effects=LOCAL, operation="create_order")
    async def create(op: Operation) -> None: ...

    with pytest.raises(ConfigurationError, match="create_order: effects=LOCAL needs a store that shares"):
        await once.start()


async def test_a_failed_startup_closes_the_store() -> None:
    shop = Shop()

    @shop.once.protect(effects=INLINE)
    @shop.app.post("/orders")
    async def create() -> str:
        return "done"

    closed: list[int] = []

    async def stop() -> None:
        closed.append(1)

    shop.once.stop = stop  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError):
        async with shop.once.lifespan(shop.app):
            pass
    assert closed == [1]


async def test_a_route_added_after_startup_is_protected() -> None:
    shop = Shop()
    await shop.once.start(shop.app)

    @shop.post(effects=INLINE, max_request_bytes=3_000_000)
    async def late() -> str:
        return "done"

    assert (await shop.send("/orders", b"x" * 2_000_000)).status == 200
    assert (await shop.send("/orders", b"x" * 2_000_000)).replayed
    assert (await shop.send("/orders", b"x", key=new_key())).status == 200
