"""The run itself: variants take turns in short slices, round by round, and every response is checked."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bench import clocks
from bench.counting import Counts, Relay, Tally
from bench.figures import BenchError, Figures, Slice
from bench.load import Lanes, Load, Volley
from bench.serving import Server, Serving, Stores
from bench.variants import Chosen, Sends, Store, Variant, without

BODY = b'{"product":"sku_teapot","quantity":2}'
REPLAYED_KEYS = 64
COUNTED = 40
STOCK = 200
STOCKING = 5.0
COUNTED_WARM = 80
"""psycopg prepares a statement after five executions, on each of ten connections."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The duration and the load of a run."""

    rounds: int = 7
    turns: int = 3
    seconds: float = 0.9
    connections: int = 16
    at_most: int = 5000
    pin: bool = False
    minutes: float = 9.0
    """A round that would end later than this after the start of the run is not started, except the first."""

    @property
    def slice_seconds(self) -> float:
        return self.seconds / self.turns


def request(path: str, key: str | None) -> bytes:
    """The bytes of a request."""
    said = "" if key is None else f'idempotency-key: "{key}"\r\n'
    head = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n{said}"
    return f"{head}content-length: {len(BODY)}\r\n\r\n".encode() + BODY


@dataclass(slots=True)
class Keys:
    """The source of a variant's keys. Keys with a response may be replayed by another process."""

    sends: Sends
    path: str
    settled: deque[str]
    fresh: list[str] = field(default_factory=list)
    known: list[str] = field(default_factory=lambda: [uuid.uuid4().hex for _ in range(REPLAYED_KEYS)])
    _again: Iterator[str] = field(init=False)

    def __post_init__(self) -> None:
        self._again = itertools.cycle(self.known)

    def next(self) -> bytes | None:
        match self.sends:
            case Sends.NO_KEY:
                return request(self.path, None)
            case Sends.REPLAY:
                return request(self.path, next(self._again))
            case Sends.ELSEWHERE:
                return request(self.path, self.settled.popleft()) if self.settled else None
            case Sends.NEW:
                self.fresh.append(uuid.uuid4().hex)
                return request(self.path, self.fresh[-1])

    def answered(self) -> None:
        """Record that every sent request has its response."""
        self.settled.extend(self.fresh)
        self.fresh.clear()


