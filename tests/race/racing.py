"""One racer: a process of its own that asks for every key at the same moment as its competitors."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier
from typing import TYPE_CHECKING

from harness.patience import PATIENCE
from oncekey import wire
from oncekey.core.model import Claim, Code, Proceed, Refuse, Replay
from oncekey.core.policy import Policy
from oncekey.testing.claims import a_claim, answered
from oncekey.testing.clock import ManualClock

if TYPE_CHECKING:
    from multiprocessing.queues import Queue


@dataclass(frozen=True)
class Course:
    """What is raced for: so many keys with this name, at this instant of the store's clock."""

    name: str
    rounds: int
    now: int

    def key(self, number: int) -> str:
        return f"{self.name}-{number:05}"

    def claim(self, number: int) -> Claim:
        return a_claim(self.key(number))


@dataclass
class Report:
    """What one racer saw."""

    won: list[str] = field(default_factory=list)
    waited: int = 0
    replayed: dict[str, bytes] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def race(url: str, courses: list[Course], line: Barrier, reports: Queue[Report]) -> None:
    """Run all courses and report; who falls ends the race for all."""
    report = Report()
    try:
        _run(url, courses, line, report)
    except BaseException as error:
        report.wrong.append(repr(error))
        line.abort()
        raise
    finally:
        reports.put(report)


def _run(url: str, courses: list[Course], line: Barrier, report: Report) -> None:
    clock = ManualClock()
    with closing(wire.connect(url, clock=clock)) as engine:
        for course in courses:
            clock.now = course.now
            for number in range(course.rounds):
                claim = course.claim(number)
                line.wait(PATIENCE)
                match engine.begin(claim, Policy()):
                    case Proceed(lease):
                        report.won.append(claim.id.key)
                        # The handler's effect and the answer, in one transaction.
                        transaction = engine.open()
                        transaction.connection.execute(
                            f"INSERT INTO effects (key, racer) VALUES ('{claim.id.key}', {os.getpid()})"
                        )
                        settled = engine.settle_within(transaction, lease, answered(_body(claim)))
                        if settled.ours:
                            transaction.commit()
                        else:
                            transaction.rollback()
                            report.wrong.append(f"{claim.id.key} was taken from its owner")
                    case Replay(record):
                        report.replayed[claim.id.key] = record.response.body
                    case Refuse(code) if code is Code.IN_PROGRESS:
                        report.waited += 1
                    case verdict:
                        report.wrong.append(f"{claim.id.key} got {verdict}")


def _body(claim: Claim) -> bytes:
    return f"{claim.id.key} by {os.getpid()}".encode()
