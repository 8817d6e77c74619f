"""Running the demo: everything that can be wrong is found before the first request, and said in one sentence.

Its own provider is a process beside it, which ends when the demo does, however it ends.
"""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import uvicorn

from oncekey.core.errors import ConfigurationError
from oncekey.demo.app import DEFAULT_PROVIDER, WEBHOOKS, create_app, link_to
from oncekey.demo.history import Progress, Wanted, remembered, write_history
from oncekey.demo.provider_server import CannotServeError, address_of, listen
from oncekey.demo.tables import Tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from oncekey.core.policy import Policy
    from oncekey.ops.stats import Recent


_COMMAND = (sys.executable, "-c", "from oncekey.cli import main; main()", "provider", "--until-eof", "--port", "0")
_GRACE_SECONDS = 5.0


class HouseProvider:
    """Use it as a context manager: entering starts it and waits until it serves."""

    def __init__(self, ledger: Path, webhooks: str | None = None) -> None:
        self._options = ("--ledger", str(ledger), *(() if webhooks is None else ("--webhooks", webhooks)))
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def __enter__(self) -> Self:
        # It holds the read end of a pipe that only we can write to: even `kill -9` of the demo closes it.
        # A session of its own keeps Ctrl-C from it, because requests that are under way still need it.
        self._process = subprocess.Popen(  # noqa: S603  (our own command)
            [*_COMMAND, *self._options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        self.url = next((word for word in said.split() if word.startswith("http://")), "")
        if not self.url:
            self.__exit__()
            raise CannotServeError("its provider did not start; the line above says why")
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
"""Longer than clients keep a connection they do not use: whoever closes first must not be the one who is asked."""
OTHERS_LEDGER: Final = (
    "--history writes charges into the ledger of the demo's own provider, and not into another one's: leave --provider "
    "out"
)
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
    history: Wanted | None = None,
    progress: Progress = lambda _done, _all: None,
) -> None:
    """Serve until a signal ends it; `announce` is told the address and the console's when everything is in order.

    A `history` is written before that; the provider has to be ours for it, because its charges go into the ledger.
    """
    with listen(host, port) as listener:
        seen = asyncio.run(_try_once(store, policy, provider or DEFAULT_PROVIDER))
        if history is not None:
            if provider is not None:
                raise ConfigurationError(OTHERS_LEDGER)
            seen = asyncio.run(write_history(store, policy, ledger or beside(store), history, progress))
        address = address_of(host, listener)
        hook = f"{address}{WEBHOOKS}" if webhooks else None
        with _provided(provider, ledger or beside(store), hook) as provider_url:
            token = secrets.token_urlsafe(24)
            announce(address, link_to(address, token))
            config = uvicorn.Config(
                create_app(store, policy, provider_url, workers=workers, console_token=token, seen=seen),
                log_level="warning",
                access_log=False,
                lifespan="on",
                timeout_graceful_shutdown=GRACE_SECONDS,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
            )
            server = uvicorn.Server(config)
            server.run(sockets=[listener])
        if not server.started:
            raise CannotServeError("the demo did not start; the lines above say why")


def beside(store: str) -> Path:
    """Where the provider's ledger is: in the folder of a store that is a file, and else in this one."""
    scheme, _, path = store.partition(":///")
    folder = Path(path.partition("?")[0]).parent if scheme.startswith("sqlite") else Path()
    return folder / LEDGER


@contextmanager
def _provided(running: str | None, ledger: Path, webhooks: str | None) -> Iterator[str]:
    """The address of the provider that is there, or of one that is there as long as we are."""
    if running is not None:
        yield running
        return
    with HouseProvider(ledger, webhooks) as ours:
        yield ours.url


async def _try_once(store: str, policy: Policy, provider: str) -> Recent:
    """Start and stop the application: a server's own report of a failed start is a page of traceback.

    What the charts begin with is read on that occasion.
    """
    app = create_app(store, policy, provider, workers=False)
    async with app.router.lifespan_context(app):
        return await remembered(Tables(app.state.once.asynchronous))
