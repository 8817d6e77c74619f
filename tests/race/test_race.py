"""Many processes, one key, one moment: exactly one executes, round after round (R50, R52, R62, R185, F14).

`make race` does the same for thousands of rounds, on every store.
"""

from __future__ import annotations

import uuid
from contextlib import closing

import pytest

from harness import flows
from harness.valkeys import StoringValkey
from oncekey import wire
from oncekey.testing.claims import a_claim
from race.grounds import OnMariadb, OnPostgres, OnSqlite, Tally, WithLedger, courses_of, prepare, run, tally
from race.racing import PhasedRun, Report

RACERS = 5
ROUNDS = {"postgresql": 250, "sqlite": 120, "mariadb": 50, "mysql": 50, "redis": 100}
"""Of four kinds of keys each: on PostgreSQL a thousand races."""
BY_FUNCTION = 20
DEFERS = ("postgresql", "sqlite")
"""Where an OUTBOX function claims first, through SQLAlchemy in threads."""


@pytest.fixture(params=ROUNDS)
def store(request):
    return request.param


@pytest.fixture
def ground(store, request, tmp_path):
    match store:
        case "redis":
            with StoringValkey() as server:
                yield WithLedger(server.url, tmp_path / "executed")
        case "mariadb" | "mysql":
            server = request.getfixturevalue(f"{store}_server")
            yield OnMariadb(server, server.create_database(f"race_{uuid.uuid4().hex}"))
        case "sqlite":
            yield OnSqlite(tmp_path / "race.db")
        case _:
            yield OnPostgres(request.getfixturevalue("postgres_dsn"))


def test_every_key_is_executed_by_exactly_one_process(ground, store):
    claimed = courses_of(ROUNDS[store])
    courses = [*claimed, PhasedRun("called", BY_FUNCTION, by_function=True)]
    if store in DEFERS:
        courses.append(PhasedRun("deferred", BY_FUNCTION, by_function=True, deferred=True))
    prepare(ground, courses)
    seen = run(ground, courses, RACERS)
    keys = [key for phased_run in courses for key in phased_run.keys]
    # One winner for each key, and one effect, and the answer is the winner's, also for who asks later.
    assert tally(keys, ground.executed(), seen) == Tally(len(keys), winners=len(keys))
    # Nobody got away without an answer, and it was a race: others were turned away while the winner worked.
    answers = sum(len(report.won) + len(report.replayed) + report.waited for report in seen)
    assert answers == RACERS * len(keys)
    assert sum(report.waited for report in seen) > 0
    assert sum(1 for report in seen if report.won) > 1

    # The fence went up with each owner: once more for those who were not the first.
    with closing(wire.connect(ground.track.url)) as engine:
        found = {key: flows.find(engine, a_claim(key).id).record for phased_run in claimed for key in phased_run.keys}
    assert {key: (record.fence, record.state.value) for key, record in found.items()} == {
        key: (1 if key.startswith("new") else 2, "completed") for key in found
    }


@pytest.mark.parametrize(
    ("executed", "won", "heard", "expected"),
    [
        ([("a", 1)], ["a"], b"a by 1", Tally(1, winners=1)),
        ([("a", 1), ("a", 2)], ["a"], b"a by 2", Tally(1, winners=1, duplicates=1)),
        ([("a", 1)], ["a", "a"], b"a by 1", Tally(1, winners=2, duplicates=1)),
        ([], ["a"], b"a by 1", Tally(1, winners=1, lost=1)),
        ([("a", 1)], ["a"], None, Tally(1, winners=1, lost=1)),
        ([("a", 1)], ["a"], b"a by 2", Tally(1, winners=1, lost=1)),
        ([("a", 1)], [], b"a by 1", Tally(1)),
    ],
)
def test_failed_race_is_reported(executed, won, heard, expected):
    report = Report(won=won, repeated={} if heard is None else {"a": heard})
    found = tally(["a"], executed, [report])
    assert found == expected
    assert found.clean == (expected == Tally(1, winners=1))
