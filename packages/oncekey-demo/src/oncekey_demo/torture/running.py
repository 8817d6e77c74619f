"""One run, from the first process to its outcome. However the run ends, it ends every process that it started.

The outcome has figures to read, a document for programs, and the history of each key with a violation.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final, Self

from oncekey.core.errors import ConfigurationError, SchemaError
from oncekey.core.model import State
from oncekey.wire import aconnect
from oncekey_demo.checker import Rule
from oncekey_demo.torture.clients import ROUTES, UNSHARED, Clients
from oncekey_demo.torture.nemesis import Nemesis, Trouble
from oncekey_demo.torture.plan import Plan, Settings
from oncekey_demo.torture.processes import Child, ProviderProcess, Server
from oncekey_demo.torture.proxy import Loss, Proxy, answered_mysql, answered_postgres
from oncekey_demo.torture.shop import Books, CellBooks
from oncekey_demo.torture.verdict import BrokenPromise, RunEvidence, broken_promises, gather, story_of, stuck

if TYPE_CHECKING:
    from oncekey.engine.shell import AsyncEngine

TICK: Final = 0.2
FINISHING: Final = 120.0
"""Seconds that the workers have to finish after the faults have ended; unfinished work after that is a violation."""
INSISTING: Final = 120.0
AT_ONCE: Final = 16
ASKED_AGAIN: Final = 2000
"""The maximum number of keys with a response that the clients retry once more at the end."""

Watch = Callable[["RunProgress"], None]


class Stage(StrEnum):
    """The stages of a run."""

    STARTING = "starting"
    TROUBLE = "injecting faults"
    HEALING = "faults ended, workers finish"
    ASKING = "clients retry once more"
    CHECKING = "checking"


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The progress of a run."""

    stage: Stage
    share: float
    keys: int
    requests: int
    faults: int


async def torture(plan: Plan, watch: Watch) -> Outcome:
    """Run a plan, and return its outcome."""
    begun = time.monotonic()
    file = plan.file
    new = file is not None and not file.exists()
    if file is not None and not file.parent.is_dir():
        raise ConfigurationError(f"there is no folder {file.parent} for the store")
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="oncekey-torture-")))
        watch(RunProgress(Stage.STARTING, 0, 0, 0, 0))
        engine = await stack.enter_async_context(_engine(plan))
        books = Books(lambda: engine) if plan.shares else CellBooks(engine)
        await _claim_store(plan, engine, books)
        run = await stack.enter_async_context(_Run.started(plan, folder, watch))
        await run.trouble()
        await run.finish(books)
        await run.stop()
        watch(run.look(Stage.CHECKING, 1))
        evidence = await gather(run.clients, books, run.provider.url)
        outcome = Outcome.of(
            plan,
            evidence,
            [*broken_promises(evidence), *stuck(run.stuck)],
            counted=run.clients.answers,
            faults=run.nemesis.done,
            lost=sum((proxy.lost for proxy in run.proxies), Counter[Loss]()),
            seconds=time.monotonic() - begun,
        )
        if outcome.clean and not plan.keep:
            await books.close(run.settings.scope)
    if outcome.clean and new and not plan.keep and file is not None:
        for name in ("", "-wal", "-shm", "-journal"):
            file.with_name(file.name + name).unlink(missing_ok=True)
    return outcome


async def _claim_store(plan: Plan, engine: AsyncEngine, books: Books | CellBooks) -> None:
    """Refuse a store with other records, unless the plan allows it, and create the run's tables."""
    with suppress(SchemaError):  # the store has no tables yet
        counted = (await books.read("foreign"))[0]
        if not plan.allow_existing and (counted["records"] or counted["parcels"]):
            raise ConfigurationError(
                f"the store already holds {counted['records']} records and {counted['parcels']} parcels: use an empty "
                f"store, or pass --allow-existing"
            )
    await engine.migrate()
    await books.open()


@asynccontextmanager
async def _engine(plan: Plan) -> AsyncIterator[AsyncEngine]:
    engine = aconnect(plan.direct)
    try:
        yield engine
    finally:
        await engine.close()


