"""Real servers and workers that end themselves at a place, and what is left of a key afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, Self
from urllib.request import urlopen

import httpx

from harness.demo import ALPHA
from harness.patience import PATIENCE
from harness.ports import free_port
from harness.provider import Provider
from harness.tables import leases_run_out
from oncekey_demo.checker import Rule, check
from oncekey_demo.history import ClientOperation, ClientSaw
from proof.crash.places import Place
from proof.crash.reading import history_of
from proof.crash.shop import Charge, Inbox

COMMAND = (sys.executable, "-m", "proof.crash.victim")
_TESTS = Path(__file__).parents[2]
_POLL = 0.01
RULES = frozenset(Rule) - {Rule.KEPT, Rule.MISMATCH, Rule.FENCED, Rule.REAL_TIME, Rule.OUTBOX, Rule.EMPTY}
"""What can be judged without having seen who said what, and when."""


class Cluster:
    """A database, a provider beside it, and the processes that come and go."""

    def __init__(self, folder: Path, url: str) -> None:
        self.place = Place(url)
        self.folder = folder
        self.provider = Provider(folder)
        self.operations: list[ClientOperation] = []
        self._victims: list[Victim] = []
        self._count = count(1)
        # Made once: the certificates that every new client reads cost more than a request.
        self._client = httpx.Client(timeout=PATIENCE, verify=False, limits=httpx.Limits(max_keepalive_connections=0))

    def __enter__(self) -> Self:
        try:
            self.provider.start()
            self.place.prepare()
        except BaseException:
            self.__exit__()
            raise
        return self

    @cached_property
    def healthy_server(self) -> Victim:
        """A server that lives through all of it."""
        return self.server()

    def __exit__(self, *_: object) -> None:
        for victim in self._victims:
            victim.kill()
        self.provider.__exit__()
        self._client.close()
        self.place.close()

    def server(self, point: str = "after:nothing:1", sign: str = "KILL") -> Victim:
        """A demo that ends itself at a point, or lives on."""
        port = free_port()
        options = ("--port", str(port), "--store", self.place.url, "--provider", self.provider.url, "--no-workers")
        victim = self._victim(point, sign, "demo", *options)
        victim.url = f"http://127.0.0.1:{port}"
        victim.wait_until_it_serves()
        return victim

    def worker(self, point: str = "after:nothing:1", sign: str = "KILL") -> Victim:
        """A worker of the demo, which ends itself at a point, or when there is nothing left to do."""
        return self._victim(point, sign, "worker", "--app", "oncekey_demo.service:once", "--concurrency", "1", "--once")

    def _victim(self, point: str, sign: str, *command: str) -> Victim:
        environment = {
            "ONCEKEY_DEMO_STORE": self.place.url,
            "ONCEKEY_DEMO_PROVIDER": self.provider.url,
            "PYTHONPATH": os.pathsep.join([str(_TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        }
        arguments = [*COMMAND, "--point", point, "--signal", sign, "--", *command]
        victim = Victim(self.folder / f"victim-{len(self._victims)}.log", arguments, environment)
        self._victims.append(victim)
        return victim

    def ask(self, server: Victim, path: str, key: str, **headers: str) -> httpx.Response | None:
        """One request; None if the connection broke before there was an answer."""
        body = {"customer_id": key, "amount_cents": 4200, "currency": "EUR"}
        if path == "/orders":
            body = {"customer_id": key, "items": [{"product_id": "p-1", "quantity": 2}]}
        sent = {"Authorization": f"Bearer {ALPHA}", "Idempotency-Key": key}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        at = next(self._count)
        operation = ClientOperation(f"op-{at}", "", key, "", at, None, ClientSaw.INFO)
        try:
            answer = self._client.post(f"{server.url}{path}", json=body, headers=sent)
        except httpx.TransportError:
            self.operations.append(operation)
            return None
        told = answer.status_code == 201
        self.operations.append(
            ClientOperation(
                operation.id,
                "",
                key,
                "",
                operation.invoked,
                next(self._count),
                ClientSaw.OK if told else ClientSaw.INFO,
                answer.status_code,
                answer.content if told else None,
                replayed=answer.headers.get("idempotent-replayed") == "true",
                code=None if told else answer.json().get("code"),
            )
        )
        return answer

    def settled(self, server: Victim, path: str, key: str) -> httpx.Response:
        """Send it again until there is a word; the leases of the dead are over, because they are set to be."""
        answer = self.ask(server, path, key)
        ends = time.monotonic() + PATIENCE
        while answer is None or (answer.status_code != 201 and answer.json()["code"] != UNKNOWN):
            assert time.monotonic() < ends, answer and answer.text
            self.leases_run_out()
            answer = self.ask(server, path, key)
        return answer

    def leases_run_out(self) -> None:
        """Time passes for the store: the dead do not renew their leases."""
        leases_run_out(self.place.url)

    def rows(self, server: Victim, path: str, key: str) -> list[dict[str, Any]]:
        """The business rows, as the shop itself shows them."""
        headers = {"Authorization": f"Bearer {ALPHA}"}
        found = self._client.get(f"{server.url}{path}?limit=1000", headers=headers).raise_for_status()
        mine = [row for row in found.json() if row["customer_id"] == key]
        return [{"kind": path, "at": row["id"], "operation": None} for row in mine]

    def record(self, key: str) -> Any:
        """The key's row, if there is one."""
        rows = self.place.look(key)["records"]
        return rows[0] if rows else None

    def charges(self, key: str) -> list[dict[str, Any]]:
        """What the provider has charged for it."""
        return [charge for charge in self.provider.charges() if charge["customer_id"] == key]

    def check(self, server: Victim, path: str, key: str) -> None:
        """What the clients heard, the provider's ledger, the business and the diary, judged by the rules."""
        mine = [operation for operation in self.operations if operation.key == key]
        charges = [Charge(one["id"], one["downstream_key"] or "", key, 4200, 10**9) for one in self.charges(key)]
        left = self.place.look(key)
        # Our own hand at the leases is no write of anybody's.
        left["diary"] = [row for row in left["diary"] if row["lease_until"] != 1]
        left["effects"] = self.rows(server, path, key)
        history = history_of(left, mine, charges, Inbox(), (), key=key, now=10**9)
        violations = check(history, RULES)
        assert not violations, "\n".join(map(str, violations))


