"""Resuming without the client: a completer's request to the application, built from the record."""

from __future__ import annotations

import asyncio
import io
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote
from wsgiref.util import setup_testing_defaults

from oncekey.core.errors import ConfigurationError
from oncekey.core.model import Claim, Record
from oncekey.core.policy import Policy, micros
from oncekey.core.scope import parts_of
from oncekey.engine import claiming
from oncekey.engine.kept_request import about_of, from_stored
from oncekey.frameworks.shared import RESUMPTION

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication, WSGIEnvironment

    from oncekey.engine.claiming import Caller
    from oncekey.frameworks.asgi import App, Message, Receive, Scope, Send


log = logging.getLogger("oncekey")

WRONG_CALLER: Final = (
    "a worker's request was authenticated as the {what} {named!r}, but it belongs to {owner!r}: authenticate it as "
    "oncekey.resumed_as(request), the result of the `principal` function (or else `tenant`), and look up its tenant"
)


@dataclass(frozen=True, slots=True)
class Resumption:
    """The record that is resumed, and the principal it is resumed as."""

    record: Record
    principal: str

    def check(self, caller: Caller, *, names_principals: bool) -> None:
        """Compare the caller that the application authenticated the request as with the one it is resumed as.

        `names_principals`: whether the application has a `principal` function. One that names nobody means the tenant.

        Raises:
            ConfigurationError: It is another caller or none, so the handler would run for the wrong one.
        """
        owner = (*parts_of(self.record.id.scope)[1:2], caller.tenant)[0]  # a long scope is a digest, which shows none
        if not caller.tenant or caller.tenant != owner:
            raise _wrong("tenant", caller.tenant, owner)
        if names_principals and (caller.principal or caller.tenant) != self.principal:
            raise _wrong("principal", caller.principal, self.principal)

    def claim(self, policy: Policy) -> Claim:
        """The claim of a completer: the record's own fields, with a new owner."""
        record = self.record
        return Claim(
            id=record.id,
            incarnation=record.incarnation,
            operation=record.operation,
            effects=record.effects,
            recovery=record.recovery,
            method=record.method,
            path=record.path,
            fingerprint=record.fingerprint,
            seed=record.seed,
            owner=f"{claiming.PROCESS}:completer:{secrets.token_hex(8)}",
            lease=micros(policy.lease),
            deadline=micros(policy.deadline),
            call_timeout=record.call_timeout,
            ttl=record.ttl,
        )


def _wrong(what: str, named: str | None, owner: str) -> ConfigurationError:
    text = WRONG_CALLER.format(what=what, named=named, owner=owner)
    log.error("oncekey: %s", text)  # some frameworks drop the exception's text
    return ConfigurationError(text)


def resumed_as(request: Any) -> str | None:  # noqa: ANN401  (a request of any framework, a scope or an environ)
    """The principal for whom a completer resumes a request; None for a client's own request.

    The application's authentication calls this first: a completer has no credentials, only the reference that the
    `principal` (or else the `tenant`) function returned when the client's request was claimed.
    """
    scope = request if isinstance(request, Mapping) else getattr(request, "scope", None)
    if scope is None:
        scope = request.environ
    resumption = scope.get(RESUMPTION)
    return resumption.principal if isinstance(resumption, Resumption) else None


async def resume(app: App, record: Record, policy: Policy) -> int | None:
    """Send a record's request through the application; returns the status of the response, if there was one."""
    assert record.request is not None
    kept = from_stored(record.request, policy.secret, about_of(record.id, record.fingerprint))
    key = record.id.key.replace("\\", "\\\\").replace('"', '\\"')
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "scheme": "https",  # many applications redirect http
        "method": kept.method,
        "path": kept.path,
        "raw_path": quote(kept.path).encode("ascii"),
        "query_string": kept.query,
        "root_path": kept.root_path,
        "headers": [*kept.headers, (b"idempotency-key", f'"{key}"'.encode("latin-1"))],
        "client": None,
        "server": ("oncekey", 443),
        "state": {},
        RESUMPTION: Resumption(record, kept.principal),
    }
    answer = _Answer()
    await app(scope, _receiver(kept.body, answer.over), answer.send)
    return answer.status


def wsgi_door(app: WSGIApplication) -> App:
    """A WSGI application through which `resume` sends a request: in a thread, and only its status is read."""

    def answered(environ: WSGIEnvironment) -> int:
        statuses: list[str] = []

        def start(status: str, _: list[tuple[str, str]], __: Any = None, /) -> Callable[[bytes], object]:  # noqa: ANN401
            statuses.append(status)
            return _ignore

        body = app(environ, start)
        try:
            for piece in body:
                _ignore(piece)
        finally:
            close = getattr(body, "close", None)
            if close is not None:
                close()
        return int(statuses[-1][:3])

    async def enter(scope: Scope, receive: Receive, send: Send) -> None:
        root, body = scope["root_path"], (await receive())["body"]
        environ: WSGIEnvironment = {
            "REQUEST_METHOD": scope["method"],
            "SCRIPT_NAME": root.encode().decode("latin-1"),
            "PATH_INFO": scope["path"].removeprefix(root).encode().decode("latin-1"),
            "QUERY_STRING": scope["query_string"].decode("latin-1"),
            "CONTENT_LENGTH": str(len(body)),
            "wsgi.input": io.BytesIO(body),
            "wsgi.url_scheme": scope["scheme"],
            RESUMPTION: scope[RESUMPTION],
        }
        for name, value in scope["headers"]:
            environ["HTTP_" + name.decode("latin-1").upper().replace("-", "_")] = value.decode("latin-1")
        environ["CONTENT_TYPE"] = environ.pop("HTTP_CONTENT_TYPE", "")
        setup_testing_defaults(environ)
        status = await asyncio.to_thread(answered, environ)
        await send({"type": "http.response.start", "status": status, "headers": []})

    return enter


def _ignore(_: bytes) -> None:
    """Discard the body: the response is in the record."""


def _receiver(body: bytes, over: asyncio.Event) -> Any:  # noqa: ANN401  (an ASGI receive)
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await over.wait()  # this client disconnects once it has its response, which some streams wait for
            return {"type": "http.disconnect"}
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


@dataclass(slots=True)
class _Answer:
    status: int | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self.over.set()