class _Run:
    """The processes, the clients and the nemesis of one run."""

    def __init__(
        self, plan: Plan, folder: Path, watch: Watch, provider: ProviderProcess, proxies: Sequence[Proxy]
    ) -> None:
        store = plan.url_through(*(proxy.port for proxy in proxies)) if proxies else plan.direct
        self.settings = Settings(store, provider.url, plan.tenant)
        self.provider = provider
        self.proxies = proxies
        self.stuck: dict[str, str] = {}
        self._plan = plan
        self._watch = watch
        surroundings = self.settings.environment()
        self._servers = [Server(f"server-{n + 1}", folder, surroundings, plan.shop) for n in range(plan.servers)]
        work = ("worker", "--app", f"{plan.shop}:once")
        self._workers = [Child(f"worker-{n + 1}", folder, surroundings, *work) for n in range(plan.workers)]
        ports = lambda: [server.port for server in self._servers]  # noqa: E731
        routes = tuple(ROUTES) if plan.shares else UNSHARED
        self.clients = Clients(plan.seed, self.settings.scope, ports, routes)
        self.nemesis = Nemesis(plan.seed, self._servers, self._workers, provider.url, proxies)

    @classmethod
    @asynccontextmanager
    async def started(cls, plan: Plan, folder: Path, watch: Watch) -> AsyncIterator[_Run]:
        """A run whose processes have started; they end with the block."""
        async with AsyncExitStack() as stack:
            provider = ProviderProcess(folder, Settings(plan.direct, "-", plan.tenant).environment())
            stack.push_async_callback(provider.kill)
            await provider.start()
            places = plan.databases if plan.file is None and plan.shares else ()
            is_whole = answered_mysql if plan.mariadb else answered_postgres
            proxies = [await stack.enter_async_context(Proxy(*place, is_whole=is_whole)) for place in places]
            run = cls(plan, folder, watch, provider, proxies)
            for child in run._children:
                stack.push_async_callback(child.kill)
            await asyncio.gather(*(child.start() for child in run._children))
            yield run

    @property
    def _children(self) -> list[Child]:
        return [*self._servers, *self._workers]

    async def trouble(self) -> None:
        """Let clients send while faults are injected, for the planned time; then each client finishes its last key."""
        sending = [asyncio.create_task(self.clients.run(number)) for number in range(self._plan.clients)]
        striking = asyncio.create_task(self.nemesis.run())
        try:
            begun = time.monotonic()
            while (passed := time.monotonic() - begun) < self._plan.seconds:
                self._watch(self.look(Stage.TROUBLE, passed / self._plan.seconds))
                await asyncio.wait([striking, *sending], timeout=TICK, return_when=asyncio.FIRST_EXCEPTION)
                for task in (striking, *sending):
                    if task.done() and task.exception() is not None:
                        task.result()
            self.clients.over.set()
            striking.cancel()
            await asyncio.gather(striking, return_exceptions=True)
            self._watch(self.look(Stage.HEALING, 0))
            await self.nemesis.heal()
            await asyncio.wait(sending, timeout=INSISTING)
        finally:
            for task in (striking, *sending):
                task.cancel()
            await asyncio.gather(striking, *sending, return_exceptions=True)

    async def finish(self, books: Books | CellBooks) -> None:
        """Wait until the workers have finished the abandoned requests; then let the clients retry."""
        self.stuck = await self._drained(books)
        await self._ask_again()
        await self._drained(books)

    async def _drained(self, books: Books | CellBooks) -> dict[str, str]:
        """Wait for the workers; returns the unfinished work, by key."""
        deadline = time.monotonic() + FINISHING
        while True:
            left = await books.read("unfinished", scope=self.settings.scope)
            if not left or time.monotonic() > deadline:
                return {row["key"]: row["what"] for row in left}
            self._watch(self.look(Stage.HEALING, 0.5))
            await asyncio.sleep(TICK)

    async def _ask_again(self) -> None:
        chance = Random(f"{self._plan.seed}/end")  # noqa: S311  (a schedule, no secret)
        intended_requests = self.clients.intended_requests
        open_ones = [key for key in intended_requests if key not in self.clients.answered]
        closed = [key for key in intended_requests if key in self.clients.answered]
        again = chance.sample(closed, min(len(closed), ASKED_AGAIN))
        room = asyncio.Semaphore(AT_ONCE)
        done = 0

        async def ask(key: str) -> None:
            nonlocal done
            async with room:
                await self.clients.insist(intended_requests[key], Random(f"{self._plan.seed}/end/{key}"))  # noqa: S311  (a schedule, no secret)
                done += 1

        asking = [asyncio.create_task(ask(key)) for key in (*open_ones, *again)]
        until = time.monotonic() + INSISTING
        while asking and time.monotonic() < until:
            self._watch(self.look(Stage.ASKING, done / len(asking)))
            if not (await asyncio.wait(asking, timeout=TICK))[1]:
                break
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    async def stop(self) -> None:
        """Stop servers and workers; they may still deliver open messages."""
        await asyncio.gather(*(child.stop() for child in self._children))

    def look(self, stage: Stage, share: float) -> RunProgress:
        """The current progress."""
        clients = self.clients
        return RunProgress(
            stage, share, len(clients.intended_requests), len(clients.operations), self.nemesis.done.total()
        )