UNKNOWN = "idempotency_outcome_unknown"


class Victim:
    """A process that may end by itself."""

    def __init__(self, log: Path, command: list[str], environment: dict[str, str]) -> None:
        self.url = ""
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, cwd=log.parent, stdout=output, stderr=output, env={**os.environ, **environment}
            )

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_until_it_serves(self) -> None:
        ends = time.monotonic() + PATIENCE
        while True:
            assert self._process.poll() is None, self.output
            assert time.monotonic() < ends, self.output
            try:
                with urlopen(f"{self.url}/healthz", timeout=PATIENCE):
                    return
            except OSError:
                time.sleep(_POLL)

    def died(self) -> None:
        """Wait for its end, which must be the one that was meant for it."""
        assert self._process.wait(PATIENCE) == -signal.SIGKILL, self.output

    def stopped(self) -> None:
        """Wait until it stands still."""
        ends = time.monotonic() + PATIENCE
        status = Path(f"/proc/{self._process.pid}/stat")
        while status.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < ends, self.output
            time.sleep(_POLL)

    def wake(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def finished(self) -> None:
        """Wait until it has ended in order."""
        assert self._process.wait(PATIENCE) == 0, self.output

    def kill(self) -> None:
        """End it, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(PATIENCE)


class Waiting(threading.Thread):
    """A client whose server stands still in the middle of its request."""

    def __init__(self, cluster: Cluster, server: Victim, path: str, key: str, **headers: str) -> None:
        super().__init__(daemon=True)
        self._asking: Callable[[], httpx.Response | None] = lambda: cluster.ask(server, path, key, **headers)
        self.heard: httpx.Response | None = None

    def run(self) -> None:
        self.heard = self._asking()

    def answer(self) -> httpx.Response:
        """What it heard in the end."""
        self.join(PATIENCE)
        assert self.heard is not None
        return self.heard
