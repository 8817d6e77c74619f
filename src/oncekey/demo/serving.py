"""Runs the demo. It checks everything before the first request, and reports a mistake in one sentence.

Its own provider is another process, which ends when the demo ends, even after a `kill -9`. `oncekey demo --history N`
first writes a day of requests into an empty store, so that the console shows something.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import uvicorn

from oncekey.core.errors import ConfigurationError
from oncekey.core.model import Instant, moment
from oncekey.demo.app import DEFAULT_PROVIDER, WEBHOOKS, create_app, link_to
from oncekey.demo.data import Tables
from oncekey.demo.day import Day
from oncekey.demo.draws import Clock
from oncekey.demo.provider_ledger import Ledger
from oncekey.demo.provider_server import CannotServeError, address_of, listen
from oncekey.engine.operate import survey_of
from oncekey.flow import Body, Statement, adrive
from oncekey.ops.stats import FINISHED, UNFINISHED, Recent, Sample, Walk
from oncekey.ports import AsyncShares
from oncekey.wire import aconnect

if TYPE_CHECKING:
    from oncekey.core.policy import Policy
    from oncekey.engine.shell import AsyncEngine
    from oncekey.once import Once

_COMMAND = (sys.executable, "-c", "from oncekey.cli import main; main()", "provider", "--until-eof", "--port", "0")
_GRACE_SECONDS = 5.0


class HouseProvider:
    """Use it as a context manager: entering starts it and waits until it serves."""

    def __init__(self, ledger: Path, webhooks: str | None = None) -> None:
        self._options = ("--ledger", str(ledger), *(() if webhooks is None else ("--webhooks", webhooks)))
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def __enter__(self) -> Self:
        # The provider reads from a pipe that only the demo writes to: even `kill -9` of the demo closes it.
        # In a session of its own it gets no Ctrl-C, because requests that are under way still need it.
        self._process = subprocess.Popen(  # noqa: S603  (our own command)
            [*_COMMAND, *self._options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self.url = next((word for word in line.split() if word.startswith("http://")), "")
        if not self.url:
            self.__exit__()
            raise CannotServeError("its provider did not start; the line above says why")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        try:
            self._process.communicate(timeout=_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


GRACE_SECONDS = 10
KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep an unused connection: if the server closed first, a request could be lost on it."""
OTHERS_LEDGER: Final = (
    "--history writes charges into the ledger of the demo's own provider, and not into another one's: leave --provider "
    "out"
)
LEDGER: Final = "oncekey-demo-provider.db"


def serve(
    store: str,
    policy: Policy,
    *,
    host: str,
    port: int,
    provider: str | None,
    ledger: Path | None,
    workers: bool,
    webhooks: bool,
    announce: Callable[[str, str], None],
    history: Wanted | None = None,
    progress: Progress = lambda _done, _all: None,
) -> None:
    """Serve until a signal ends it. It calls `announce` with the demo's address and the console's when all is in order.

    A `history` is written before that; it needs the demo's own provider, because its charges go into the ledger.
    """
    with listen(host, port) as listener:
        seen = asyncio.run(_try_once(store, policy, provider or DEFAULT_PROVIDER))
        if history is not None:
            if provider is not None:
                raise ConfigurationError(OTHERS_LEDGER)
            seen = asyncio.run(write_history(store, policy, ledger or beside(store), history, progress))
        address = address_of(host, listener)
        hook = f"{address}{WEBHOOKS}" if webhooks else None
        with _provided(provider, ledger or beside(store), hook) as provider_url:
            token = secrets.token_urlsafe(24)
            announce(address, link_to(address, token))
            config = uvicorn.Config(
                create_app(store, policy, provider_url, workers=workers, console_token=token, seen=seen),
                log_level="warning",
                access_log=False,
                lifespan="on",
                timeout_graceful_shutdown=GRACE_SECONDS,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
            )
            server = uvicorn.Server(config)
            server.run(sockets=[listener])
        if not server.started:
            raise CannotServeError("the demo did not start; the lines above say why")


def beside(store: str) -> Path:
    """The path of the provider's ledger: in the folder of a store that is a file, else in the current folder."""
    scheme, _, path = store.partition(":///")
    folder = Path(path.partition("?")[0]).parent if scheme.startswith("sqlite") else Path()
    return folder / LEDGER


