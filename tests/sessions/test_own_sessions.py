"""A LOCAL handler that writes by a connection of its own is named: at start-up, when it opens one, and by `routes`."""

import json
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import flask
import litestar
import pytest
from fastapi import Depends, FastAPI
from litestar.di import Provide
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from harness.asgi import call
from oncekey import INLINE, LOCAL, OUTBOX, SINGLE_TENANT, Once, Operation, SyncOperation
from oncekey.litestar import OncePlugin
from oncekey.once.route_report import Protection, route_lines

AT_START = "takes neither op nor once.session or once.connection"
AT_RUN = "opened its own connection while it ran"
ADD = text("INSERT INTO sold (item) VALUES ('tea')")
EVERY = {"litestar", "starlette", "fastapi", "flask", "wsgi", "function", "inbox"}


def warned(caplog: pytest.LogCaptureFixture, sentence: str) -> list[str]:
    """Whose names are in the warnings, by the logger that turns them down."""
    said = [record for record in caplog.records if record.name == "oncekey.local" and sentence in record.getMessage()]
    assert {record.levelname for record in said} <= {"WARNING"}
    return [record.getMessage().split()[1] for record in said]


# What each framework can hand a handler, and what is said of it before the first request.


class Told:
    """One application with several handlers, started; each handler's name says what it takes."""

    def __init__(self, once: Once) -> None:
        self.once = once

    async def started(self, app: Any) -> list[Protection]:
        async with self.once.lifespan(app):
            return self.verdicts()

    def verdicts(self) -> list[Protection]:
        found = route_lines([self.once], self.once.served)
        return [Protection(one.verdict) for one in found if str(one.operation).endswith("neither")]

    async def fastapi(self) -> list[Protection]:
        once, app = self.once, FastAPI()

        async def repository(session: Annotated[Any, Depends(once.connection)]) -> Any:
            return session

        @app.post("/neither")
        @once.protect(effects=LOCAL, operation="neither")
        async def neither() -> None: ...

        @app.post("/op")
        @once.protect(effects=LOCAL)
        async def by_op(op: Operation) -> None: ...

        @app.post("/def")
        @once.protect(effects=OUTBOX)
        def by_def(op: SyncOperation) -> None: ...

        @app.post("/session")
        @once.protect(effects=LOCAL)
        async def by_session(session: Annotated[Any, Depends(once.session)]) -> None: ...

        @app.post("/inner")
        @once.protect(effects=LOCAL)
        async def by_inner(inner: Annotated[Any, Depends(repository)]) -> None: ...

        @app.post("/inline")
        @once.protect(effects=INLINE)
        async def inline() -> None: ...

        once.install(app, tenant=SINGLE_TENANT)
        return await self.started(app)

    async def starlette(self) -> list[Protection]:
        once = self.once

        @once.protect(effects=LOCAL, operation="neither")
        async def neither(request: Request) -> JSONResponse:
            return JSONResponse({})

        @once.protect(effects=LOCAL)
        async def by_asking(request: Request) -> JSONResponse:
            return JSONResponse({"is": str(await once.connection())})

        @once.protect(effects=LOCAL)
        async def by_asking_farther(request: Request) -> JSONResponse:
            return JSONResponse({"is": str(await self.once.session())})

        served = (neither, by_asking, by_asking_farther)
        app = Starlette(routes=[Route(f"/{one.__name__}", one, methods=["POST"]) for one in served])
        once.install(app, tenant=SINGLE_TENANT)
        return await self.started(app)

    async def litestar(self) -> list[Protection]:
        once = self.once

        @litestar.post("/neither")
        @once.protect(effects=LOCAL, operation="neither")
        async def neither() -> None: ...

        @litestar.post("/op")
        @once.protect(effects=LOCAL)
        async def by_op(op: Operation) -> None: ...

        @litestar.post("/lent", dependencies={"connection": Provide(once.connection)})
        @once.protect(effects=LOCAL)
        async def by_providing(connection: Any) -> None: ...

        app = litestar.Litestar(
            [neither, by_op, by_providing], plugins=[OncePlugin(once, tenant=SINGLE_TENANT)], logging_config=None
        )
        async with app.lifespan():
            return self.verdicts()

    async def flask(self) -> list[Protection]:
        once, app = self.once, flask.Flask("shop")

        @app.post("/neither")
        @once.protect(effects=LOCAL, operation="neither")
        def neither() -> str:
            return ""

        @app.post("/op")
        @once.protect(effects=LOCAL)
        def by_op(op: SyncOperation) -> str:
            return ""

        once.flask(app, tenant=SINGLE_TENANT)
        app.test_client().post("/op", headers={"Idempotency-Key": uuid.uuid4().hex})
        return self.verdicts()

    async def wsgi(self) -> list[Protection]:
        once = self.once

        @once.protect(effects=LOCAL, operation="neither")
        def neither(environ: Any, start_response: Any) -> list[bytes]:
            return []

        once.wsgi(neither, tenant=SINGLE_TENANT)
        once.start_blocking()
        return [Protection.APART]  # what it serves cannot be seen

    async def function(self) -> list[Protection]:
        @self.once.function(effects=LOCAL, key="number", operation="neither")
        def neither(number: str) -> None: ...

        @self.once.function(effects=LOCAL, key="number", operation="by_op")
        def by_op(number: str, op: SyncOperation) -> None: ...

        return await self.started(None)

    async def inbox(self) -> list[Protection]:
        @self.once.inbox(effects=LOCAL, consumer="neither")
        async def neither(message: str) -> None: ...

        @self.once.inbox(effects=LOCAL, consumer="by_op")
        async def by_op(message: str, op: Operation) -> None: ...

        return await self.started(None)


