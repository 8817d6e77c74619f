"""The console as an ASGI application: `app.mount("/console", Console(once, tokens=...))`.

It needs a way to log in: tokens, or the application's own authentication. Every operator has a role, every form carries
a token against forgery, and without `public=True` the console answers only requests from this machine.
"""

from __future__ import annotations

import asyncio
import inspect
import ipaddress
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import parse_qsl, quote
from weakref import WeakKeyDictionary

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from oncekey.console.access import Attempts, Operator, Role, Session, Sessions, Tokens
from oncekey.console.letters import LetterPages
from oncekey.console.moves import Moves
from oncekey.console.pages import Pages
from oncekey.console.views import HEADERS, Handler, Refused, Views, Visit, base_of, readable
from oncekey.core.errors import CommitAmbiguousError, ConfigurationError, OncekeyError, SchemaError, StoreError
from oncekey.core.flow import Flow, adrive
from oncekey.core.transitions import Actor, Mover
from oncekey.engine import operate
from oncekey.engine.operate import NOT_HERE
from oncekey.ops.stats import History, Recent
from oncekey.wire import aconnect, declared, sealing, understand

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

    from oncekey.core.model import Record, RecordId
    from oncekey.engine.shell import AsyncEngine
    from oncekey.once import Once
    from oncekey.reconcile import Ledger
    from oncekey.sealing import Seal

T = TypeVar("T")
Authenticate = Callable[[Request], "Awaitable[Operator | None] | Operator | None"]
"""The application's own authentication: the operator, or None if the request may not use the console."""

COOKIE: Final = "oncekey_console"
AFTER: Final = "after"
"""The parameter of the login page after a log-in with a valid token: the page checks that it receives the session."""
NO_SESSION: Final = (
    "The token is valid, but your browser did not return the session's cookie, or this process cannot read it. Allow "
    "cookies; open a public console by https; set the same secret (ONCEKEY_CONSOLE_SECRET) in all of its processes."
)
BY_ITSELF: Final = frozenset({"/live", "/series.json"})
"""Paths that an open page requests by itself: such a request does not extend the session."""
LARGEST_FORM: Final = 2 * 1024 * 1024
OFF: Final = (
    "the console needs either tokens='ann:operate:TOKEN' or authenticate=, a function that receives the request and "
    "returns an Operator or None"
)
NO_TRACE: Final = "trace_url must be the URL of a trace, with {trace} for its ID: https://traces.example/trace/{trace}"
ONLY_HERE: Final = (
    "This console accepts requests from this machine only. To open it to others, behind TLS, set "
    "Console(public=True) or run oncekey console --public."
)
_INSIDE: Final = re.compile(r"/(?:[\w.~%-][\w.~%/-]*)?(?:\?[\w.~%=&+-]*)?")
_LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
log = logging.getLogger("oncekey.console")


