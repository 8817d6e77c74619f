"""COMMITs whose replies, or who themselves, are lost between a real server and PostgreSQL (F8, P7)."""

from __future__ import annotations

import logging
from contextlib import closing

import pytest

from harness.dsn import through
from harness.proxy import Proxy
from oncekey.core.model import Effects
from oncekey_demo.checker import check
from oncekey_demo.history import ClientOperation
from proof.crash.crasher import Crasher
from proof.crash.places import Place
from proof.crash.proof import PROMISES, RULES
from proof.crash.reading import history_of
from proof.crash.shop import CallReport, Inbox, Ledger, Process, World

KEY = "a-key-whose-commit-is-lost"
COMMIT = b"COMMIT;"
"""As asyncpg says it; the isolation level has these letters, too."""


@pytest.mark.parametrize("what", ["the reply", "the request"])
@pytest.mark.parametrize("effects", [Effects.LOCAL, Effects.PHASED, Effects.OUTBOX])
async def test_a_lost_commit_is_neither_done_twice_nor_forgotten(  # R75, R116, F8, F20
    postgres_dsn: str, effects: Effects, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    with Proxy.before(postgres_dsn) as proxy, closing(Place(asyncpg(postgres_dsn))) as place:
        place.prepare()
        far = Place(asyncpg(through(postgres_dsn, proxy.port)))
        ticks = iter(range(1, 1_000_000))
        ledger, inbox = Ledger(lambda: next(ticks), deduplicates=True), Inbox()
        world, crasher = World(ledger, inbox), Crasher(ticks=lambda: next(ticks))
        process = Process(far, crasher, world, clock=None, repeatable=True)
        operations: list[ClientOperation] = []

        async def ask() -> CallReport:
            name, invoked = f"op-{len(operations) + 1}", next(ticks)
            report = await process.ask(effects, KEY, name)
            told = (report.kind(effects), report.status, report.body, report.replayed, report.code)
            operations.append(
                ClientOperation(name, "", KEY, "", invoked, next(ticks), *told, promises=PROMISES[effects])
            )
            return report

        hit = proxy.lose_reply(COMMIT, b"COMMIT") if what == "the reply" else proxy.lose_request(COMMIT)
        report = await ask()
        assert hit.is_set(), "nothing was lost, so nothing was proven"
        for _ in range(5):
            if report.status == 201:
                break
            await process.relay()
            report = await ask()
        await process.relay()
        last = await ask()
        await process.end()
        left = place.look(KEY)

    assert (report.status, last.status, last.replayed) == (201, 201, True)
    history = history_of(left, operations, ledger.charges, inbox, crasher.said, key=KEY, now=next(ticks))
    violations = check(history, RULES)
    assert not violations, "\n".join(map(str, violations))


def asyncpg(dsn: str) -> str:
    return dsn.replace("postgresql://", "postgresql+asyncpg://", 1)
