"""The databases that the crash proof runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

from harness.databases import DatabaseServer
from oncekey.testing.crash.places import Place
from oncekey.wire import Kind

T = TypeVar("T")


@contextmanager
def a_place(kind: Kind, folder: Path, server: Callable[[], DatabaseServer], name: str) -> Iterator[Place]:
    """An empty database of that kind, prepared for the proof."""
    if kind is Kind.SQLITE:
        url = f"sqlite:///{folder / name}.db"
    else:
        url = server().create_database(name).replace("postgresql://", "postgresql+asyncpg://", 1)
    with closing(Place(url)) as place:
        place.prepare()
        yield place
    if kind is Kind.POSTGRES:
        server().drop_database(name)


def run(work: Awaitable[T]) -> T:
    """Run it in an event loop of its own."""

    async def awaited() -> T:
        return await work

    return asyncio.run(awaited())
