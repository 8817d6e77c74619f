"""An adapter for requests.

session.mount("https://", OncekeyAdapter())
"""

from __future__ import annotations

import io
import ssl
import time
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, Final

import requests
from requests.adapters import HTTPAdapter
from requests.structures import CaseInsensitiveDict
from urllib3.exceptions import NewConnectionError
from urllib3.response import HTTPResponse

from oncekey_client.attempts import KeyedCall, RetryRules, RetrySession, drive
from oncekey_client.exchange import Call, Failure, Loss, Reply, RequestOutcomeUnknownError, fields
from oncekey_client.journal import Journal, JournalEntry

PATIENCE: Final = 30.0
"""The default timeout in seconds for each attempt of `ask_again` and `resume`."""

_NOTHING_SENT: Final = (
    requests.exceptions.ConnectTimeout,
    requests.exceptions.ProxyError,
)
_HOPELESS: Final = (
    requests.exceptions.InvalidURL,
    requests.exceptions.InvalidHeader,
    requests.exceptions.InvalidSchema,
)


class OncekeyAdapter(HTTPAdapter):
    """Sends state-changing requests so that they execute once; other methods are passed through.

    Other options are passed to `HTTPAdapter`. Its own `max_retries` stays 0: it would retry without the flow.
    """

    def __init__(
        self,
        *,
        rules: RetryRules | None = None,
        journal: Journal | None = None,
        session: RetrySession | None = None,
        sleep: Callable[[float], object] = time.sleep,
        **options: Any,  # noqa: ANN401  (handed on to HTTPAdapter)
    ) -> None:
        super().__init__(**{**options, "max_retries": 0})
        self.session = session or RetrySession(rules=rules or RetryRules(), journal=journal)
        self._sleep = sleep

    def send(  # noqa: PLR0917  (the signature of HTTPAdapter)
        self,
        request: requests.PreparedRequest,
        stream: bool = False,  # noqa: FBT001, FBT002  (the signature of HTTPAdapter)
        timeout: float | tuple[float, float] | tuple[float, None] | None = None,
        verify: bool | str = True,  # noqa: FBT001, FBT002  (the signature of HTTPAdapter)
        cert: bytes | str | tuple[bytes | str, bytes | str] | None = None,
        proxies: Mapping[str, str] | None = None,
    ) -> requests.Response:
        """Send a request, and return its response.

        Raises:
            RequestKeyReusedError: The key belongs to another request.
            RequestOutcomeUnknownError: It may have happened; `ask_again` takes the error.
        """
        options = {"timeout": timeout, "verify": verify, "cert": cert, "proxies": proxies}
        if not self.session.enrols(request.method or ""):
            return super().send(request, stream=stream, **options)  # type: ignore[arg-type]  # its own options
        begun = self.session.begin(_call(request))
        if isinstance(begun, Reply):
            return self._answered(request, begun)
        return self._finish(begun, options)

    def ask_again(self, error: RequestOutcomeUnknownError, **options: Any) -> requests.Response:  # noqa: ANN401
        """Resume an operation whose outcome was unknown; the options are those of `send`."""
        return self._finish(KeyedCall(error.key, error.call), {"timeout": PATIENCE, **options})

    def resume(
        self,
        headers: Callable[[JournalEntry], Mapping[str, str]] | None = None,
        *,
        only: Container[str] | None = None,
        **options: Any,  # noqa: ANN401  (handed on to HTTPAdapter.send)
    ) -> list[tuple[JournalEntry, requests.Response | Exception]]:
        """Resend the journal's entries without a response, with the same keys.

        `headers` adds headers that the journal does not store, such as `Authorization`; `only` limits it to these keys.
        """
        done: list[tuple[JournalEntry, requests.Response | Exception]] = []
        for entry in self.session.unfinished(only):
            try:
                operation = self.session.take_up(entry, entry.completed({} if headers is None else headers(entry)))
                done.append((entry, self._finish(operation, {"timeout": PATIENCE, **options})))
            except Exception as error:  # noqa: BLE001  (one that fails must not keep the others from being sent)
                done.append((entry, error))
        return done

    def _finish(self, operation: KeyedCall, options: Mapping[str, Any]) -> requests.Response:
        last: list[requests.Response] = []
        outcome = drive(self.session.tries(operation), lambda call: self._exchange(call, options, last), self._sleep)
        found = self.session.conclude(operation, outcome)
        if isinstance(found, Failure):
            raise found.error
        return last[0]

    def _exchange(self, call: Call, options: Mapping[str, Any], last: list[requests.Response]) -> Reply | Failure:
        try:
            response = super().send(_prepared(call), stream=True, **options)
            with response:
                # Read here, so that a truncated response counts as a failed attempt.
                body = response.content
        except requests.exceptions.ContentDecodingError as error:
            return Failure(Loss.LOST, error)
        except requests.exceptions.RequestException as error:
            return Failure(_loss(error), error)
        last[:] = [response]
        return Reply(response.status_code, fields(response.headers.items()), body)

    def _answered(self, request: requests.PreparedRequest, reply: Reply) -> requests.Response:
        raw = HTTPResponse(
            io.BytesIO(reply.body), headers=dict(reply.headers), status=reply.status, preload_content=False
        )
        response = self.build_response(request, raw)
        assert response.content is not None
        return response


def _call(request: requests.PreparedRequest) -> Call:
    call = Call(request.method or "", request.url or "", fields(request.headers.items()))
    return call.with_body(_frozen(request.body))


def _frozen(body: object) -> bytes:
    """The complete body: a file or an iterator can be sent only once."""
    if body is None:
        return b""
    if isinstance(body, str):
        return body.encode()
    if isinstance(body, bytes | bytearray):
        return bytes(body)
    read = getattr(body, "read", None)
    if read is not None:
        return _frozen(read())
    assert isinstance(body, Iterable)
    return b"".join(_frozen(part) for part in body)


def _prepared(call: Call) -> requests.PreparedRequest:
    made = requests.PreparedRequest()
    made.method, made.url, made.body = call.method, call.url, call.body or None
    # A request from the journal has no length, and would be sent in chunks.
    whole = call if call.method in {"GET", "HEAD"} else call.with_body(call.body)
    made.headers = CaseInsensitiveDict(whole.headers)
    return made


def _loss(error: Exception) -> Loss:
    for cause in _causes(error):
        # A retry does not fix a wrong certificate.
        if isinstance(cause, ssl.SSLCertVerificationError):
            return Loss.HOPELESS
        if isinstance(cause, NewConnectionError):
            return Loss.NOT_SENT
    if isinstance(error, _HOPELESS):
        return Loss.HOPELESS
    return Loss.NOT_SENT if isinstance(error, _NOTHING_SENT) else Loss.LOST


def _causes(error: BaseException) -> list[BaseException]:
    """The error and its causes: requests and urllib3 pass their reasons as arguments."""
    found, waiting = [], [error]
    while waiting:
        one = waiting.pop()
        found.append(one)
        inner = [*one.args, getattr(one, "reason", None), one.__cause__, one.__context__]
        waiting += [each for each in inner if isinstance(each, BaseException) and each not in found]
    return found
