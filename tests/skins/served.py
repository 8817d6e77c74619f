"""A skin's application in a process of its own: `skins.served:app` and `skins.served:once`, as the environment says.

`python -m skins.served` serves it by uvicorn or waitress on a socket that it was handed. It serves in a child,
and when that is killed, in the next one: the frameworks are imported once, and all else is as in a process that was
started.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys
from datetime import timedelta
from importlib import import_module
from typing import Any

from oncekey.core.policy import ErrorFormat, Policy
from oncekey.frameworks import resuming
from oncekey.frameworks.asgi.installation import Installation
from oncekey.frameworks.blocking import Threads
from skins.rows import SKINS
from skins.service import Service

SKIN, STORE, PROVIDER, SOCKET = "SKIN", "SKIN_STORE", "SKIN_PROVIDER", "SKIN_SOCKET"
ERRORS = "SKIN_ERRORS"
RESUMED = "SKIN_RESUMED"
"""The tenant that the application authenticates a worker's request as, whatever `resumed_as` returns."""
NAMELESS = "SKIN_NAMELESS"
"""What the application's `tenant` function does with every request: it `raises`, or returns `nothing`."""

POLICY = Policy(
    complete_interval=timedelta(seconds=0.2),
    send_window=timedelta(seconds=0.5),
    error_format=ErrorFormat(os.environ.get(ERRORS, "problem")),
)
"""Nobody is waited for long: here what is dead stays dead."""


def __getattr__(name: str) -> Any:
    if name not in {"app", "once"}:
        raise AttributeError(name)
    if RESUMED in os.environ:
        resuming.resumed_as = lambda _: os.environ[RESUMED]
    if NAMELESS in os.environ:
        for kind in (Installation, Threads):
            kind.__init__ = functools.partialmethod(_nameless, kind.__init__)
    skin, url = SKINS[os.environ[SKIN]], os.environ[STORE]
    made = globals()["once"] = skin.once(url, migrate=True, policy=POLICY)  # which Django looks up to make the other
    globals()["app"] = skin.make(Service(made, url, os.environ[PROVIDER]))
    return globals()[name]


def _nameless(self: Any, init: Any, *args: Any, **options: Any) -> None:
    def tenant(_: object) -> None:
        if os.environ[NAMELESS] == "raises":
            raise PermissionError("the caller is no longer a member")

    init(self, *args, **{**options, "tenant": tenant})


def serve(listening: socket.socket) -> None:
    """Serve until the process is killed."""
    app = __getattr__("app")
    match SKINS[os.environ[SKIN]].server:
        case ("uvicorn",):
            import uvicorn

            uvicorn.Server(uvicorn.Config(app, lifespan="on", log_level="warning")).run([listening])
        case ("waitress",):
            import waitress

            waitress.create_server(app, sockets=[listening], threads=8).run()
        case _:
            app.serve(listening)  # a framework that brings its own


def main() -> None:
    """Serve in one child after the other."""
    listening = socket.socket(fileno=int(os.environ[SOCKET]))
    skin = SKINS[os.environ[SKIN]]
    for module in (skin.module, *skin.server, "psycopg", "asyncpg"):
        import_module(module)
    while True:
        child = os.fork()
        if child == 0:
            serve(listening)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            sys.exit(f"the server has ended: {status}")


if __name__ == "__main__":
    main()