class Field:
    """Running servers, with connections to each, and the record of the requests sent to them."""

    def __init__(self, chosen: Chosen, serving: Serving, connections: int) -> None:
        self.chosen = chosen
        self._servers = serving.servers
        self._connections = connections
        self._lanes: dict[str, Lanes] = {}
        self._executed: Counter[tuple[str, str]] = Counter()
        shared: dict[str, deque[str]] = {}
        homes = {place.name: place.shares or place.name for place in chosen.places}
        self._keys = {
            # Only orders are replayed by another server.
            one.name: Keys(one.sends, one.path, shared.setdefault(homes[one.place] + one.path, deque(maxlen=50_000)))
            for one in chosen.variants
        }
        self._homes = homes
        self._used: dict[str, int] = {}
        self._resting = False

    async def open(self, slice_seconds: float, at_most: int) -> None:
        """Connect, create the keys that will be replayed, warm up, and pause all servers."""
        for name, server in self._servers.items():
            self._lanes[name] = await Lanes.open(server.port, self._connections)
        for variant in self.chosen.variants:
            if variant.sends is Sends.REPLAY:
                await self._primed(variant)
        for variant in self.chosen.variants:
            await self.stock(variant, at_most)
            await self.fire(variant, slice_seconds, at_most)
        for server in self._servers.values():
            server.pause()
        self._resting = True

    async def stock(self, variant: Variant, at_most: int) -> None:
        """Ensure that there are enough keys for a variant that replays each once: half as many again as it used last.

        The server that creates them may be slower, and its turn may come later, so it creates them now, unmeasured.
        """
        if variant.sends is not Sends.ELSEWHERE:
            return
        keys = self._keys[variant.name]
        wanted = min(at_most, self._used.get(variant.name, STOCK) * 3 // 2)
        feeder = next(
            one
            for one in self.chosen.variants
            if one.sends is Sends.NEW and (one.place, one.path) == (self._homes[variant.place], variant.path)
        )
        if self._resting and len(keys.settled) < wanted:
            self.server(feeder).resume()
        while len(keys.settled) < wanted:
            await self.fire(feeder, STOCKING, wanted - len(keys.settled))
        if self._resting:
            self.server(feeder).pause()

    async def close(self) -> None:
        for lanes in self._lanes.values():
            await lanes.close()

    def server(self, variant: Variant) -> Server:
        return self._servers[variant.place]

    async def fire(self, variant: Variant, seconds: float, at_most: int) -> Volley:
        """A slice of load. A wrong response ends the run without figures."""
        keys = self._keys[variant.name]
        mark = f"\r\n{variant.replayed}: true".encode() if variant.replayed else None
        replays = variant.sends in {Sends.REPLAY, Sends.ELSEWHERE}
        load = Load(
            keys.next,
            str(variant.status).encode(),
            marker=mark if replays else None,
            unmarked=None if replays else mark,
            seconds=seconds,
            at_most=at_most,
        )
        volley = await self._lanes[variant.place].fire(load)
        if volley.wrong or not volley.count:
            reason = volley.wrong[0] if volley.wrong else "no request was left to send"
            raise BenchError(f"{variant.name}: {reason}\n{self.server(variant).said()}")
        keys.answered()
        self._used[variant.name] = volley.count
        if not replays and variant.table is not None:
            self._executed[self._homes[variant.place], variant.table] += volley.count
        return volley

    def check(self, stores: Stores) -> None:
        """Raise unless there are as many rows as executed requests."""
        places = {place.name: place for place in self.chosen.places}
        for (home, table), executed in self._executed.items():
            rows = stores.rows(places[home], table)
            if rows != executed:
                raise BenchError(f"{home}: {executed} requests were executed, and {table} has {rows} rows")

    async def _primed(self, variant: Variant) -> None:
        """Execute the keys that this variant replays, once."""
        keys = iter(self._keys[variant.name].known)

        def first() -> bytes | None:
            key = next(keys, None)
            return None if key is None else request(variant.path, key)

        volley = await self._lanes[variant.place].fire(Load(first, str(variant.status).encode(), seconds=60))
        if volley.wrong:
            raise BenchError(f"{variant.name}: {volley.wrong[0]}")
        if variant.table is not None:
            self._executed[self._homes[variant.place], variant.table] += volley.count


class Progress:
    """Shows the progress of a run, and how long it will take."""

    def __init__(self, total: int) -> None:
        self._began = time.monotonic()
        self._total = total
        self._done = 0
        self._live = sys.stderr.isatty()

    def step(self, words: str) -> None:
        """Count a finished slice; on a terminal its line overwrites the last one."""
        self._done += 1
        if self._live:
            left = (time.monotonic() - self._began) / self._done * (self._total - self._done)
            print(f"\r\033[K  {words}, about {left:.0f} s left", end="", file=sys.stderr, flush=True)

    def line(self, words: str) -> None:
        """Print a line that stays."""
        left = (time.monotonic() - self._began) / max(1, self._done) * (self._total - self._done)
        start = "\r\033[K" if self._live else ""
        print(f"{start}  {words}, about {left:.0f} s left", file=sys.stderr, flush=True)


@dataclass(slots=True)
class Measured:
    """The results of a run."""

    chosen: Chosen
    rounds: dict[str, list[Figures]]
    counts: dict[str, Counts]
    missing: dict[str, str]


@dataclass(frozen=True, slots=True)
class Run:
    """One run: its plan, its stores and its interpreters."""

    plan: Plan
    stores: Stores
    pythons: dict[str, Path]
    before: Path | None
    say: Callable[[str], None]
    began: float = field(default_factory=time.monotonic)

    async def measured(self, chosen: Chosen) -> Measured:
        """Count first, which also shows which servers start; then measure."""
        counts, missing = await self._counted(chosen)
        chosen = without(chosen, missing)
        if not chosen.variants:
            raise BenchError("nothing is left to measure")
        return Measured(chosen, await self._timed(chosen), counts, missing)

    async def _counted(self, chosen: Chosen) -> tuple[dict[str, Counts], dict[str, str]]:
        self.say(f"starting {len(chosen.places)} servers to count messages")
        async with await Relay.open(self.stores.postgres.port) as relay:
            stores = Stores(self.stores.postgres, self.stores.folder, self.stores.redis, relay.port)
            with Serving(stores, self.pythons, self.before) as serving:
                missing = await serving.start(chosen.places, Progress(len(chosen.places)).step)
                return await self._each_counted(without(chosen, missing), serving, stores, relay), missing

    async def _each_counted(self, chosen: Chosen, serving: Serving, stores: Stores, relay: Relay) -> dict[str, Counts]:
        self.say(f"counting messages of {len(chosen.variants)} variants")
        found: dict[str, Counts] = {}
        stored = {place.name for place in chosen.places if place.store not in {Store.NONE, Store.SQLITE}}
        progress = Progress(len(chosen.variants))
        target = Field(chosen, serving, connections=1)
        await target.open(30.0, min(COUNTED_WARM, self.plan.at_most))
        for variant in chosen.variants:
            progress.step(variant.name)
            if variant.place in stored:
                await target.stock(variant, COUNTED)
                target.server(variant).resume()
                before = Tally.now(relay, stores)
                fired = await target.fire(variant, 30.0, min(COUNTED, self.plan.at_most))
                found[variant.name] = Tally.now(relay, stores).per(before, fired.count)
                target.server(variant).pause()
        target.check(stores)
        await target.close()
        return found

    async def _timed(self, chosen: Chosen) -> dict[str, list[Figures]]:
        plan, variants = self.plan, chosen.variants
        self.say(f"starting {len(chosen.places)} servers to measure")
        rounds: dict[str, list[Figures]] = {variant.name: [] for variant in variants}
        timed = Stores(self.stores.postgres, self.stores.folder, self.stores.redis)
        with Serving(timed, self.pythons, self.before, pin=plan.pin) as serving:
            await serving.start(chosen.places, Progress(len(chosen.places)).step)
            if plan.pin:
                os.sched_setaffinity(0, os.sched_getaffinity(0) - {min(os.sched_getaffinity(0))})
            target = Field(chosen, serving, plan.connections)
            self.say(f"warming up {len(variants)} variants")
            await target.open(plan.slice_seconds * 2, plan.at_most)
            progress = Progress(plan.rounds * plan.turns * len(variants))
            first_began = time.monotonic()
            for turn in range(plan.rounds):
                if turn and _too_late(self.began, first_began, time.monotonic(), turn, plan.minutes):
                    self.say(f"{plan.minutes:g} minutes are over after {turn} rounds: raise --minutes for more")
                    break
                slices: dict[str, list[Slice]] = {variant.name: [] for variant in variants}
                for part in range(plan.turns):
                    # The order changes with each turn, so that caches and other load favour no variant.
                    first = (turn * plan.turns + part) * 5 % len(variants)
                    for variant in (*variants[first:], *variants[:first]):
                        slices[variant.name].append(await self._slice(target, variant))
                        progress.step(f"round {turn + 1} of {plan.rounds}: {variant.name}")
                for name, found in slices.items():
                    rounds[name].append(Figures.of(found))
                progress.line(f"round {turn + 1} of {plan.rounds} is done")
            target.check(timed)
            await target.close()
        return rounds

    async def _slice(self, target: Field, variant: Variant) -> Slice:
        await target.stock(variant, self.plan.at_most)
        server = target.server(variant)
        server.resume()
        own_before, stored_before = server.spent()
        machine, mine = clocks.Machine.now(), time.process_time()
        volley = await target.fire(variant, self.plan.slice_seconds, self.plan.at_most)
        mine, later = time.process_time() - mine, clocks.Machine.now()
        own, stored = server.spent()
        server.pause()
        server_seconds = None if own is None or own_before is None else own - own_before
        store_seconds = None if stored is None or stored_before is None else clocks.added(stored_before, stored)
        foreign = None
        if machine and later and server_seconds is not None and store_seconds is not None:
            busy = later.busy - machine.busy + later.stolen - machine.stolen
            foreign = max(0.0, busy - server_seconds - store_seconds - mine) / volley.seconds
        return Slice(volley.seconds, volley.latencies, server_seconds, store_seconds, foreign)


def _too_late(began: float, first_began: float, now: float, done: int, minutes: float) -> bool:
    """Whether another round, as long as the finished ones, would end too late."""
    return now + (now - first_began) / done > began + minutes * 60


def run(plan: Run, chosen: Chosen) -> Measured:
    """Run in a separate event loop, the fastest available one."""
    made: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with suppress(ImportError):
        import uvloop  # noqa: PLC0415

        made = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=made) as runner:
        return runner.run(plan.measured(chosen))
