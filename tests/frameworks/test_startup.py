"""Every mistake of a first hour is one sentence when it is made or when the application starts, and no 503 later."""

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import Any

import flask
import httpx
import litestar
import pytest
from fastapi import FastAPI
from sqlalchemy.ext.asyncio import create_async_engine
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from frameworks.shop import KEY, LedgerOnce, Shop, tenant_of
from harness.asgi import Caller, call
from harness.ledger import Ledger
from harness.patience import PATIENCE
from harness.served import Served
from oncekey import (
    INLINE,
    LOCAL,
    OUTBOX,
    PHASED,
    SINGLE_TENANT,
    ConfigurationError,
    Once,
    Operation,
    Policy,
    SchemaError,
)
from oncekey.litestar import OncePlugin
from oncekey.once import startup

HEADERS = {"Idempotency-Key": KEY}


def sentence(raised: Any) -> str:
    """What is said; and nothing is printed above it that somebody would have to scroll through."""
    error = raised.value
    assert error.__suppress_context__ or error.__context__ is None
    said = str(error)
    assert "\n" not in said
    return said


# -------------------------------------------------------------------------------------------- when it is written


@pytest.mark.parametrize(
    ("store", "said"),
    [
        ("oracle://", "there is no store for oracle: keys can be stored in "),
        ("shop.db", "'shop.db' is not a store: use memory:"),
        ("sqlite://shop.db", "a SQLite store is a file: sqlite:///relative.db (three slashes)"),
        ("", "'' is not a store"),
        (7, "a store is a URL or a SQLAlchemy engine"),
    ],
)
def test_an_unknown_store_url_is_rejected(store: Any, said: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        Once(store)
    assert said in sentence(raised)


class Oracle:
    """As much of an engine as is looked at; no driver of that database is installed here."""

    class dialect:  # noqa: N801
        name = "oracle"

    sync_engine = None


def test_an_engine_of_an_unsupported_database_is_rejected() -> None:
    kind = type("AsyncEngine", (Oracle,), {"__module__": "sqlalchemy.ext.asyncio.engine"})
    with pytest.raises(ConfigurationError) as raised:
        Once(kind())
    assert "there is no store for oracle: create the engine for" in sentence(raised)
    Once(create_async_engine("postgresql+asyncpg://nowhere/nothing"))


def test_an_unknown_policy_setting_is_rejected() -> None:
    with pytest.raises(ConfigurationError) as raised:
        Policy(leas=3)
    assert sentence(raised) == "leas is not a setting; the closest one is lease"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"effects": LOCAL, "leas": 3}, "leas is not a setting; the closest one is lease"),
        ({"effects": LOCAL, "sweep_interval": 3}, "sweep_interval is a setting of the whole application: pass it as"),
        ({"effects": OUTBOX, "outbox_lease": 3}, "outbox_lease is a setting of the whole application"),
        ({"effects": LOCAL, "complete": False}, "complete has no effect with effects=LOCAL: it is for PHASED"),
        (
            {"effects": OUTBOX, "is_definitely_not_executed": bool},
            "is_definitely_not_executed has no effect with effects=OUTBOX: it is for INLINE and PHASED",
        ),
        ({"effects": PHASED, "not_executed_statuses": {401}}, "it is for INLINE"),
    ],
)
def test_an_option_without_effect_is_rejected(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        Once("memory:").protect(**options)
    assert said in sentence(raised)


def test_a_by_path_option_without_effect_is_rejected() -> None:
    with pytest.raises(ConfigurationError) as raised:
        Once("memory:").by_path(effects=INLINE, operation="x", complete=True)  # type: ignore[call-arg]
    assert "complete has no effect with effects=INLINE" in sentence(raised)


def test_an_op_parameter_without_annotation_is_rejected() -> None:
    once = Once("memory:")
    with pytest.raises(ConfigurationError) as raised:

        @once.protect(effects=INLINE)
        async def create(op) -> None: ...

    assert sentence(raised).endswith("would take for one of the request's: write op: Operation")
    with pytest.raises(ConfigurationError, match="write op: SyncOperation"):

        @once.protect(effects=INLINE)
        def create_too(op=None) -> None: ...

    @once.protect(effects=INLINE)
    async def calculate(op: str) -> None: ...  # the handler's own


def test_an_unknown_install_option_is_rejected() -> None:
    with pytest.raises(ConfigurationError) as raised:
        Once("memory:").install(FastAPI(), tennant=SINGLE_TENANT)  # type: ignore[call-arg]
    assert sentence(raised) == "once.install takes no tennant; the closest is tenant"


@pytest.mark.parametrize("tenant", ["acme", 7])
def test_a_tenant_that_is_not_callable_is_rejected(tenant: Any) -> None:
    with pytest.raises(ConfigurationError) as raised:
        Once("memory:").install(FastAPI(), tenant=tenant)
    assert "takes a function of the request that returns a string, or, in FastAPI, Depends(...)" in sentence(raised)


async def lived(app: Any, said: list[Any] | None = None) -> list[Any]:
    """What an application says to a server that starts and stops it."""
    asked, said = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}], [] if said is None else said

    async def receive() -> Any:
        return asked.pop(0)

    async def send(message: Any) -> None:
        said.append((message["type"].removeprefix("lifespan."), message.get("message", "")))

    await app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)
    return said


