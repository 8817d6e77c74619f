"""`oncekey torture` on two PostgreSQL servers that Patroni keeps, with etcd: the leader is killed, and nobody helps.

    make failover

Patroni notices that the leader is gone when its key in etcd has expired (20 s), and promotes the synchronous standby.
The application goes on by its address of two hosts. `tests/torture/test_failover.py` does without Patroni, in seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psycopg

from harness.patience import wait_until
from harness.ports import free_port
from harness.postgres_binaries import Installation, installations
from harness.processes import children, is_alive

TORTURE = (sys.executable, "-c", "from oncekey.cli import main; main()", "torture")
# PostgreSQL refuses root, and Patroni starts it under its own account: one that only this process knows.
_NOT_ROOT = ("unshare", "--user", "--map-user=1000", "--map-group=1000") if os.geteuid() == 0 else ()
BEFORE = 6.0
"""Seconds of load before the leader is killed."""


class Kept:
    """A process of the cluster; it is ended with all its children."""

    def __init__(self, folder: Path, name: str, words: list[str | Path], data: Path | None = None) -> None:
        self._data = data
        self._log = (folder / f"{name}.log").open("wb")
        self.process = subprocess.Popen(
            [*_NOT_ROOT, *words],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            cwd=folder,
        )

    def kill(self) -> None:
        """End it at once with its server, as a host that loses its power; Patroni alone would leave that running."""
        self.process.kill()
        self.process.wait()
        if self._data is not None and (self._data / "postmaster.pid").exists():
            postmaster = int((self._data / "postmaster.pid").read_text().split()[0])
            if is_alive(postmaster):
                os.kill(postmaster, signal.SIGSTOP)  # so that it neither starts another child nor repairs anything
                for pid in (*children(postmaster), postmaster):
                    os.kill(pid, signal.SIGKILL)
        self._log.close()


class Cluster:
    """etcd, and two nodes of Patroni in synchronous mode; use it as a context manager."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation
        self._etcd = f"127.0.0.1:{free_port()}"
        self._apis = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        self.ports = [free_port() for _ in range(2)]
        self._nodes: list[Kept] = []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="oncekey-patroni-")))
            peer = f"http://127.0.0.1:{free_port()}"
            client = f"http://{self._etcd}"
            words: list[str | Path] = [_program("etcd"), "--data-dir", folder / "etcd"]
            words += ["--listen-client-urls", client, "--advertise-client-urls", client]
            words += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
            words += ["--initial-cluster", f"default={peer}"]
            stack.callback(Kept(folder, "etcd", words).kill)
            for number in range(2):
                settings = folder / f"node{number}.json"
                settings.write_text(json.dumps(self._settings(folder, number)), encoding="utf-8")
                node = Kept(folder, f"node{number}", [_program("patroni"), settings], folder / f"data{number}")
                stack.callback(node.kill)
                self._nodes.append(node)
                if number == 0:
                    wait_until(lambda: self.leader() == 0, "no leader came up", every=0.2)
            wait_until(self._is_synchronous, "the standby did not become synchronous", every=0.2)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def dsn(self, database: str) -> str:
        """The address of a database, by both hosts."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        return f"postgresql://postgres@{hosts}/{database}"

    def leader(self) -> int | None:
        """Which node takes writes, if one does."""
        for number, api in enumerate(self._apis):
            if _status(f"http://{api}/primary") == 200:
                return number
        return None

    def kill_leader(self) -> int:
        """Kill the leader's host."""
        leader = self.leader()
        assert leader is not None
        self._nodes[leader].kill()
        return leader

    def _is_synchronous(self) -> bool:
        return any(_status(f"http://{api}/synchronous") == 200 for api in self._apis)

    def _settings(self, folder: Path, number: int) -> dict[str, Any]:
        # A file of JSON is one of YAML, too.
        return {
            "scope": "oncekey",
            "name": f"node{number}",
            "restapi": {"listen": self._apis[number], "connect_address": self._apis[number]},
            "etcd3": {"host": self._etcd},
            "bootstrap": {
                "dcs": {
                    "ttl": 20,
                    "loop_wait": 2,
                    "retry_timeout": 3,
                    "synchronous_mode": True,
                    "postgresql": {"parameters": {"max_connections": 200, "unix_socket_directories": ""}},
                },
                "initdb": ["data-checksums", {"encoding": "UTF8"}, {"locale": "C"}, {"auth": "trust"}],
                "pg_hba": ["host all all 127.0.0.1/32 trust", "host replication all 127.0.0.1/32 trust"],
            },
            "postgresql": {
                "listen": f"127.0.0.1:{self.ports[number]}",
                "connect_address": f"127.0.0.1:{self.ports[number]}",
                "data_dir": str(folder / f"data{number}"),
                "bin_dir": str(self._installation.folder),
                "authentication": {"superuser": {"username": "postgres"}, "replication": {"username": "postgres"}},
            },
        }


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def _program(name: str) -> Path:
    found = shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        raise SystemExit(f"{name} is not installed: make failover does that")
    return Path(found)


def main() -> None:
    """Torture the cluster while its leader dies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=35)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    options = parser.parse_args()
    with Cluster(installations()[-1]) as cluster, tempfile.TemporaryDirectory() as folder:
        leader = f"{cluster.dsn('postgres')}?target_session_attrs=read-write"
        with psycopg.connect(leader, autocommit=True) as connection:
            connection.execute("CREATE DATABASE torture")
        words = [*TORTURE, "--store", cluster.dsn("torture"), "--seconds", str(options.seconds)]
        process = subprocess.Popen([*words, "--seed", str(options.seed)], cwd=folder)
        try:
            time.sleep(BEFORE)
            killed, at = cluster.kill_leader(), time.monotonic()
            wait_until(lambda: cluster.leader() not in {None, killed}, "nobody was promoted", every=0.2)
            took = time.monotonic() - at
            print(f"node{killed} was killed, and the other one led after {took:.1f} s", file=sys.stderr)
            code = process.wait()
        finally:
            process.kill()
            process.wait()
    raise SystemExit(code)


if __name__ == "__main__":
    main()
