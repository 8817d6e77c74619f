"""MariaDB and MySQL servers of the tests' own: made in a moment, killed without regret."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import pymysql

from harness.patience import PATIENCE
from harness.ports import free_port
from harness.postgres_binaries import account, private_folder
from oncekey.core.flow import drive
from oncekey.databases.mariadb.generated.pymysql import PymysqlDriver
from oncekey.databases.mariadb.store import MariadbStore
from oncekey.engine import migrating

ROOT = Path(__file__).resolve().parents[2]

_SETTINGS = {
    "bind-address": "127.0.0.1",
    "max-connections": "300",
    "innodb-buffer-pool-size": "64M",
    "innodb-buffer-pool-load-at-startup": "0",
    "innodb-buffer-pool-dump-at-shutdown": "0",
    "performance-schema": "0",
}
_POLL = 0.02


class MariadbMissingError(Exception):
    """Tests need a MariaDB and there is none: a failure, never a skip."""


class MariadbFailedError(Exception):
    """The server did not do what was asked of it; the message carries the end of its log."""


@dataclass(frozen=True, slots=True)
class MariadbInstallation:
    """A folder with MariaDB's programs, as its packages lay them out."""

    root: Path
    name: ClassVar[str] = "mariadb"
    daemon: ClassVar[str] = "mariadbd"
    settings: ClassVar[Mapping[str, str]] = {"innodb-log-file-size": "48M"}

    def program(self, name: str) -> list[str]:
        """How a program is started."""
        return [
            str(next(path for path in (self.root / "usr/sbin" / name, self.root / "usr/bin" / name) if path.exists()))
        ]

    @property
    def galera(self) -> Path:
        """The library that makes nodes of servers."""
        return self.root / "usr/lib/galera/libgalera_smm.so"

    @property
    def environment(self) -> dict[str, str]:
        """What its programs need to find each other and their libraries."""
        programs = [str(self.root / "usr" / kind) for kind in ("bin", "sbin")]
        return {
            "LC_ALL": "C",
            "TZ": "UTC",
            "PATH": os.pathsep.join([*programs, os.defpath, "/usr/sbin", "/sbin"]),
            "LD_LIBRARY_PATH": os.pathsep.join(map(str, self.libraries)),
        }

    @property
    def libraries(self) -> list[Path]:
        """The folders of the libraries that came with it."""
        return [path for kind in ("usr/lib", "lib") for path in (self.root / kind).glob("*-linux-gnu*")]

    def options(self) -> list[str]:
        """What tells them where the rest of them is."""
        return [
            "--no-defaults",
            f"--basedir={self.root / 'usr'}",
            f"--lc-messages-dir={self.root / 'usr/share/mysql'}",
            f"--plugin-dir={self.root / 'usr/lib/mysql/plugin'}",
        ]

    def making(self, data: Path) -> list[str]:
        """What makes a folder of data."""
        return [
            *self.program("mariadb-install-db"),
            *self.options(),
            f"--datadir={data}",
            f"--tmpdir={data.parent}",  # one that starts removes what others have in a folder that they share
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            "--innodb-log-file-size=48M",
        ]


@dataclass(frozen=True, slots=True)
class MysqlInstallation(MariadbInstallation):
    """The same of MySQL. Its packages are of a later Debian than the machine may be, so its C library came along."""

    name: ClassVar[str] = "mysql"
    daemon: ClassVar[str] = "mysqld"
    settings: ClassVar[Mapping[str, str]] = {
        "innodb-redo-log-capacity": "32M",
        "disable-log-bin": "1",
        "mysqlx": "OFF",
        "secure-file-priv": "NULL",
    }

    def program(self, name: str) -> list[str]:
        """How a program is started: by the loader of its own C library."""
        loader = next(path for folder in self.libraries for path in folder.glob("ld-linux*.so.*"))
        libraries = os.pathsep.join(map(str, self.libraries))
        return [str(loader), "--library-path", libraries, *MariadbInstallation.program(self, name)]

    @property
    def environment(self) -> dict[str, str]:
        """What it starts must not find its libraries: the machine's own programs have another C library."""
        return {"LC_ALL": "C", "TZ": "UTC", "PATH": os.defpath}

    def making(self, data: Path) -> list[str]:
        """What makes a folder of data."""
        settings = [f"--{name}={value}" for name, value in self.settings.items()]
        settings += [f"--datadir={data}", f"--tmpdir={data.parent}"]
        return [*self.program(self.daemon), *self.options(), *settings, "--initialize-insecure"]


def installation(kind: type[MariadbInstallation] = MariadbInstallation) -> MariadbInstallation:
    """The programs that the environment names, or those that `make mariadb` or `make mysql` got."""
    return kind(_root(kind.name, kind.daemon))


@functools.cache
def _root(name: str, program: str) -> Path:
    variable = f"ONCEKEY_TEST_{name.upper()}"
    named = os.environ.get(variable)
    places = [Path(named)] if named else [Path(sys.prefix) / name, ROOT / ".venv" / name]
    daemon = Path("usr/sbin") / program
    root = next((place for place in places if (place / daemon).exists()), None)
    if root is None:
        raise MariadbMissingError(
            f"No {program} was found: `make {name}` gets it for the tests, or set {variable} to a folder with "
            f"{daemon} in it."
        )
    if account().user is None or account().reaches(root / daemon):
        return root
    copy = private_folder(f"{name}-programs")
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    shutil.copytree(root, copy / "root", symlinks=True)
    return copy / "root"