# ----------------------------------------------------------------------------------------------- when it starts


def orders(app: FastAPI, once: Once) -> list[int]:
    runs: list[int] = []

    @app.post("/orders")
    @once.protect(effects=LOCAL, operation="create_order")
    async def create(op: Operation) -> None:
        runs.append(1)

    return runs


def watched(tmp_path: Any, framework: str) -> tuple[Once, Any, list[str]]:
    """A shop of a framework, and what happens in it."""
    events: list[str] = []

    class Watched(Once):
        async def start(self, app: Any = None) -> None:
            await super().start(app)
            events.append("ours starts")

        async def drain(self) -> None:
            await super().drain()
            events.append("ours drains")

        async def stop(self) -> None:
            await super().stop()
            events.append("ours stops")

    once = Watched(f"sqlite:///{tmp_path}/a.db", migrate=True)

    @once.protect(effects=LOCAL, operation="create")
    async def create(request: Request, op: Operation) -> Response:
        return JSONResponse({"state": getattr(request.state, "pool", None)}, 201)

    @asynccontextmanager
    async def mine(_: Any) -> Any:
        events.append("the application starts")
        assert once.running  # the store is open
        yield {"pool": "mine"}
        assert once.running
        events.append("the application stops")

    make: Any = FastAPI if framework == "fastapi" else Starlette
    app = make(lifespan=mine, routes=[Route("/a", create, methods=["POST"])])
    return once, app, events


@pytest.mark.parametrize("framework", ["fastapi", "starlette"])
def test_once_starts_before_and_stops_after_the_application(tmp_path: Any, framework: str) -> None:
    # On a real server: the store is open for the application's start and stop, and all of ours ends before the latter.
    once, app, events = watched(tmp_path, framework)
    once.install(app, tenant=SINGLE_TENANT)
    with Served(app) as served:
        reply = httpx.post(f"http://127.0.0.1:{served.port}/a", headers=HEADERS)
        assert (reply.status_code, reply.json()) == (201, {"state": "mine"})
    assert events == [
        "ours starts",
        "the application starts",
        "ours drains",
        "the application stops",
        "ours drains",  # there is nothing left
        "ours stops",
    ]


