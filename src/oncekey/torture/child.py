"""A process of a run: `serve MODULE PORT`, or any command of `oncekey`. It ends with the run, however that ends."""

from __future__ import annotations

import logging
import os
import sys
import threading
from importlib import import_module


def main(words: list[str]) -> None:
    """Run the server or the command that the words name."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    match words:
        case ["serve", module, port]:
            _serve(module, int(port))
        case _:
            # Imported by name: the layer of the command line is above this module.
            sys.argv = ["oncekey", *words]
            import_module("oncekey.cli").main()


def _serve(module: str, port: int) -> None:
    import uvicorn  # noqa: PLC0415  (a worker does not need it)

    from oncekey.demo.provider_server import address_of, listen  # noqa: PLC0415

    host = "127.0.0.1"
    app = import_module(module).app  # before a client can connect: a refused connection is better than a long wait
    with listen(host, port) as listener:
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="on", timeout_graceful_shutdown=5, log_config=None
        )
        server = uvicorn.Server(config)
        print(address_of(host, listener), flush=True)  # noqa: T201  (the parent process reads it)
        server.run(sockets=[listener])


def _end_with_parent() -> None:
    """Standard input is a pipe that the run holds open: it ends when the run does, even by `kill -9`."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
