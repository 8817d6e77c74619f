"""The nemesis: it injects faults on a schedule that the seed determines."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from enum import StrEnum
from random import Random
from typing import Any, Final

from oncekey_demo.charging import AnswerLostError, NothingSentError, ask
from oncekey_demo.torture.clients import FAULTS
from oncekey_demo.torture.plan import CALL_TIMEOUT, LEASE, SEND_WINDOW
from oncekey_demo.torture.processes import Child, ChildFailedError
from oncekey_demo.torture.proxy import Loss, Proxy


class Trouble(StrEnum):
    """A fault of the processes, the network or the provider."""

    KILL_SERVER = "server killed"
    KILL_WORKER = "worker killed"
    PAUSE_SERVER = "server paused past its lease"
    PAUSE_WORKER = "worker paused past its lease"
    PROVIDER = "provider fails by name"
    CUT = "connections cut"
    SILENCE = "network silent"
    COMMIT_REPLY = "COMMIT reply lost"
    COMMIT_REQUEST = "COMMIT request lost"
    REPLY = "statement's reply lost"


WEIGHTS: Final[Mapping[Trouble, int]] = {
    Trouble.KILL_SERVER: 4,
    Trouble.KILL_WORKER: 3,
    Trouble.PAUSE_SERVER: 2,
    Trouble.PAUSE_WORKER: 1,
    Trouble.PROVIDER: 4,
    Trouble.CUT: 2,
    Trouble.SILENCE: 1,
    Trouble.COMMIT_REPLY: 6,
    Trouble.COMMIT_REQUEST: 3,
    Trouble.REPLY: 4,
}
NETWORK: Final = frozenset({Trouble.CUT, Trouble.SILENCE, Trouble.COMMIT_REPLY, Trouble.COMMIT_REQUEST, Trouble.REPLY})
PAUSE: Final = LEASE * 1.8
WORKER_PAUSE: Final = SEND_WINDOW + CALL_TIMEOUT + 5.0 + LEASE
"""Longer than a worker may hold a parcel."""
BETWEEN: Final = (0.1, 0.9)


class Nemesis:
    """Injects faults until it is cancelled; `heal` ends the faults that still last."""

    def __init__(
        self, seed: int, servers: Sequence[Child], workers: Sequence[Child], provider: str, proxies: Sequence[Proxy]
    ) -> None:
        self.done: Counter[Trouble] = Counter()
        self._chance = Random(f"{seed}/nemesis")  # noqa: S311  (a schedule, no secret)
        self._servers = servers
        self._workers = workers
        self._provider = provider
        self._proxies = proxies
        self._going: set[asyncio.Task[None]] = set()
        self._choices = [kind for kind in Trouble if proxies or kind not in NETWORK]
        self._strikes: Mapping[Trouble, Callable[[Trouble], Coroutine[Any, Any, None]]] = {
            Trouble.KILL_SERVER: lambda kind: self._kill(kind, self._servers),
            Trouble.KILL_WORKER: lambda kind: self._kill(kind, self._workers),
            Trouble.PAUSE_SERVER: lambda kind: self._pause(kind, self._servers, PAUSE),
            Trouble.PAUSE_WORKER: lambda kind: self._pause(kind, self._workers, WORKER_PAUSE),
            Trouble.PROVIDER: self._fail_provider,
            Trouble.CUT: self._cut,
            Trouble.SILENCE: self._silence,
            Trouble.COMMIT_REPLY: lambda kind: self._lose(kind, Loss.COMMIT_REPLY),
            Trouble.COMMIT_REQUEST: lambda kind: self._lose(kind, Loss.COMMIT_REQUEST),
            Trouble.REPLY: lambda kind: self._lose(kind, Loss.ANY_REPLY),
        }

    async def run(self) -> None:
        """Inject one fault after the other. A lasting fault overlaps with the next one."""
        while True:
            await asyncio.sleep(self._chance.uniform(*BETWEEN))
            kind = self._chance.choices(self._choices, [WEIGHTS[one] for one in self._choices])[0]
            task = asyncio.create_task(self._strikes[kind](kind))
            self._going.add(task)
            task.add_done_callback(self._going.discard)

    async def heal(self) -> None:
        """End all faults: every process runs, the network passes everything, the provider works."""
        for task in self._going:
            task.cancel()
        await asyncio.gather(*self._going, return_exceptions=True)
        for proxy in self._proxies:
            proxy.calm()
        await ask("DELETE", f"{self._provider}/faults")
        for child in (*self._servers, *self._workers):
            if child.paused:
                child.go_on()
            if not child.alive:
                await child.start()

    async def _kill(self, kind: Trouble, children: Sequence[Child]) -> None:
        victim, rest = self._chance.choice(children), self._chance.uniform(0, 0.4)
        if victim.paused or not victim.ready:
            return
        await victim.kill()
        self.done[kind] += 1  # at once: the run may end before the process has started again
        try:
            await asyncio.sleep(rest)
            await victim.start()
        except ChildFailedError:
            return  # `heal` starts it again, and raises if it cannot

    async def _pause(self, kind: Trouble, children: Sequence[Child], seconds: float) -> None:
        victim = self._chance.choice(children)
        if victim.paused or not victim.ready:
            return
        victim.pause()
        self.done[kind] += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            victim.go_on()

    async def _fail_provider(self, kind: Trouble) -> None:
        fault = {"fault": self._chance.choice(FAULTS), "times": self._chance.randint(1, 3)}
        try:
            await ask("POST", f"{self._provider}/faults", content=json.dumps(fault).encode())
        except (NothingSentError, AnswerLostError):
            return
        self.done[kind] += 1

    async def _lose(self, kind: Trouble, loss: Loss) -> None:
        for proxy in self._proxies:
            proxy.lose(loss)
        self.done[kind] += 1

    async def _cut(self, kind: Trouble) -> None:
        for proxy in self._proxies:
            proxy.cut()
        self.done[kind] += 1

    async def _silence(self, kind: Trouble) -> None:
        for proxy in self._proxies:
            proxy.hold()
        self.done[kind] += 1
        try:
            await asyncio.sleep(LEASE * 1.2)
        finally:
            for proxy in self._proxies:
                proxy.calm()
