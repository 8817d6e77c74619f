"""The plan of a run, checked before any process starts, and the environment of its processes.

Their policy has short leases and intervals, so that a recovery takes seconds, not minutes.
"""

from __future__ import annotations

import ipaddress
import os
import shlex
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit

from oncekey.core.errors import ConfigurationError
from oncekey.core.model import SECOND
from oncekey.core.policy import Policy
from oncekey.core.scope import bound_scope
from oncekey.databases.address import Kind
from oncekey.engine.enrolment import NO_NAMESPACE
from oncekey.once.startup import STEPS
from oncekey.wire import declared, understand

LEASE: Final = 1.0
CALL_TIMEOUT: Final = 0.8
SEND_WINDOW: Final = 0.5
ENOUGH: Final = 100_000
"""More attempts than any run needs: repeatable work must end with a response, however many faults occur."""

STORE: Final = "ONCEKEY_TORTURE_STORE"
PROVIDER: Final = "ONCEKEY_TORTURE_PROVIDER"
TENANT: Final = "ONCEKEY_TORTURE_TENANT"


@dataclass(frozen=True, slots=True)
class Settings:
    """The addresses of an application's store and provider, and the tenant whose keys it serves."""

    store: str
    provider: str
    tenant: str

    @classmethod
    def from_environment(cls) -> Self:
        """Read the settings from the environment of a run's process."""
        missing = [name for name in (STORE, PROVIDER, TENANT) if not os.environ.get(name)]
        if missing:
            raise ConfigurationError(f"{missing[0]} is not set: only `oncekey torture` starts this application")
        return cls(os.environ[STORE], os.environ[PROVIDER], os.environ[TENANT])

    def environment(self) -> dict[str, str]:
        """The environment for a process that the run starts."""
        return {**os.environ, STORE: self.store, PROVIDER: self.provider, TENANT: self.tenant}

    @property
    def scope(self) -> str:
        """The scope of this run's keys in the store."""
        return bound_scope(POLICY.bind_to, POLICY.namespace or NO_NAMESPACE, self.tenant)


def policy_for(store: str) -> Policy:
    """The policy of a run. If the store's clock counts whole seconds, the lease is longer."""
    least = STEPS * declared(understand(store).kind).store().resolution / SECOND
    return POLICY.override(lease=max(LEASE, least))


POLICY: Final = Policy().override(
    lease=LEASE,
    deadline=60.0,
    call_timeout=CALL_TIMEOUT,
    send_window=SEND_WINDOW,
    outbox_lease=LEASE,
    complete_interval=0.3,
    max_attempts=ENOUGH,
    outbox_max_attempts=ENOUGH,
)


SHOP: Final = "oncekey_demo.torture.service"
SHORTEST: Final = 1.0
LONGEST: Final = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Plan:
    """A run: its store, its duration, the number of processes, and the seed."""

    store: str
    seconds: float
    seed: int
    servers: int = 2
    workers: int = 2
    clients: int = 8
    allow_existing: bool = False
    keep: bool = False
    shop: str = SHOP
    """The module under test, with `app` and `once`."""
    tenant: str = field(default_factory=lambda: f"torture-{uuid.uuid4().hex[:12]}")

    def __post_init__(self) -> None:
        if not SHORTEST <= self.seconds <= LONGEST:
            raise ConfigurationError(f"--seconds {self.seconds:g}: a run takes {SHORTEST:g} to {LONGEST:g} seconds")
        for name, count in (("servers", self.servers), ("workers", self.workers), ("clients", self.clients)):
            if not 1 <= count <= 64:  # noqa: PLR2004  (one machine)
                raise ConfigurationError(f"--{name} {count}: must be 1 to 64")
        kind = understand(self.store).kind
        if kind is Kind.MEMORY:
            raise ConfigurationError(
                "memory: ends with its process, so it cannot be tested: use SQLite or a database server"
            )
        if kind is Kind.POSTGRES and not self.databases:
            raise ConfigurationError(
                "torture needs a PostgreSQL on this machine, over TCP: postgresql://user@127.0.0.1:5432/scratch"
            )
        if kind is Kind.MARIADB and not self.databases:
            raise ConfigurationError(
                "torture needs a MariaDB on this machine, over TCP: mariadb://user@127.0.0.1:3306/scratch"
            )
        if kind is Kind.DYNAMODB and not self._emulated:
            raise ConfigurationError(
                "torture needs an emulator on this machine: dynamodb://any/scratch?endpoint=http://127.0.0.1:8000"
            )

    @property
    def _emulated(self) -> bool:
        """Whether DynamoDB is an emulator on this machine."""
        host = urlsplit(dict(understand(self.store).options)["endpoint"]).hostname
        return host is not None and (host == "localhost" or _is_loopback(host))

    @property
    def shares(self) -> bool:
        """Whether the store shares the application's transactions; otherwise some routes and faults are left out."""
        return declared(understand(self.store).kind).store().outbox is not None

    @property
    def databases(self) -> tuple[tuple[str, int], ...]:
        """The hosts and ports of the database; none if the store is a file, or if a host is another machine."""
        parts = urlsplit(self.store)
        usual = 3306 if self.mariadb else 5432
        found = [_host_and_port(place, usual) for place in parts.netloc.rpartition("@")[2].split(",")]
        elsewhere = any(word.startswith(("host=", "hostaddr=", "unix_socket=")) for word in parts.query.split("&"))
        places = tuple(place for place in found if place is not None)
        return places if len(places) == len(found) and not elsewhere else ()

    def url_through(self, *ports: int) -> str:
        """The store's URL through proxies; without encryption, because a proxy looks for the word COMMIT."""
        parts = urlsplit(self.store)
        account = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
        options = [word for word in parts.query.split("&") if word and not word.startswith("ssl")]
        query = "&".join(options if self.mariadb else [*options, "sslmode=disable"])
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        return parts._replace(netloc=f"{account}{hosts}", query=query).geturl()

    @property
    def mariadb(self) -> bool:
        """Whether the server uses MySQL's protocol."""
        return understand(self.store).kind is Kind.MARIADB

    @property
    def file(self) -> Path | None:
        """The file of a SQLite store."""
        address = understand(self.store)
        return Path(address.place).absolute() if address.kind is Kind.SQLITE else None

    @property
    def direct(self) -> str:
        """The store's URL, independent of a process's working folder."""
        return self.store if self.file is None else f"{self.store.partition(':')[0]}:///{self.file}"

    @property
    def shown(self) -> str:
        """The store's URL without user, password and options."""
        parts = urlsplit(self.store)
        if not parts.netloc:
            return self.store
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()

    @property
    def command(self) -> str:
        """The command that repeats the run, with the store's URL without user and password."""
        words = [
            "oncekey",
            "torture",
            "--store",
            self.shown,
            "--seconds",
            f"{self.seconds:g}",
            "--seed",
            str(self.seed),
        ]
        words += ["--servers", str(self.servers), "--workers", str(self.workers), "--clients", str(self.clients)]
        return shlex.join(words)


def _host_and_port(place: str, usual: int) -> tuple[str, int] | None:
    """Host and port of one host of an address; None if it is not on this machine."""
    try:
        parts = urlsplit(f"//{place}")
        host, port = parts.hostname, parts.port or usual
    except ValueError:
        return None
    return (host, port) if host == "localhost" or (host is not None and _is_loopback(host)) else None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
