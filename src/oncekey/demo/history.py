"""`oncekey demo --history N`: writes a day of requests into an empty store, so that the console shows something."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Final

from oncekey.core.errors import ConfigurationError
from oncekey.core.model import moment
from oncekey.demo.app import create_app
from oncekey.demo.day import Day
from oncekey.demo.draws import Clock
from oncekey.demo.provider_ledger import Ledger
from oncekey.demo.tables import Tables
from oncekey.engine.operate import survey_of
from oncekey.flow import adrive
from oncekey.ops.stats import Recent, Sample
from oncekey.ops.survey import FINISHED, UNFINISHED, Walk
from oncekey.ports import AsyncShares
from oncekey.wire import aconnect

if TYPE_CHECKING:
    from pathlib import Path

    from oncekey.core.model import Instant
    from oncekey.core.policy import Policy
    from oncekey.engine.shell import AsyncEngine
    from oncekey.flow import Statement, Steps
    from oncekey.once import Once

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
                await tx.step(_alone(mark))
                mark = None
            goes_on = await tx.step(day.forward(day.begun + PORTION))
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


def _alone(statement: Statement) -> Steps[None]:
    yield statement
