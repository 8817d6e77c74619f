"""`oncekey.django.Middleware`, the last entry of MIDDLEWARE: it sees the final bytes of the view's response.

Middleware before it (compression, CORS, session cookies) processes every response, replays included. Authentication in
middleware runs before it; REST framework authenticates before it calls a protected method.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.http import HttpResponse

from oncekey.core.errors import CONTROL_ERRORS
from oncekey.django.exchange import BufferedRequest, DjangoExchange, then_closed
from oncekey.django.project import enrolment_of, once_of_project
from oncekey.engine.deciding import is_inner
from oncekey.engine.enrolment import SAFE
from oncekey.frameworks.shared import thread_exchange
from oncekey.frameworks.wsgi import KEY

if TYPE_CHECKING:
    from collections.abc import Callable


class Middleware:
    """Captures and stores the response of a claimed request before it is sent; for WSGI and ASGI."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[Any], Any]) -> None:
        self.get_response = get_response
        self._threads = once_of_project().threads
        self._is_async = iscoroutinefunction(get_response)
        if self._is_async:
            markcoroutinefunction(self)

    def __call__(self, request: Any) -> Any:  # noqa: ANN401  (Django has no types)
        """Serve one request."""
        return self._shielded(request) if self._is_async else self._serve(request)

    def process_view(self, request: Any, view: Any, *_: Any) -> Any:  # noqa: ANN401
        """Open the transaction before `ATOMIC_REQUESTS` opens its own, so that Django's block is the inner one.

        If Django's block were the outer one, it would commit after oncekey had treated its own as committed, and an
        error raised while a response is rendered late would be too late for both.
        """
        exchange, database = thread_exchange.get(), self._threads.database
        assert isinstance(exchange, DjangoExchange)
        if not exchange.keyed or database is None or not database.wraps(view) or not database.one_commit:
            return None
        enrolment = enrolment_of(view, request.method)
        if enrolment is None or not enrolment.transactional or enrolment.owner is not self._threads.engines:
            return None
        return exchange.open(enrolment)

    @staticmethod
    def process_exception(_: Any, error: BaseException) -> Any:  # noqa: ANN401
        """Record the exception of a view before other middleware handles it; ignore oncekey's control errors.

        If the connection was lost before the protected view, for example in a decorator above it, return 503.
        """
        exchange = thread_exchange.get()
        assert isinstance(exchange, DjangoExchange)
        exchange.uncaught = error
        ours = isinstance(error, CONTROL_ERRORS) and not is_inner(error, exchange.ended.began)
        return HttpResponse(status=500) if ours else exchange.instead_of(error)

    def _begun(self, request: Any) -> DjangoExchange:  # noqa: ANN401
        self._threads.begin(self._start)
        # A key has no effect on safe methods, even if it is malformed.
        keyed = KEY in request.META and request.method not in SAFE
        return DjangoExchange(
            self._threads, BufferedRequest(request, self._threads.max_request_bytes if keyed else None)
        )

    def _start(self) -> None:
        then_closed(self._threads.ready)

    def _serve(self, request: Any) -> Any:  # noqa: ANN401
        exchange = self._begun(request)
        token = thread_exchange.set(exchange)
        try:
            response = self.get_response(request)
            if exchange.capture is not None:
                error = exchange.failing(response)
                if error is None:
                    exchange.begin(response)
                    exchange.take(response)
                exchange.finish(error)
            return exchange.sent(response)
        except BaseException as error:
            if exchange.unsettled:
                exchange.finish(error)
            raise
        finally:
            thread_exchange.reset(token)  # the server reuses the thread for its next request
            exchange.end()

    async def _shielded(self, request: Any) -> Any:  # noqa: ANN401
        """Finish serving after a disconnect: Django cancels the view, and the cancellation is deferred."""
        work, cancelled = asyncio.ensure_future(self._aserve(request)), None
        while not work.done():
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            work.exception()
            raise cancelled
        return work.result()

    async def _aserve(self, request: Any) -> Any:  # noqa: ANN401
        exchange = self._begun(request)
        thread_exchange.set(exchange)  # runs in a separate task, so the value is not shared
        settle = sync_to_async(exchange.finish, thread_sensitive=True)
        try:
            response = await self.get_response(request)
            if exchange.capture is not None:
                error = exchange.failing(response)
                if error is None:
                    exchange.begin(response)
                    await exchange.atake(response)
                await settle(error)
            sent = exchange.sent(response)
        except BaseException as error:
            if exchange.unsettled:
                await settle(error)
            raise
        else:
            return sent
        finally:
            await sync_to_async(exchange.end, thread_sensitive=True)()
