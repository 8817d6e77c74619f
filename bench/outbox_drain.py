"""`python -m bench.outbox_drain`: messages per second that workers deliver from a full outbox; two queues to compare.

The peers are procrastinate and pgqueuer (`pip install --group bench`), on the same PostgreSQL, with the same number of
messages, workers in one process, and concurrent messages; the called function does nothing. `--lines 200` measures
oncekey with 200 ordered queues; with `--awaits` its function awaits something.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from bench import clocks
from bench.figures import BenchError, Range
from bench.places import places

Say = Callable[[str], None]
TOPIC = "noop"
CHUNK = 500


class Queue(Protocol):
    """A queue to fill and drain."""

    async def open(self, stack: AsyncExitStack) -> None:
        """Create its tables."""

    async def fill(self, count: int) -> None:
        """Add messages; this is not measured."""

    async def drain(self, loops: int, batch: int) -> int:
        """Work until it is empty; returns how often the function was called."""


class Ours:
    """oncekey's outbox: messages of `op.emit`, and the relay that `oncekey worker` runs."""

    def __init__(self, url: str, *, lines: int = 0, awaits: bool = False) -> None:
        self._url = url
        self._lines = lines
        self._awaits = awaits

    async def open(self, stack: AsyncExitStack) -> None:
        from oncekey.wire import aconnect  # noqa: PLC0415

        self._engine = aconnect(self._url)
        stack.push_async_callback(self._engine.close)
        await self._engine.migrate()

    async def fill(self, count: int) -> None:
        self._count = count
        from oncekey.core.flow import Mode, Transaction  # noqa: PLC0415
        from oncekey.core.model import Parcel, ParcelKind, RecordId  # noqa: PLC0415

        def parcel(number: int) -> Parcel:
            return Parcel(
                id=uuid.uuid4(),
                kind=ParcelKind.EMIT,
                record_id=RecordId("bench", f"key-{number}"),
                incarnation=uuid.uuid4(),
                topic=TOPIC,
                payload=json.dumps({"n": number}),
                downstream_key=str(uuid.uuid4()),
                position=0,
                order_by=f"line-{number % self._lines}" if self._lines else None,
            )

        outbox = self._engine.store.outbox
        assert outbox is not None
        for begin in range(0, count, CHUNK):
            parcels = tuple(parcel(number) for number in range(begin, min(begin + CHUNK, count)))
            await self._engine.driver.run(Transaction("fill", Mode.ATOMIC, lambda now=parcels: outbox.putting(now)))

    async def drain(self, loops: int, batch: int) -> int:
        from oncekey.core.policy import Policy  # noqa: PLC0415
        from oncekey.core.topics import Message, Topics  # noqa: PLC0415
        from oncekey.workers.relay import Relay  # noqa: PLC0415
        from oncekey.workers.service import Service  # noqa: PLC0415

        topics, called, over = Topics(), 0, asyncio.Event()
        last: dict[str, int] = {}

        def count(message: Message) -> None:
            nonlocal called
            line, number = message.order_by, message.payload["n"]
            if line is not None:
                if last.get(line, -1) >= number:
                    raise BenchError(f"{line}: {number} came after {last[line]}")
                last[line] = number
            called += 1
            if called == self._count:
                over.set()

        if self._awaits:

            @topics.topic(TOPIC)
            async def noop(message: Message) -> None:
                await asyncio.sleep(0)
                count(message)
        else:

            @topics.topic(TOPIC)
            async def noop(message: Message) -> None:
                count(message)

        outbox, run = self._engine.store.outbox, self._engine.driver.run
        assert outbox is not None
        services = [Service([Relay(outbox, run, topics, Policy(), concurrency=batch)]) for _ in range(loops)]
        running = [asyncio.create_task(service.run()) for service in services]
        await over.wait()
        for service in services:
            service.stop()  # acknowledges what was delivered
        await asyncio.gather(*running)
        return called


