"""Many processes, one key, one moment: exactly one executes, round after round (R50, R52, R62, F14)."""

from __future__ import annotations

import multiprocessing
import sqlite3
from collections import Counter
from contextlib import closing

import psycopg
import pytest

from harness.patience import PATIENCE
from harness.tables import make_tables
from oncekey import wire
from oncekey.core.model import Retryable
from oncekey.core.policy import Policy
from oncekey.engine import migrate
from oncekey.flow import drive
from oncekey.testing.claims import LEASE, TTL, answered
from oncekey.testing.clock import START, ManualClock
from race.racing import Course, race

RACERS = 5
EFFECTS = "CREATE TABLE effects (key TEXT NOT NULL, racer BIGINT NOT NULL)"


class OnPostgres:
    """What the race runs on."""

    rounds = 250  # of four kinds of keys: a thousand races
    table = "oncekey.record"

    def __init__(self, dsn: str) -> None:
        self.url, self._dsn = f"{dsn}?pgbouncer=0", make_tables(dsn)
        with psycopg.connect(dsn) as connection:
            connection.execute(EFFECTS)

    def rows(self, text: str) -> list[tuple]:
        with psycopg.connect(self._dsn) as connection:
            return connection.execute(text).fetchall()


class OnSqlite:
    """One file, and writers who wait for each other."""

    rounds = 120
    table = "oncekey_record"

    def __init__(self, path) -> None:
        self.url, self._path = f"sqlite:///{path}", path
        with closing(wire.connect(self.url)) as engine:
            drive(migrate.up(engine.store.schema), engine.driver.run)
        self.rows(EFFECTS)

    def rows(self, text: str) -> list[tuple]:
        with closing(sqlite3.connect(self._path)) as connection, connection:
            return connection.execute(text).fetchall()


@pytest.fixture(params=("postgresql", "sqlite"))
def ground(request, tmp_path):
    if request.param == "sqlite":
        return OnSqlite(tmp_path / "race.db")
    return OnPostgres(request.getfixturevalue("postgres_dsn"))


def courses(ground) -> list[Course]:
    """Four kinds of keys, each at the instant at which it is to be had."""
    return [
        Course("new", ground.rounds, START),
        Course("retryable", ground.rounds, START),
        Course("stale", ground.rounds, START + LEASE),
        Course("expired", ground.rounds, START + TTL),
    ]


def prepare(ground) -> None:
    """Somebody has used the keys of three courses before, and left them in three states."""
    with closing(wire.connect(ground.url, clock=ManualClock(START))) as engine:
        for course in courses(ground)[1:]:
            for number in range(course.rounds):
                verdict = engine.begin(course.claim(number), Policy())
                if course.name == "retryable":
                    assert engine.settle(verdict.lease, Retryable("x")).ours
                if course.name == "expired":
                    assert engine.settle(verdict.lease, answered(b"of another time")).ours


def test_every_key_is_executed_by_exactly_one_process(ground):
    prepare(ground)
    spawn = multiprocessing.get_context("spawn")
    line, reports = spawn.Barrier(RACERS), spawn.Queue()
    racers = [spawn.Process(target=race, args=(ground.url, courses(ground), line, reports)) for _ in range(RACERS)]
    for racer in racers:
        racer.start()
    seen = [reports.get(timeout=2 * PATIENCE) for _ in racers]
    for racer in racers:
        racer.join(PATIENCE)
    assert [report.wrong for report in seen] == [[]] * RACERS
    assert [racer.exitcode for racer in racers] == [0] * RACERS
    keys = {course.key(number) for course in courses(ground) for number in range(course.rounds)}
    # One winner for each key, and one effect, and the answer is the winner's.
    won = Counter(key for report in seen for key in report.won)
    assert won == dict.fromkeys(keys, 1)
    effects = dict(ground.rows("SELECT key, racer FROM effects"))
    assert len(effects) == len(ground.rows("SELECT key FROM effects")) == len(keys)
    assert effects.keys() == keys
    for report in seen:
        for key, body in report.replayed.items():
            assert body == f"{key} by {effects[key]}".encode()
    # Nobody got away without an answer, and it was a race: others were turned away while the winner worked.
    answers = sum(len(report.won) + len(report.replayed) + report.waited for report in seen)
    assert answers == RACERS * len(keys)
    assert sum(report.waited for report in seen) > 0
    assert sum(1 for report in seen if report.won) > 1

    # The fence went up with each owner: once more for those who were not the first.
    fences = {row[0]: row[1:] for row in ground.rows(f"SELECT key, fence, state FROM {ground.table}")}
    assert fences == {key: (1 if key.startswith("new") else 2, "completed") for key in keys}
