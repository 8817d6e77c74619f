"""`once.session` and `once.connection`: plain dependencies, because one with `yield` would end after the answer."""

from __future__ import annotations

from typing import Any

from oncekey.frameworks.asgi.nesting import request_of
from oncekey.frameworks.asgi.transactions import RequestTransaction, transaction_of

NO_REQUEST = "once.session and once.connection are for requests of an application with once.install(app) of that Once"


class TransactionDependency:
    """The dependencies of one `Once`: they use its database, also if the request passed other installations."""

    def __init__(self, owner: object) -> None:
        self._owner = owner

    async def session(self) -> Any:  # noqa: ANN401  (SQLAlchemy's AsyncSession, which we may not import)
        """The session of this request."""
        return await self._transaction().session()

    async def connection(self) -> Any:  # noqa: ANN401  (whatever the driver's users know)
        """The connection of this request."""
        return await self._transaction().connection()

    def _transaction(self) -> RequestTransaction:
        request = request_of(self._owner)
        if request is None:
            raise RuntimeError(NO_REQUEST)
        return transaction_of(request)
