"""Servers for a run: PostgreSQL, Redis, and one process for each place; all are private and end with the run."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench import clocks, prepared
from bench.figures import BenchError
from bench.load import HOST
from bench.places import AS_SHIPPED, ROOT
from bench.variants import Place, Store

SERVED = ROOT / "bench" / "served"
PATIENCE = 90.0
_TABLES = """
    CREATE TABLE bench_order (id {id}, product text NOT NULL, quantity integer NOT NULL);
    CREATE TABLE bench_payment (id {id}, product text NOT NULL, quantity integer NOT NULL, charge text);
"""
POSTGRES_TABLES = _TABLES.format(id="bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY")
SQLITE_TABLES = _TABLES.format(id="INTEGER PRIMARY KEY")


class Server:
    """The process of a place. It is paused while others are measured, so that its polling does not affect them."""

    def __init__(self, place: Place, process: subprocess.Popen[str], words: Any, stores: Stores) -> None:
        self.place = place
        self.pid = process.pid
        self.port = 0
        self._process = process
        self._words = words
        self._stores = stores

    def wait(self) -> str | None:
        """Wait for its first output: sets the port, or returns why it cannot serve."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE)
        line = self._process.stdout.readline().strip() if ready else ""
        if line.startswith("missing: "):
            return line.removeprefix("missing: ")
        if not line.isdigit():
            raise BenchError(f"the server of {self.place.name} did not start:\n{self.said()}")
        self.port = int(line)
        return None

    def said(self) -> str:
        """The end of its standard error."""
        self._words.seek(0)
        return "\n".join(self._words.read().decode(errors="replace").splitlines()[-15:])

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def spent(self) -> tuple[float | None, dict[int, float] | None]:
        """Processor time so far: of this process, and of each process of its stores."""
        return clocks.seconds_of(self.pid), self._stores.spent(self.place)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Its data is no longer needed, and a paused process ignores other signals.
        self._process.kill()
        self._process.communicate()
        self._words.close()


@dataclass(slots=True)
class Stores:
    """A separate database, file or Redis for every place, on servers that this run has started."""

    postgres: Any
    folder: Path
    redis: Redis | None = None
    relay: int | None = None
    """The port of the relay in front of PostgreSQL, for the round that counts messages."""
    _databases: dict[str, str] = field(default_factory=dict)

    def addresses(self, place: Place) -> list[str]:
        """The addresses for its application: of a new empty store, or of the one that it shares."""
        if place.store is Store.NONE:
            return []
        home = place.shares or place.name
        if home not in self._databases:
            self._databases[home] = self._made(place, f"bench_{uuid.uuid4().hex}")
        address = self._databases[home]
        if place.store is Store.SQLITE:
            return [f"sqlite:///{address}"]
        dsn = self.postgres.dsn(address)
        if self.relay is not None:
            dsn = dsn.replace(f":{self.postgres.port}/", f":{self.relay}/")
        if place.store is Store.POSTGRES_AND_REDIS:
            assert self.redis is not None
            return [dsn, self.redis.url]
        return [dsn]

    def rows(self, place: Place, table: str) -> int:
        """How many rows its application has written."""
        address = self._databases[place.shares or place.name]
        said = f"SELECT count(*) FROM {table}"
        if place.store is Store.SQLITE:
            with closing(sqlite3.connect(address)) as file:
                return int(file.execute(said).fetchone()[0])
        return int(self.asked(said, address)[0])

    def asked(self, said: str, database: str = "postgres") -> tuple[Any, ...]:
        """The first row of a query's result."""
        import psycopg  # noqa: PLC0415

        with psycopg.connect(self.postgres.dsn(database), autocommit=True) as connection:
            row = connection.execute(said.encode()).fetchone()
        assert row is not None
        return row

    def spent(self, place: Place) -> dict[int, float] | None:
        """Processor time of each process of a place's store."""
        if clocks.seconds_of(os.getpid()) is None:
            return None
        if place.store in {Store.NONE, Store.SQLITE}:
            return {}
        found = clocks.backends_of(self.postgres.pid, self._databases[place.shares or place.name])
        if place.store is Store.POSTGRES_AND_REDIS and self.redis is not None:
            found[self.redis.pid] = clocks.seconds_of(self.redis.pid) or 0.0
        return found

    def _made(self, place: Place, name: str) -> str:
        if place.store is Store.SQLITE:
            file = self.folder / f"{name}.db"
            with closing(sqlite3.connect(file)) as fresh:
                fresh.executescript(SQLITE_TABLES)
            return str(file)
        import psycopg  # noqa: PLC0415

        with psycopg.connect(self.postgres.create_database(name), autocommit=True) as connection:
            connection.execute(POSTGRES_TABLES.encode())
        return name


