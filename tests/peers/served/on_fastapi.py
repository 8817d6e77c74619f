"""The shop on FastAPI behind another package, as its README shows it: `python on_fastapi.py PACKAGE [REDIS]`."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Annotated

import uvicorn
from counted import CALLERS, announce, placed, total
from fastapi import Depends, FastAPI, Header, HTTPException, Response
from pydantic import BaseModel, StrictInt

app = FastAPI()


class Order(BaseModel):
    item: str
    quantity: StrictInt


def known(authorization: Annotated[str, Header()] = "") -> str:
    if authorization not in CALLERS:
        raise HTTPException(401)
    return CALLERS[authorization]


@app.post("/orders", status_code=201)
async def order(
    _: Order,
    response: Response,
    caller: Annotated[str, Depends(known)],
    x_slow: Annotated[float, Header()] = 0.0,
    x_fail: Annotated[str | None, Header()] = None,
) -> dict[str, str]:
    await asyncio.sleep(x_slow)
    if x_fail is not None:
        raise RuntimeError("it was told to fail")
    content = placed(caller)
    response.headers["Location"] = f"/orders/{content['id']}"
    return content


@app.get("/orders")
async def orders(caller: Annotated[str, Depends(known)]) -> dict[str, int]:
    return total(caller)


def behind_idemkit() -> None:
    """Add it with the backend of its first example, and with the scope that its README wants for tenants."""
    from idemkit import HttpConfig, IdempotencyMiddleware, InMemoryBackend

    config = HttpConfig(scope=lambda request: request.headers.get("authorization", "anonymous"))
    app.add_middleware(IdempotencyMiddleware, backend=InMemoryBackend(), config=config)


def behind_asgi_idempotency_header(redis_url: str) -> None:
    """Add it with Redis, the only backend that its README shows."""
    from idempotency_header_middleware import IdempotencyHeaderMiddleware
    from idempotency_header_middleware.backends import RedisBackend
    from redis.asyncio import from_url

    app.add_middleware(IdempotencyHeaderMiddleware, backend=RedisBackend(redis=from_url(redis_url)))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["idemkit"]:
            behind_idemkit()
        case ["asgi-idempotency-header", redis_url]:
            behind_asgi_idempotency_header(redis_url)
        case words:
            sys.exit(f"there is no shop for {words}")
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        announce(listener.getsockname()[1])
        uvicorn.Server(uvicorn.Config(app, log_level="critical", access_log=False)).run(sockets=[listener])
