"""`once.session` and `once.connection`: plain dependencies, because one that yields would end after the answer."""

from __future__ import annotations

from typing import Any

from oncekey.frameworks.asgi.exchange import current
from oncekey.frameworks.asgi.lending import Lending, lend

NO_REQUEST = "once.session and once.connection are for requests of an application with once.install(app)"


async def session() -> Any:  # noqa: ANN401  (SQLAlchemy's AsyncSession, which we may not import)
    """The session of this request."""
    return await _lending().session()


async def connection() -> Any:  # noqa: ANN401  (whatever the driver's users know)
    """The connection of this request."""
    return await _lending().connection()


def _lending() -> Lending:
    request = current.get()
    if request is None:
        raise RuntimeError(NO_REQUEST)
    return lend(request)
