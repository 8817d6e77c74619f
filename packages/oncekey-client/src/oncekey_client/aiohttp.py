"""A middleware for aiohttp's client.

    session = aiohttp.ClientSession(middlewares=[OncekeyClientMiddleware()])

It has no journal: an aiohttp response cannot be built from a file's entry. The session's total timeout covers all
attempts together, so it has to be longer than the deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from ssl import SSLContext
from typing import Final

import aiohttp
from aiohttp.client_middlewares import ClientHandlerType
from aiohttp.client_reqrep import ClientRequest, ClientResponse
from yarl import URL

from oncekey_client.attempts import KeyedCall, RetryRules, RetrySession, adrive
from oncekey_client.exchange import (
    Call,
    ClientConfigurationError,
    Failure,
    Loss,
    Reply,
    RequestOutcomeUnknownError,
    fields,
)

_HOPELESS: Final = (
    aiohttp.ClientConnectorCertificateError,
    aiohttp.ServerFingerprintMismatch,
    aiohttp.InvalidURL,
    aiohttp.NonHttpUrlClientError,
)
_NOT_SENT: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)

_Exchange = Callable[[Call], Awaitable[ClientResponse]]


class OncekeyClientMiddleware:
    """Sends state-changing requests so that they execute once; other methods are passed through."""

    def __init__(
        self,
        *,
        rules: RetryRules | None = None,
        session: RetrySession | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.session = session or RetrySession(rules=rules or RetryRules())
        if self.session.journal is not None:
            raise ClientConfigurationError("the aiohttp middleware has no journal: use httpx or requests with one")
        self._sleep = sleep

    async def __call__(self, request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
        """Send a request, and return its response.

        Raises:
            RequestKeyReusedError: The key belongs to another request.
            RequestOutcomeUnknownError: It may have happened; `ask_again` takes the error.
        """
        if not self.session.enrols(request.method):
            return await handler(request)
        begun = self.session.begin(await _call(request))
        assert isinstance(begun, KeyedCall), "only a journal has responses"

        async def exchange(call: Call) -> ClientResponse:
            if (call.method, call.url) != (begun.call.method, begun.call.url):
                return await _beside(request.session, call, ssl=request.ssl, proxy=request.proxy)
            request.headers.clear()
            request.headers.extend(call.headers)
            # The streamed body is complete now, and has a length.
            request.chunked = None
            await request.update_body(call.body or None)
            return await handler(request)

        return await self._finish(begun, exchange)

    async def ask_again(self, error: RequestOutcomeUnknownError, session: aiohttp.ClientSession) -> ClientResponse:
        """Resume an operation whose outcome was unknown, with its key."""
        return await self._finish(KeyedCall(error.key, error.call), lambda call: _beside(session, call))

    async def _finish(self, operation: KeyedCall, exchange: _Exchange) -> ClientResponse:
        last: list[ClientResponse] = []
        flow = self.session.tries(operation)
        outcome = await adrive(flow, lambda call: _tried(exchange, call, last), self._sleep)
        found = self.session.conclude(operation, outcome)
        if isinstance(found, Failure):
            raise found.error
        return last[0]


async def _tried(exchange: _Exchange, call: Call, last: list[ClientResponse]) -> Reply | Failure:
    try:
        response = await exchange(call)
        # Read here, so that a truncated response counts as a failed attempt.
        body = await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        return Failure(_loss(error), error)
    last[:] = [response]
    return Reply(response.status, fields(response.headers.items()), body)


def _loss(error: Exception) -> Loss:
    if isinstance(error, _HOPELESS):
        return Loss.HOPELESS
    return Loss.NOT_SENT if isinstance(error, _NOT_SENT) else Loss.LOST


async def _call(request: ClientRequest) -> Call:
    body = b"" if isinstance(request.body, bytes) else await request.body.as_bytes()
    return Call(request.method, str(request.url), fields(request.headers.items())).with_body(body)


async def _beside(
    session: aiohttp.ClientSession,
    call: Call,
    *,
    ssl: SSLContext | bool | aiohttp.Fingerprint = True,
    proxy: URL | None = None,
) -> ClientResponse:
    """A separate request, without middleware: to another URL or with another method than the original."""
    return await session.request(
        call.method,
        call.url,
        headers=list(call.headers),
        data=call.body or None,
        allow_redirects=False,
        middlewares=(),
        ssl=ssl,
        proxy=proxy,
    )