class Procrastinate:
    """procrastinate, which deletes finished messages, as oncekey does."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def open(self, stack: AsyncExitStack) -> None:
        import procrastinate  # noqa: PLC0415

        self._called = 0
        connector = procrastinate.PsycopgConnector(conninfo=self._url, min_size=10, max_size=10)
        self._app = procrastinate.App(connector=connector)
        await stack.enter_async_context(self._app.open_async())
        await self._app.schema_manager.apply_schema_async()

        @self._app.task(name=TOPIC)
        async def noop(n: int) -> None:
            self._called += n >= 0

        self._noop = noop

    async def fill(self, count: int) -> None:
        for begin in range(0, count, CHUNK):
            await self._noop.batch_defer_async(*({"n": n} for n in range(begin, min(begin + CHUNK, count))))

    async def drain(self, loops: int, batch: int) -> int:
        before = self._called
        await asyncio.gather(
            *(
                self._app.run_worker_async(
                    wait=False,
                    concurrency=batch,
                    delete_jobs="always",
                    listen_notify=False,
                    install_signal_handlers=False,
                )
                for _ in range(loops)
            )
        )
        return self._called - before


class Pgqueuer:
    """pgqueuer on asyncpg, which moves finished messages to its log."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def open(self, stack: AsyncExitStack) -> None:
        import asyncpg  # noqa: PLC0415
        from pgqueuer import PgQueuer  # noqa: PLC0415

        self._called = 0
        self._pool = await stack.enter_async_context(asyncpg.create_pool(self._url, min_size=10, max_size=10))
        await PgQueuer.from_asyncpg_pool(self._pool).queries.install()

    async def fill(self, count: int) -> None:
        from pgqueuer import PgQueuer  # noqa: PLC0415

        queries = PgQueuer.from_asyncpg_pool(self._pool).queries
        for begin in range(0, count, CHUNK):
            size = min(CHUNK, count - begin)
            await queries.enqueue([TOPIC] * size, [b'{"n": 1}'] * size, [0] * size)

    async def drain(self, loops: int, batch: int) -> int:
        from pgqueuer import PgQueuer  # noqa: PLC0415
        from pgqueuer.types import QueueExecutionMode  # noqa: PLC0415

        before = self._called

        def worker() -> Any:
            queuer = PgQueuer.from_asyncpg_pool(self._pool)

            @queuer.entrypoint(TOPIC)
            async def noop(job: Any) -> None:
                self._called += json.loads(job.payload)["n"] >= 0

            return queuer

        await asyncio.gather(
            *(worker().run(batch_size=batch, mode=QueueExecutionMode.drain) for _ in range(loops)),
        )
        return self._called - before


KINDS: dict[str, tuple[str, Callable[..., Queue]]] = {
    "oncekey asyncpg": ("asyncpg", Ours),
    "oncekey psycopg": ("psycopg", Ours),
    "procrastinate": ("psycopg", Procrastinate),
    "pgqueuer": ("asyncpg", Pgqueuer),
}
PEERS = ("procrastinate", "pgqueuer")
OURS = tuple(name for name in KINDS if name not in PEERS)


@dataclass(frozen=True, slots=True)
class Plan:
    """The number of messages and workers."""

    messages: int = 10_000
    rounds: int = 5
    loops: int = 2
    batch: int = 100
    lines: int = 0
    awaits: bool = False


@dataclass(frozen=True, slots=True)
class Drained:
    """One queue in one round."""

    rate: float
    """Messages per second."""
    cpu_us: float | None
    """Processor time per message, in this process and in PostgreSQL; None if the system does not report it."""


def spent(url: str) -> float | None:
    """Processor seconds so far, of this process and of the backends of a database."""
    import psycopg  # noqa: PLC0415

    with psycopg.connect(url, autocommit=True) as connection:
        said = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        pids = [int(pid) for [pid] in connection.execute(said).fetchall()]
    found = [clocks.seconds_of(pid) for pid in (os.getpid(), *pids)]
    return None if None in found else sum(one for one in found if one is not None)


async def measure(urls: dict[str, str], plan: Plan, say: Say) -> dict[str, list[Drained]]:
    """Rounds in which the queues take turns, in changing order."""
    found: dict[str, list[Drained]] = {name: [] for name in urls}
    ours = {"lines": plan.lines, "awaits": plan.awaits}
    async with AsyncExitStack() as stack:
        queues = {name: KINDS[name][1](url, **({} if name in PEERS else ours)) for name, url in urls.items()}
        for queue in queues.values():
            await queue.open(stack)
        names = list(queues)
        for turn in range(-1, plan.rounds):  # the first one warms up
            for offset in range(len(names)):
                name = names[(turn + offset) % len(names)]
                count = plan.messages if turn >= 0 else min(plan.messages, 200)
                await queues[name].fill(count)
                plain = "postgresql:" + urls[name].partition(":")[2]
                before, begun = spent(plain), time.perf_counter()
                called = await queues[name].drain(plan.loops, plan.batch)
                took, after = time.perf_counter() - begun, spent(plain)
                if called != count:
                    raise BenchError(f"{name}: {count} messages, and {called} calls")
                if turn >= 0:
                    cpu = None if before is None or after is None else (after - before) / count * 1e6
                    found[name].append(Drained(count / took, cpu))
            if turn >= 0:
                say(f"outbox{f' in {plan.lines} lines' if plan.lines else ''}: round {turn + 1} of {plan.rounds}")
    return found


