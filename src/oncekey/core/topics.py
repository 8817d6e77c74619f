"""Topics: the functions that a worker calls for the parcels of the outbox, with their arguments and results."""

from __future__ import annotations

import asyncio
import inspect
import json
import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

from oncekey.core.endings import NEVER_STORED, kept_headers
from oncekey.core.errors import ConfigurationError, ResultNotStorableError
from oncekey.core.memo import FINISHED, REPEATABLE, STARTED
from oncekey.core.model import LONGEST_NAME, Duration, StoredResponse
from oncekey.core.policy import Policy, micros

if TYPE_CHECKING:
    from uuid import UUID


F = TypeVar("F", bound=Callable[..., Any])

_FAULTS: Final = 500
_EMPTY: Final = frozenset({204, 205, 304})
_JSON: Final = b"application/json"


class CallBrokenError(Exception):
    """The function was cancelled, or raised something other than an `Exception`: how far it came is unknown."""


def contained(error: BaseException) -> Exception:
    """The error of an application's function as an `Exception`, which concerns only that call.

    An extension module may raise other errors, such as a panic in Rust code. Raises the error itself if it concerns
    the caller: its task is being cancelled, or a signal ends the process.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    if isinstance(error, GeneratorExit) or _cancels_caller(error) or _ends_process(error):
        raise error
    return CallBrokenError(type(error).__name__)


def _cancels_caller(error: BaseException) -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # a thread without a loop
        return False
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _ends_process(error: BaseException) -> bool:
    """Whether a signal handler raised it; a function that calls `sys.exit()` ends only itself."""
    if threading.current_thread() is not threading.main_thread():
        return False  # signals are handled in the main thread
    if isinstance(error, KeyboardInterrupt):
        return True
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


@dataclass(frozen=True, slots=True)
class Message:
    """The argument of a topic's function. Pass on `downstream_key`: it is the same on every attempt."""

    topic: str
    payload: Any = field(repr=False)
    key: str = field(repr=False)
    downstream_key: str = field(repr=False)
    attempt: int
    incarnation: UUID
    scope: str = field(repr=False)
    order_by: str | None = None

    @property
    def traceparent(self) -> str:
        """The W3C `traceparent` to pass on: its trace id is the record's incarnation."""
        return f"00-{self.incarnation.hex}-{self.incarnation.hex[16:]}-01"


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of a deferred call: the response of the request that deferred it.

    `body` is plain data, stored as JSON, or bytes, stored as they are. `provider_id` is the provider's own id of
    the call; it is stored with the result before anything else is. A status of 429 or 5xx is not final: the worker
    treats it as a failed attempt, as if the function had raised. Raise `RejectedError(Reply(...))` for a final refusal.
    """

    status: int = 200
    body: Any = None
    headers: tuple[tuple[str, str], ...] = ()
    provider_id: str | None = None

    def __post_init__(self) -> None:
        if not 200 <= self.status <= 599:  # noqa: PLR2004  (the final statuses of HTTP)
            raise ResultNotStorableError(f"a reply's status is 200 to 599, not {self.status}")

    @property
    def is_final(self) -> bool:
        """Whether it may be the client's final response: 429, 5xx and similar mean "not now", and are tried again."""
        return self.status < _FAULTS and self.status not in NEVER_STORED

    @property
    def retry_after(self) -> float | None:
        """The seconds in its `Retry-After`, if it has a number."""
        for name, value in self.headers:
            if name.lower() == "retry-after" and value.strip().isdecimal():
                return float(value)
        return None

    def stored(self, policy: Policy) -> StoredResponse:
        """The response as it is stored and replayed; over the size limit without its body."""
        body = self._bytes()
        try:
            given = tuple((name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in self.headers)
        except (AttributeError, TypeError, ValueError) as error:
            raise ResultNotStorableError(f"a reply's headers are pairs of text: {type(error).__name__}") from None
        headers = kept_headers(given, policy)
        if body and all(name != b"content-type" for name, _ in headers):
            headers = ((b"content-type", _JSON), *headers)
        if len(body) > policy.max_response_bytes:
            return StoredResponse(self.status, tuple(line for line in headers if line[0] == b"location"), None)
        return StoredResponse(self.status, headers, body)

    def _bytes(self) -> bytes:
        if isinstance(self.body, bytes):
            return self.body
        if self.body is None and self.status in _EMPTY:
            return b""
        try:
            text = json.dumps(self.body, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
            return text.encode("utf-8")
        except (TypeError, ValueError, RecursionError) as error:
            raise ResultNotStorableError(
                f"a {type(self.body).__name__} is not JSON: return plain data, bytes or Reply ({type(error).__name__})"
            ) from None


def reply_of(returned: object) -> Reply:
    """A function's return value as a reply: plain data is 200 and JSON."""
    return returned if isinstance(returned, Reply) else Reply(body=returned)


@dataclass(frozen=True, slots=True)
class Topic:
    """One function, and how long after the first send a repetition of its call is safe."""

    name: str
    function: Callable[[Message], Any]
    repeatable: Duration | None
    blocking: bool


class Topics:
    """The functions by the names of their topics."""

    def __init__(self) -> None:
        self._topics: dict[str, Topic] = {}

    def topic(self, name: str, *, repeatable: bool | timedelta = False) -> Callable[[F], F]:
        """Register the decorated function for a topic; `def` functions are called in a thread.

        `repeatable=True`, or the time for which the provider recognises a repeated `downstream_key`, lets an uncertain
        call be made again. Without it, an uncertain call is left to a person or a resolver.
        """
        _check_name(name)
        window = _window(name, repeatable)

        def register(function: F) -> F:
            if name in self._topics:
                raise ConfigurationError(f"two functions are registered for the topic {name!r}: remove one of them")
            blocking = not inspect.iscoroutinefunction(function)
            self._topics[name] = Topic(name, function, window, blocking)
            return function

        return register

    @property
    def names(self) -> tuple[str, ...]:
        """All topics, sorted."""
        return tuple(sorted(self._topics))

    def __contains__(self, name: object) -> bool:
        return name in self._topics

    def __getitem__(self, name: str) -> Topic:
        return self._topics[name]


def _check_name(name: str) -> None:
    if not isinstance(name, str):
        raise ConfigurationError('a topic needs a name: @once.topic("charge")')
    if not 1 <= len(name) <= LONGEST_NAME or name in {STARTED, FINISHED}:
        raise ConfigurationError(
            f"a topic's name has 1 to {LONGEST_NAME} characters and is neither {STARTED!r} nor {FINISHED!r}"
        )


def _window(name: str, repeatable: object) -> Duration | None:
    if isinstance(repeatable, bool):
        return micros(REPEATABLE) if repeatable else None
    if not isinstance(repeatable, timedelta) or repeatable <= timedelta(0):
        raise ConfigurationError(f"topic {name!r}: repeatable is True, False or a time above zero")
    return micros(repeatable)
