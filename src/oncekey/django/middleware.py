"""`oncekey.django.Middleware`, the last one in MIDDLEWARE: it sees the final bytes of a view, and no other one's.

What is farther out (compression, CORS, session cookies) is made anew for each answer, replays included. Authentication
by middleware has happened before it, and that of REST framework happens before a protected method is called.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.http import HttpResponse

from oncekey.core.errors import SAID_TO_US
from oncekey.django.exchange import DjangoExchange, Sent
from oncekey.django.project import enrolment_of, once_of_project
from oncekey.engine.deciding import is_inner
from oncekey.engine.enrolment import SAFE
from oncekey.frameworks.shared import thread_exchange
from oncekey.frameworks.wsgi import KEY

if TYPE_CHECKING:
    from collections.abc import Callable


class Middleware:
    """Captures the answers of claimed requests, settles them, and only then lets them out; for WSGI and ASGI."""

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
        """Open the transaction of a view that `ATOMIC_REQUESTS` is about to open one around: theirs is then inside.

        Where theirs were outside, it would be committed after ours was believed to be; and what a response that is
        rendered late raises would be too late for both.
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
        """Note what a view raised, before any other middleware is asked; what was said to oncekey is no fault."""
        exchange = thread_exchange.get()
        assert isinstance(exchange, DjangoExchange)
        exchange.uncaught = error
        ours = isinstance(error, SAID_TO_US) and not is_inner(error, exchange.ended.began)
        return HttpResponse(status=500) if ours else None

    def _begun(self, request: Any) -> DjangoExchange:  # noqa: ANN401
        # On safe methods a key has no effect, whatever it looks like.
        keyed = KEY in request.META and request.method not in SAFE
        return DjangoExchange(self._threads, Sent(request, self._threads.max_request_bytes if keyed else None))

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
            thread_exchange.reset(token)  # a server uses the thread for its next request
            exchange.end()

    async def _shielded(self, request: Any) -> Any:  # noqa: ANN401
        """Serve to the end although the client has left, for whom Django cancels the view; the cancellation waits."""
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
        thread_exchange.set(exchange)  # in a task of its own, so nobody else sees it
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