SHOWN: Final = 5
_CRASHES: Final = (Trouble.KILL_SERVER, Trouble.KILL_WORKER)
_PAUSES: Final = (Trouble.PAUSE_SERVER, Trouble.PAUSE_WORKER)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run in figures."""

    plan: Plan
    seconds: float
    keys: int
    requests: int
    answers: Mapping[str, int]
    faults: Mapping[str, int]
    crashes: int
    pauses: int
    ambiguous_commits: int
    resumed: int
    delivered_again: int
    states: Mapping[str, int]
    charges: int
    findings: tuple[BrokenPromise, ...]
    stories: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(
        cls,
        plan: Plan,
        evidence: RunEvidence,
        findings: list[BrokenPromise],
        *,
        counted: Counter[str],
        faults: Counter[Trouble],
        lost: Counter[Loss],
        seconds: float,
    ) -> Self:
        """Compute the figures from the evidence."""
        bad = list(dict.fromkeys(finding.key for finding in findings))[:SHOWN]
        return cls(
            plan=plan,
            seconds=seconds,
            keys=len(evidence.intended_requests),
            requests=len(evidence.operations),
            answers=dict(counted.most_common()),
            faults={kind.value: count for kind, count in faults.most_common()},
            crashes=sum(faults[kind] for kind in _CRASHES),
            pauses=sum(faults[kind] for kind in _PAUSES),
            ambiguous_commits=lost[Loss.COMMIT_REPLY] + lost[Loss.COMMIT_REQUEST],
            resumed=_resumed(evidence),
            delivered_again=sum(n - 1 for names in evidence.deliveries.values() for n in names.values()),
            states=dict(Counter(record.state.value for record in evidence.records.values()).most_common()),
            charges=sum(map(len, evidence.charges.values())),
            findings=tuple(findings),
            stories={key: story_of(evidence, key) for key in bad},
        )

    @property
    def clean(self) -> bool:
        """Whether there was no violation."""
        return not self.findings

    @property
    def unknown(self) -> int:
        """Records whose outcome is unknown."""
        return self.states.get(State.UNKNOWN.value, 0)

    @property
    def duplicates(self) -> int:
        """Keys that were executed more than once."""
        return self._keys_with(Rule.ONE_EFFECT)

    @property
    def lost(self) -> int:
        """Acknowledged keys whose effect or response is missing."""
        return self._keys_with(Rule.NO_LOST_ACK)

    def _keys_with(self, rule: Rule) -> int:
        return len({finding.key for finding in self.findings if finding.rule == rule})

    def document(self) -> dict[str, Any]:
        """The outcome as JSON."""
        return {
            "ok": self.clean,
            "seed": self.plan.seed,
            "store": self.plan.shown,
            "seconds": round(self.seconds, 1),
            "keys": self.keys,
            "requests": self.requests,
            "answers": dict(self.answers),
            "faults": dict(self.faults),
            "crashes": self.crashes,
            "pauses": self.pauses,
            "ambiguous_commits": self.ambiguous_commits,
            "resumed": self.resumed,
            "delivered_again": self.delivered_again,
            "states": dict(self.states),
            "unknown": self.unknown,
            "charges": self.charges,
            "duplicates": self.duplicates,
            "lost": self.lost,
            "violations": [
                {
                    "rule": finding.rule.value,
                    "key": finding.key,
                    "sentence": finding.sentence,
                    "story": list(self.stories.get(finding.key, ())),
                }
                for finding in self.findings
            ],
            "command": self.plan.command,
        }


def _resumed(evidence: RunEvidence) -> int:
    """How often a next owner resumed a record, counted by the fences."""
    count = 0
    ordered = sorted(evidence.writes, key=lambda write: (write.key, write.at))
    for _, group in groupby(ordered, key=lambda write: (write.key, write.incarnation)):
        fences = [write.fence for write in group]
        count += max(fences) - fences[0]
    return count
