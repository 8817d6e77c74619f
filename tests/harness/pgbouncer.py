"""A PgBouncer of the tests' own: it lends few server connections to many clients, one transaction at a time."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Self
from urllib.parse import unquote, urlsplit

import psycopg

from harness.dsn import address, through
from harness.patience import PATIENCE
from harness.ports import free_port
from harness.postgres_binaries import account, private_folder

VARIABLE = "ONCEKEY_TEST_PGBOUNCER"
MISSING = (
    "No PgBouncer was found: `make pooler` installs it on Debian and Ubuntu as root; elsewhere install it yourself, "
    f"or set {VARIABLE} to the program."
)
PREPARES = (1, 21)
"""From which version on it knows prepared statements."""

_PLACES = ("/usr/sbin", "/usr/local/sbin", "/usr/local/bin", "/opt/homebrew/bin")
_POLL = 0.02


class PgBouncerMissingError(Exception):
    """Tests need a PgBouncer and there is none: a failure, never a skip."""


class PgBouncer:
    """A private pooler in transaction mode before one server; use it as a context manager.

    Its settings are those that docs/howto/postgresql.md asks for, and few server connections, so that each
    one is somebody else's soon.
    """

    def __init__(self, dsn: str, *, size: int = 3, prepared: int = 200) -> None:
        self.port = free_port()
        self._dsn, self._size, self._prepared = dsn, size, prepared
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        program, user = _program(), account()
        self._folder = folder = private_folder("pgbouncer")
        try:
            for _ in range(3):
                (folder / "pgbouncer.ini").write_text(self.settings(), encoding="utf-8")
                user.owns(folder / "pgbouncer.ini")
                with (folder / "log").open("wb") as log:
                    self._process = subprocess.Popen(
                        [program, folder / "pgbouncer.ini"],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        cwd=folder,
                        env={"PATH": os.defpath},
                        user=user.user,
                        group=user.group,
                        extra_groups=[] if user.user is not None else None,
                    )
                if self._serves():
                    return self
                self.port = free_port()  # somebody else's by now
            raise PgBouncerMissingError(f"PgBouncer did not start:\n{(folder / 'log').read_text(errors='replace')}")
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    @property
    def version(self) -> tuple[int, int]:
        """Its major and minor version."""
        told = subprocess.run([_program(), "--version"], capture_output=True, text=True, check=True).stdout
        major, minor = re.findall(r"\d+", told)[:2]
        return int(major), int(minor)

    def dsn(self, dsn: str) -> str:
        """The same database through the pooler, and the address says so."""
        return f"{through(dsn, self.port)}{'&' if '?' in dsn else '?'}pgbouncer=1"

    def settings(self) -> str:
        """What its file says."""
        host, port = address(self._dsn)
        parts = urlsplit(self._dsn)
        password = f" password='{unquote(parts.password)}'" if parts.password else ""
        return "\n".join(
            [
                "[databases]",
                f"* = host={host} port={port} user={unquote(parts.username or 'postgres')}{password}",
                "[pgbouncer]",
                "listen_addr = 127.0.0.1",
                f"listen_port = {self.port}",
                "unix_socket_dir =",
                "auth_type = any",
                "pool_mode = transaction",
                f"default_pool_size = {self._size}",
                "max_client_conn = 200",
                "server_reset_query_always = 1",
                *([f"max_prepared_statements = {self._prepared}"] if self.version >= PREPARES else []),
                "",
            ]
        )

    def _serves(self) -> bool:
        """Wait for its first answer; False when it ended instead."""
        assert self._process is not None
        deadline = time.monotonic() + PATIENCE
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                psycopg.connect(through(self._dsn, self.port), connect_timeout=5, prepare_threshold=None).close()
            except psycopg.OperationalError:
                time.sleep(_POLL)
            else:
                return self._process.poll() is None
        return False


def _program() -> str:
    named = os.environ.get(VARIABLE)
    found = named or shutil.which("pgbouncer", path=os.pathsep.join([os.environ.get("PATH", os.defpath), *_PLACES]))
    if found is None or not os.access(found, os.X_OK):
        raise PgBouncerMissingError(MISSING)
    return found
