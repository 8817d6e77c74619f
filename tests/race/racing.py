"""One racer: a process of its own that asks for every key at the same moment as its competitors.

It asks in one of three ways. By a claim: the record is claimed first, and settled together with the effect where the
store shares a transaction. By a function: `@once.function`, as an application calls it; LOCAL, so that key and effect
are in one commit, or INLINE on a store that shares none. By an OUTBOX function through the application's own SQLAlchemy
engine, where the record is claimed first: the answer is what the function returned with its parcel.

Who executes leaves a mark: a row, or an item, in the transaction of the answer. A store that shares none has a file for
that, to which one line is appended, so an execution is counted even if its answer never comes into being.
"""

from __future__ import annotations

import os
import random
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sqlalchemy import create_engine

from harness import flows
from harness.patience import PATIENCE
from oncekey import INLINE, LOCAL, OUTBOX, InProgressError, Message, Once, SyncOperation, wire
from oncekey.core.model import Claim, Code, Lease, Proceed, Refuse, Replay
from oncekey.core.policy import Policy
from oncekey.engine.shell import Engine
from oncekey.testing.claims import START, ManualClock, a_claim, answered

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

EFFECTS = "effects"
"""The table of the marks, in the application's own hands."""

PAUSE = 0.003
"""Seconds that a racer of a seeded race waits at most, before it asks and while it executes."""


@dataclass(frozen=True)
class PhasedRun:
    """What is raced for: so many keys with this name, at this instant of the store's clock, or by a function."""

    name: str
    rounds: int
    now: int = START
    by_function: bool = False
    deferred: bool = False
    """Whether the function is OUTBOX, on the application's own engine."""

    def key(self, number: int) -> str:
        return f"{self.name}-{number:05}"

    @property
    def keys(self) -> list[str]:
        return [self.key(number) for number in range(self.rounds)]


@dataclass(frozen=True)
class Track:
    """Where the race is: the store, and the file of the marks if it shares no transaction."""

    url: str
    ledger: Path | None = None
    seed: int | None = None
    """Makes racers wait for moments of their own; None: all run as fast as they can."""
    tells: str | None = None
    """Under this name the first racer tells on stderr how far they are."""

    @property
    def sqlalchemy_url(self) -> str:
        """The same database for an application's own engine."""
        return self.url.partition("?")[0].replace("postgresql:", "postgresql+psycopg:", 1)

    def mark(self, connection: Any, key: str) -> None:
        """The effect of an execution."""
        if self.ledger is not None:
            with self.ledger.open("ab", buffering=0) as file:
                file.write(f"{key} {os.getpid()}\n".encode())
        elif self.url.startswith("dynamodb:"):
            mark = {"id": {"S": uuid.uuid4().hex}, "mark": {"S": f"{key} {os.getpid()}"}}
            connection.put(TableName=EFFECTS, Item=mark)
        else:
            write = connection.execute if hasattr(connection, "execute") else connection.cursor().execute
            write = getattr(connection, "exec_driver_sql", write)
            write(f"INSERT INTO {EFFECTS} (key_name, racer) VALUES ('{key}', {os.getpid()})")


@dataclass
class Report:
    """What one racer saw."""

    won: list[str] = field(default_factory=list)
    waited: int = 0
    replayed: dict[str, bytes] = field(default_factory=dict)
    repeated: dict[str, bytes] = field(default_factory=dict)
    """By key: the answer that is stored, as a request after the race hears it."""
    wrong: list[str] = field(default_factory=list)


class Way(Protocol):
    """How a racer asks."""

    def ask(self, key: str) -> tuple[str, bytes]:
        """How it ended, "won", "replayed" or "busy", and the answer; anything else is wrong."""
        ...

    def close(self) -> None:
        """Give the connections back."""
        ...


def race(track: Track, courses: list[PhasedRun], number: int, line: Barrier, reports: Queue[Report]) -> None:
    """Run all courses and report; who falls ends the race for all."""
    report = Report()
    try:
        _run(track, courses, number, line, report)
    except BaseException as error:
        report.wrong.append(repr(error))
        line.abort()
        raise
    finally:
        reports.put(report)