def measured(plan: Plan, names: Sequence[str], say: Say) -> dict[str, list[Drained]]:
    """All measurements, on a separate server."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # the peers log every message
    try:
        with places(("asyncpg", "psycopg")) as stores:
            urls = {name: stores[KINDS[name][0]]() for name in names}
            for peer in PEERS:
                if peer in urls:
                    urls[peer] = "postgresql:" + urls[peer].partition(":")[2]
            return asyncio.run(measure(urls, plan, say))
    finally:
        logging.disable(before)


def document(found: dict[str, list[Drained]], plan: Plan) -> dict[str, Any]:
    """The results as a document."""
    queues = {}
    for name, rounds in found.items():
        rates, costs = [one.rate for one in rounds], [one.cpu_us for one in rounds if one.cpu_us is not None]
        queues[name] = {
            "rate": {**asdict(Range.of(rates)), "rounds": rates},
            "cpu_us": asdict(Range.of(costs)) if costs else None,
        }
    return {"settings": asdict(plan), "queues": queues}


def table(found: dict[str, list[Drained]]) -> str:
    """Rates and costs, and each rate as a multiple of the peers' of the same round."""
    peers = [peer for peer in PEERS if peer in found]
    lines = [f"{'queue':<17} {'messages/s':>20} {'CPU us':>8}" + "".join(f"{'x ' + peer:>26}" for peer in peers)]
    for name, rounds in found.items():
        rate = Range.of([one.rate for one in rounds])
        costs = [one.cpu_us for one in rounds if one.cpu_us is not None]
        line = f"{name:<17} {f'{rate.median:.0f} ({rate.low:.0f}-{rate.high:.0f})':>20}"
        line += f" {Range.of(costs).median:>8.1f}" if costs else f" {'?':>8}"
        for peer in peers:
            pairs = zip(rounds, found[peer], strict=True)
            ratio = Range.of([mine.rate / theirs.rate for mine, theirs in pairs])
            line += f"{f'{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})':>26}"
        lines.append(line)
    return "\n".join(lines)


def main(words: list[str] | None = None) -> int:
    """Measure and print."""
    usual = Plan()
    parser = argparse.ArgumentParser(prog="python -m bench.outbox_drain", description=__doc__)
    parser.add_argument(
        "--messages", type=int, default=usual.messages, help=f"messages per round and queue ({usual.messages})"
    )
    parser.add_argument("--rounds", type=int, default=usual.rounds, help=f"rounds ({usual.rounds})")
    parser.add_argument(
        "--loops", type=int, default=usual.loops, help=f"workers per queue, in one process ({usual.loops})"
    )
    parser.add_argument("--batch", type=int, default=usual.batch, help=f"messages at once per worker ({usual.batch})")
    parser.add_argument("--lines", type=int, default=0, help="oncekey's ordered queues (0: none)")
    parser.add_argument("--awaits", action="store_true", help="oncekey's function awaits something")
    parser.add_argument("--without-peers", action="store_true", help="measure only oncekey")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results")
    said = parser.parse_args(words)
    missing = [peer for peer in PEERS if find_spec(peer) is None]
    if missing and not said.without_peers:
        _say(f"{missing[0]} is not installed: pip install --group bench, or --without-peers")
        return 1
    plan = Plan(said.messages, said.rounds, said.loops, said.batch, said.lines, said.awaits)
    try:
        found = measured(plan, OURS if said.without_peers else tuple(KINDS), _say)
    except BenchError as error:
        _say(str(error))
        return 1
    print(table(found))
    print(f"\n{said.rounds} rounds of {said.messages} messages, {said.loops} workers, {said.batch} in work each.")
    if said.json:
        said.json.write_text(json.dumps(document(found, plan), indent=2) + "\n")
    return 0


def _say(words: str) -> None:
    print(f"bench: {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