@pytest.mark.parametrize("framework", ["fastapi", "starlette"])
async def test_an_explicit_lifespan_starts_once_only_once(
    tmp_path: Any, framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make: Any = FastAPI if framework == "fastapi" else Starlette
    once = Once(f"sqlite:///{tmp_path}/a.db", migrate=True, workers=True)
    app, checks = make(lifespan=once.lifespan), []
    once.install(app, tenant=SINGLE_TENANT)
    monkeypatch.setattr(startup, "check_settings", lambda *_: checks.append(1))
    async with app.router.lifespan_context(app):
        assert once.running
        workers = [task for task in asyncio.all_tasks() if task.get_name() == "oncekey-workers"]
        assert len(workers) == 1
    assert not once.running
    assert workers[0].done()
    assert checks == [1]


async def test_two_once_instances_share_one_application_lifespan(tmp_path: Any) -> None:
    app, first, second = FastAPI(), Once("memory:"), Once("memory:", policy=Policy(docs_url="/other"))
    first.install(app, tenant=SINGLE_TENANT)
    second.install(app, tenant=SINGLE_TENANT, status=None)
    async with app.router.lifespan_context(app):
        assert first.running
        assert second.running
    assert (first.running, second.running) == (False, False)


async def test_workers_run_only_while_the_application_does(tmp_path: Any) -> None:
    seen: list[bool] = []

    def working() -> bool:
        return any(task.get_name() == "oncekey-workers" for task in asyncio.all_tasks())

    @asynccontextmanager
    async def mine(_: Any) -> Any:
        seen.append(working())
        yield
        seen.append(working())

    app, once = FastAPI(lifespan=mine), Once(f"sqlite:///{tmp_path}/a.db", migrate=True, workers=True)
    once.install(app, tenant=SINGLE_TENANT)
    async with app.router.lifespan_context(app):
        seen.append(working())
    assert seen == [False, True, False]


async def test_a_failed_start_is_repeated_in_full(tmp_path: Any) -> None:
    once = Once(f"sqlite:///{tmp_path}/a.db")
    for _ in range(2):
        with pytest.raises(SchemaError, match="oncekey migrate up"):
            await once.start()
        assert not once.running


async def test_a_replaced_lifespan_fails_the_startup() -> None:
    once, app = Once("memory:"), FastAPI()
    own = app.router.lifespan_context
    once.install(app, tenant=SINGLE_TENANT)
    app.router.lifespan_context = own
    said: list[Any] = []
    with pytest.raises(ConfigurationError):
        await lived(app, said)
    ((kind, message),) = said
    assert kind == "startup.failed"
    assert "once.lifespan is not running" in message


def test_a_server_without_lifespan_returns_500_and_logs_why(
    tmp_path: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    once, app, events = watched(tmp_path, "starlette")
    once.install(app, tenant=SINGLE_TENANT)
    # Another test's server may have configured uvicorn's loggers, which then pass nothing on to the root logger.
    monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)
    with Served(app, lifespan="off", log_level="error", log_config=None) as served:
        assert httpx.post(f"http://127.0.0.1:{served.port}/a", headers=HEADERS).status_code == 500
    assert events == []
    assert "let the server run the application's lifespan (uvicorn: without `--lifespan off`)" in caplog.text


async def test_a_request_without_a_started_lifespan_raises(tmp_path: Any) -> None:
    # A server's start-up is not there to say it; a 503 for tables that nobody made would say something else.
    once, app = Once(f"sqlite:///{tmp_path / 'a.db'}", migrate=True), FastAPI(lifespan=None)
    once.install(app, tenant=SINGLE_TENANT)
    runs = orders(app, once)
    with pytest.raises(ConfigurationError, match=r"app\.router\.lifespan_context\(app\)"):
        await Caller(app, "POST", "/orders", headers=HEADERS).run(raising=True)
    assert runs == []
    async with once.lifespan(app):
        assert (await call(app, "POST", "/orders", headers=HEADERS)).status == 200
    assert runs == [1]


@pytest.mark.parametrize("protected", [True, False])
async def test_a_mounted_application_needs_its_parents_lifespan(tmp_path: Any, *, protected: bool) -> None:
    outer, inner = (Once(f"sqlite:///{tmp_path / name}.db", migrate=True) for name in ("outer", "inner"))
    app, api = FastAPI(), FastAPI()  # no server enters the second one's lifespan
    inner.install(api, tenant=SINGLE_TENANT)
    orders(api, inner)
    app.mount("/v1", api)
    if protected:  # it fails at start-up
        outer.install(app, tenant=SINGLE_TENANT)
    with pytest.raises(ConfigurationError, match=r"parent enters `async with once\.lifespan\(api\):`"):
        await (lived(app) if protected else Caller(app, "POST", "/v1/orders", headers=HEADERS).run(raising=True))


async def test_a_stopped_once_is_not_running() -> None:
    once = Once("memory:")
    await once.start()
    assert once.running
    await once.stop()
    assert not once.running
    with pytest.raises(ConfigurationError):
        once.asynchronous()


# ------------------------------------------------------------------------------------- once.asgi and its lifespan


def wrapped(inner: Any, ledger: Ledger, **patterns: Any) -> Any:
    once = LedgerOnce(ledger)
    enrolment = once.by_path(effects=INLINE, operation="orders")
    return once.asgi(inner, tenant=lambda _: "acme", enrol={"POST /orders": enrolment})


async def asserts_http(scope: Any, receive: Any, send: Any) -> None:
    assert scope["type"] == "http"


async def ignores_lifespans(scope: Any, receive: Any, send: Any) -> None:
    return


@pytest.mark.parametrize("inner", [asserts_http, ignores_lifespans])
async def test_an_application_without_a_lifespan_gets_one(inner: Any) -> None:
    ledger = Ledger()
    assert await lived(wrapped(inner, ledger)) == [("startup.complete", ""), ("shutdown.complete", "")]
    assert ledger.log == ["close"]


async def test_an_application_lifespan_runs_inside_oncekeys() -> None:
    ledger, events = Ledger(), []

    @asynccontextmanager
    async def mine(app: Any) -> Any:
        events.append("begins")
        yield {"database": 1}
        events.append(("ends", list(ledger.log)))

    app = FastAPI(lifespan=mine)
    app.post("/orders")(lambda: None)
    assert await lived(wrapped(app, ledger)) == [("startup.complete", ""), ("shutdown.complete", "")]
    assert (events, ledger.log) == (["begins", ("ends", [])], ["close"])


async def test_a_failed_application_startup_is_forwarded() -> None:
    ledger = Ledger()

    async def fails(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no licence"})

    assert await lived(wrapped(fails, ledger)) == [("startup.failed", "no licence")]
    assert ledger.log == ["close"]


async def test_a_failed_application_shutdown_is_forwarded() -> None:
    async def fails(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.failed", "message": "lost"})
        await receive()  # and waits for ever

    assert await lived(wrapped(fails, Ledger())) == [("startup.complete", ""), ("shutdown.failed", "lost")]


async def test_a_failed_schema_check_fails_the_startup(tmp_path: Any) -> None:
    once = Once(f"sqlite:///{tmp_path / 'a.db'}")  # nobody made the tables
    said: list[Any] = []
    with pytest.raises(SchemaError, match="oncekey migrate up"):
        await lived(once.asgi(asserts_http, tenant=lambda _: "acme", enrol={}), said)
    ((kind, message),) = said
    assert kind == "startup.failed"
    assert "oncekey migrate up" in message


def test_once_asgi_serves_an_application_over_a_socket(tmp_path: Any) -> None:
    runs: list[int] = []

    async def bare(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        runs.append(1)
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    once = Once(f"sqlite:///{tmp_path / 'a.db'}", migrate=True)
    enrolment = once.by_path(effects=INLINE, operation="create_job")
    app = once.asgi(bare, tenant=lambda _: "acme", enrol={"POST /jobs": enrolment})
    with Served(app) as server, httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE) as client:
        replies = [client.post("/jobs", headers=HEADERS) for _ in range(2)]
    assert [(reply.status_code, reply.text) for reply in replies] == [(201, "done")] * 2
    assert runs == [1]


# --------------------------------------------------------------------------------------------- enrolled by path


@pytest.mark.parametrize(
    ("pattern", "path", "methods"),
    [
        ("POST /orders/{id}", "/orders/{order:int}", ["POST"]),
        ("POST /orders/{rest:path}", "/orders/{order}/items", ["POST"]),
        ("PUT /files/{name}", "/files/{id:uuid}", ["PUT"]),
    ],
)
async def test_a_pattern_that_matches_a_route_is_accepted(pattern: str, path: str, methods: list[str]) -> None:
    once, app = LedgerOnce(Ledger()), FastAPI()
    once.install(app, tenant=tenant_of, enrol={pattern: once.by_path(effects=INLINE, operation="x")})
    app.add_api_route(path, lambda: None, methods=methods)
    await once.start(app)


@pytest.mark.parametrize("pattern", ["POST /order", "PUT /orders", "POST /api/orders", "POST /orders/", "POST /v1/x"])
async def test_a_pattern_without_a_matching_route_is_rejected(pattern: str) -> None:
    # it would protect nothing
    once, app = LedgerOnce(Ledger()), FastAPI()
    once.install(app, tenant=tenant_of, enrol={pattern: once.by_path(effects=INLINE, operation="x")})
    app.add_api_route("/orders", lambda: None, methods=["POST"])
    app.mount("/v1", Starlette())
    with pytest.raises(ConfigurationError) as raised:
        await once.start(app)
    assert f"enrol={{'{pattern}': ...}} protects nothing: no route of the application matches it" in sentence(raised)


@pytest.mark.parametrize(
    ("pattern", "path"), [("POST /orders/7", "/orders/{order:int}"), ("POST /a/b/c", "/{rest:path}")]
)
async def test_a_pattern_with_a_literal_parameter_value_is_rejected(pattern: str, path: str) -> None:
    # the route serves other spellings of the same value: /orders/007
    once, app = LedgerOnce(Ledger()), FastAPI()
    once.install(app, tenant=tenant_of, enrol={pattern: once.by_path(effects=INLINE, operation="x")})
    app.add_api_route(path, lambda: None, methods=["POST"])
    with pytest.raises(ConfigurationError, match="no route of the application matches it"):
        await once.start(app)


async def test_a_pattern_below_an_opaque_mount_is_accepted() -> None:
    once, app = LedgerOnce(Ledger()), FastAPI()
    enrolment = once.by_path(effects=INLINE, operation="x")
    once.install(app, tenant=tenant_of, enrol={"POST /old/pay": enrolment})
    app.router.routes.append(Mount("/old", app=asserts_http))
    await once.start(app)
    asgi = once.asgi(asserts_http, tenant=lambda _: "acme", enrol={"POST /anything": enrolment})
    await once.start(asgi)


@pytest.mark.parametrize("wrap", ["install", "asgi"])
@pytest.mark.parametrize(
    ("root", "path"),
    [
        ("", "/orders"),
        ("/api", "/api/orders"),  # a server that says where it is mounted, in both
        ("/api", "/orders"),  # a proxy that strips it
        ("/api/", "/api/orders"),
    ],
)
async def test_patterns_match_paths_without_the_root_path(wrap: str, root: str, path: str) -> None:
    # R11, R32
    once, runs = LedgerOnce(Ledger()), []
    app = FastAPI()

    @app.post("/orders")
    async def create() -> int:
        runs.append(1)
        return len(runs)

    patterns = {"POST /orders": once.by_path(effects=INLINE, operation="orders")}
    served: Any = app
    if wrap == "install":
        once.install(app, tenant=lambda _: "acme", enrol=patterns)
    else:
        served = once.asgi(app, tenant=lambda _: "acme", enrol=patterns)
    if root.endswith("/") and wrap == "asgi":
        served.app = lambda scope, receive, send: app({**scope, "root_path": "/api"}, receive, send)
    elif root.endswith("/"):
        root = root.rstrip("/")
    replies = [await call(served, "POST", path, headers=HEADERS, root_path=root) for _ in range(2)]
    assert [(reply.status, reply.replayed) for reply in replies] == [(200, False), (200, True)]
    assert (await call(served, "POST", path, root_path=root)).code == "idempotency_key_missing"
    assert runs == [1]


async def test_a_path_sharing_a_root_path_prefix_is_kept() -> None:
    once, seen = LedgerOnce(Ledger()), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    enrolment = once.by_path(effects=INLINE, operation="orders")
    served = once.asgi(app, tenant=lambda _: "acme", enrol={"POST /v2/orders": enrolment})
    for _ in range(2):
        await call(served, "POST", "/api/v2/orders", headers=HEADERS, root_path="/api")
        await call(served, "POST", "/apiv2/v2/orders", headers=HEADERS, root_path="/api")
    assert seen == ["/api/v2/orders", "/apiv2/v2/orders", "/apiv2/v2/orders"]


async def test_a_mounted_application_enrols_by_its_own_paths() -> None:
    once, inner, outer = LedgerOnce(Ledger()), Shop(install=False).app, FastAPI()
    inner.post("/orders")(lambda: "done")
    once.install(inner, tenant=tenant_of, enrol={"POST /orders": once.by_path(effects=INLINE, operation="x")})
    outer.mount("/v1", inner)
    async with once.lifespan(inner):
        replies = [await call(outer, "POST", "/v1/orders", headers=HEADERS) for _ in range(2)]
    assert [reply.replayed for reply in replies] == [False, True]


# ------------------------------------------------------------------------------------------------- who calls it


def attached(kind: str, **install: Any) -> None:
    """Attach a Once in one of the ways that have a tenant."""
    policy = install.pop("policy", None)
    once = Once("memory:", policy=policy)
    options = {"tenant": SINGLE_TENANT} | install
    match kind:
        case "starlette":
            once.install(Starlette(), **options)
        case "asgi":
            options.pop("status", None)
            once.asgi(Starlette(), enrol={}, **options)
        case "litestar":
            litestar.Litestar(plugins=[OncePlugin(once, **options)])
        case "flask":
            once.flask(flask.Flask("shop"), **options)
        case _:
            once.wsgi(flask.Flask("shop"), **options)


KINDS = ("starlette", "asgi", "litestar", "flask", "wsgi")


@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_principals_need_a_principal(kind: str) -> None:
    # R28: known at start-up, and not with the first request
    with pytest.raises(ConfigurationError, match=r'bind_to="principal".*pass principal='):
        attached(kind, policy=Policy(bind_to="principal"))
    attached(kind, policy=Policy(bind_to="principal"), principal=SINGLE_TENANT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["tenant", "principal"])
def test_a_tenant_that_is_no_function_is_rejected(kind: str, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}.* a function"):
        attached(kind, **{name: "acme"})


@pytest.mark.parametrize("kind", ["starlette", "litestar", "flask", "wsgi"])
def test_a_status_path_without_a_slash_is_rejected(kind: str) -> None:
    with pytest.raises(ConfigurationError, match="status='keys' is not a path: write status='/keys'"):
        attached(kind, status="keys")


def test_a_handler_is_protected_once() -> None:
    once = Once("memory:")

    @once.protect(effects=INLINE)
    async def pay() -> None:
        pass

    with pytest.raises(ConfigurationError, match="pay is protected twice"):
        once.protect(effects=INLINE, operation="again")(pay)


def test_a_handler_has_one_operation() -> None:
    async def pay(op: Operation[Any], other: Operation[Any]) -> None:
        pass

    with pytest.raises(ConfigurationError, match="pay has 2 parameters of type Operation: one is enough"):
        Once("memory:").protect(effects=INLINE)(pay)


def test_an_operation_that_only_type_checkers_know_is_rejected() -> None:
    once = Once("memory:")

    async def pay(op: "Op[Any]") -> None:  # type: ignore[name-defined]  # noqa: F821
        pass

    async def legacy(op: "str") -> None:
        pass

    with pytest.raises(ConfigurationError, match=r"pay: the annotation Op\[Any\] of op exists for type checkers only"):
        once.protect(effects=INLINE)(pay)
    once.protect(effects=INLINE)(legacy)  # a parameter of the request's may have that name


def test_unknown_effects_are_named() -> None:
    with pytest.raises(TypeError, match=r"write @once.protect\(effects=...\), not effects='lokal'"):
        Once("memory:").protect(effects="lokal")  # type: ignore[call-overload]
