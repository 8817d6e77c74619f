"""`oncekey demo --history`: a made-up day that nothing can tell from one that was."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace

import pytest

from cli.operating import oncekey
from console.trouble import opened, put
from harness.demo import Demo
from oncekey import wire
from oncekey.cli.demo import policy_for
from oncekey.core.errors import ConfigurationError
from oncekey.core.model import HOUR, Effects, State
from oncekey.core.scope import shown_scope
from oncekey.core.transitions import Actor
from oncekey.demo.provider_ledger import Ledger
from oncekey.demo.serving import Wanted, _try_once, serve, write_history
from oncekey.engine.operate import box_of, survey_of
from oncekey.flow import drive
from oncekey.ops.stats import FINISHED, UNFINISHED, WINDOWS, Walk, series

LEDGER_OPTIONS = (
    "--column", "provider_id=id", "--column", "amount=amount_cents", "--amount", "/amount_cents", "--currency",
    "/currency", "--inline", "send_notification=notification_sent",
)  # fmt: skip
REQUESTS = 600


def write(url, ledger, wanted):
    return asyncio.run(write_history(url, policy_for(30.0), ledger, wanted))


def asked(url, flow):
    """What a store says."""
    engine = wire.connect(url)
    try:
        return drive(flow(engine.store), engine.driver.run)
    finally:
        engine.close()


def all_records(url):
    """Every record that can be read, as lists show it."""
    found = []
    for states in (UNFINISHED, *((state,) for state in FINISHED)):
        place = None
        while True:
            part = asked(url, lambda store, at=place, of=states: survey_of(store).walk(Walk(states=of), 500, at))
            found += part.records
            if not part.further:
                break
            place = part.further
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A history in SQLite, for tests that only look: its URL, and the provider's ledger."""
    folder = tmp_path_factory.mktemp("history")
    url = f"sqlite:///{folder / 'shop.db'}"
    write(url, folder / "ledger.db", Wanted(REQUESTS, seed=7))
    return url, folder / "ledger.db"


@pytest.fixture(scope="module")
def records(made):
    return all_records(made[0])


def differences(url, ledger, folder):
    """How the provider's books differ from ours, by kind."""
    books = Ledger(ledger)
    try:
        charges = asyncio.run(books.charges())
    finally:
        books.close()
    file = folder / "charges.json"
    file.write_text(json.dumps([charge.shown() for charge in charges]))
    result = oncekey("reconcile", "ledger", "--store", url, "--ledger", str(file), *LEDGER_OPTIONS, "--json")
    return Counter(one["kind"] for one in json.loads(result.stdout)["differences"])


def test_every_request_has_a_record_that_can_be_read(made, records):
    with closing(sqlite3.connect(made[0].removeprefix("sqlite:///"))) as connection:
        (rows,) = connection.execute("SELECT count(*) FROM oncekey_record").fetchone()

    assert len(records) == rows == REQUESTS
    assert {one.effects for one in records} == set(Effects)
    assert {one.state for one in records} == set(State) - {State.EXPIRED}
    assert len({shown_scope(one.id.scope) for one in records}) >= 3
    assert {one.response.status for one in records if one.response is not None} == {201, 402}
    assert max(one.attempts for one in records) > 1
    assert {entry.name for one in records for entry in one.memo} >= {"payment_created", "charge_created"}


@pytest.mark.parametrize("seed", range(8))
def test_every_state_is_there_whatever_is_drawn(tmp_path, seed):
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    midnight = time.time_ns() // 1000 // (24 * HOUR) * 24 * HOUR

    write(url, tmp_path / "ledger.db", Wanted(60, seed=seed, ended_at=midnight))

    assert {one.state for one in all_records(url)} == set(State) - {State.EXPIRED}


def test_what_needs_a_person_is_there_with_all_that_a_person_needs(made, records):
    url, _ = made
    unknown = [one for one in records if one.state is State.UNKNOWN]
    letters = asked(url, lambda store: box_of(store).dead_letters(100))
    lines = asked(url, lambda store: survey_of(store).notes(1000)).entries

    assert {one.effects for one in unknown} == {Effects.PHASED, Effects.OUTBOX, Effects.INLINE}
    assert all(one.reconcile_after is None for one in unknown)  # a resolver would settle them under one's eyes
    assert {letter.parcel.kind.value for letter in letters} == {"emit", "defer"}
    assert {entry.note.actor for entry in lines} >= {Actor.OPERATOR, Actor.RESOLVER, Actor.WEBHOOK, Actor.SWEEPER}
    assert [entry.at for entry in lines] == sorted((entry.at for entry in lines), reverse=True)
    phased = next(one for one in unknown if one.effects is Effects.PHASED)
    assert asked(url, lambda store: survey_of(store).reports_about((phased.intent.downstream_key,), ()))
    assert oncekey("keys", "show", phased.id.key, "--store", url).exit_code == 0


def findings(url):
    """What `oncekey doctor` finds, by what it is about; that no worker lives is so before the demo is served."""
    said = json.loads(oncekey("doctor", "--store", url, "--workers", "0", "--json").stdout)
    return {(one["level"], one["about"]) for one in said["items"] if one["level"] != "ok"}


def test_the_doctor_finds_what_is_meant_to_be_seen_and_nothing_else(made):
    assert findings(made[0]) - {("note", "sqlite")} <= {
        ("warning", "unknown"), ("warning", "dead_letters"), ("note", "workers"), ("note", "stale"),
        ("note", "parcels_due"),
    }  # fmt: skip


