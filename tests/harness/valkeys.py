"""Servers of Redis that keep records: one alone, a primary with a replica and sentinels, and a cluster of six."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import urlencode

import redis

from harness.brokers import BrokerMissingError, Valkey
from harness.certificates import certificate
from harness.patience import wait_until
from harness.ports import free_port

ROOT = Path(__file__).parents[2]
PROGRAM = "usr/bin/redis-server"
SLOTS = 16384
NODE_TIMEOUT_MS = 1500


class StoringValkey(Valkey):
    """A server whose every acknowledged write is on its disk; its options come behind, and count."""

    scheme: ClassVar[str] = "redis"

    def __init__(self, *options: str, config: str | None = None) -> None:
        super().__init__()
        self._options = options
        self._config = config
        self._folder = Path(tempfile.mkdtemp(prefix="oncekey-valkey-"))

    @property
    def url(self) -> str:
        """Where it is."""
        return _named("", [self], "/0")

    @property
    def files(self) -> dict[str, str]:
        """The files that a client needs: none."""
        return {}

    def command(self) -> list[str]:
        """Its program and options; with a file, those of the file are first."""
        named, *settings = super().command()
        kept = ["--dir", str(self._folder), "--maxmemory-policy", "noeviction", "--repl-diskless-sync-delay", "0"]
        durable = ["--appendonly", "yes", "--appendfsync", "always"]
        if self._config is None:
            return [named, *settings, *kept, *durable, *self._options]
        file = self._folder / "sentinel.conf"
        if not file.exists():  # a sentinel writes down there what it has learnt
            file.write_text(self._config)
        return [named, str(file), "--port", str(self.port), "--bind", "127.0.0.1", *self._options]

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> Self:
        """Start it again, with what it had on its disk."""
        return super().__enter__()

    def kill(self) -> None:
        """End it at once, as a crash does."""
        super().__exit__()

    def freeze(self) -> None:
        """Let it hold still, with all its sockets open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def say(self, *words: object) -> Any:
        """One command."""
        with self.client() as client:
            return client.execute_command(*words)

    def info(self, name: str) -> Any:
        """One line of what it says about itself."""
        with self.client() as client:
            return client.info().get(name)

    def client(self) -> redis.Redis:
        """A client of its own, to look from outside."""
        return redis.Redis(port=self.port, socket_timeout=10)


class TlsRedis(StoringValkey):
    """A Redis that only speaks TLS, with its replicas and its cluster, too, and wants a certificate of each client.

    It comes from Debian's packages: the Valkey of the development requirements is built without TLS.
    """

    scheme = "rediss"

    def __init__(self, *options: str, config: str | None = None) -> None:
        super().__init__(*options, config=config)
        self._shown, self._key = _certificate()

    @property
    def files(self) -> dict[str, str]:
        """The files that a client needs, by the names that URLs and the client library have for them."""
        return {"ssl_ca_certs": str(self._shown), "ssl_certfile": str(self._shown), "ssl_keyfile": str(self._key)}

    def command(self) -> list[str]:
        """As without TLS, and no port for those who do not speak it."""
        shown, key = str(self._shown), str(self._key)
        files = ["--tls-cert-file", shown, "--tls-ca-cert-file", shown, "--tls-key-file", key]
        within = ["--tls-replication", "yes", "--tls-cluster", "yes"]
        return [*_redis(), *super().command()[1:], "--port", "0", "--tls-port", str(self.port), *files, *within]

    def client(self) -> redis.Redis:
        """A client with a certificate."""
        return redis.Redis(port=self.port, socket_timeout=10, ssl=True, **self.files)  # type: ignore[arg-type]

    def _answers(self) -> bool:
        try:
            return bool(self.say("PING"))
        except (redis.RedisError, OSError):
            return False


