"""Running the provider until a signal ends it, or until whoever started it is gone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import uvicorn

from oncekey.demo.listening import CannotServeError, address_of, listen
from oncekey.demo.outbound import http_url
from oncekey.demo.provider.app import create_provider
from oncekey.demo.provider.ledger import Ledger
from oncekey.demo.provider.silence import DroppingProtocol

GRACE_SECONDS = 1


def serve(
    ledger: Path,
    *,
    host: str,
    port: int,
    webhooks: str | None,
    secret: str,
    until_eof: bool,
    announce: Callable[[str], None],
) -> None:
    """Serve; `announce` is told the address when everything is in order."""
    if webhooks is not None:
        http_url(webhooks)
    with listen(host, port) as listener:
        config = uvicorn.Config(
            create_provider(Ledger(ledger), webhooks, secret),
            http=DroppingProtocol,
            log_level="critical",  # requests that hang until the end are meant to
            access_log=False,
            lifespan="on",
            proxy_headers=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        server = uvicorn.Server(config)
        if until_eof:
            threading.Thread(target=_end_with_parent, args=(server,), daemon=True).start()
        announce(address_of(host, listener))
        server.run(sockets=[listener])
        if not server.started:
            raise CannotServeError("the provider did not start")


def _end_with_parent(server: uvicorn.Server) -> None:
    """Standard input is a pipe that the parent holds open: it ends when the parent does, even by `kill -9`."""
    while sys.stdin.buffer.read(1):
        pass
    server.should_exit = server.force_exit = True
