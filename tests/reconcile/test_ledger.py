"""The provider's books against ours: pure, from files, and by the command (R140)."""

from __future__ import annotations

import json
import time
from decimal import Decimal

import pytest
from typer.testing import CliRunner

from oncekey.cli.app import make_app
from oncekey.core.errors import ConfigurationError
from oncekey.core.flow import drive
from oncekey.core.resolvers import Executed, Rejected
from oncekey.core.topics import Reply
from oncekey.databases.sqlite.blocking import SqliteDriver
from oncekey.databases.sqlite.store import SqliteStore
from oncekey.engine import migrating
from oncekey.reconcile import (
    MEANING,
    Belief,
    Books,
    DifferenceKind,
    Expected,
    LedgerEntry,
    Pointers,
    compare,
    entries,
    read,
)
from oncekey_contract.world import blocking
from reconcile.doubts import CALL, announced, inline, key_of, outbox, phased, receive


def ours(key="k1", belief=Belief.MADE, **more):
    return Expected(key, belief, "pay", "scope", "digest", **more)


def theirs(key="k1", provider_id="ch_1", **more):
    return LedgerEntry(key, provider_id, **more)


@pytest.mark.parametrize(
    ("ledger", "expected", "kinds"),
    [
        ([theirs()], [ours()], []),
        ([], [], []),
        ([theirs("planted")], [], [DifferenceKind.ORPHAN]),
        ([theirs(None, "ch_9")], [ours()], [DifferenceKind.ORPHAN, DifferenceKind.MISSING]),
        ([theirs(None, "ch_9")], [ours(provider_id="ch_9")], []),
        (  # two accounts use the same id, and the charge may be of either
            [theirs(None, "1")],
            [ours(provider_id="1"), ours("k2", provider_id="1")],
            [DifferenceKind.ORPHAN, DifferenceKind.MISSING, DifferenceKind.MISSING],
        ),
        ([], [ours()], [DifferenceKind.MISSING]),
        ([], [ours(belief=Belief.REFUSED), ours("k2", Belief.OPEN), ours("k3", Belief.GONE)], []),
        ([theirs(), theirs(provider_id="ch_2")], [ours()], [DifferenceKind.TWICE]),
        ([theirs(), theirs()], [ours()], []),  # the same charge, listed twice
        ([theirs()], [ours(belief=Belief.REFUSED)], [DifferenceKind.REFUSED]),
        ([theirs()], [ours(belief=Belief.OPEN)], [DifferenceKind.OPEN]),
        ([theirs()], [ours(belief=Belief.GONE)], []),
        ([theirs(amount=Decimal(7))], [ours(amount=Decimal("7.00"))], []),
        ([theirs(amount=Decimal(8))], [ours(amount=Decimal(7))], [DifferenceKind.AMOUNT]),
        ([theirs(amount=Decimal(8))], [ours()], []),
        ([theirs(currency="eur")], [ours(currency="EUR")], []),
        ([theirs(currency="USD")], [ours(currency="EUR")], [DifferenceKind.CURRENCY]),
        ([theirs()], [ours(belief=Belief.REFUSED), ours()], []),  # refused in one life, made in another
        ([theirs()], [ours(), ours(belief=Belief.REFUSED)], []),
    ],
)
def test_compare_reports_each_kind_of_difference(ledger, expected, kinds):
    report = compare(ledger, expected)
    assert [one.kind for one in report.differences] == kinds
    assert report.agree == (not kinds)
    assert set(MEANING) == set(DifferenceKind)


def test_expected_calls_are_read_from_the_records(world):
    made, refused, unknown, running = phased(world), phased(world), phased(world), announced(world)[0]
    parcel, direct = outbox(world), inline(world)
    receive(world, made, Executed({"id": "ch_1", "amount": 7, "currency": "EUR"}, provider_id="ch_1"))
    receive(world, refused, Rejected("no"))
    receive(world, parcel, Executed(Reply(201, {"amount": "8.50"})))
    receive(world, direct, Executed(Reply(201, {})))
    books = Books(pointers=Pointers("/amount", "/currency"), inline={"pay": CALL})
    found = {one.downstream_key: one for one in world.go(read(world.store, books))}
    assert {key_of(claim): found[key_of(claim)].belief for claim in (made, refused, unknown, running)} == {
        key_of(made): Belief.MADE,
        key_of(refused): Belief.REFUSED,
        key_of(unknown): Belief.OPEN,
        key_of(running): Belief.OPEN,
    }
    assert (found[key_of(made)].amount, found[key_of(made)].currency) == (Decimal(7), "EUR")
    assert (found[key_of(parcel)].belief, found[key_of(parcel)].amount) == (Belief.MADE, Decimal("8.50"))
    assert found[key_of(direct)].belief is Belief.MADE
    assert len(found) == 6
    later = Books(since=world.clock() + 1, inline={"pay": CALL})
    assert world.go(read(world.store, later)) == []


