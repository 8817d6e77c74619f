"""`once.session` and `once.connection` in a PHASED handler: the phase's own transaction, and outside of one to read."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import psycopg
import pytest
from fastapi import Depends, FastAPI, HTTPException
from sqlalchemy import insert, select, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from frameworks.realshop import MariadbDatabase, SqliteFile
from frameworks.shop import tenant_of
from harness.asgi import Caller, Reply
from oncekey.core.errors import ConfigurationError, TransactionControlError
from oncekey.core.model import PHASED
from oncekey.engine.operation import Operation, SyncOperation
from oncekey.once import Once
from phased.bank import KEY

ENGINES = ["postgresql+asyncpg", "postgresql+psycopg", "sqlite+aiosqlite", "mysql+aiomysql"]
SAYS_WHAT_TO_DO = r"op\.phase\(name, fn\)"


class Tables(DeclarativeBase):
    pass


class Row(Tables):
    __tablename__ = "wares"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]


class Shop:
    """An application on a database, and what others see in it."""

    def __init__(self, store: Any, database: Any) -> None:
        self.once = Once(store, migrate=True)
        self.store = store
        self.database = database
        self.app = FastAPI()
        self.once.install(self.app, tenant=tenant_of)
        self.session = Annotated[AsyncSession, Depends(self.once.session)]
        self.connection = Annotated[Any, Depends(self.once.connection)]
        self.runs: list[Any] = []
        self.errors: list[BaseException] = []

    def pay(self, handler: Any, **options: Any) -> None:
        self.app.post("/payments", status_code=201, response_model=None)(
            self.once.protect(effects=PHASED, operation="pay", **options)(handler)
        )

    @asynccontextmanager
    async def open(self) -> AsyncIterator["Shop"]:
        async with self.once.lifespan(self.app):
            yield self
        if isinstance(self.store, AsyncEngine):
            assert self.store.pool.checkedout() == 0  # type: ignore[attr-defined]
            await self.store.dispose()

    async def send(self, target: str = "/payments", key: str = KEY) -> Reply:
        caller = Caller(self.app, "POST", target, headers=[("Idempotency-Key", key)])
        try:
            return await caller.run(raising=True)
        except Exception as error:
            self.errors.append(error)
            return caller.reply if caller.answered else Reply(500, (), b"{}")

    @property
    def items(self) -> list[str]:
        return sorted(item for (item,) in self.database.execute("SELECT item FROM wares"))

    def refused(self) -> bool:
        """Whether the last request was told to write inside of a phase."""
        error = self.errors[-1]
        return isinstance(error, TransactionControlError) and "op.phase(name, fn)" in str(error)


TABLE = "CREATE TABLE wares (id {id} PRIMARY KEY, item TEXT NOT NULL)"


class Postgres:
    """The database that the tests of phases share, emptied."""

    held = "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction'"

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.execute("DROP TABLE IF EXISTS wares")
        self.execute("TRUNCATE oncekey.record, oncekey.work, oncekey.outbox, oncekey.dead_letter")
        self.execute(TABLE.format(id="SERIAL"))

    def execute(self, sql: str) -> list[Any]:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []


class Mariadb(MariadbDatabase):
    """A database of the test's own."""

    held = "SELECT count(*) FROM information_schema.innodb_trx"

    def __init__(self, url: str) -> None:
        super().__init__(url, "aiomysql")
        self.execute(TABLE.format(id="SERIAL"))


def mariadb_shop(request: pytest.FixtureRequest) -> Shop:
    url = request.getfixturevalue("mariadb_url")
    address = url.replace("mariadb://", "mysql+aiomysql://", 1)
    return Shop(create_async_engine(address, pool_size=2, max_overflow=0), Mariadb(url))


def sqlite_file(path: Path) -> SqliteFile:
    database = SqliteFile(path / "shop.db")
    database.execute(TABLE.format(id="INTEGER"))
    return database


@pytest.fixture(params=ENGINES)
def orm(request: pytest.FixtureRequest, tmp_path: Path) -> Shop:
    """Shops with a SQLAlchemy engine."""
    if request.param.startswith("sqlite"):
        database = sqlite_file(tmp_path)
        return Shop(create_async_engine(database.url.replace("sqlite", request.param)), database)
    if request.param == "mysql+aiomysql":
        return mariadb_shop(request)
    dsn = request.getfixturevalue("phased_dsn")
    engine = create_async_engine(dsn.replace("postgresql", request.param), pool_size=2, max_overflow=0)
    return Shop(engine, Postgres(dsn))


