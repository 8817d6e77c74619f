"""Runs the demo. It checks its configuration before it serves, and reports a mistake in one line.

The demo's own provider is a separate process, which ends when the demo ends, even after a `kill -9`. With
`oncekey demo --traffic SECONDS` the demo also sends requests to itself, so that the console has something to show.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import uvicorn

from oncekey_demo.app import DEFAULT_PROVIDER, WEBHOOKS, create_app, link_to
from oncekey_demo.provider_server import CannotServeError, address_of, listen
from oncekey_demo.traffic import Traffic, send

if TYPE_CHECKING:
    from oncekey.core.policy import Policy

_COMMAND = (sys.executable, "-c", "from oncekey.cli import main; main()", "provider", "--until-eof", "--port", "0")
_GRACE_SECONDS = 5.0


class OwnProvider:
    """The demo's own provider, as a context manager: entering starts it and waits until it serves."""

    def __init__(self, ledger: Path, webhooks: str | None = None) -> None:
        self._options = ("--ledger", str(ledger), *(() if webhooks is None else ("--webhooks", webhooks)))
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def __enter__(self) -> Self:
        # The provider reads from a pipe whose other end only the demo has: even `kill -9` of the demo closes it.
        # In a separate session it gets no Ctrl-C, because requests in progress still need it.
        self._process = subprocess.Popen(  # noqa: S603  (a fixed command)
            [*_COMMAND, *self._options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self.url = next((word for word in line.split() if word.startswith("http://")), "")
        if not self.url:
            self.__exit__()
            raise CannotServeError("the demo's provider did not start; see the line above")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        try:
            self._process.communicate(timeout=_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


GRACE_SECONDS = 10
KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep an idle connection: if the server closed it first, a request could be lost."""
LEDGER: Final = "oncekey-demo-provider.db"


def serve(
    store: str,
    policy: Policy,
    *,
    host: str,
    port: int,
    provider: str | None,
    ledger: Path | None,
    workers: bool,
    webhooks: bool,
    announce: Callable[[str, str], None],
    traffic: Traffic | None = None,
) -> None:
    """Serve until a signal arrives. Before the first request it calls `announce` with the demo's URL and the console's.

    Then it sends the `traffic` to itself, and continues to serve.
    """
    with listen(host, port) as listener:
        asyncio.run(_check_start(store, policy, provider or DEFAULT_PROVIDER))
        address = address_of(host, listener)
        hook = f"{address}{WEBHOOKS}" if webhooks else None
        with _provider_url(provider, ledger or ledger_next_to(store), hook) as provider_url:
            token = secrets.token_urlsafe(24)
            announce(address, link_to(address, token))
            config = uvicorn.Config(
                create_app(store, policy, provider_url, workers=workers, console_token=token),
                log_level="warning",
                access_log=False,
                lifespan="on",
                timeout_graceful_shutdown=GRACE_SECONDS,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
            )
            server = uvicorn.Server(config)
            if traffic is None:
                server.run(sockets=[listener])
            else:
                asyncio.run(_serve_traffic(server, listener, address, traffic))
        if not server.started:
            raise CannotServeError("the demo did not start; see the lines above")


def ledger_next_to(store: str) -> Path:
    """The path of the provider's ledger: next to a SQLite store, otherwise in the current folder."""
    scheme, _, path = store.partition(":///")
    folder = Path(path.partition("?")[0]).parent if scheme.startswith("sqlite") else Path()
    return folder / LEDGER


@contextmanager
def _provider_url(running: str | None, ledger: Path, webhooks: str | None) -> Iterator[str]:
    """The URL of the running provider, or of one that runs as long as the block."""
    if running is not None:
        yield running
        return
    with OwnProvider(ledger, webhooks) as ours:
        yield ours.url


async def _check_start(store: str, policy: Policy, provider: str) -> None:
    """Start and stop the application once: uvicorn would report a failed start with a long traceback."""
    app = create_app(store, policy, provider, workers=False)
    async with app.router.lifespan_context(app):
        pass


async def _serve_traffic(server: uvicorn.Server, listener: socket.socket, address: str, traffic: Traffic) -> None:
    sending = asyncio.create_task(send(address, traffic, lambda: server.should_exit))
    try:
        await server.serve(sockets=[listener])
    finally:
        sending.cancel()
        await asyncio.wait([sending])
    if not sending.cancelled():
        sending.result()
