"""The server under load, in a process of its own: `python bench/served APP STORE [SECOND]` says its port first.

It is started by its path, by whichever interpreter has the packages of APP: nothing in this folder imports `bench`. It
ends when its standard input does, so that nothing is left behind by a bench that was killed.
"""

# ruff: noqa: PLC0415  (each application imports what only its own environment has)

from __future__ import annotations

import os
import socket
import sys
import threading

import uvicorn

HOUR = 3600


def app_of(name: str, *places: str) -> object:
    """The application that a name stands for; its packages are imported only now."""
    match name:
        case "bare" | "stock" | "stock_sqlalchemy":
            import plain

            return getattr(plain, name)(*places)
        case "idemkit" | "header_memory" | "header_redis" | "dbos":
            import others

            return getattr(others, name)(*places)
        case _:
            import ours

            return getattr(ours, name)(*places)


def end_with_the_bench() -> None:
    """Wait for the end of standard input, which is the end of the bench."""
    while os.read(0, 1):
        pass
    os._exit(1)


def main() -> None:
    try:
        app = app_of(*sys.argv[1:])
    except NotImplementedError as error:
        print(f"missing: {error}", flush=True)
        return
    threading.Thread(target=end_with_the_bench, daemon=True).start()
    # Connections are kept for the whole run, and idle while others are measured.
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=HOUR)  # type: ignore[arg-type]
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        print(listener.getsockname()[1], flush=True)
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
