"""`python -m bench.session_reset`: the cost of resetting a session after a handler used it.

One write in one commit (begin, lock, the handler's row, the record, commit) through each driver, with four kinds of
reset in turn: none, that of the drivers (sent after the commit, without waiting), the same with waiting before the
response, and `DISCARD ALL` without prepared statements. Other load hardly changes processor time; waits are compared
with those of the same round.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.places import ROOT

DRIVERS = ("asyncpg", "psycopg", "sqlalchemy+asyncpg", "sqlalchemy+psycopg")
WAYS = ("none", "sent", "waited for", "DISCARD ALL")
AT_ONCE = 8
INSERT = "INSERT INTO bench_rows (key) VALUES ('x')"


@dataclass(frozen=True, slots=True)
class Figures:
    """One kind in one round: the wait of a request, and its processor time in the client and in the server."""

    waits: float
    client: float
    server: float


class Writer:
    """Protected writes through one driver, with one kind of reset."""

    def __init__(self, driver: Any, way: str, say: Callable[[Any], Awaitable[Any]]) -> None:
        from oncekey.databases.postgres.store import PostgresStore  # noqa: PLC0415

        self.driver, self.way, self._say = driver, way, say
        self._locks = PostgresStore().locks
        if way == "none":
            driver._resets_session = False  # noqa: SLF001
        if way == "DISCARD ALL":
            driver._resets_session = True  # noqa: SLF001

    async def write(self) -> None:
        from oncekey.core.model import Effects, RecordId  # noqa: PLC0415
        from oncekey.core.onecommit import LockNumbers  # noqa: PLC0415
        from oncekey.core.policy import Policy  # noqa: PLC0415
        from oncekey.engine import local  # noqa: PLC0415
        from oncekey.testing.claims import a_claim, answered  # noqa: PLC0415

        assert self._locks is not None
        key = uuid.uuid4().hex
        claim = replace(a_claim(), id=RecordId("bench", key), effects=Effects.LOCAL)
        tx = await self.driver.begin()
        lock = LockNumbers("bench", None).of(claim.id, claim.fingerprint)
        go = local.enter(await tx.run(self._locks.locking(lock, claim)), claim, Policy())
        assert isinstance(go, local.LockHeld)
        await self._say(tx.connection)
        await tx.run(self._locks.completing(claim, go.target, answered(), go.begun))
        await tx.commit()
        if self.way in {"waited for", "DISCARD ALL"}:
            await self.cleaned()

    async def cleaned(self) -> None:
        """Wait until the used connections are reset."""
        pool = getattr(self.driver, "_pool", None)
        if pool is None:
            await self.driver.close()  # waits for connections that are being returned, and does nothing else
        elif hasattr(pool, "_returns"):
            if pool._returns:  # noqa: SLF001
                await asyncio.wait(set(pool._returns))  # noqa: SLF001
        else:
            async with pool.lent(10.0):
                pass


async def figures(writer: Writer, writes: int, at_once: int, server_seconds: Callable[[], float]) -> Figures:
    """Microseconds per write: the wait of single writes, then the processor time of concurrent ones."""
    spent = []
    for _ in range(writes):
        begun = time.perf_counter()
        await writer.write()
        spent.append(time.perf_counter() - begun)

    async def several() -> None:
        for _ in range(writes // at_once):
            await writer.write()

    ours, theirs = time.process_time(), server_seconds()
    await asyncio.gather(*(several() for _ in range(at_once)))
    await writer.cleaned()
    each = 1e6 / (writes // at_once * at_once)
    ours, theirs = time.process_time() - ours, server_seconds() - theirs
    return Figures(statistics.median(spent) * 1e6, ours * each, theirs * each)


def opened(driver: str, dsn: str, way: str) -> tuple[Writer, Callable[[], Awaitable[None]]]:
    """A writer, and the function that closes it."""
    unprepared = way == "DISCARD ALL"
    if driver.startswith("sqlalchemy"):
        from sqlalchemy import text  # noqa: PLC0415
        from sqlalchemy.ext.asyncio import create_async_engine  # noqa: PLC0415

        from oncekey.databases.sqlalchemy.asynchronous import SqlalchemyDriver  # noqa: PLC0415

        package = driver.partition("+")[2]
        options: dict[str, Any] = {}
        if unprepared and package == "asyncpg":
            options = {"connect_args": {"prepared_statement_cache_size": 0, "statement_cache_size": 0}}
        elif unprepared:
            options = {"connect_args": {"prepare_threshold": None}}
        engine = create_async_engine(dsn.replace("postgresql:", f"postgresql+{package}:"), pool_size=10, **options)
        said = text(INSERT)
        return Writer(SqlalchemyDriver(engine), way, lambda connection: connection.execute(said)), engine.dispose
    if driver == "asyncpg":
        from oncekey.databases.postgres.asyncpg import AsyncpgDriver as Driver  # noqa: PLC0415
    else:
        from oncekey.databases.postgres.psycopg_async import AsyncPsycopgDriver as Driver  # type: ignore[assignment]  # noqa: PLC0415
    mark = "&" if "?" in dsn else "?"
    ours = Driver(f"{dsn}{mark}pgbouncer={int(unprepared)}")
    return Writer(ours, way, lambda connection: connection.execute(INSERT)), ours.close


async def measure(
    driver: str, dsn: str, rounds: int, writes: int, server_seconds: Callable[[], float]
) -> dict[str, list[Figures]]:
    """All kinds in turn, round by round; the order changes with each round."""
    from oncekey.databases import handler_sql  # noqa: PLC0415
    from oncekey.databases.postgres import asyncpg_connections, psycopg_connections  # noqa: PLC0415

    found: dict[str, list[Figures]] = {way: [] for way in WAYS}
    writers = {way: opened(driver, dsn, way) for way in WAYS}
    try:
        for turn in range(rounds + 1):
            for at in range(len(WAYS)):
                way = WAYS[(turn + at) % len(WAYS)]
                for module in (asyncpg_connections, psycopg_connections):
                    module.RESET = "DISCARD ALL" if way == "DISCARD ALL" else handler_sql.RESET  # type: ignore[misc]
                one = await figures(writers[way][0], writes, AT_ONCE, server_seconds)
                if turn:  # the first round only warms up
                    found[way].append(one)
    finally:
        for writer, close in writers.values():
            await writer.driver.close()
            await close()
    return found


def table(driver: str, found: dict[str, list[Figures]]) -> str:
    """Medians of all rounds; in brackets the ratio to no reset. Processor time is the total of all rounds."""
    lines = []
    for way, rounds in found.items():
        waits = [one.waits / other.waits for one, other in zip(rounds, found["none"], strict=True)]
        line = f"{driver:<19} {way:<12} {statistics.median(one.waits for one in rounds):>7.0f} us"
        line += f" (x {statistics.median(waits):.2f})"
        for name in ("client", "server"):
            each, base = (statistics.mean(getattr(one, name) for one in found[kind]) for kind in (way, "none"))
            # The system counts processor time in hundredths of a second: a short run may show none.
            ratio = f"x {each / base:.2f}" if base else "too short to tell"
            line += f"   {name} {each:>5.0f} us ({ratio})"
        lines.append(line)
    return "\n".join(lines)


def main(words: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.session_reset", description=__doc__)
    parser.add_argument("--driver", action="append", choices=DRIVERS, help="only this one; may be repeated")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--writes", type=int, default=160, help="per kind and round, one by one and then eight at once")
    said = parser.parse_args(words)
    sys.path.insert(0, str(ROOT / "tests"))
    from harness.postgres import PostgresServer  # noqa: PLC0415

    # Without fsync no commit waits for the disk, which would hide the cost of the reset.
    with PostgresServer(settings={"fsync": "off"}) as server:
        dsn = server.dsn()
        _tables(dsn)
        for driver in dict.fromkeys(said.driver or DRIVERS):
            measured = asyncio.run(measure(driver, dsn, said.rounds, said.writes, lambda: _seconds(server.pid)))
            print(table(driver, measured), flush=True)
    return 0


def _seconds(postmaster: int) -> float:
    """The processor time of a server's processes, including those that have ended."""
    from harness.processes import children  # noqa: PLC0415

    ticks = 0
    for pid in (postmaster, *children(postmaster)):
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15] if pid == postmaster else fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _tables(dsn: str) -> None:
    import psycopg  # noqa: PLC0415

    from oncekey.wire import migrations_for  # noqa: PLC0415

    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(migrations_for(dsn).script().encode())
        connection.execute("CREATE TABLE bench_rows (key text)")


if __name__ == "__main__":
    sys.exit(main())
