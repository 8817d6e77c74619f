"""`oncekey demo --traffic`: real requests to the demo, after which its console has something of every kind to show."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from random import Random

import pytest

from cli.operating import oncekey
from harness.demo import Demo
from harness.patience import wait_until
from oncekey import wire
from oncekey.core.flow import drive
from oncekey.core.model import Effects, Outcome, State
from oncekey.core.transitions import Actor
from oncekey.engine.operate import box_of, survey_of
from oncekey.ops.stats import FINISHED, UNFINISHED, Walk
from oncekey_demo.traffic import KINDS, Send, drawn

QUICK = ("--lease", "3", "--call-timeout", "2", "--interval", "1")
MOST = 10_000


@pytest.fixture(params=["sqlite", "postgresql"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'demo.db'}"
    dsn: str = request.getfixturevalue("postgres_dsn")
    return dsn


def test_demo_traffic_creates_records_of_every_kind(tmp_path: Path, store: str) -> None:
    with Demo(tmp_path, "--traffic", "4", "--seed", "7", *QUICK, store=store) as demo:
        wait_until(lambda: "traffic: 4 of 4 s. " in demo.output)
        *_, last = (line for line in demo.output.splitlines() if line.startswith("traffic: "))
        statuses = {part.split(" x ")[1] for part in last.partition(". ")[2].split(", ")}
        assert statuses >= {"201", "201 replayed", "202", "402", "402 replayed", "409", "422", "500", "502"}
        assert "lost" not in statuses
        assert demo.output.startswith("traffic: seed 7\n")
        assert demo.output.count(f"Operators' console: {demo.url}/console/login#") == 2

        engine = wire.connect(store)
        survey, go = survey_of(engine.store), engine.driver.run

        def is_calm() -> bool:
            """Whether workers have finished what they can."""
            unfinished = drive(survey.walk(Walk(states=UNFINISHED), MOST), go).records
            letters = drive(box_of(engine.store).dead_letters(MOST), go)
            return bool(letters) and {one.state for one in unfinished} == {State.UNKNOWN}

        wait_until(is_calm, lambda: demo.output)
        records = [
            one
            for states in (UNFINISHED, *((state,) for state in FINISHED))
            for one in drive(survey.walk(Walk(states=states), MOST), go).records
        ]
        assert {one.effects for one in records} == set(Effects)
        assert {one.outcome for one in records if one.state is State.COMPLETED} == {Outcome.SUCCESS, Outcome.FAILURE}
        assert {one.effects for one in records if one.state is State.UNKNOWN} == {Effects.PHASED, Effects.INLINE}
        assert max(one.attempts for one in records) > 1
        assert Actor.WEBHOOK in {entry.note.actor for entry in drive(survey.notes(MOST), go).entries}
        engine.close()

        # The ledger has each charge once, and none for what failed before the provider booked it.
        charges = tmp_path / "charges.json"
        charges.write_text(json.dumps(demo.ledger()))
        columns = ("--column", "provider_id=id", "--column", "amount=amount_cents", "--amount", "/amount_cents")
        inline = ("--inline", "send_notification=notification_sent", "--json")
        compared = oncekey("reconcile", "ledger", "--store", store, "--ledger", str(charges), *columns, *inline)
        assert json.loads(compared.stdout)["agree"], compared.stdout
        assert demo.order("a-key-after-the-traffic").status_code == 201


def test_ctrl_c_ends_it_in_the_middle_of_its_traffic(tmp_path: Path) -> None:
    with Demo(tmp_path, "--traffic", "3600", *QUICK) as demo:
        wait_until(lambda: " of 3600 s. " in demo.output)
        assert demo.stop(signal.SIGINT) == 0
        assert "Traceback" not in demo.output


def test_the_same_seed_sends_the_same_requests() -> None:
    def sent(seed: int) -> list[Send]:
        chance = Random(seed)
        return [drawn(seed, number, chance) for number in range(200)]

    assert sent(7) == sent(7)
    assert sent(7) != sent(8)
    assert {one.key for one in sent(7)}.isdisjoint({one.key for one in sent(8)})
    assert [one.kind for one in sent(7)[: len(KINDS)]] == list(KINDS)


@pytest.mark.parametrize("seconds", ["0", "3601"])
def test_traffic_is_bounded(seconds: str) -> None:
    refused = oncekey("demo", "--traffic", seconds)
    assert (refused.exit_code, "--traffic" in refused.stderr) == (2, True)
