"""An ASGI server in the test's hands: what arrives when, when the client leaves, what was sent and in which order."""

from __future__ import annotations

import asyncio
import json
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import unquote

from harness.patience import PATIENCE

Message = MutableMapping[str, Any]
App = Callable[..., Awaitable[None]]
Pairs = Mapping[str, str] | Iterable[tuple[str, str]]
T = TypeVar("T")


@dataclass(frozen=True)
class Reply:
    """What one request was answered."""

    status: int
    lines: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str | None:
        """The first value of a field."""
        return next(iter(self.all(name)), None)

    def all(self, name: str) -> list[str]:
        """All values of a field, in their order."""
        return [value for found, value in self.lines if found.lower() == name.lower()]

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def code(self) -> str | None:
        """The `code` of a problem of ours."""
        said = self.json() if "json" in (self.header("content-type") or "") else None
        return said.get("code") if isinstance(said, dict) else None

    @property
    def replayed(self) -> bool:
        """Whether it is marked as a replay."""
        return self.header("Idempotent-Replayed") == "true"


class Caller:
    """One client and its request. `leave` closes the connection; `received` wakes up whoever waits for the body."""

    def __init__(
        self,
        app: App,
        method: str = "POST",
        target: str = "/",
        *,
        headers: Pairs = (),
        body: bytes | Iterable[bytes] = b"",
        spec_version: str = "2.3",
        extensions: dict[str, Any] | None = None,
        root_path: str = "",
        on_send: Callable[[Message], object] | None = None,
    ) -> None:
        self.app = app
        path, _, query = target.partition("?")
        lines = headers.items() if isinstance(headers, Mapping) else headers
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": spec_version},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": root_path,
            "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in lines],
            "client": ("203.0.113.7", 50000),
            "server": ("shop.example", 80),
            "state": {},
        }
        if extensions is not None:
            self.scope["extensions"] = extensions
        self.sent: list[Message] = []
        self.receives = 0
        self._on_send = on_send
        self._gone = asyncio.Event()
        chunks = [body] if isinstance(body, bytes) else list(body)
        self._chunks = chunks or [b""]

    async def receive(self) -> Message:
        """What the server hands to the application: the body, then nothing until the client leaves."""
        self.receives += 1
        if self._chunks:
            chunk = self._chunks.pop(0)
            return {"type": "http.request", "body": chunk, "more_body": bool(self._chunks)}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """What the application hands to the server."""
        if self._on_send is not None:
            self._on_send(message)
        self.sent.append(message)

    def leave(self) -> None:
        """The client closes the connection."""
        self._gone.set()

    async def run(self, *, raising: bool = False) -> Reply:
        """Serve the request to its end, as a server does: an exception is logged there and is no answer."""
        try:
            await self.app(self.scope, self.receive, self.send)
        except Exception:
            if raising:
                raise
        return self.reply

    @property
    def answered(self) -> bool:
        """Whether a complete answer went out."""
        return any(m["type"] == "http.response.body" and not m.get("more_body", False) for m in self.sent)

    @property
    def reply(self) -> Reply:
        """The answer; a test that gets here without one fails."""
        starts = [message for message in self.sent if message["type"] == "http.response.start"]
        assert len(starts) == 1, f"{len(starts)} answers were started"
        assert self.answered, "the answer was not finished"
        headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in starts[0]["headers"])
        bodies = [message.get("body", b"") for message in self.sent if message["type"] == "http.response.body"]
        return Reply(starts[0]["status"], headers, b"".join(bodies))


async def call(app: App, method: str, target: str, **request: Any) -> Reply:
    """One request, from its first byte to its last."""
    return await Caller(app, method, target, **request).run()


async def cancelled_at(number: int, work: Coroutine[Any, Any, T]) -> T | None:
    """Run `work` in a task that is cancelled when it waits for the `number`-th time; None if that ended it.

    A task that waits less often than that ends as it would have, so a test counts up until nothing is cancelled.
    """
    task = asyncio.get_running_loop().create_task(_counted(work, number))
    try:
        return await task
    except asyncio.CancelledError:
        return None


async def _counted(work: Coroutine[Any, Any, T], number: int) -> T:
    return await _waits(work, number)


@types.coroutine
def _waits(work: Coroutine[Any, Any, T], number: int) -> Generator[Any, Any, T]:
    waits = 0
    thrown: BaseException | None = None
    while True:
        try:
            awaited = work.send(None) if thrown is None else work.throw(thrown)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]  # a coroutine's return value is untyped here
        thrown = None
        waits += 1
        if waits == number:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        try:
            yield awaited
        except BaseException as error:
            thrown = error


async def until(condition: Callable[[], object], *, seconds: float = PATIENCE) -> None:
    """Wait for what nobody announces: a heartbeat, a thread, a file."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  (there is nobody who could set an event)
            await asyncio.sleep(0.002)
