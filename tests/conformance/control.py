"""Commands for the tester that reach into the test: each asks a small server in this process to do something."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


class Control:
    """Things that can be done by command line; `asked` says in which order they were."""

    def __init__(self, **acts: Callable[[], object]) -> None:
        self.asked: list[str] = []
        control = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                name = self.path.strip("/")
                control.asked.append(name)
                acts[name]()
                self.send_response(204)
                self.end_headers()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def command(self, name: str) -> tuple[str, ...]:
        """The words of the command that does it, and returns when it is done."""
        program = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=60)"
        return sys.executable, "-Sc", program, f"http://127.0.0.1:{self._server.server_address[1]}/{name}"