@pytest.mark.parametrize("framework", sorted(EVERY))
async def test_a_handler_that_takes_no_transaction_is_named_at_start_up(
    tmp_path: Path, framework: str, caplog: pytest.LogCaptureFixture
) -> None:
    told = Told(Once(f"sqlite:///{tmp_path}/shop.db", migrate=True))
    verdicts = await getattr(told, framework)()
    assert warned(caplog, AT_START) == ["neither"]
    assert verdicts == [Protection.APART]
    assert Protection.APART.is_finding


# What a handler opens while it runs.

SYNC = ("sqlite", "postgresql")
ASYNC = ("aiosqlite", "asyncpg", "psycopg", "aiomysql")


def url_of(driver: str, request: pytest.FixtureRequest, folder: Path) -> str:
    match driver:
        case "sqlite":
            return f"sqlite:///{folder}/shop.db"
        case "aiosqlite":
            return f"sqlite+aiosqlite:///{folder}/shop.db"
        case "aiomysql":
            return str(request.getfixturevalue("mariadb_url")).replace("://", "+aiomysql://", 1)
        case "postgresql":
            return str(request.getfixturevalue("tables_dsn")).replace("postgresql:", "postgresql+psycopg:")
        case _:
            return str(request.getfixturevalue("tables_dsn")).replace("postgresql:", f"postgresql+{driver}:")


@pytest.fixture(params=SYNC)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(url_of(request.param, request, tmp_path))
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE sold (item VARCHAR(50))"))
    yield engine
    engine.dispose()


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE sold (item VARCHAR(50))"))
    yield engine
    await engine.dispose()


@pytest.fixture(params=ASYNC)
def aurl(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_of(request.param, request, tmp_path)


async def asked(app: Any, path: str) -> int:
    lines = {"content-type": "application/json", "idempotency-key": uuid.uuid4().hex}
    return (await call(app, "POST", path, headers=lines, body=json.dumps({}).encode())).status


async def test_a_connection_that_an_async_handler_opens_is_named_once(
    aurl: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(aurl) as engine:
        await own_connections_of_async_handlers(engine)
    assert warned(caplog, AT_RUN) == ["own", "own.function"]
    assert warned(caplog, AT_START) == []


async def own_connections_of_async_handlers(aengine: AsyncEngine) -> None:
    once, app, own = Once(aengine, migrate=True), FastAPI(), async_sessionmaker(aengine)

    @app.post("/own")
    @once.protect(effects=LOCAL, operation="own")
    async def by_its_own(op: Operation) -> None:
        async with own() as session:
            assert (await session.execute(text("SELECT 1"))).scalar() == 1

    @app.post("/lent")
    @once.protect(effects=LOCAL)
    async def by_what_is_lent(session: Annotated[AsyncSession, Depends(once.session)], op: Operation) -> None:
        await session.execute(ADD)
        await op.connection.execute(ADD)
        await session.commit()

    @app.post("/inline")
    @once.protect(effects=INLINE)
    async def inline() -> None:
        async with own.begin() as session:
            await session.execute(ADD)

    @app.post("/open")
    async def unprotected() -> None:
        await inline_too()

    async def inline_too() -> None:
        async with own.begin() as session:
            await session.execute(ADD)

    @once.function(effects=LOCAL, key="number", operation="own.function")
    async def count(number: str, op: Operation) -> None:
        async with aengine.connect() as connection:
            await connection.execute(text("SELECT 1"))

    once.install(app, tenant=SINGLE_TENANT)
    async with once.lifespan(app):
        for path in ("/lent", "/inline", "/open", "/own", "/own", "/lent"):
            assert await asked(app, path) == 200
        for _ in range(2):
            await count(uuid.uuid4().hex)


async def test_a_connection_that_a_def_handler_opens_is_named_once(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    once, asgi, wsgi = Once(engine, migrate=True), FastAPI(), flask.Flask("shop")

    def look() -> None:
        with Session(engine) as session:
            assert session.execute(text("SELECT 1")).scalar() == 1

    def add(op: SyncOperation) -> None:
        with Session(op.connection) as session:
            session.execute(ADD)
            session.commit()

    def handlers(route: Callable[[str], Any], kind: str) -> None:
        @route("/own")
        @once.protect(effects=LOCAL, operation=f"{kind}.own")
        def by_its_own(op: SyncOperation) -> dict[str, str]:
            look()
            return {}

        @route("/lent")
        @once.protect(effects=LOCAL, operation=f"{kind}.lent")
        def by_what_is_lent(op: SyncOperation) -> dict[str, str]:
            add(op)
            return {}

        @route("/inline")
        @once.protect(effects=INLINE, operation=f"{kind}.inline")
        def inline() -> dict[str, str]:
            look()
            return {}

    @once.function(effects=LOCAL, key="number", operation="own.function")
    def count(number: str, op: SyncOperation) -> None:
        look()

    handlers(asgi.post, "fastapi")
    handlers(wsgi.post, "flask")
    once.install(asgi, tenant=SINGLE_TENANT)
    once.flask(wsgi, tenant=SINGLE_TENANT)
    client = wsgi.test_client()
    paths = ("/lent", "/inline", "/own", "/own", "/lent")
    async with once.lifespan(asgi):
        for path in paths:
            assert await asked(asgi, path) == 200
    for path in paths:
        sent = client.post(path, json={}, headers={"Idempotency-Key": uuid.uuid4().hex})
        assert sent.status_code == 200
    for _ in range(2):
        count(uuid.uuid4().hex)
    assert warned(caplog, AT_RUN) == ["fastapi.own", "flask.own", "own.function"]
    assert warned(caplog, AT_START) == []
