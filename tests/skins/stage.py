"""A skin on a real server and a real store, a provider beside it, and clients that meet, leave and come back."""

from __future__ import annotations

import functools
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Container, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

from harness.pages import ROOT
from harness.patience import PATIENCE, wait_until
from harness.processes import children, is_alive
from harness.provider import Provider
from harness.proxy import Proxy
from harness.served import Wire
from skins.rows import SKINS, Skin
from skins.served import ERRORS, PROVIDER, SKIN, SOCKET, STORE
from skins.service import TABLES, WRITER, execute
from wsgi.shop import Reply, send

KEYS = (sys.executable, "-c", "from oncekey.cli import main; main()")
PLACES = os.pathsep.join(str(ROOT / name) for name in ("src", "tests"))


def new_key() -> str:
    return uuid.uuid4().hex


@dataclass
class Held:
    """A request whose handler waits."""

    key: str
    order: dict[str, Any]
    gate: Path
    reply: Future[Reply]

    def release(self) -> Reply:
        self.gate.touch()
        return self.reply.result()


class Stage:
    """One skin and its store, between entering and leaving the block.

    The socket is the test's own, so a server that is killed loses what it has accepted, and whoever comes while
    the next one starts only waits.
    """

    def __init__(
        self,
        skin: Skin,
        url: str,
        folder: Path,
        provider: Provider,
        *,
        proxy: Proxy | None = None,
        options: tuple[str, ...] = (),
        errors: str = "problem",
    ) -> None:
        self.skin, self.url, self.folder = skin, url, folder
        self._options, self._errors = options, errors
        self.provider, self.proxy = provider, proxy
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listening.getsockname()[1]
        self._log = (folder / "server.log").open("wb")
        self._server: subprocess.Popen[bytes] | None = None
        self._clients = ThreadPoolExecutor(16)

    @property
    def environment(self) -> dict[str, str]:
        """What tells a process which application it is."""
        said = {SKIN: self.skin.name, STORE: self.store, PROVIDER: self.provider.url, ERRORS: self._errors}
        return {**os.environ, **said, SOCKET: str(self._listening.fileno()), "PYTHONPATH": PLACES}

    @property
    def store(self) -> str:
        """What the application is told: through the proxy, by the driver of its kind."""
        url = self.url
        if self.proxy is not None:
            head, _, rest = url.rpartition("@")
            url = f"{head}@127.0.0.1:{self.proxy.port}/{rest.partition('/')[2]}"
        return url.replace("postgresql:", "postgresql+psycopg:") if self.skin.blocking else url

    def __enter__(self) -> Self:
        for table in TABLES:
            execute(self.url, table)
        self.start()
        return self

    def start(self) -> None:
        """Start the server; a second time after it has ended."""
        first, *words = (*self.skin.server, *self._options)
        command = [sys.executable, "-m", "skins.served"]
        if first == "gunicorn":
            quiet = ("--log-level", "error", "--no-control-socket", "--bind", f"fd://{self._listening.fileno()}")
            command = [sys.executable, "-m", "gunicorn", *quiet, *words, "skins.served:app"]
        self._server = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment,
            pass_fds=[self._listening.fileno()],
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        serves, process = self._clients.submit(self.get, "/orders"), self._server
        wait_until(lambda: serves.done() or process.poll() is not None, lambda: self.log)
        if not serves.done() or serves.result().status != 200:
            self.__exit__()
            raise RuntimeError(self.log)

    @property
    def pid(self) -> int:
        """The server's process: of gunicorn the one that has workers, elsewhere the one that serves."""
        assert self._server is not None
        return self._server.pid if self.skin.server[0] == "gunicorn" else children(self._server.pid)[0]

    def ended(self) -> int:
        """Wait until the server has ended, and return its exit code."""
        assert self._server is not None
        return self._server.wait(PATIENCE)

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        with suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()
        self._listening.shutdown(socket.SHUT_RDWR)
        self._clients.shutdown(cancel_futures=True)
        self._listening.close()
        self._log.close()

    # Clients

    def send(
        self, path: str, order: Any, *, key: str | None = None, token: str = WRITER, headers: Mapping[str, str] = {}
    ) -> Reply:
        """A POST with a key of its own, or with this one; "" sends none."""
        chosen = new_key() if key is None else key or None
        return send(self.port, path, order, key=chosen, Authorization=f"Bearer {token}", **headers)

    def status(self, key: str, *, headers: Mapping[str, str] = {}) -> Reply:
        """What the status resource says of a key."""
        lines = {"Authorization": f"Bearer {WRITER}", **headers}
        return send(self.port, f"/idempotency-keys/{key}", key=None, method="GET", **lines)

    def send_chunks(self, path: str, *pieces: bytes, key: str) -> Reply:
        """A POST that does not say how long it is."""
        lines = {"Authorization": f"Bearer {WRITER}", "Idempotency-Key": key, "Content-Type": "application/json"}
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)) as connection:
            connection.request("POST", path, iter(pieces), lines, encode_chunked=True)
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, names, response.read())

    @contextmanager
    def held(self, path: str) -> Iterator[Held]:
        """A request that is in its handler until the block ends."""
        gate = self.folder / new_key()
        order, key = {"hold": str(gate), "item": "held"}, new_key()
        held = Held(key, order, gate, self._clients.submit(self.send, path, order, key=key))
        entered = Path(f"{gate}.entered")
        wait_until(lambda: entered.exists() or held.reply.done(), "the handler was not entered")
        try:
            yield held
        finally:
            held.gate.touch()

    def meanwhile(self, path: str, held: Held) -> Future[Reply]:
        """The same request once more, while the first one runs."""
        return self._clients.submit(self.send, path, held.order, key=held.key)

    def leave(self, path: str) -> Held:
        """A client that is gone while its handler runs."""
        gate, key = self.folder / new_key(), new_key()
        order = {"hold": str(gate)}
        body = json.dumps(order).encode()
        with Wire(self.port) as wire:
            lines = (
                f"POST {path} HTTP/1.1",
                "Host: shop",
                f"Authorization: Bearer {WRITER}",
                f"Idempotency-Key: {key}",
            )
            wire.say(*lines, "Content-Type: application/json", f"Content-Length: {len(body)}", body=body)
            wait_until(Path(f"{gate}.entered").exists, "the handler was not entered")
        gate.touch()
        return Held(key, order, gate, Future())

    def dies(self, path: str, order: Any, key: str) -> None:
        """A request whose server is killed."""
        with pytest.raises((http.client.HTTPException, OSError)):
            self.send(path, order, key=key)

    def kill(self) -> None:
        """Kill what serves, whatever it does; the process that started it starts the next one."""
        assert self._server is not None
        doomed = children(self._server.pid)
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, doomed)), "the server lives")

    def settled(self, path: str, order: Any, key: str) -> Reply:
        """What a client hears that comes again for as long as it is told to wait."""
        replies: list[Reply] = []

        def is_settled() -> bool:
            replies.append(self.send(path, order, key=key))
            return replies[-1].status not in {202, 409, 503}

        wait_until(is_settled, lambda: str(replies[-1]), every=0.1)
        return replies[-1]

    def get(self, path: str) -> Reply:
        return send(self.port, path, key=None, method="GET", Authorization=f"Bearer {WRITER}")

    # What others see

    def rows(self, sql: str) -> list[Any]:
        return execute(self.url, sql)

    @property
    def charges(self) -> int:
        return len(self.provider.charges())

    @contextmanager
    def worker(self, only: str = "completer,relay", **environment: str) -> Iterator[None]:
        """`oncekey worker` for the same application, in a separate process."""
        command = [*KEYS, "worker", "--app", "skins.served:once", "--only", only]
        with subprocess.Popen(
            command, cwd=self.folder, env=self.environment | environment, stdout=self._log, stderr=self._log
        ) as process:
            try:
                yield
            finally:
                process.kill()

    def command(self, *words: str) -> str:
        """What a command of `oncekey` prints for the same application."""
        command = [*KEYS, *words, "--app", "skins.served:once"]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def log(self) -> str:
        return (self.folder / "server.log").read_text(errors="replace")


def stages(
    *abilities: str, without: str | None = None, sqlite: Container[str] = (), one_server: bool = False
) -> list[Any]:
    """The skins that can do all of this: on PostgreSQL, by every server or one of each; these on SQLite, too."""
    able = [skin for skin in SKINS.values() if skin.can.issuperset(abilities) and without not in skin.can]
    served = list({skin.row: skin for skin in reversed(able)}.values()) if one_server else able
    places = [(skin.name, "postgresql") for skin in served]
    places += [(skin.name, "sqlite") for skin in able if skin.name in sqlite]
    return [pytest.param(_place(name, store), id=f"{name}-{store}") for name, store in places]


@functools.cache
def _place(skin: str, store: str) -> tuple[str, str]:
    """The same object each time: pytest keeps a fixture for as long as its parameter is that."""
    return skin, store
