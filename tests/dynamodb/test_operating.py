"""What an operator types: the table made, looked over, and found wanting."""

from __future__ import annotations

import json
from contextlib import nullcontext
from datetime import timedelta

import pytest
from typer.testing import CliRunner

from harness import flows
from harness.dynamo import Dynalite
from oncekey import OUTBOX, Once, Operation, wire
from oncekey.cli.app import make_app
from oncekey.cli.stores import abilities
from oncekey.core.errors import ConfigurationError, SchemaError
from oncekey.core.policy import Policy
from oncekey.databases.address import Kind
from oncekey.databases.dynamodb.diagnostics import tables as dynamodb
from oncekey.databases.dynamodb.items import sorted_by
from oncekey.ops.doctor import Level
from oncekey.testing.claims import a_claim, answered


@pytest.fixture(params=["moto", "dynalite"])
def server(request):
    return request.getfixturevalue(request.param)


def typed(*words):
    return CliRunner().invoke(make_app(), list(words))


def test_migrate_creates_the_table_and_doctor_checks_it(server, clients, new_table):
    new_table(server)
    url = server.url("made-by-migrate")
    assert typed("migrate", "status", "--store", url).exit_code == 1
    made = typed("migrate", "up", "--store", url)
    assert (made.exit_code, made.stdout) == (0, "applied 0001_pre_table.sql\n")
    assert typed("migrate", "up", "--store", url).stdout == "nothing to do\n"
    assert typed("migrate", "status", "--store", url).exit_code == 0

    engine = wire.connect(url)
    engine.check()
    lease = flows.begin(engine, a_claim(), Policy()).lease
    assert flows.settle(engine, lease, answered()).ours
    engine.close()

    said = typed("doctor", "--store", url, "--workers", "0", "--json")
    findings = {(one["about"], one["level"]): one["seen"] for one in json.loads(said.stdout)["items"]}
    assert findings["schema", "ok"] == "all 1 migrations are applied"
    assert "differ by" in findings["clock", "ok"]
    assert findings["dynamodb", "ok"] == "made-by-migrate is active, billed as PAY_PER_REQUEST"
    if server.transacts:
        assert clients[server.port].describe_time_to_live(TableName="made-by-migrate")["TimeToLiveDescription"] == {
            "TimeToLiveStatus": "ENABLED",
            "AttributeName": "forget_at",
        }
        assert findings["dynamodb", "warning"] == "point-in-time recovery is off on made-by-migrate"
    else:  # dynalite says that time to live is off, cannot switch it on, and knows no backups
        assert findings["dynamodb", "warning"] == "time to live is off on made-by-migrate"


def test_table_of_another_application_is_rejected(moto, clients, new_table):
    new_table(moto)
    clients[moto.port].create_table(
        TableName="somebody-elses",
        BillingMode="PAY_PER_REQUEST",
        KeySchema=[{"AttributeName": "pk", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "pk", "AttributeType": "S"}],
    )
    engine = wire.connect(moto.url("somebody-elses"))
    with pytest.raises(SchemaError, match="not created by oncekey"):
        engine.check()
    engine.close()


def test_doctor_reports_dynamodb_table_settings():
    table = {"table": "keys", "status": "ACTIVE", "billing": "PROVISIONED", "writes": 5}
    found = list(dynamodb([{**table, "expiry": False, "recovery": False}]))
    assert [one.level for one in found] == [Level.WARNING, Level.WARNING, Level.NOTE, Level.OK]
    assert "update-time-to-live --table-name keys" in found[0].todo
    well = {**table, "billing": "PAY_PER_REQUEST", "expiry": True, "recovery": True}
    assert [one.level for one in dynamodb([well])] == [Level.OK]
    unsaid = {**well, "expiry": None, "recovery": None}
    assert [one.level for one in dynamodb([unsaid])] == [Level.OK]


async def test_outbox_on_dynamodb_is_rejected_at_startup(moto, new_table):
    deferring = Once(moto.url(new_table(moto)))

    @deferring.protect(effects=OUTBOX)
    async def defer(op: Operation): ...

    with pytest.raises(ConfigurationError, match=r"defer: .* outbox"):
        await deferring.start()
    await deferring.stop()


@pytest.mark.parametrize("lease", [9, 10])
async def test_lease_shorter_than_ten_seconds_is_rejected(moto, new_table, lease):
    once = Once(moto.url(new_table(moto)), policy=Policy(lease=timedelta(seconds=lease)))
    with pytest.raises(ConfigurationError, match="lease=0:00:09") if lease == 9 else nullcontext():
        await once.start()
    await once.stop()


def test_dynamodb_store_supports_all_effects_but_outbox():
    row = wire.declared(Kind.DYNAMODB)
    able = abilities(row.store(), *(way.load() for way in (*row.blocking, *row.asynchronous)))
    assert able.effects == ("LOCAL", "PHASED", "INLINE")
    assert (able.phase, able.outbox, able.upkeep, able.tables) == (True, False, True, True)


@pytest.mark.parametrize(
    ("url", "place", "options", "size"),
    [
        ("dynamodb://eu-central-1/keys", "keys", ("eu-central-1", ""), 50),
        ("dynamodb:///my.keys-1_x?pool_size=7", "my.keys-1_x", ("", ""), 7),
        ("dynamodb://x/keys?endpoint=http%3A//h:1", "keys", ("x", "http://h:1"), 50),
        ("dynamodb://x/keys?endpoint=https://h:1/", "keys", ("x", "https://h:1/"), 50),
    ],
)
def test_dynamodb_url_is_parsed(url, place, options, size):
    address = wire.understand(url)
    assert (address.kind, address.place, address.pool_size) == (Kind.DYNAMODB, place, size)
    assert tuple(value for _, value in address.options) == options


@pytest.mark.parametrize(
    "url",
    [
        "dynamodb:keys",
        "dynamodb://keys",
        "dynamodb://x/k",
        "dynamodb://x/keys/more",
        "dynamodb://key:secret@x/keys",
        "dynamodb://x/keys?endpoint=localhost:8000",
        "dynamodb://x/keys?secret=hush",
        "dynamodb://x/keys?pool_size=0",
    ],
)
def test_invalid_dynamodb_url_is_rejected_without_its_secrets(url):
    with pytest.raises(ConfigurationError) as raised:
        wire.understand(url)
    assert "secret" not in str(raised.value)
    assert "hush" not in str(raised.value)


def test_places_sort_as_their_bytes():
    places = [
        (instant, scope, key) for instant in (-1, 0, 7) for scope in ("", "a", "a\0", "ab") for key in ("", "\0", "é")
    ]
    assert sorted(places) == sorted(places, key=sorted_by)
    long = "x" * 2000
    assert len(sorted_by((1, long, "a"))) <= 1024
    assert sorted_by((1, long, "a")) != sorted_by((1, long, "b"))


def test_a_missing_dynalite_is_a_failure(monkeypatch):
    monkeypatch.setenv(Dynalite.variable, "/nothing/here")
    with pytest.raises(FileNotFoundError), Dynalite():
        pass