@pytest.fixture(params=["asyncpg", "psycopg", "sqlite", "sqlalchemy", "sqlalchemy-mariadb"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Shop:
    """Shops with a connection of every driver."""
    if request.param == "sqlite":
        database = sqlite_file(tmp_path)
        return Shop(database.url, database)
    if request.param == "sqlalchemy-mariadb":
        return mariadb_shop(request)
    dsn = request.getfixturevalue("phased_dsn")
    if request.param == "sqlalchemy":
        engine = create_async_engine(dsn.replace("postgresql", "postgresql+asyncpg"), pool_size=2, max_overflow=0)
        return Shop(engine, Postgres(dsn))
    mark = "&" if "?" in dsn else "?"
    return Shop(f"{dsn.replace('postgresql', f'postgresql+{request.param}')}{mark}pool_size=2", Postgres(dsn))


def said(connection: Any, sql: str) -> Any:
    """A statement as the driver takes it."""
    return connection.execute(text(sql) if isinstance(connection, AsyncConnection) else sql)


INSERT = "INSERT INTO wares (item) VALUES ('tea')"


# ------------------------------------------------------------------------------------------------ inside of a phase


async def test_session_commit_in_a_failing_phase_rolls_back(orm: Shop) -> None:
    # R115, R116: three sends of one key left three rows
    async def pay(op: Operation, session: orm.session) -> Any:
        async def write(_: Any) -> int:
            row = Row(item="tea")
            session.add(row)
            await session.commit()
            orm.runs.append(1)
            if len(orm.runs) < 4:
                raise HTTPException(503)
            return row.id

        return {"id": await op.phase("write", write)}

    orm.pay(pay)
    async with orm.open():
        assert [(await orm.send()).status for _ in range(3)] == [503] * 3
        assert orm.items == []
        good = await orm.send()
        assert good.status == 201
        again = await orm.send()
        assert (again.body, again.replayed) == (good.body, True)
        assert (orm.items, len(orm.runs)) == (["tea"], 4)


async def test_connection_writes_in_a_failing_phase_roll_back(shop: Shop) -> None:
    # R115, R116
    async def pay(op: Operation, connection: shop.connection) -> Any:
        async def write(own: Any) -> str:
            await said(connection, INSERT)
            rows = await said(own, "SELECT 1")
            assert rows is not None
            shop.runs.append(1)
            if len(shop.runs) < 4:
                raise HTTPException(503)
            return "written"

        return await op.phase("write", write)

    shop.pay(pay)
    async with shop.open():
        assert [(await shop.send()).status for _ in range(5)] == [503, 503, 503, 201, 201]
        assert (shop.items, len(shop.runs)) == (["tea"], 4)


async def test_session_rows_commit_with_the_recovery_point(orm: Shop) -> None:
    # R115: what is not flushed yet is flushed with the phase, and a retry goes on after it
    async def pay(op: Operation, session: orm.session) -> Any:
        async def order(_: Any) -> None:
            session.add(Row(item="order"))

        async def rename(connection: Any) -> str:
            row = (await session.scalars(select(Row))).one()
            row.item = "paid"
            await session.flush()
            return str((await connection.execute(text("SELECT item FROM wares"))).scalar())

        await op.phase("order", order)
        orm.runs.append(1)
        if len(orm.runs) == 1:
            raise HTTPException(503)
        return {"seen": await op.phase("rename", rename)}

    orm.pay(pay)
    async with orm.open():
        assert (await orm.send()).status == 503
        assert orm.items == ["order"]
        assert (await orm.send()).json() == {"seen": "paid"}
        assert orm.items == ["paid"]


async def test_a_phase_may_await_session_and_connection(orm: Shop) -> None:
    async def pay(op: Operation) -> Any:
        async def write(_: Any) -> None:
            session = await orm.once.session()
            session.add(Row(item="tea"))
            connection = await orm.once.connection()
            await connection.execute(insert(Row).values(item="milk"))

        await op.phase("write", write)

    orm.pay(pay)
    async with orm.open():
        assert (await orm.send()).status == 201
        assert orm.items == ["milk", "tea"]


async def test_a_failed_phase_may_be_repeated_with_its_session(orm: Shop) -> None:
    async def pay(op: Operation, session: orm.session) -> Any:
        async def write(_: Any) -> None:
            row = Row(item="tea")
            session.add(row)
            await session.flush()
            row.item = "changed and lost"
            orm.runs.append(row)
            if len(orm.runs) == 1:
                raise ValueError
            row.item = "milk"

        try:
            await op.phase("write", write)
        except ValueError:
            await op.phase("write", write)

    orm.pay(pay)
    async with orm.open():
        assert (await orm.send()).status == 201
        assert orm.items == ["milk"]


async def test_changing_an_object_of_another_phase_raises(orm: Shop) -> None:
    """A handler that is gone on with has no such object, so the first run must not live on it either."""

    async def pay(op: Operation, session: orm.session) -> Any:
        kept: list[Row] = []

        async def order(_: Any) -> int:
            kept.append(Row(item="order"))
            session.add(kept[0])
            await session.flush()
            return kept[0].id

        async def rename(_: Any) -> None:
            if orm.runs:
                kept[:] = [await session.get_one(Row, number)]
            kept[0].item = "paid"

        number = await op.phase("order", order)
        if orm.runs:
            assert kept == []
        await op.phase("rename", rename)

    orm.pay(pay)
    async with orm.open():
        assert (await orm.send()).status == 500
        assert orm.refused()
        assert orm.items == ["order"]
        orm.runs.append("read it again")
        assert (await orm.send()).status == 201
        assert orm.items == ["paid"]


# ------------------------------------------------------------------------------------------------ outside of a phase


async def test_the_session_can_read_outside_a_phase(orm: Shop) -> None:
    orm.database.execute("INSERT INTO wares (item) VALUES ('before')")

    async def user(session: orm.session) -> Row:
        return (await session.scalars(select(Row))).one()

    async def pay(op: Operation, session: orm.session, user: Annotated[Row, Depends(user)]) -> Any:
        async def write(_: Any) -> None:
            session.add(Row(item=f"after {user.item}"))

        first = (await session.scalars(select(Row.item))).all()
        await session.commit()  # nothing was changed, so there is nothing to refuse
        await op.phase("write", write)
        return {"seen": [*first, *(await session.scalars(select(Row.item).order_by(Row.id))).all()]}

    orm.pay(pay, complete=False)
    async with orm.open():
        assert (await orm.send()).json() == {"seen": ["before", "before", "after before"]}


async def test_the_connection_can_read_outside_a_phase(shop: Shop) -> None:
    async def user(connection: shop.connection) -> None:
        await said(connection, "SELECT 1")

    async def pay(op: Operation, connection: shop.connection, user: Annotated[None, Depends(user)]) -> Any:
        async def write(_: Any) -> None:
            await said(connection, INSERT)

        await said(connection, "SELECT 1")
        await op.phase("write", write)
        await said(connection, "SELECT item FROM wares")

    shop.pay(pay)
    async with shop.open():
        assert (await shop.send()).status == 201
        assert shop.items == ["tea"]


async def added(session: AsyncSession) -> None:
    session.add(Row(item="lost"))
    await session.commit()


async def flushed(session: AsyncSession) -> None:
    session.add(Row(item="lost"))
    await session.flush()


async def said_in_core(session: AsyncSession) -> None:
    await session.execute(insert(Row).values(item="lost"))
    await session.commit()


async def said_in_text(session: AsyncSession) -> None:
    await session.execute(text("INSERT INTO wares (item) VALUES ('lost')"))
    await session.commit()


async def left_pending(session: AsyncSession) -> None:
    session.add(Row(item="lost"))


async def changed(session: AsyncSession) -> None:
    row = (await session.scalars(select(Row))).one()
    row.item = "lost"


async def changed_and_committed(session: AsyncSession) -> None:
    await changed(session)
    await session.commit()


CHANGES = {
    change.__name__: change
    for change in (added, flushed, said_in_core, said_in_text, left_pending, changed, changed_and_committed)
}
PLACES = ("dependency", "before", "between", "after")


async def test_session_changes_outside_a_phase_raise(orm: Shop) -> None:
    # R116: what would be lost, or come twice, is an error with the sentence that says what to do
    orm.database.execute("INSERT INTO wares (item) VALUES ('first')")

    async def user(session: orm.session, change: str, place: str) -> None:
        if place == "dependency":
            await CHANGES[change](session)

    async def pay(
        op: Operation, session: orm.session, change: str, place: str, user: Annotated[None, Depends(user)]
    ) -> Any:
        async def nothing(_: Any) -> None: ...

        if place == "before":
            await CHANGES[change](session)
        await op.phase("one", nothing)
        if place == "between":
            await CHANGES[change](session)
        await op.phase("two", nothing)
        if place == "after":
            await CHANGES[change](session)

    orm.pay(pay)
    async with orm.open():
        for change in CHANGES:
            for place in PLACES:
                for _ in range(2):
                    target = f"/payments?change={change}&place={place}"
                    reply = await orm.send(target, key=f"key-{change}-{place}-0000000000")
                    assert (change, place, reply.status) == (change, place, 500)
                    assert orm.refused(), (change, place, orm.errors[-1])
        assert orm.items == ["first"]


@pytest.mark.parametrize("how", ["insert", "commit"])
async def test_connection_writes_outside_a_phase_raise(shop: Shop, how: str) -> None:
    # R116
    async def pay(op: Operation, connection: shop.connection) -> Any:
        async def write(_: Any) -> None:
            await said(connection, "INSERT INTO wares (item) VALUES ('milk')")

        await op.phase("one", write)
        with pytest.raises(TransactionControlError, match=SAYS_WHAT_TO_DO):
            await (said(connection, INSERT) if how == "insert" else connection.commit())
        await said(connection, "SELECT 1")  # it still reads
        with pytest.raises(TransactionControlError, match=SAYS_WHAT_TO_DO):
            await (said(connection, INSERT) if how == "insert" else connection.commit())

    shop.pay(pay)
    async with shop.open():
        reply = await shop.send()
        assert shop.errors == []
        assert reply.status == 201
        assert shop.items == ["milk"]


async def test_no_connection_is_held_between_steps(shop: Shop) -> None:
    """Neither while a call is made outside, nor when another connection is needed."""

    async def pay(op: Operation, connection: shop.connection) -> Any:
        async def call(*, key: str) -> int:
            if isinstance(shop.database, SqliteFile):
                return 0
            return int((await asyncio.to_thread(shop.database.execute, shop.database.held))[0][0])

        await said(connection, "SELECT 1")
        return {"held": await op.call("charge", call, repeatable=True)}

    shop.pay(pay)
    async with shop.open():
        assert (await shop.send()).json() == {"held": 0}


async def test_synchronous_use_of_the_connection_raises(shop: Shop) -> None:
    async def pay(op: Operation, connection: shop.connection) -> Any:
        async def nothing(_: Any) -> None: ...

        await op.phase("one", nothing)
        with pytest.raises(TransactionControlError, match=r"await once\.connection\(\)"):
            connection.something  # noqa: B018  (an attribute that nothing can be awaited of)
        with pytest.raises(TransactionControlError, match=r"await once\.connection\(\)"):
            connection.something = 1
        assert await shop.once.connection() is connection
        await said(connection, "SELECT 1")

    shop.pay(pay)
    async with shop.open():
        assert (await shop.send()).status == 201


async def test_dependencies_of_a_def_handler_can_read(tmp_path: Path) -> None:
    database = sqlite_file(tmp_path)
    shop = Shop(database.url, database)

    async def user(connection: shop.connection) -> None:
        await said(connection, "SELECT 1")

    def pay(op: SyncOperation, user: Annotated[None, Depends(user)]) -> Any:
        def write(connection: Any) -> None:
            connection.execute(INSERT)

        op.phase("write", write)

    shop.pay(pay)
    async with shop.open():
        assert (await shop.send()).status == 201
        assert shop.items == ["tea"]


async def test_once_session_requires_an_engine(tmp_path: Path) -> None:
    shop = Shop(f"sqlite:///{tmp_path / 'shop.db'}", None)

    async def pay(op: Operation, session: shop.session) -> Any: ...

    shop.pay(pay)
    async with shop.open():
        await shop.send()
        assert isinstance(shop.errors[0], ConfigurationError)
        assert "create_async_engine" in str(shop.errors[0])