class Console:
    """The operators' console on a store: a URL, or the application's own `Once`.

    `tokens` lists who may log in (`NAME:ROLE:TOKEN`, by lines), or `authenticate` lets the application decide. `secret`
    signs sessions; several processes need the same one. `namespace` is the policy's. `trace_url` is the URL of a
    trace, with `{trace}` for its ID; `links` returns more links for a record, by name. `ledger` is the provider's
    ledger, to compare with the store. `history` stores the charts' data. `seal` decrypts the contents of a store
    that is given by its URL; a `Once` has its own.
    """

    def __init__(
        self,
        store: str | Once,
        *,
        tokens: str | Tokens | None = None,
        authenticate: Authenticate | None = None,
        secret: bytes | None = None,
        public: bool = False,
        namespace: str | None = None,
        title: str = "oncekey",
        trace_url: str | None = None,
        links: Callable[[Record], Mapping[str, str]] | None = None,
        ledger: Ledger | None = None,
        history: History | None = None,
        sessions: Sessions | None = None,
        seal: Seal | None = None,
    ) -> None:
        if (tokens is None) == (authenticate is None):
            raise ConfigurationError(OFF)
        if isinstance(store, str) and declared(understand(store).kind).store().survey is None:
            raise ConfigurationError(NOT_HERE)
        if trace_url is not None and ("{trace}" not in trace_url or not trace_url.startswith(("https://", "http://"))):
            raise ConfigurationError(NO_TRACE)
        self.store = store
        self._seal = seal
        self.notify = None if isinstance(store, str) else store.notify
        """Sends the events of operators' moves to the application's observers."""
        self.tokens = Tokens.read(tokens) if isinstance(tokens, str) else tokens
        self.namespace = namespace
        self.trace_url = trace_url
        self.links = links
        self.ledger = ledger
        self.history: History = Recent() if history is None else history
        self.views = Views(title)
        self.sessions = sessions or Sessions(secret)
        self._authenticate = authenticate
        self._public = public
        self._attempts = Attempts()
        self._engines: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncEngine] = WeakKeyDictionary()
        pages = Pages(self)
        letters = LetterPages(self)
        moves = Moves(self, pages, letters)
        parts = (pages, letters, moves)
        self._app = Starlette(
            routes=[
                *self._own_routes(),
                *(self._route(*read) for part in parts for read in part.reads),
                *(self._route(*write, "POST") for part in parts for write in part.writes),
            ],
            exception_handlers={
                HTTPException: self._on_refusal,
                CommitAmbiguousError: self._on_ambiguity,
                StoreError: self._on_silence,
                SchemaError: self._on_mistake,
                OncekeyError: self._on_mistake,
                Exception: self._on_fault,
            },
            lifespan=self._lifespan,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; every response has the security headers for browsers."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                there = {name for name, _ in message["headers"]}
                given = ((name.encode(), value.encode()) for name, value in HEADERS.items())
                message["headers"] = [*message["headers"], *(one for one in given if one[0] not in there)]
            await send(message)

        if not self._public and not _is_local(scope):
            await PlainTextResponse(ONLY_HERE, 403)(scope, receive, sending)
            return
        await self._app(scope, receive, sending)

    # Used by the pages

    async def engine(self) -> AsyncEngine:
        """The engine of the running event loop, after a check of its schema."""
        if not isinstance(self.store, str):
            return self.store.asynchronous()
        loop = asyncio.get_running_loop()
        engine = self._engines.get(loop)
        if engine is not None:
            return engine
        made = sealing(aconnect(self.store), self._seal)
        try:
            await made.check()
        except BaseException:
            await made.close()
            raise
        engine = self._engines.setdefault(loop, made)
        if engine is not made:  # another request was first
            await made.close()
        return engine

    async def ask(self, flow: Callable[[Any], Flow[T]]) -> T:
        """Run the flow that `flow` creates for the store, and return its result."""
        engine = await self.engine()
        return await adrive(flow(engine.store), engine.driver.run)

    async def forget(self, record_id: RecordId) -> None:
        """Remove a response from the caches in front of the store; a console without a `Once` has none."""
        if not isinstance(self.store, str):
            await self.store.forget(record_id)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """The lifespan of a console that is served alone; the application closes a mounted one."""
        yield
        await self.close()

    async def close(self) -> None:
        """Close the console's own connections."""
        for engine in list(self._engines.values()):
            await engine.close()
        self._engines.clear()

    def page(self, visit: Visit, template: str, status: int = 200, **context: Any) -> Response:  # noqa: ANN401
        """A page for an operator who is logged in."""
        return self.views.page(
            visit.base,
            template,
            status,
            operator=visit.session.operator,
            may_operate=visit.session.operator.role.covers(Role.OPERATE),
            proof=self.sessions.proof(visit.session),
            logs_out=self.tokens is not None,
            has_ledger=self.ledger is not None,
            here=visit.request.url.path.removeprefix(visit.base) or "/",
            **context,
        )

    # Log-in

    def _own_routes(self) -> Sequence[Route]:
        return (
            Route("/assets/{name:path}", self._asset, methods=["GET"]),
            Route("/login", self._show_login, methods=["GET"]),
            Route("/login", self._log_in, methods=["POST"]),
            self._route("/logout", self._log_out, Role.READ, "POST"),
        )

    def _route(self, path: str, handler: Handler, role: Role, method: str = "GET") -> Route:
        async def guarded(request: Request) -> Response:
            session = await self._session(request)
            if session is None:
                return self._to_login(request)
            form: Mapping[str, str] = {}
            if method == "POST":
                form = await _form(request)
                if not _from_here(request) or not self.sessions.proves(session, form.get("proof", "")):
                    raise Refused(
                        403,
                        "The form was rejected",
                        "Its token does not belong to your session, perhaps because you logged in again. Nothing was "
                        "changed. Go back, reload the page and try again.",
                    )
            if not session.operator.role.covers(role):
                raise Refused(
                    403,
                    "Read-only access",
                    f"{session.operator.name} has the role {session.operator.role}; this page needs {role}. "
                    "Nothing was changed.",
                )
            answer = await handler(Visit(request, session, form))
            if path not in BY_ITSELF and _cookie_of(request) not in answer.headers.get("set-cookie", ""):
                self._remember(request, answer, session)
            return answer

        return Route(path, guarded, methods=[method])

    async def _session(self, request: Request) -> Session | None:
        cookie = request.cookies.get(_cookie_of(request), "")
        if self._authenticate is None:
            tokens = self.tokens
            assert tokens is not None
            session = self.sessions.read(cookie, lambda ticket, _: tokens.operator(ticket))
            ended = session is not None and await self.ask(partial(operate.has_ended, nonce=session.nonce))
            return None if ended else session
        authenticated = self._authenticate(request)
        operator = await authenticated if inspect.isawaitable(authenticated) else authenticated
        if operator is None:
            raise Refused(403, "No access", "The application does not list you as an operator.")
        same = self.sessions.read(cookie, lambda _, name: operator if name == operator.name else None)
        return same or self.sessions.begin(operator)

    def _remember(self, request: Request, answer: Response, session: Session) -> None:
        answer.set_cookie(
            _cookie_of(request),
            self.sessions.cookie(session),
            path=base_of(request) or "/",
            # A public console is reached by TLS, which a proxy in front of it may end.
            secure=self._public or request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )

    def _to_login(self, request: Request) -> Response:
        base = base_of(request)
        if request.headers.get("hx-request") == "true":
            return Response(status_code=401, headers={"hx-redirect": f"{base}/login"})
        if request.method != "GET":
            raise Refused(401, "Your session has ended", "Nothing was changed. Log in and try again.")
        wanted = request.url.path.removeprefix(base)
        wanted += f"?{request.url.query}" if request.url.query else ""
        suffix = f"?next={quote(wanted)}" if wanted not in {"", "/"} else ""
        return RedirectResponse(f"{base}/login{suffix}", 303)

    async def _show_login(self, request: Request, wrong: str = "", status: int = 200) -> Response:
        if self.tokens is None:
            raise HTTPException(404)
        wanted = request.query_params.get("next", "")
        if AFTER in request.query_params:
            if await self._session(request) is not None:
                return RedirectResponse(f"{base_of(request)}{_inside(wanted)}", 303)
            wrong, status = NO_SESSION, 401
        return self.views.page(base_of(request), "login.html", status, wrong=wrong, wanted=wanted)

    async def _log_in(self, request: Request) -> Response:
        if self.tokens is None:
            raise HTTPException(404)
        source = request.client.host if request.client else "-"
        form = await _form(request)
        if not _from_here(request):
            raise Refused(403, "The form was rejected", "Another site sent it. You were not logged in.")
        # Nothing is awaited from here until the attempt is counted: other attempts ended while the form was read.
        wait = self._attempts.wait(source)
        if wait:
            answer = await self._show_login(request, f"Too many invalid tokens. Try again in {wait} seconds.", 429)
            answer.headers["retry-after"] = str(wait)
            return answer
        ticket = self.tokens.ticket(form.get("token", "").strip())
        operator = None if ticket is None else self.tokens.operator(ticket)
        if ticket is None or operator is None:
            self._attempts.failed(source)
            log.warning("console: log-in with an invalid token from %s", source)
            return await self._show_login(request, "The token is not valid.", 401)
        self._attempts.forget(source)
        wanted = quote(_inside(form.get("next", "")))
        answer = RedirectResponse(f"{base_of(request)}/login?{AFTER}&next={wanted}", 303)
        self._remember(request, answer, self.sessions.begin(operator, ticket))
        log.info("console: %s logged in", operator.name)
        return answer

    async def _log_out(self, visit: Visit) -> Response:
        session = visit.session
        mover = Mover(Actor.OPERATOR, session.operator.name)
        await self.ask(partial(operate.end_session, nonce=session.nonce, mover=mover))
        log.info("console: %s logged out", session.operator.name)
        answer = RedirectResponse(f"{visit.base}/login", 303)
        answer.delete_cookie(_cookie_of(visit.request), path=visit.base or "/")
        return answer

    async def _asset(self, request: Request) -> Response:
        found = self.views.asset(request.path_params["name"])
        if found is None:
            raise HTTPException(404)
        return found

    # Errors

    async def _on_refusal(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        heading = getattr(error, "heading", "There is no such page" if error.status_code == 404 else error.detail)  # noqa: PLR2004
        sentence = error.detail if isinstance(error, Refused) else "The address may be outdated."
        return self._message(request, error.status_code, heading, sentence)

    async def _on_silence(self, request: Request, error: Exception) -> Response:
        log.error("console: the store does not respond (%s)", type(error).__name__)
        sentence = "Nothing was changed. Protected requests are rejected until the store is back. Try again."
        return self._message(request, 503, "The store does not respond", sentence)

    async def _on_ambiguity(self, request: Request, _: Exception) -> Response:
        sentence = (
            "The connection was lost during the commit, so the change may have been made. Check the timeline of the "
            "record before you repeat it."
        )
        return self._message(request, 503, "The change may have been made", sentence)

    async def _on_mistake(self, request: Request, error: Exception) -> Response:
        log.error("console: %s", type(error).__name__)
        return self._message(request, 500, "The console cannot show this", f"{error}")

    async def _on_fault(self, request: Request, error: Exception) -> Response:
        """A bug in the console: the server's log has it, and the timeline shows whether a move was made."""
        log.error("console: %s on %s", type(error).__name__, request.method)
        sentence = "This is a bug in the console. If you were making a change, check the audit before you repeat it."
        return self._message(request, 500, "Internal error", sentence)

    def _message(self, request: Request, status: int, heading: str, sentence: str) -> Response:
        context = {"heading": heading, "sentence": sentence, "has_ledger": self.ledger is not None, "here": ""}
        return self.views.page(base_of(request), "message.html", status, status_code=status, **context)


def _cookie_of(request: Request) -> str:
    """The name of the session's cookie: cookies ignore ports, so each console of a host needs its own name."""
    return re.sub(r"[^0-9A-Za-z]+", "_", f"{COOKIE}_{request.headers.get('host', '')}{base_of(request)}")


def _inside(wanted: str) -> str:
    """The path in the console that a log-in leads to; its first page for anything else."""
    return wanted if _INSIDE.fullmatch(wanted) else "/"


def _is_local(scope: Scope) -> bool:
    """Whether the request is from this machine and its Host names it: another site's name may resolve to it."""
    client = scope.get("client")
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    name = re.sub(r":\d+$", "", hosts[0]).lower() if hosts else ""
    try:
        near = client is None or ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        near = False
    return near and name in _LOCAL_NAMES


def _from_here(request: Request) -> bool:
    """Whether a page of this site sent a form, according to the browser's headers."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site in {"same-origin", "none"}
    origin = request.headers.get("origin")
    return origin is None or origin.partition("://")[2] == request.headers.get("host")


async def _form(request: Request) -> dict[str, str]:
    """The fields of a form; the last of several with one name."""
    if request.headers.get("content-type", "").partition(";")[0] != "application/x-www-form-urlencoded":
        raise Refused(415, "Not a form", "Nothing was changed.")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST_FORM:
            raise Refused(413, "The form is too large", f"The limit is {LARGEST_FORM} bytes. Nothing was changed.")
    try:
        fields = dict(parse_qsl(body.decode("ascii"), keep_blank_values=True, errors="strict"))
    except UnicodeDecodeError:
        raise Refused(400, "Not a form", "It is not UTF-8. Nothing was changed.") from None
    return {name: readable(value) for name, value in fields.items()}