class Redis:
    """A private server that syncs its log every second, the default with persistence."""

    def __init__(self, program: Path) -> None:
        from harness.ports import free_port  # noqa: PLC0415

        self._folder = Path(tempfile.mkdtemp(prefix="oncekey-bench-redis-"))
        port = free_port()
        self.url = f"redis://{HOST}:{port}/0"
        options = ("--port", str(port), "--bind", HOST, "--save", "", "--appendonly", "yes")
        self._process = subprocess.Popen(
            [program, *options], cwd=self._folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder)


@contextmanager
def stores(places: Iterable[Place], pythons: Mapping[str, Path]) -> Iterator[Stores]:
    """PostgreSQL with its defaults, `fsync` on; Redis if a place needs it; a folder for files."""
    sys.path.insert(0, str(ROOT / "tests"))
    from harness.postgres import PostgresServer  # noqa: PLC0415

    with ExitStack() as stack:
        postgres = stack.enter_context(PostgresServer(settings={**AS_SHIPPED, "max_connections": "600"}))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="oncekey-bench-")))
        redis = None
        for place in places:
            if place.store is Store.POSTGRES_AND_REDIS and redis is None:
                program = prepared.redis_server(Path(sys.executable) if place.peer is None else pythons[place.peer])
                redis = None if program is None else stack.enter_context(Redis(program))
        yield Stores(postgres, folder, redis)


class Serving:
    """All servers of a phase, started together."""

    def __init__(self, stores_: Stores, pythons: Mapping[str, Path], before: Path | None, *, pin: bool = False) -> None:
        self._stores = stores_
        self._pythons = pythons
        self._before = before
        self._pin = pin
        self._stack = ExitStack()
        self.servers: dict[str, Server] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    async def start(self, places: Iterable[Place], tell: Callable[[str], None] = lambda _: None) -> dict[str, str]:
        """Start them, and wait for each port; returns why places cannot serve, if any. Calls `tell` for each.

        A place that shares a database starts after the one that created it, so that only one creates the tables.
        """
        missing: dict[str, str] = {}
        wanted = list(places)
        for batch in ([one for one in wanted if not one.shares], [one for one in wanted if one.shares]):
            started = []
            for place in batch:
                if place.shares in missing:
                    missing[place.name] = missing[place.shares]
                elif place.store is Store.POSTGRES_AND_REDIS and self._stores.redis is None:
                    missing[place.name] = "there is no Redis server"
                else:
                    started.append(self._stack.enter_context(self._started(place)))
            for server in started:
                reason = await _ready(server)
                if reason is None:
                    self.servers[server.place.name] = server
                    tell(f"{server.place.name} is up")
                else:
                    missing[server.place.name] = reason
                    tell(f"{server.place.name} is missing")
        return missing

    def _started(self, place: Place) -> Server:
        python = sys.executable if place.peer is None else self._pythons[place.peer]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ONCEKEY"))}
        if place.before:
            # Precedes the installed package, which the application checks.
            environment["PYTHONPATH"] = environment["BENCH_SOURCES"] = str(self._before)
        words = tempfile.TemporaryFile()  # noqa: SIM115  (it is the server's, and closed with it)
        process = subprocess.Popen(
            [python, SERVED, place.app, *self._stores.addresses(place)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            text=True,
            process_group=0,  # Ctrl-C reaches only the bench, which ends them
        )
        if self._pin:
            os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
        return Server(place, process, words, self._stores)


async def _ready(server: Server) -> str | None:
    """Wait until a server responds, or return why it cannot serve. oncekey must start; a peer may be missing."""
    try:
        # The relay of the counting round runs on this loop while a server starts.
        reason = await asyncio.to_thread(server.wait)
        if reason is None:
            await _answers(server)
    except BenchError as error:
        if server.place.peer is None:
            raise
        print(f"bench: {error}", file=sys.stderr, flush=True)
        return "its server did not start"
    return reason


async def _answers(server: Server) -> None:
    """Wait until a server sends any response: it listens before its application is ready."""
    said = b""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection(HOST, server.port)
            writer.write(b"GET /nothing HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n")
            said = await reader.read()
            writer.close()
    if not said.startswith(b"HTTP/1.1 "):
        raise BenchError(f"the server of {server.place.name} does not serve:\n{server.said()}")