def _run(track: Track, courses: list[PhasedRun], number: int, line: Barrier, report: Report) -> None:
    chance = random.Random(f"{track.seed} {number}")

    def pause() -> None:
        if track.seed is not None and chance.random() < 0.5:
            time.sleep(chance.random() * PAUSE)

    for phased_run in courses:
        way: Way = _Claims(track, phased_run.now, pause)
        if phased_run.by_function:
            way = _Functions(track, pause, deferred=phased_run.deferred)
        with closing(way):
            for round_, key in enumerate(phased_run.keys):
                if track.tells and number == 0 and round_ % 250 == 0:
                    print(f"{track.tells}: {phased_run.name}, round {round_} of {phased_run.rounds}", file=sys.stderr)
                line.wait(PATIENCE)
                pause()
                match way.ask(key):
                    case "won", _:
                        report.won.append(key)
                    case "replayed", body:
                        report.replayed[key] = body
                    case "busy", _:
                        report.waited += 1
                    case other:
                        report.wrong.append(f"{key} got {other}")
            line.wait(PATIENCE)
            # Each key once more, when its race is over: it is answered, and not executed.
            for key in phased_run.keys[number :: line.parties]:
                how, body = way.ask(key)
                if how == "replayed":
                    report.repeated[key] = body
                else:
                    report.wrong.append(f"{key} was {how} when its race was over")
        line.wait(PATIENCE)


class _Claims:
    """By a claim, at an instant that the race chooses."""

    def __init__(self, track: Track, now: int, pause: Callable[[], None]) -> None:
        self._engine: Engine = wire.connect(track.url, clock=ManualClock(now))
        self._track = track
        self._pause = pause

    def ask(self, key: str) -> tuple[str, bytes]:
        claim = a_claim(key)
        match flows.begin(self._engine, claim, Policy()):
            case Proceed(lease):
                self._pause()
                return ("won" if self._executed(claim, lease) else "taken from its owner"), b""
            case Replay(record):
                return "replayed", (record.response and record.response.body) or b""
            case Refuse(code) if code is Code.IN_PROGRESS:
                return "busy", b""
            case verdict:
                return str(verdict), b""

    def _executed(self, claim: Claim, lease: Lease) -> bool:
        """The effect and the answer, in one transaction where the store shares one."""
        if self._track.ledger is not None:
            self._track.mark(None, claim.id.key)
            return flows.settle(self._engine, lease, answered(_body(claim.id.key))).ours
        transaction = self._engine.open()
        self._track.mark(transaction.connection, claim.id.key)
        ours = flows.settle_within(self._engine, transaction, lease, answered(_body(claim.id.key))).ours
        if ours:
            transaction.commit()
        else:
            transaction.rollback()
        return ours

    def close(self) -> None:
        self._engine.close()


class _Functions:
    """By a function of an application."""

    def __init__(self, track: Track, pause: Callable[[], None], *, deferred: bool) -> None:
        self._engine = create_engine(track.sqlalchemy_url) if deferred else None
        self._once = Once(self._engine or track.url)
        self._ran = False
        options: dict[str, Any] = {"effects": OUTBOX if deferred else LOCAL}
        if track.ledger is not None:
            options = {"effects": INLINE, "low_stakes": True}

        @self._once.function(key="key", operation="race", **options)
        def execute(op: SyncOperation, key: str) -> str:
            self._ran = True
            track.mark(None if track.ledger else op.connection, key)
            pause()
            if deferred:
                op.defer("never", {})
            return _body(key).decode()

        if deferred:
            self._once.topic("never")(_never)

        self._execute = execute

    def ask(self, key: str) -> tuple[str, bytes]:
        self._ran = False
        try:
            answer = self._execute(key).encode()
        except InProgressError as error:
            if not error.accepted:
                return "busy", b""
            answer = str(error.value).encode()
        return ("won" if self._ran and answer == _body(key) else "replayed"), answer

    def close(self) -> None:
        self._once.blocking().close()
        if self._engine is not None:
            self._engine.dispose()


def _never(_: Message) -> None:
    raise AssertionError("there is no worker")


def _body(key: str) -> bytes:
    return f"{key} by {os.getpid()}".encode()
