"""After `session.rollback()` a session still works, and commits nothing: on every engine, and with Flask-SQLAlchemy."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import flask
import pytest
from fastapi import Depends, FastAPI, HTTPException
from fastapi.responses import JSONResponse
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import Column, String, create_engine, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Session

from frameworks.shop import new_key
from harness.asgi import call
from oncekey import LOCAL, PHASED, SINGLE_TENANT, Once, Operation, SyncOperation
from oncekey.core.errors import TransactionControlError
from oncekey.flask import database

ASYNC = ("postgresql+asyncpg", "postgresql+psycopg", "mysql+aiomysql", "sqlite+aiosqlite")
BLOCKING = ("postgresql+psycopg blocking", "sqlite blocking", "postgresql+psycopg flask", "sqlite flask")
WAYS = (*ASYNC, "postgresql+asyncpg phase", "sqlite+aiosqlite phase", *BLOCKING)


class Base(DeclarativeBase):
    pass


class Tag(Base):
    __tablename__ = "tags"
    name = Column(String(20), primary_key=True)


Work = Callable[[Session], int]
Sent = tuple[int, bool]


class Shop:
    """`POST /tags` does what the test put into `work`, in the session of its key's transaction."""

    def __init__(self, url: str, how: str) -> None:
        self.url, self.how = url, how
        self.runs = 0
        self.work: Work = lambda _: 201

    def does(self, session: Session) -> int:
        self.runs += 1
        return self.work(session)

    @asynccontextmanager
    async def open(self) -> AsyncIterator["Shop"]:
        if self.how == "flask":
            db = self.flask()
            yield self
            with self.served.app_context():
                db.engine.dispose()
            return
        engine: Any = create_engine(self.url) if self.how == "blocking" else create_async_engine(self.url)
        once = Once(engine, migrate=True)
        self.app = FastAPI()
        once.install(self.app, tenant=SINGLE_TENANT)
        self.app.post("/tags")(self.handler(once))
        async with once.lifespan(self.app):
            yield self
        if self.how == "blocking":
            engine.dispose()
        else:
            await engine.dispose()

    def handler(self, once: Once) -> Any:
        given = Annotated[AsyncSession, Depends(once.session)]
        if self.how == "blocking":

            def tag(op: SyncOperation) -> Any:
                with Session(op.connection) as session:
                    return JSONResponse({}, self.does(session))

            return once.protect(effects=LOCAL)(tag)
        if self.how == "phase":

            async def phased(op: Operation, session: given) -> Any:
                async def inside(_: Any) -> None:
                    if await session.run_sync(self.does) == 409:
                        raise HTTPException(409)  # a phase that returns has to commit

                try:
                    await op.phase("tagged", inside)
                except TransactionControlError:
                    logging.getLogger().exception("the server logs it")
                    raise

            return once.protect(effects=PHASED)(phased)

        async def asynchronous(session: given) -> Any:
            return JSONResponse({}, await session.run_sync(self.does))

        return once.protect(effects=LOCAL)(asynchronous)

    def flask(self) -> SQLAlchemy:
        db = SQLAlchemy(model_class=Base)
        once = Once(database(db), migrate=True)
        self.served = flask.Flask("tags")
        self.served.config["SQLALCHEMY_DATABASE_URI"] = self.url
        db.init_app(self.served)

        @self.served.post("/tags")
        @once.protect(effects=LOCAL)
        def tag() -> Any:
            return {}, self.does(db.session())

        once.flask(self.served, tenant=SINGLE_TENANT)
        return db

    async def send(self, key: str) -> Sent:
        if self.how == "flask":
            answer = self.served.test_client().post("/tags", headers={"Idempotency-Key": key})
            return answer.status_code, "Idempotent-Replayed" in answer.headers
        reply = await call(self.app, "POST", "/tags", headers=[("Idempotency-Key", key)])
        return reply.status, reply.replayed

    async def names(self) -> list[str]:
        return await asyncio.to_thread(names, self.url)


