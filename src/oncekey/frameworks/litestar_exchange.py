"""The middleware of one Litestar route handler, and answers of ours as responses of Litestar's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from litestar import Request, Response
from litestar.exceptions import LitestarException
from litestar.types import Empty
from litestar.utils.scope.state import ScopeState

from oncekey.frameworks.asgi.delivery import send_answer
from oncekey.frameworks.asgi.exchange_state import UnsettledError
from oncekey.frameworks.asgi.intake import ClientLeftError
from oncekey.frameworks.asgi.middleware import KEY_FIELD, OncekeyMiddleware
from oncekey.frameworks.asgi.nesting import current
from oncekey.frameworks.asgi.transactions import transaction_of
from oncekey.frameworks.litestar_routes import protected_in

if TYPE_CHECKING:
    from litestar.handlers import HTTPRouteHandler

    from oncekey.core.answers import Answer
    from oncekey.frameworks.asgi.installation import Installation
    from oncekey.frameworks.asgi.types import App, Receive, Scope, Send


class HandlerMiddleware(OncekeyMiddleware):
    """The middleware of one route handler."""

    def __init__(
        self,
        app: App,
        installation: Installation,
        handler: HTTPRouteHandler,
        *,
        sessions: Sequence[str],
        compresses: bool,
    ) -> None:
        super().__init__(self._lend if sessions else app, installation)
        self._endpoint: Any = protected_in(handler)
        self._inner = app
        self._sessions = sessions
        """Where the SQLAlchemy plugin looks for the sessions that the handler's transaction is lent as."""
        self._compresses = compresses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; Litestar has made another exception of what tells us that there is nothing to add."""
        scope["endpoint"] = self._endpoint
        if self._compresses and any(name == KEY_FIELD for name, _ in scope["headers"]):
            # Litestar compresses inside of all middleware, and what is stored is for clients of every kind.
            scope["headers"] = [line for line in scope["headers"] if line[0] != b"accept-encoding"]
            ScopeState.from_scope(scope).headers = Empty  # type: ignore[arg-type]  # a copy that somebody has read
        try:
            await super().__call__(scope, receive, send)
        except LitestarException as error:
            # A stream raises in a group.
            cause = BaseExceptionGroup("", [error.__cause__ or error])
            if cause.split((UnsettledError, ClientLeftError))[1] is not None:
                raise

    async def _lend(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Put our session where the SQLAlchemy plugin would put one of its own."""
        from advanced_alchemy.extensions.litestar._utils import set_aa_scope_state  # noqa: PLC0415  (optional)

        request = current.get()
        assert request is not None
        await request.read_ahead(self._endpoint.__oncekey__.policy)
        for key in self._sessions:
            set_aa_scope_state(scope, key, transaction_of(request).following())  # type: ignore[arg-type]
        await self._inner(scope, receive, send)


class AnswerResponse(Response[bytes]):
    """An answer of ours, with its header lines as they are."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.body, status_code=answer.status)
        self._answer = answer

    def to_asgi_response(self, *_: Any, **__: Any) -> Any:  # noqa: ANN401  (as its parent's)
        """Send it."""

        async def say(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001
            await send_answer(send, self._answer)

        return say


class AnsweredError(Exception):
    """An answer that is given instead of the handler's, where Litestar would take it for the handler's data."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer


def respond(answer: Answer) -> Response[bytes]:
    """An answer as what a handler returns; a DTO would read it as the handler's data, so there it is raised."""
    request = current.get()
    assert request is not None
    if request.scope["route_handler"].resolve_return_dto() is not None:
        raise AnsweredError(answer)
    return AnswerResponse(answer)


def answered(_: Request[Any, Any, Any], error: Exception) -> Response[Any]:
    """The answer that was raised."""
    assert isinstance(error, AnsweredError)
    return AnswerResponse(error.answer)
