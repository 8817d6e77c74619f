"""`oncekey stores`: every store, what is installed, and what each can do."""

from __future__ import annotations

import json

import pytest

from cli.operating import oncekey
from oncekey import wire
from oncekey.ports.store import Shares


def test_every_store_is_listed_with_what_it_can_do():
    items = {one["store"]: one for one in json.loads(oncekey("stores", "--json").stdout)["items"]}

    assert list(items) == [row.kind.value for row in wire.STORES]
    for row in wire.STORES:
        item = items[row.kind.value]
        assert item["install"] == []
        assert set(item["schemes"]) == set(row.schemes)
        engine = wire.connect(row.forms[0])  # connects to nothing
        shares = isinstance(engine.driver, Shares)
        can = item["can"]
        assert ("LOCAL" in can["effects"], can["phase"]) == (shares, shares)
        for part in ("outbox", "audit", "upkeep", "operate", "survey", "reconcile"):
            assert can[part] is (getattr(engine.store, part) is not None), (row.kind, part)
        assert can["tables"] is bool(engine.store.schema.migrations)
        engine.close()


def test_stores_prints_a_line_per_store_and_the_redis_warning():
    lines = oncekey("stores").stdout.splitlines()
    assert lines[0].split() == ["store", "url", "asyncio", "threads", "effects", "also"]
    shown = lines[1 : len(wire.STORES) + 1]
    assert all(line.startswith(f"{row.title} ") for line, row in zip(shown, wire.STORES, strict=True))
    assert "Redis: for low stakes only: Redis can forget a key" in lines[-1]


@pytest.mark.parametrize(
    ("package", "store", "command"),
    [("redis", "redis", "pip install 'oncekey[redis]'"), ("asyncpg", "postgres", "pip install 'oncekey[asyncpg]'")],
)
def test_stores_prints_the_install_command_of_a_missing_package(monkeypatch, package, store, command):
    found = wire.find_spec
    monkeypatch.setattr(wire, "find_spec", lambda name: None if name == package else found(name))

    (item,) = (one for one in json.loads(oncekey("stores", "--json").stdout)["items"] if one["store"] == store)

    assert item["install"] == [command]
    assert (item["can"] is None) is (package == "redis")  # PostgreSQL has another driver
    assert command in oncekey("stores").stdout
