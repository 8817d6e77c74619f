"""Routes that nobody protects: what the framework costs, and what one row in one transaction costs."""

# ruff: noqa: PLC0415  (each application imports what only its own environment has)

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from orders import INSERT, POOL, OrderIn, made


def bare() -> FastAPI:
    """The body is read and checked, and answered."""
    app = FastAPI(docs_url=None, redoc_url=None)

    @app.post("/bare", status_code=201)
    async def create(order: OrderIn) -> dict[str, Any]:
        return made(1, order)

    return app


def stock(dsn: str) -> FastAPI:
    """The row in a transaction on asyncpg's own pool."""
    import asyncpg

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with asyncpg.create_pool(dsn, min_size=POOL, max_size=POOL) as app.state.pool:
            yield

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.post("/orders", status_code=201)
    async def create(order: OrderIn) -> dict[str, Any]:
        async with app.state.pool.acquire() as connection, connection.transaction():
            number = await connection.fetchval(INSERT, order.product, order.quantity)
        return made(number, order)

    return app


def stock_sqlalchemy(dsn: str) -> FastAPI:
    """The row in a session on SQLAlchemy's own pool."""
    from sqlalchemy import text
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    engine = create_async_engine(dsn.replace("postgresql:", "postgresql+asyncpg:", 1), pool_size=POOL, max_overflow=0)
    said = text(INSERT.replace("$1", ":product").replace("$2", ":quantity"))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.dispose()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.post("/orders", status_code=201)
    async def create(order: OrderIn) -> dict[str, Any]:
        async with AsyncSession(engine) as session, session.begin():
            number = (await session.execute(said, order.model_dump())).scalar_one()
        return made(number, order)

    return app
