"""`oncekey console`: serves the operator console on this machine.

It checks its configuration before it serves, and reports a mistake in one line.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import secrets
import socket
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from oncekey.cli import options
from oncekey.core.errors import ConfigurationError, OncekeyError
from oncekey.engine.operate import survey_of
from oncekey.ops.stats import sample_of
from oncekey.sealing import from_environment

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.types import Receive, Scope, Send

    from oncekey.console.app import Console

TOKENS: Final = "ONCEKEY_CONSOLE_TOKENS"
SECRET: Final = "ONCEKEY_CONSOLE_SECRET"  # noqa: S105  (the name of a variable, not a secret)
NOBODY: Final = (
    "no operator could log in: pass --as NAME for a token that lasts as long as this command, or --tokens FILE with "
    f"lines of NAME:ROLE:TOKEN, or set {TOKENS} to such lines"
)


def register(app: typer.Typer) -> None:
    """Add the command `console`."""
    app.command("console")(console)


def console(
    store: options.StoreUrl,
    *,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 picks a free one.")] = 8002,
    name: Annotated[
        str | None,
        typer.Option("--as", help="Create a token for NAME that lasts as long as this command.", metavar="NAME"),
    ] = None,
    role: Annotated[str, typer.Option(help="With --as: operate or read.")] = "operate",
    tokens: Annotated[
        Path | None, typer.Option(help=f"A file with lines of NAME:ROLE:TOKEN. [default: {TOKENS}]", metavar="FILE")
    ] = None,
    namespace: options.Namespace = None,
    trace_url: Annotated[
        str | None,
        typer.Option("--trace-url", envvar="ONCEKEY_TRACE_URL", metavar="URL", help="The URL of a trace: .../{trace}."),
    ] = None,
    public: Annotated[
        bool,
        typer.Option("--public", help=("Allow an address that other machines can reach; put TLS in front of it.")),
    ] = False,
) -> None:
    """Serve the operator console: pending work, the history of keys, and actions.

    It does not start without a token. Tokens come from a file or from ONCEKEY_CONSOLE_TOKENS, never from the command
    line, which other users can see; `--as NAME` adds one that lasts as long as this command, and prints the link.
    ROLE is `read` or `operate`. Several processes that serve one console share ONCEKEY_CONSOLE_SECRET, which signs
    sessions.

    An address that other machines can reach needs --public.
    """
    from oncekey.cli.app import as_typed
    from oncekey.console import Console, Operator, Role, Tokens

    made = secrets.token_urlsafe(24)
    if name is not None:
        if role not in set(Role):
            raise ConfigurationError(f"--role is {' or '.join(Role)}")
        known = Tokens.read(_given(tokens, needed=False), (made, Operator(name.strip(), Role(role))))
    else:
        known = Tokens.read(_given(tokens))
    secret = os.environ.get(SECRET)
    pages = Console(
        store,
        tokens=known,
        secret=secret.encode() if secret else None,
        public=public,
        namespace=namespace,
        trace_url=trace_url,
        seal=from_environment(),
    )
    pages.views.as_typed = as_typed
    options.check_exists(store)

    def announce(address: str) -> None:
        link = f"{address}/login#{made}" if name is not None else address
        typer.echo(f"oncekey console: {link}")
        typer.echo("Press Ctrl-C to stop." + (f" The link logs {name} in." if name is not None else ""))

    serve(pages, host=host, port=port, public=public, announce=announce)


def _given(file: Path | None, *, needed: bool = True) -> str:
    if file is None:
        text = os.environ.get(TOKENS, "")
        if needed and not text.strip():
            raise ConfigurationError(NOBODY)
        return text
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"--tokens {file} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None


EVERY: Final = 10.0
"""Seconds between two samples of the store's counts, so that charts have data before an operator opens them."""
PUBLIC: Final = (
    "other machines can reach {host}, and the console shows customers' keys and changes their records: pass --public "
    "if that is intended, behind a proxy with TLS; otherwise omit --host, and forward the port with ssh"
)
log = logging.getLogger("oncekey.console")


def serve(console: Console, *, host: str, port: int, public: bool, announce: Callable[[str], None]) -> None:
    """Serve until a signal stops it. It calls `announce` with the URL when everything is ready."""
    try:
        import uvicorn
    except ImportError:
        raise ConfigurationError("the console needs a web server: pip install 'oncekey[console]'") from None

    check_host(host, public=public)
    asyncio.run(_try_once(console))
    with closing(listen(host, port)) as listener:
        name = f"[{host}]" if ":" in host else host
        announce(f"http://{name}:{listener.getsockname()[1]}")
        config = uvicorn.Config(Watched(console), log_level="warning", access_log=False, lifespan="on")
        uvicorn.Server(config).run(sockets=[listener])


def check_host(host: str, *, public: bool) -> None:
    """Refuse an address that other machines can reach, unless `public` allows it."""
    try:
        near = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        near = False
    if not near and not public:
        raise ConfigurationError(PUBLIC.format(host=host))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises ConfigurationError if the port cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from None


class Watched:
    """The console, with a task that samples the store while it is served."""

    def __init__(self, console: Console) -> None:
        self._console = console

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request. The task starts and stops with the server's lifespan."""
        if scope["type"] != "lifespan":
            await self._console(scope, receive, send)
            return
        async with self._watching():
            await self._console(scope, receive, send)

    @asynccontextmanager
    async def _watching(self) -> AsyncIterator[None]:
        watcher = asyncio.create_task(watch(self._console))
        try:
            yield
        finally:
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher


async def watch(console: Console, every: float = EVERY) -> None:
    """Sample the store's counts every few seconds, until cancelled."""
    while True:
        try:
            tally = await console.ask(lambda store: survey_of(store).tally())
            roll = await console.ask(lambda store: store.upkeep.workers())
            console.history.add(sample_of(tally, roll))
        except OncekeyError as error:
            log.warning("console: reading the store failed (%s)", type(error).__name__)
        await asyncio.sleep(every)


async def _try_once(console: Console) -> None:
    """Query the store, so that a wrong URL is reported now, not to the first operator."""
    try:
        await console.ask(lambda store: survey_of(store).tally())
    finally:
        await console.close()