def test_the_books_differ_where_they_are_meant_to(made, records, tmp_path):
    found = differences(made[0], made[1], tmp_path)

    assert (found.pop("orphan_charge"), found.pop("charged_twice")) == (1, 1)
    assert 0 < found.pop("charged_while_unknown") < sum(one.state is State.UNKNOWN for one in records)
    assert not found


def test_the_charts_have_the_day_also_after_a_restart(made):
    url, _ = made
    seen = asyncio.run(_try_once(url, policy_for(30.0), "http://127.0.0.1:1"))
    tally = asked(url, lambda store: survey_of(store).tally())
    ends = asked(url, lambda store: survey_of(store).ended(5000))

    shown = series(ends, seen.since(0), tally.now, WINDOWS["24 h"])

    assert all(sum(column) > 0 for column in shown["outcomes"][1:])
    hours = Counter(end.at // HOUR % 24 for end in ends)
    assert sum(hours[hour] for hour in (1, 2, 3)) * 3 < sum(hours[hour] for hour in (14, 15, 16))
    assert sum(value is not None for value in shown["latency"][1]) > 30
    instants, *columns = shown["states"]
    assert instants[-1] - instants[0] > 23 * 3600
    assert all(max(column) > 0 for column in columns)
    assert set(shown["workers"][1]) == {1, 2}


def test_the_same_seed_makes_the_same_day_in_every_store(tmp_path, postgres_dsn):
    wanted = Wanted(150, seed=3, ended_at=time.time_ns() // 1000)
    urls = [f"sqlite:///{tmp_path / 'one.db'}", postgres_dsn, f"sqlite:///{tmp_path / 'another.db'}"]
    for number, url in enumerate(urls):
        write(url, tmp_path / f"ledger-{number}.db", wanted if number < 2 else replace(wanted, seed=4))

    one, same, another = ({record.id: record for record in all_records(url)} for url in urls)

    assert len(one) == 150
    assert one == same
    assert not set(one) & set(another)
    assert findings(postgres_dsn) >= {("warning", "unknown"), ("warning", "dead_letters")}
    assert not {about for level, about in findings(postgres_dsn) if level in {"warning", "error"}} - {
        "unknown", "dead_letters",
    }  # fmt: skip
    assert set(differences(postgres_dsn, tmp_path / "ledger-1.db", tmp_path)) == {
        "orphan_charge", "charged_twice", "charged_while_unknown",
    }  # fmt: skip


def test_a_history_is_written_once_and_never_among_real_records(made, tmp_path):
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    with opened(url) as world:
        put(world, State.COMPLETED, Effects.INLINE, "a-real-one")

    with pytest.raises(ConfigurationError, match="a history of 600 requests in this store already"):
        write(made[0], made[1], Wanted(100))
    with pytest.raises(ConfigurationError, match="this store has records, and none of them is made up"):
        write(url, tmp_path / "ledger.db", Wanted(100))
    assert len(all_records(url)) == 1
    assert not (tmp_path / "ledger.db").exists()


def test_charges_are_not_written_into_the_ledger_of_another_provider(tmp_path):
    url = f"sqlite:///{tmp_path / 'shop.db'}"

    with pytest.raises(ConfigurationError, match="leave --provider out"):
        serve(
            url, policy_for(30.0), host="127.0.0.1", port=0, provider="http://127.0.0.1:1", ledger=None, workers=False,
            webhooks=False, announce=lambda *_: None, history=Wanted(100),
        )  # fmt: skip

    assert all_records(url) == []


def test_the_demo_goes_on_from_it(tmp_path):
    url = f"sqlite:///{tmp_path / 'oncekey-demo.db'}"
    with Demo(tmp_path, "--history", "150", "--lease", "2", "--call-timeout", "1", "--interval", "1") as demo:
        assert demo.output.startswith("history: 150 requests\n")
        assert f"Operators' console: {demo.url}/console/login#" in demo.output
        assert '<a href="/console/">Console</a>' in demo.read("/").text
        # A client that repeats a request of that day gets its answer.
        order = next(
            one for one in all_records(url) if one.effects is Effects.LOCAL and shown_scope(one.id.scope) == "alpha"
        )
        placed = next(one for one in demo.orders() if f"/orders/{one['id']}".encode() in answer_of(url, order))
        again = demo.order(order.id.key, {name: placed[name] for name in ("customer_id", "items")})
        assert (again.status_code, again.headers["idempotent-replayed"]) == (201, "true")
        assert again.json() == placed
        assert demo.order("another-one-of-today").status_code == 201
        demo.post("/transfers", "a-transfer-that-is-declined", fault="decline")
        deadline = time.monotonic() + 60
        while not is_calm(url) or demo.record("a-transfer-that-is-declined")["state"] != "completed":
            assert time.monotonic() < deadline, asked(url, lambda store: survey_of(store).tally())
            time.sleep(0.1)
    # What was under way when the day ended was gone on with, and what was declined is no missing charge.
    found = differences(url, tmp_path / "oncekey-demo-provider.db", tmp_path)
    assert set(found) <= {"orphan_charge", "charged_twice", "charged_while_unknown"}


def answer_of(url, record):
    """The headers of a stored answer, which lists leave out."""
    found = asked(url, lambda store: store.find(record.id)).record
    return dict(found.response.headers)[b"location"]


def is_calm(url):
    """Whether nothing is under way."""
    tally = asked(url, lambda store: survey_of(store).tally())
    return not any(tally.of(what).found for what in ("in_progress", "pending", "stuck", "due"))
