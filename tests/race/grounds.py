"""Where racers race: every store on a private server, with the marks of who executed; and what a race came to."""

from __future__ import annotations

import multiprocessing
import queue
import sqlite3
from collections import Counter
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import psycopg

from harness import flows
from harness.dynamo import Dynamo, everything
from harness.mariadb import MariadbServer, migrated
from harness.patience import PATIENCE
from harness.tables import make_tables
from oncekey import wire
from oncekey.core.flow import drive
from oncekey.core.model import Proceed, Retryable
from oncekey.core.policy import Policy
from oncekey.databases.dynamodb.items import table_of
from oncekey.engine import migrating
from oncekey.testing.claims import LEASE, START, TTL, ManualClock, a_claim, answered
from race.racing import EFFECTS, PhasedRun, Report, Track, race

MARKS = f"CREATE TABLE {EFFECTS} (key_name VARCHAR(255) NOT NULL, racer BIGINT NOT NULL)"
MARKED = f"SELECT key_name, racer FROM {EFFECTS}"


class WriteTarget(Protocol):
    """What the race runs on."""

    track: Track

    def executed(self) -> list[tuple[str, int]]:
        """Every execution: its key, and the process that did it. It is not read through oncekey."""
        ...


class OnPostgres:
    """A database of a server."""

    def __init__(self, dsn: str) -> None:
        self._dsn = make_tables(dsn)
        self.track = Track(f"{dsn}?pgbouncer=0")
        with psycopg.connect(dsn) as connection:
            connection.execute(MARKS.encode())

    def executed(self) -> list[tuple[str, int]]:
        with psycopg.connect(self._dsn) as connection:
            return connection.execute(MARKED.encode()).fetchall()


class OnSqlite:
    """One file, and writers who wait for each other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.track = Track(f"sqlite:///{path}")
        with closing(wire.connect(self.track.url)) as engine:
            drive(migrating.up(engine.store.schema), engine.driver.run)
        self._say(MARKS)

    def executed(self) -> list[tuple[str, int]]:
        return self._say(MARKED)

    def _say(self, text: str) -> list[tuple[str, int]]:
        with closing(sqlite3.connect(self._path)) as connection, connection:
            return connection.execute(text).fetchall()


class OnMariadb:
    """A database of a private server."""

    def __init__(self, server: MariadbServer, url: str) -> None:
        self._server, self._database = server, url.rpartition("/")[2]
        self.track = Track(migrated(url))
        server.say(MARKS, self._database)

    def executed(self) -> list[tuple[str, int]]:
        return [(key, racer) for key, racer in self._server.say(MARKED, self._database)]


class WithLedger:
    """A store that shares no transaction: the marks are in a file."""

    def __init__(self, url: str, ledger: Path) -> None:
        ledger.touch()
        self._ledger = ledger
        self.track = Track(url, ledger)

    def executed(self) -> list[tuple[str, int]]:
        return _marks(self._ledger.read_text().splitlines())


class OnDynamo:
    """A table of an emulator that knows transactions, and the application's own table beside it."""

    def __init__(self, server: Dynamo) -> None:
        self._client = server.client()
        self._client.create_table(**table_of("race"))
        self._client.create_table(
            TableName=EFFECTS,
            BillingMode="PAY_PER_REQUEST",
            KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
            AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
        )
        self.track = Track(server.url("race"))

    def executed(self) -> list[tuple[str, int]]:
        return _marks(item["mark"]["S"] for item in everything(self._client, EFFECTS))


def _marks(lines: Iterable[str]) -> list[tuple[str, int]]:
    return [(key, int(racer)) for key, _, racer in (line.rpartition(" ") for line in lines)]


def courses_of(rounds: int) -> list[PhasedRun]:
    """Four kinds of keys, each at the instant at which it is to be had by a claim."""
    return [
        PhasedRun("new", rounds),
        PhasedRun("retryable", rounds),
        PhasedRun("stale", rounds, START + LEASE),
        PhasedRun("expired", rounds, START + TTL),
    ]


def prepare(ground: WriteTarget, courses: list[PhasedRun]) -> None:
    """Somebody has used the keys of three courses before, and left them in three states."""
    with closing(wire.connect(ground.track.url, clock=ManualClock(START))) as engine:
        for phased_run in courses:
            for key in phased_run.keys if phased_run.name in {"retryable", "stale", "expired"} else ():
                verdict = flows.begin(engine, a_claim(key), Policy())
                assert isinstance(verdict, Proceed)
                if phased_run.name == "retryable":
                    assert flows.settle(engine, verdict.lease, Retryable("x")).ours
                if phased_run.name == "expired":
                    assert flows.settle(engine, verdict.lease, answered(b"of another time")).ours


def run(ground: WriteTarget, courses: list[PhasedRun], racers: int, **options: Any) -> list[Report]:
    """Let so many processes race, and collect what they saw; `options` are those of the track."""
    spawn = multiprocessing.get_context("spawn")
    line, reports = spawn.Barrier(racers), spawn.Queue()
    track = replace(ground.track, **options)
    crowd = [spawn.Process(target=race, args=(track, courses, number, line, reports)) for number in range(racers)]
    for racer in crowd:
        racer.start()
    seen: list[Report] = []
    running = True
    while running and len(seen) < racers:
        # Nobody waits for ever at the line, so all of them end. Who ended has sent its report, or never will.
        running = any(racer.is_alive() for racer in crowd)
        with suppress(queue.Empty):
            while len(seen) < racers:
                seen.append(reports.get(timeout=1))
    for racer in crowd:
        racer.join(PATIENCE)
    return [*seen, *(Report(wrong=["a racer ended without a word"]) for _ in range(racers - len(seen)))]


@dataclass
class Tally:
    """What a race came to."""

    rounds: int
    winners: int = 0
    duplicates: int = 0
    """Executions beyond the first one of a key."""
    lost: int = 0
    """Keys without an execution, and those whose stored answer is not the one of who executed."""
    wrong: list[str] = field(default_factory=list)
    """Anything else that must not be."""

    @property
    def clean(self) -> bool:
        """One execution and one answer for each key, and nothing else."""
        return (self.winners, self.duplicates, self.lost, self.wrong) == (self.rounds, 0, 0, [])


def tally(keys: Iterable[str], executed: list[tuple[str, int]], seen: list[Report]) -> Tally:
    """Compare the marks of the executions with what the racers heard."""
    asked = set(keys)
    by = dict(executed)
    done = Counter(key for key, _ in executed)
    won = Counter(key for report in seen for key in report.won)
    repeated = {key: body for report in seen for key, body in report.repeated.items()}
    result = Tally(len(asked), winners=won.total(), wrong=[word for report in seen for word in report.wrong])
    for key in sorted(asked | done.keys()):
        result.duplicates += max(done[key], won[key], 1) - 1
        if key not in asked:
            result.wrong.append(f"{key} was executed, and nobody asked for it")
        elif key not in by or repeated.get(key) != f"{key} by {by[key]}".encode():
            result.lost += 1
        for report in seen:
            if key in report.replayed and key in by and report.replayed[key] != f"{key} by {by[key]}".encode():
                result.wrong.append(f"{key} was executed by {by[key]}, and somebody heard {report.replayed[key]!r}")
    return result
