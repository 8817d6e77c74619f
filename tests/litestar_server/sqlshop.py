"""A shop on Litestar with the SQLAlchemy plugin of advanced-alchemy: models, and sessions that are injected."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from litestar import Litestar, Request, Response, post
from litestar.di import Provide
from sqlalchemy import ForeignKey, String, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from harness.served import Served
from oncekey.core.model import INLINE, LOCAL, PHASED
from oncekey.engine.operation import Operation
from oncekey.litestar import OncePlugin
from oncekey.once import Once

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from advanced_alchemy.extensions.litestar import SQLAlchemyAsyncConfig, SQLAlchemyPlugin


__all__ = ["SQLAlchemyAsyncConfig", "SQLAlchemyPlugin", "SqlShop"]


class Base(DeclarativeBase):
    pass


class Sale(Base):
    __tablename__ = "sale"

    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str] = mapped_column(String(40))


class Promise(Base):
    """Its sale may come later: who commits without one is told then."""

    __tablename__ = "promise"

    id: Mapped[int] = mapped_column(primary_key=True)
    sale: Mapped[int] = mapped_column(ForeignKey("sale.id", deferrable=True, initially="DEFERRED"))


def async_url(url: str) -> str:
    return url.replace("sqlite://", "sqlite+aiosqlite://").replace("postgresql://", "postgresql+psycopg://")


class Commits:
    """The commits of an engine, in their order, with what was said before."""

    def __init__(self, engine: Any) -> None:
        from sqlalchemy import event

        self.of: dict[Any, list[str]] = {}
        self.done: list[list[str]] = []
        event.listen(engine.sync_engine, "before_cursor_execute", self._said)
        event.listen(engine.sync_engine, "commit", self._committed)
        event.listen(engine.sync_engine, "rollback", lambda connection: self.of.pop(self._at(connection), None))

    @staticmethod
    def _at(connection: Any) -> Any:
        return id(connection.connection.dbapi_connection)

    def _said(self, connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        self.of.setdefault(self._at(connection), []).append(" ".join(statement.split()))

    def _committed(self, connection: Any) -> None:
        said = self.of.pop(self._at(connection), [])
        if any(one.startswith("INSERT INTO sale") for one in said):
            self.done.append(said)

    @property
    def together(self) -> list[bool]:
        """Of each commit of a sale: whether a record of ours was in it."""
        return [any("record" in one and not one.startswith("SELECT") for one in said) for said in self.done]


class SqlShop:
    """Handlers that write through the session which the SQLAlchemy plugin injects."""

    def __init__(self, url: str, *, before_send: Any = "autocommit", first: bool = False, **more: Any) -> None:
        self.alchemy = SQLAlchemyAsyncConfig(
            connection_string=async_url(url), before_send_handler=before_send, metadata=Base.metadata, create_all=True
        )
        self.engine = self.alchemy.get_engine()
        self.commits = Commits(self.engine)
        self.once = once = Once(self.engine, migrate=True)
        self.runs: list[str] = []
        self.sessions: list[Any] = []
        shop = self

        @post("/sales")
        @once.protect(effects=LOCAL)
        async def sell(request: Request[Any, Any, Any], db_session: AsyncSession) -> Response[Any]:
            return await shop.sells(await request.json(), db_session)

        @post("/optional")
        @once.protect(effects=LOCAL, require_key=False, operation="optional")
        async def optional(request: Request[Any, Any, Any], db_session: AsyncSession) -> Response[Any]:
            return await shop.sells(await request.json(), db_session)

        async def known(db_session: AsyncSession) -> list[str]:
            """A dependency that reads before the claim."""
            return list(await db_session.scalars(select(Sale.item)))

        @post("/served", dependencies={"known": Provide(known)})
        @once.protect(effects=LOCAL, operation="served")
        async def through_dependency(
            request: Request[Any, Any, Any], known: list[str], db_session: AsyncSession
        ) -> Response[Any]:
            shop.runs.append(f"knew {len(known)}")
            return await shop.sells(await request.json(), db_session)

        async def writes(db_session: AsyncSession) -> None:
            db_session.add(Sale(item="too early"))
            await db_session.flush()

        @post("/early", dependencies={"early": Provide(writes)})
        @once.protect(effects=LOCAL, operation="early")
        async def too_early(early: None, db_session: AsyncSession) -> None:
            shop.runs.append("early")

        @post("/phases")
        @once.protect(effects=PHASED)
        async def phases(
            request: Request[Any, Any, Any], db_session: AsyncSession, op: Operation[Any]
        ) -> Response[Any]:
            shop.runs.append("phases")
            item = (await request.json())["item"]

            async def sold(_: Any) -> str:
                db_session.add(Sale(item=item))
                return str(item)

            async def paid(_: Any) -> None:
                sale = (await db_session.scalars(select(Sale).where(Sale.item == item))).one()
                sale.item = f"{item} paid"

            await op.phase("sold", sold)
            if op.attempt == 1:
                raise ValueError("it stumbled")
            await op.phase("paid", paid)
            return Response({"item": item}, status_code=201)

        @post("/plain")
        async def unprotected(request: Request[Any, Any, Any], db_session: AsyncSession) -> Response[Any]:
            return await shop.sells(await request.json(), db_session)

        @post("/inline")
        @once.protect(effects=INLINE)
        async def inline(request: Request[Any, Any, Any], db_session: AsyncSession) -> Response[Any]:
            return await shop.sells(await request.json(), db_session)

        ours = OncePlugin(once, tenant=lambda _: "acme")
        theirs = SQLAlchemyPlugin(config=self.alchemy)
        handlers = [sell, optional, through_dependency, too_early, phases, unprotected, inline]
        plugins = [ours, theirs] if first else [theirs, ours]
        # The plugin disposes of the first engine of a process only.
        self.app = Litestar(handlers, plugins=plugins, logging_config=None, on_shutdown=[self.engine.dispose], **more)

    async def sells(self, order: dict[str, Any], session: AsyncSession) -> Response[Any]:
        self.runs.append(order["item"])
        self.sessions.append(session)
        session.add(Sale(item=order["item"]))
        await session.commit()
        match order.get("does"):
            case "promise":
                session.add(Promise(sale=999))
                await session.flush()
            case "raise":
                raise ValueError("it failed")
            case "roll back":
                session.add(Sale(item="never"))
                await session.flush()
                await session.rollback()
            case "say commit":
                await session.execute(text("/* mine */ commit"))
            case _:
                pass
        return Response({"item": order["item"]}, status_code=order.get("status", 201))

    @contextmanager
    def served(self) -> Iterator[int]:
        with Served(self.app) as server:
            yield server.port