@functools.cache
def _certificate() -> tuple[Path, Path]:
    folder = Path(tempfile.mkdtemp(prefix="oncekey-certificate-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return certificate(folder)


def _redis() -> list[str]:
    """The program that the environment names, or that `make redis` got, with the libraries that came with it."""
    named = os.environ.get("ONCEKEY_TEST_REDIS")
    places = [Path(named)] if named else [Path(sys.prefix) / "redis", ROOT / ".venv" / "redis"]
    root = next((place for place in places if (place / PROGRAM).exists()), None)
    if root is None:
        raise BrokerMissingError(
            "No Redis with TLS was found: `make redis` gets one for the tests, or set ONCEKEY_TEST_REDIS to a folder "
            f"with {PROGRAM} in it (/ where the package redis-server is installed)."
        )
    libraries = ":".join(map(str, (root / "usr/lib").glob("*-linux-gnu*")))
    return ["env", f"LD_LIBRARY_PATH={libraries}", str(root / PROGRAM)]


def _named(mode: str, servers: Sequence[StoringValkey], rest: str = "") -> str:
    """The URL of several servers of one kind."""
    hosts = ",".join(f"127.0.0.1:{one.port}" for one in servers)
    files = f"?{urlencode(servers[0].files)}" if servers[0].files else ""
    return f"{servers[0].scheme}{mode}://{hosts}{rest}{files}"


@dataclass(frozen=True)
class Pair:
    """A primary, its replica, and sentinels who watch them."""

    primary: StoringValkey
    replica: StoringValkey
    sentinels: tuple[StoringValkey, ...] = ()

    @property
    def url(self) -> str:
        """By the sentinels."""
        return _named("+sentinel", self.sentinels, "/shop/0")

    def is_promoted(self) -> bool:
        """Whether the sentinels name the replica."""
        named = self.sentinels[0].say("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "shop")
        return int(named[1]) == self.replica.port and self.replica.info("role") == "master"


@contextmanager
def pair(*, sentinels: int = 0, kind: type[StoringValkey] = StoringValkey) -> Iterator[Pair]:
    """A primary and a replica that has caught up."""
    with ExitStack() as stack:
        primary = stack.enter_context(kind())
        replica = stack.enter_context(kind("--replicaof", f"127.0.0.1 {primary.port}"))
        wait_until(lambda: replica.info("master_link_status") == "up")
        config = (
            f"sentinel monitor shop 127.0.0.1 {primary.port} {sentinels // 2 + 1}\n"
            "sentinel down-after-milliseconds shop 1000\nsentinel failover-timeout shop 5000\n"
        )
        watching = tuple(stack.enter_context(kind("--sentinel", config=config)) for _ in range(sentinels))
        wait_until(lambda: all(_watches(one, sentinels) for one in watching))
        yield Pair(primary, replica, watching)


def _watches(sentinel: StoringValkey, others: int) -> bool:
    with sentinel.client() as client:
        state = client.sentinel_master("shop")
    return (state["num-slaves"], state["num-other-sentinels"]) == (1, others - 1)


class Cluster:
    """Three primaries, and a replica of each if wanted; use it as a context manager."""

    def __init__(self, kind: type[StoringValkey] = StoringValkey, *, replicas: int = 1) -> None:
        self.nodes: list[StoringValkey] = []
        self._kind = kind
        self._replicas = replicas
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        """By all nodes."""
        return _named("+cluster", self.nodes)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            buses = [free_port() for _ in range(3 + 3 * self._replicas)]
            for bus in buses:
                options = ("--cluster-enabled", "yes", "--cluster-node-timeout", str(NODE_TIMEOUT_MS))
                self.nodes.append(stack.enter_context(self._kind(*options, "--cluster-port", str(bus))))
            first, primaries = self.nodes[0], self.nodes[:3]
            for number, node in enumerate(primaries):
                node.say("CLUSTER", "ADDSLOTSRANGE", number * SLOTS // 3, (number + 1) * SLOTS // 3 - 1)
                node.say("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            for node, bus in zip(self.nodes[1:], buses[1:], strict=True):
                first.say("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
            wait_until(
                lambda: all(len(node.say("CLUSTER", "NODES").splitlines()) == len(buses) for node in self.nodes),
                every=0.05,
            )
            for primary, replica in zip(primaries, self.nodes[3:], strict=False):
                name = primary.say("CLUSTER", "MYID").decode()
                replica.say("CLUSTER", "REPLICATE", name)
            wait_until(self.is_whole, every=0.05)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def is_whole(self) -> bool:
        """Whether every node serves, every replica follows, and all of them know it."""
        return all(
            b"cluster_state:ok" in node.say("CLUSTER", "INFO") and self._knows_all(node) for node in self.nodes
        ) and all(node.info("master_link_status") == "up" for node in self.nodes[3:])

    def flush(self) -> None:
        """Empty all primaries."""
        for node in self.nodes:
            if node.info("role") == "master":
                node.say("FLUSHALL")

    def _knows_all(self, node: StoringValkey) -> bool:
        slots = node.say("CLUSTER", "SLOTS")
        return len(slots) == 3 and all(len(one) == 3 + self._replicas for one in slots)