def test_calls_are_read_page_by_page(world, monkeypatch):
    claims = [phased(world) for _ in range(5)]
    monkeypatch.setattr("oncekey.reconcile.PAGE", 2)
    found = world.go(read(world.store, Books()))
    assert {one.downstream_key for one in found} == {key_of(claim) for claim in claims}


def test_ledger_entries_are_read_from_csv_and_json(tmp_path):
    table = tmp_path / "books.csv"
    table.write_text("id,downstream_key,amount_cents\nch_1,k1,700\nch_2,,\n", encoding="utf-8-sig")
    named = {"provider_id": "id", "amount": "amount_cents"}
    assert list(entries(str(table), named)) == [theirs(amount=Decimal(700)), theirs(None, "ch_2")]
    document = tmp_path / "books.json"
    document.write_text('{"charges": [{"downstream_key": "k1", "provider_id": "ch_1", "amount": 7.10}]}')
    assert list(entries(str(document))) == [theirs(amount=Decimal("7.10"))]
    for text in ("{", "1", '["x"]', '{"a": [], "b": []}', '[{"amount": 1}]', '[{"provider_id": "c", "amount": "x"}]'):
        document.write_text(text)
        with pytest.raises(ConfigurationError):
            list(entries(str(document)))
    for place in (str(tmp_path / "none.csv"), "ftp://127.0.0.1/books"):
        with pytest.raises(ConfigurationError):
            list(entries(place))


@pytest.fixture
def shop(tmp_path):
    """A store with one payment that was made, and its provider's books."""
    driver = SqliteDriver(tmp_path / "shop.db")
    drive(migrating.up(SqliteStore().schema), driver.run)
    with blocking(SqliteStore, driver) as world:
        claim = phased(world)
        receive(world, claim, Executed({"id": "ch_1", "amount": 700}))
    books = tmp_path / "books.csv"
    books.write_text(f"downstream_key,provider_id,amount\n{key_of(claim)},ch_1,700\n")
    return f"sqlite:///{tmp_path / 'shop.db'}", books


def run(url, books, *options):
    command = ["reconcile", "ledger", "--store", url, "--ledger", str(books), "--amount", "/amount", *options]
    return CliRunner().invoke(make_app(), command)


def test_matching_ledgers_exit_with_status_zero(shop):
    done = run(*shop)
    assert (done.exit_code, done.stdout) == (0, "the ledgers agree\n1 charges, 1 calls, 1 agree\n")
    assert json.loads(run(*shop, "--json").stdout)["agree"] is True


def test_a_planted_charge_is_reported(shop):  # R140
    url, books = shop
    books.write_text(books.read_text() + "planted,ch_orphan,5\n")
    told = run(url, books)
    assert told.exit_code == 1
    assert "orphan_charge" in told.stdout
    assert "--inline" not in told.stdout
    shape = json.loads(run(url, books, "--json").stdout)
    assert [(one["kind"], one["provider_id"], one["theirs"]["amount"]) for one in shape["differences"]] == [
        ("orphan_charge", "ch_orphan", "5")
    ]


def test_an_orphan_that_an_inline_operation_may_have_made_names_the_option(shop):
    url, books = shop
    driver = SqliteDriver(books.with_name("shop.db"))
    with blocking(SqliteStore, driver) as world:
        world.clock.now = time.time_ns() // 1000
        inline(world)
    books.write_text(books.read_text() + "planted,ch_orphan,5\n")
    assert "pass --inline pay=CALL or --app" in run(url, books).stdout
    assert "pass --inline" not in run(url, books, "--inline", "pay=charge").stdout


def test_an_amount_that_differs_is_reported(shop):
    url, books = shop
    books.write_text(books.read_text().replace(",700", ",70"))
    shape = json.loads(run(url, books, "--json").stdout)
    (one,) = shape["differences"]
    assert (one["kind"], one["ours"]["amount"], one["theirs"]["amount"]) == ("amount_differs", "700", "70")


@pytest.mark.parametrize(
    "options",
    [["--column", "amount"], ["--column", "sum=x"], ["--currency", "currency"], ["--inline", "=x"], ["--since", "now"]],
)
def test_invalid_ledger_options_raise(shop, options):
    done = run(*shop, *options)
    assert done.exit_code != 0
    assert isinstance(done.exception, ConfigurationError)