class MariadbServer:
    """A private server on loopback, with its own data, that a test may kill.

    Use it as a context manager: entering starts it, leaving ends it and removes its data.
    """

    def __init__(
        self, settings: Mapping[str, str] | None = None, *, kind: type[MariadbInstallation] = MariadbInstallation
    ) -> None:
        self.installation = installation(kind)
        self.port = free_port()
        self.settings = {**_SETTINGS, **kind.settings, **(settings or {})}
        self.folder = Path()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.folder = private_folder("mariadb")
        try:
            _as_account(["cp", "-a", str(_template(self.installation)), str(self.folder / "data")])
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        """The server's process id."""
        if self._process is None:
            raise MariadbFailedError("the server is not running")
        return self._process.pid

    def url(self, database: str) -> str:
        """A database's address, as a store is given it."""
        return f"{self.installation.name}://root@127.0.0.1:{self.port}/{database}"

    def connect(self, database: str | None = None, **options: Any) -> pymysql.Connection[Any]:
        """A connection of PyMySQL's, for who looks from outside; it commits each statement."""
        return pymysql.connect(
            host="127.0.0.1",
            port=self.port,
            user="root",
            database=database,
            **{"autocommit": True, "connect_timeout": 5, **options},
        )

    def create_database(self, name: str) -> str:
        """Create an empty database and return its address."""
        self.say(f"CREATE DATABASE `{name}`")
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Remove a database; who still has a transaction open in it is ended first."""
        self.end_sessions(name)
        self.say(f"DROP DATABASE `{name}`")

    def end_sessions(self, name: str) -> None:
        """End whoever is connected to a database."""
        with self.connect() as connection, connection.cursor() as cursor:
            cursor.execute("SELECT id FROM information_schema.processlist WHERE db = %s", (name,))
            for (number,) in cursor.fetchall():
                with contextlib.suppress(pymysql.Error):  # it may have gone by itself
                    cursor.execute(f"KILL {int(number)}")

    def say(self, sql: str, database: str | None = None) -> tuple[tuple[Any, ...], ...]:
        """Execute one statement as the administrator."""
        with self.connect(database) as connection, connection.cursor() as cursor:
            cursor.execute(sql)
            return tuple(cursor.fetchall())

    def start(self, *more: str, awaited: bool = True) -> None:
        """Start the server and return when it serves."""
        self.launch(*more)
        if awaited:
            self.await_serving()

    def launch(self, *more: str) -> None:
        """Start the server, and wait for nothing."""
        user = account()
        settings = [f"--{name}={value}" for name, value in self.settings.items()]
        with (self.folder / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *self.installation.program(self.installation.daemon),
                    *self.installation.options(),
                    f"--datadir={self.folder / 'data'}",
                    f"--socket={self.folder / 's'}",
                    f"--pid-file={self.folder / 'pid'}",
                    f"--tmpdir={self.folder}",
                    f"--port={self.port}",
                    *settings,
                    *more,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=self.installation.environment,
                user=user.user,
                group=user.group,
                extra_groups=[] if user.user is not None else None,
            )

    def await_serving(self, patience: float = PATIENCE) -> None:
        """Return when it serves."""
        deadline = time.monotonic() + patience
        while not self._answers():
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                raise MariadbFailedError(f"the server did not start:\n{self.log_tail()}")
            time.sleep(_POLL)

    def kill(self) -> None:
        """End it at once with SIGKILL, as a crash does."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait()

    def restart(self) -> None:
        """Start again on the same port and data."""
        self.kill()
        self.start()

    def log_tail(self, lines: int = 20) -> str:
        """The end of the server's log."""
        return "\n".join((self.folder / "server.log").read_text(errors="replace").splitlines()[-lines:])

    def _answers(self) -> bool:
        try:
            found = self.say("SELECT @@datadir")
        except pymysql.Error:
            return False
        # Another worker's server may have won the race for the port.
        return Path(str(found[0][0])) == self.folder / "data"


def migrated(url: str) -> str:
    """Make the tables, and return the address again."""
    with contextlib.closing(PymysqlDriver(url)) as driver:
        drive(migrating.up(MariadbStore().schema), driver.run)
    return url


@contextlib.contextmanager
def mariadb_with_tables(server: MariadbServer, purpose: str) -> Iterator[str]:
    """A database with the tables, as long as it is needed: what the tests of one folder share."""
    name = f"{purpose}_{uuid.uuid4().hex}"
    yield migrated(server.create_database(name))
    server.drop_database(name)


def emptied(server: MariadbServer, url: str) -> str:
    """Make the tables as empty as they were at first, and return the address again."""
    name = url.rpartition("/")[2]
    server.end_sessions(name)
    with server.connect(name) as connection, connection.cursor() as cursor:
        cursor.execute("SHOW TABLES LIKE 'oncekey\\_%'")
        for (table,) in cursor.fetchall():
            if table != "oncekey_migration":
                cursor.execute(f"DELETE FROM `{table}`")
    return url


@functools.cache
def _template(found: MariadbInstallation) -> Path:
    """An initialised data folder: made once per process and copied, because making one takes seconds."""
    folder = private_folder(f"{found.name}-template")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _as_account(found.making(folder / "data"), found.environment)
    return folder / "data"


def _as_account(command: list[str], environment: Mapping[str, str] | None = None) -> None:
    user = account()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env=environment,
        user=user.user,
        group=user.group,
        extra_groups=[] if user.user is not None else None,
    )
    if done.returncode != 0:
        raise MariadbFailedError(f"{Path(command[0]).name} failed:\n{done.stdout}{done.stderr}")