@contextmanager
def _provided(running: str | None, ledger: Path, webhooks: str | None) -> Iterator[str]:
    """The address of the provider that runs already, or of one that runs as long as the block."""
    if running is not None:
        yield running
        return
    with HouseProvider(ledger, webhooks) as ours:
        yield ours.url


async def _try_once(store: str, policy: Policy, provider: str) -> Recent:
    """Start and stop the application once, because a server reports a failed start with a long traceback.

    It also reads the samples with which the charts begin.
    """
    app = create_app(store, policy, provider, workers=False)
    async with app.router.lifespan_context(app):
        return await remembered(Tables(app.state.once.asynchronous))


PORTION: Final = 500
"""Requests per transaction: a large one is quick, but a very large one keeps other writers waiting."""
THERE: Final = (
    "there is a history of {requests:,} requests in this store already, until {ended}: leave --history out to serve "
    "it, or say another --store"
)
NOT_EMPTY: Final = (
    "this store has records, and none of them is made up: --history writes only into a store without any, so that real "
    "ones are never mixed with others. Say another --store"
)

Progress = Callable[[int, int], None]
"""Called with how many requests of how many are written."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The history to write."""

    requests: int
    seed: int = 1
    ended_at: Instant | None = None
    """Its last instant; None: now."""


async def write_history(
    store_url: str, policy: Policy, ledger: Path, wanted: Wanted, progress: Progress = lambda _done, _all: None
) -> Recent:
    """Write the history and the provider's charges; returns the numbers that a console would have sampled meanwhile."""
    app = create_app(store_url, policy, workers=False)
    once: Once = app.state.once
    async with app.router.lifespan_context(app):
        tables = Tables(once.asynchronous)
        now = await _only_if_empty(once.asynchronous(), tables)
        clock = Clock(now if wanted.ended_at is None else wanted.ended_at)
        engine = aconnect(store_url, clock=clock)
        try:
            return await _written(engine, once, tables, clock, ledger, wanted, progress)
        finally:
            await engine.close()


async def _only_if_empty(engine: AsyncEngine, tables: Tables) -> Instant:
    """The store's clock; a store with records is refused."""
    for row in await tables.read("find_history"):
        raise ConfigurationError(THERE.format(requests=row["requests"], ended=moment(row["ended_at"])))
    survey = survey_of(engine.store)
    for states in (UNFINISHED, *((state,) for state in FINISHED)):
        part = await adrive(survey.walk(Walk(states=states), 1), engine.driver.run)
        if part.records:
            raise ConfigurationError(NOT_EMPTY)
    return part.now


async def _written(  # noqa: PLR0917  (what, where and how)
    engine: AsyncEngine, once: Once, tables: Tables, clock: Clock, ledger: Path, wanted: Wanted, progress: Progress
) -> Recent:
    driver = engine.driver
    assert isinstance(driver, AsyncShares)
    mark: Statement | None = tables.statement(
        "insert_history", {"requests": wanted.requests, "seed": wanted.seed, "ended_at": clock.now}
    )
    day = Day(engine.store, once, tables.statement, clock, requests=wanted.requests, seed=wanted.seed)
    goes_on = True
    while goes_on:
        tx = await driver.begin()
        try:
            if mark is not None:  # with the first portion, so that an interrupted history can be recognised
                await tx.run(_alone(mark))
                mark = None
            goes_on = await tx.run(day.forward(day.begun + PORTION))
            await tx.commit()
        except BaseException:
            await tx.rollback()
            raise
        if not goes_on or day.begun < wanted.requests:
            progress(day.begun, wanted.requests)
    books = Ledger(ledger)
    try:
        await books.enter(day.charges)
    finally:
        books.close()
    kept = json.dumps([astuple(sample) for sample in day.samples])
    await tables.write("keep_samples", {"samples": kept, "ended_at": clock.now})
    return await remembered(tables)


async def remembered(tables: Tables) -> Recent:
    """The numbers that a console would have sampled during a history, if there is one. The store does not keep them."""
    seen = Recent()
    for row in await tables.read("find_history"):
        for sample in json.loads(row["samples"]):
            seen.add(Sample(*sample))
    return seen


def _alone(statement: Statement) -> Body[None]:
    yield statement