def plain(url: str) -> str:
    return url.replace("+asyncpg", "+psycopg").replace("+aiosqlite", "").replace("+aiomysql", "+pymysql")


def names(url: str) -> list[str]:
    engine = create_engine(plain(url))
    with engine.connect() as connection:
        found = [name for (name,) in connection.execute(text("SELECT name FROM tags ORDER BY name"))]
    engine.dispose()
    return found


@pytest.fixture(params=WAYS)
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    """A shop of each kind; the tag `x` exists."""
    scheme, _, how = request.param.partition(" ")
    if scheme.startswith("sqlite"):
        url = f"{scheme}:///{tmp_path}/shop.db"
    else:
        found = request.getfixturevalue("mariadb_url" if "mysql" in scheme else "tables_dsn")
        url = f"{scheme}://{found.partition('://')[2]}"
    engine = create_engine(plain(url))
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add(Tag(name="x"))
    yield Shop(url, how)
    Base.metadata.drop_all(engine)
    engine.dispose()


def read(session: Session) -> None:
    assert session.get(Tag, "x") is not None
    session.commit()


def write(session: Session) -> None:
    session.add(Tag(name="y"))
    session.commit()
    assert session.get(Tag, "y") is not None
    session.commit()


def begin(session: Session) -> None:
    with session.begin():
        session.add(Tag(name="y"))


def nested(session: Session) -> None:
    with session.begin_nested():
        session.add(Tag(name="y"))
    session.commit()


def twice(session: Session) -> None:
    session.add(Tag(name="y"))
    session.flush()
    session.rollback()
    write(session)


def leave(session: Session) -> None:
    session.add(Tag(name="y"))


AFTER = (read, write, begin, nested, twice, leave)


@pytest.mark.parametrize("status", [409, 201])
@pytest.mark.parametrize("after", AFTER)
async def test_a_rolled_back_session_works_and_commits_nothing(
    shop: Shop, after: Callable[[Session], None], status: int, caplog: pytest.LogCaptureFixture
) -> None:
    # L5, L6, F16: "get or create": the 4xx is stored alone, and a success whose rows are gone is not
    def work(session: Session) -> int:
        try:
            session.add(Tag(name="x"))
            session.commit()
        except IntegrityError:
            session.rollback()
            after(session)
        return status

    key, shop.work = new_key(), work
    async with shop.open():
        sent = [await shop.send(key) for _ in range(2)]
        assert sent == ([(409, False), (409, True)] if status == 409 else [(500, False)] * 2)
        assert await shop.names() == ["x"]
    assert shop.runs == (1 if status == 409 else 2)
    if status == 201 and (shop.how, after) != ("phase", leave):  # which is refused for its pending change
        assert "session.rollback()" in caplog.text
        assert "session.begin_nested()" in caplog.text


def by_text(session: Session) -> None:
    session.execute(text("COMMIT"))


def by_connection(session: Session) -> None:
    session.connection().commit()


def by_transaction(session: Session) -> None:
    transaction = session.connection().get_transaction()
    assert transaction is not None
    transaction.commit()


@pytest.mark.parametrize("before", ["rollback", "begin_nested"])
@pytest.mark.parametrize("how", [by_text, by_connection, by_transaction])
async def test_no_commit_past_the_session_is_accepted(shop: Shop, how: Callable[[Session], None], before: str) -> None:
    # L5, F16: rows without a record, which the retry would write again
    def work(session: Session) -> int:
        session.get(Tag, "x")
        if before == "rollback":
            session.rollback()
        else:
            with session.begin_nested():
                session.execute(text("SELECT 1"))
        session.add(Tag(name="y"))
        session.flush()
        how(session)
        return 409

    shop.work = work
    async with shop.open():
        assert await shop.send(new_key()) == (500, False)
        assert await shop.names() == ["x"]
