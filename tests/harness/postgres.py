"""PostgreSQL servers of the tests' own: made in a moment, killed without regret."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import psycopg

from harness.databases import DatabaseServer, ForeignServer, create_database, drop_database
from harness.dsn import with_database
from harness.patience import PATIENCE
from harness.ports import free_port
from harness.postgres_binaries import (
    Installation,
    PostgresMissingError,
    account,
    installations,
    preferred_installation,
    private_folder,
)
from harness.processes import children, is_alive

__all__ = [
    "DatabaseServer",
    "ForeignServer",
    "Installation",
    "PostgresMissingError",
    "PostgresServer",
    "ServerFailedError",
    "installations",
    "preferred_installation",
]

_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "fsync": "on",
    "shared_preload_libraries": "pg_stat_statements",
    "max_connections": "200",
    "max_wal_size": "256MB",  # it may lie in memory
    "autovacuum_naptime": "1d",  # it would be one session more to those who count them, and changes plans
    "timezone": "UTC",
    "log_timezone": "UTC",
}
_ENVIRONMENT = {"LC_ALL": "C", "PATH": os.defpath, "TZ": "UTC"}
_POLL = 0.02

# What a server says that only came too early after a kill -9, or found that another one took its port.
_ORPHANS_REMAIN = ("pre-existing shared memory block", 'lock file "postmaster.pid" already exists')
_PORT_TAKEN = "could not bind"


class ServerFailedError(Exception):
    """The server did not do what was asked of it; the message carries the end of its log."""


class PostgresServer:
    """A private server on loopback, with its own data, that a test may kill.

    Use it as a context manager: entering starts it, leaving stops it and removes its data.
    """

    def __init__(self, installation: Installation | None = None, settings: Mapping[str, str] | None = None) -> None:
        self.installation = installation or preferred_installation()
        self.port = free_port()
        self._settings = {**_SETTINGS, **(settings or {})}
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._folder = private_folder("postgres")
        try:
            self._fill(self._folder / "data")
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # Its data go away next, so nothing need be written; unlike a kill, this gives shared memory back.
        self._end(signal.SIGQUIT)
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    @property
    def pid(self) -> int:
        """The postmaster's process id."""
        if self._process is None:
            raise ServerFailedError("the server is not running")
        return self._process.pid

    def dsn(self, database: str = "postgres") -> str:
        """Return a database's address."""
        return with_database(f"postgresql://postgres@127.0.0.1:{self.port}/", database)

    def create_database(self, name: str) -> str:
        """Create an empty database and return its address."""
        return create_database(self.dsn(), name)

    def drop_database(self, name: str) -> None:
        """Remove a database, with whoever is still connected to it."""
        drop_database(self.dsn(), name)

    def start(self) -> None:
        """Start the server and return when it serves."""
        if self._process is not None:
            raise ServerFailedError("the server is running already")
        deadline = time.monotonic() + PATIENCE
        fresh = not self._log.exists()
        while not self._serves(deadline):
            said = self.log_tail()
            if fresh and _PORT_TAKEN in said:
                self.port = free_port()
            elif not any(reason in said for reason in _ORPHANS_REMAIN):
                raise ServerFailedError(f"{self.installation} did not start:\n{said}")
            time.sleep(_POLL)

    def stop(self) -> None:
        """Stop the server in order: connections end, data are written out."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """End the postmaster and all its children at once with SIGKILL, as a crash does."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        # Stopped first, so that it neither starts another child nor repairs anything meanwhile.
        process.send_signal(signal.SIGSTOP)
        victims = children(process.pid)
        for pid in victims:
            _kill(pid)
        process.kill()
        process.wait()
        deadline = time.monotonic() + PATIENCE
        while any(is_alive(pid) for pid in victims):
            if time.monotonic() > deadline:
                raise ServerFailedError(f"killed children of {self.installation} are still there")
            time.sleep(_POLL)

    def restart(self) -> None:
        """Start again on the same port and data, after a kill or in the middle of work."""
        self.stop()
        self.start()

    def demote(self) -> None:
        """Start again as a standby: it waits for a primary that never speaks, and meanwhile only reads."""
        self.stop()
        mark = self._home / "data" / "standby.signal"
        mark.touch()
        account().owns(mark)
        self.start()

    def log_tail(self, lines: int = 20) -> str:
        """Return the end of the server's log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def _fill(self, data: Path) -> None:
        """Make the server's data folder."""
        run_as_account(["cp", "-a", _template(self.installation), data])

    @property
    def _log(self) -> Path:
        return self._home / "server.log"

    @property
    def _home(self) -> Path:
        if self._folder is None:
            raise ServerFailedError("the server has no data: use it as a context manager")
        return self._folder

    def _end(self, sign: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(sign)
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def _serves(self, deadline: float) -> bool:
        """Start a process and wait for its first connection; False when it ended instead."""
        data = self._home / "data"
        settings = {**self._settings, "port": str(self.port)}
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        user = account()
        # A log per start, so that no earlier reason is taken for this one's.
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                [self.installation.program("postgres"), "-D", data, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._home,
                env=_ENVIRONMENT,
                user=user.user,
                group=user.group,
                extra_groups=[] if user.user is not None else None,
            )
        self._process = process
        while process.poll() is None:
            if self._answers(data):
                return True
            if time.monotonic() > deadline:
                self.kill()
                raise ServerFailedError(f"{self.installation} did not serve in time:\n{self.log_tail()}")
            time.sleep(_POLL)
        self._process = None
        return False

    def _answers(self, data: Path) -> bool:
        try:
            with psycopg.connect(self.dsn(), connect_timeout=5) as connection:
                row = connection.execute("SHOW data_directory").fetchone()
        except psycopg.OperationalError:
            return False
        # Another worker's server may have won the race for the port.
        return row is not None and Path(row[0]) == data


@functools.cache
def _template(installation: Installation) -> Path:
    """Return an initialised data folder: made once per process and copied, because initdb takes a second."""
    folder = private_folder("postgres-template")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    data = folder / "data"
    run_as_account(
        [
            installation.program("initdb"),
            "--pgdata",
            data,
            "--username=postgres",
            "--auth=trust",
            "--encoding=UTF8",
            "--locale=C",
            "--no-sync",
        ]
    )
    return data


def run_as_account(command: list[str | Path]) -> None:
    """Run a program as the server's account, and raise with what it said when it fails."""
    user = account()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env=_ENVIRONMENT,
        user=user.user,
        group=user.group,
        extra_groups=[] if user.user is not None else None,
    )
    if done.returncode != 0:
        raise ServerFailedError(f"{Path(command[0]).name} failed:\n{done.stdout}{done.stderr}")


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
