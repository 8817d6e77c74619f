"""`oncekey keys` and `oncekey unknown`, on SQLite and PostgreSQL."""

from __future__ import annotations

import importlib
import json
import logging
import re
import shlex
import sys
import uuid
from dataclasses import replace

import psycopg
import pytest
from typer.testing import CliRunner

from cli.operating import KEY, SCOPE, oncekey, refused
from harness import flows
from oncekey.canonical.digests import downstream_key
from oncekey.cli.app import make_app
from oncekey.core.flow import Mode, Statement, Transaction, drive
from oncekey.core.keys import key_digest
from oncekey.core.model import (
    HOUR,
    SECOND,
    Announcement,
    Deferred,
    Doubtful,
    Effects,
    EntryKind,
    MemoEntry,
    Parcel,
    ParcelKind,
    RecordId,
    Recovery,
    Retryable,
    State,
)
from oncekey.core.onecommit import lock_number
from oncekey.core.policy import Policy
from oncekey.core.rulings import LEASE_RAN_OUT
from oncekey.core.scope import BindTo, bound_scope, scope_of
from oncekey.core.transitions import Actor, Mover
from oncekey.core.upkeep import Expired
from oncekey.testing.claims import a_claim, answered

ID = RecordId(SCOPE, KEY)
WHOSE = ("--tenant", "acme")


def own(shop, effects=Effects.LOCAL, recovery=Recovery.RETRY, **changes):
    """A record in progress."""
    claim = a_claim(effects=effects, recovery=recovery, **{"id": ID, **changes})
    return flows.begin(shop, claim, Policy()).lease


def doubt(shop, **changes):
    """An INLINE record of which nobody knows whether it was executed."""
    lease = own(shop, Effects.INLINE, Recovery.UNKNOWN, **changes)
    flows.settle(shop, lease, Doubtful("call_uncertain"))
    return lease


def phased(shop):
    """A PHASED record with an open call of which nobody knows."""
    lease = own(shop, Effects.PHASED, Recovery.RESUME)
    step = MemoEntry("order_created", EntryKind.PHASE, '"o_1"')
    call = Announcement("charge", "dk-1", "digest", 1, None, 5 * SECOND, 30 * SECOND)
    drive(shop.store.phases.announce(lease, (), (step,), call), shop.driver.run)
    flows.settle(shop, lease, Doubtful("call_uncertain"))


def shown(shop, url):
    return json.loads(oncekey("keys", "show", KEY, *WHOSE, "--store", url, "--json").stdout)


def test_keys_show_prints_all_fields_of_a_record(shop, url):
    # R42, R56, R143
    flows.settle(shop, own(shop), answered())
    said = shown(shop, url)
    assert {name: said[name] for name in ("key", "state", "outcome", "recovery_point", "attempts", "last_error")} == {
        "key": KEY, "state": "completed", "outcome": "success", "recovery_point": "finished", "attempts": 1,
        "last_error": None,
    }  # fmt: skip
    assert said["response"]["body"] == '{"id":7}'
    assert said["retry"] == "A retry receives the stored response (201). Nothing is executed."
    assert [one["row"] for one in said["possible"]] == [35, 32]
    assert (said["means"], said["why"]) == ("Done: it succeeded (201).", None)
    assert set(said) == {
        "key", "state", "outcome", "operation", "method", "path", "recovery_point", "attempts", "last_error",
        "created_at", "last_run_at", "finished_at", "expires_at", "response", "scope", "effects", "recovery",
        "incarnation", "fence", "version", "owner", "lease_until", "deadline", "reconcile_after", "reconcile_tries",
        "steps", "open_call", "not_executed_is_believed_from", "parcels", "evidence", "retry", "possible", "now",
        "means", "why", "downstream_keys", "result_shape",
    }  # fmt: skip
    assert not {"seed", "fingerprint"} & set(said)
    text = oncekey("keys", "show", KEY, *WHOSE, "--store", url).stdout
    assert text.startswith(
        "Done: it succeeded (201).\nA retry receives the stored response (201). Nothing is executed.\n"
    )
    assert "incarnation" not in text
    text = oncekey("keys", "show", KEY, *WHOSE, "--store", url, "--verbose").stdout
    assert re.search(r"^state +completed$", text, re.MULTILINE)
    assert re.search(r"^incarnation +[0-9a-f-]{36}$", text, re.MULTILINE)


def test_show_names_every_state(shop, url):  # R43
    def parcel(lease):
        return Parcel(uuid.uuid4(), ParcelKind.DEFER, lease.id, lease.incarnation, "ship", "{}", "dk-1")

    settled = {
        State.IN_PROGRESS: lambda _: None,
        State.PENDING: lambda lease: Deferred(parcel(lease)),
        State.COMPLETED: lambda _: answered(),
        State.FAILED_RETRYABLE: lambda _: Retryable("refused"),
        State.UNKNOWN: lambda _: Doubtful("call_uncertain"),
        State.EXPIRED: lambda _: answered(),
    }
    assert set(settled) == set(State)
    keys = {state: RecordId(SCOPE, f"{KEY}-{state}") for state in State}
    for state, settlement in settled.items():
        effects = Effects.OUTBOX if state is State.PENDING else Effects.LOCAL
        lease = own(shop, effects, id=keys[state], ttl=1 if state is State.EXPIRED else HOUR)
        if (settlement := settlement(lease)) is not None:
            assert flows.settle(shop, lease, settlement).ours
    # `ttl` is one microsecond, and SQLite's clock has milliseconds: a second less is past it on every machine.
    due = Expired(age=-SECOND, until=flows.find(shop, keys[State.EXPIRED]).record.expires_at, soft=True)
    marked = drive(shop.store.upkeep.mark(due, 10), shop.driver.run)
    assert marked.moved == 1
    found = {
        state: json.loads(oncekey("keys", "show", key.key, *WHOSE, "--store", url, "--json").stdout)["state"]
        for state, key in keys.items()
    }
    assert found == {state: state.value for state in State}


def test_keys_show_of_a_missing_key_exits_with_code_1(shop, url):
    result = oncekey("keys", "show", KEY, *WHOSE, "--store", url)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("oncekey: no such key")
    result = oncekey("keys", "show", KEY, *WHOSE, "--store", url, "--json")
    assert (result.exit_code, json.loads(result.stdout)["changed"]) == (1, False)


@pytest.mark.parametrize("command", ["show", "bust"])
def test_unreadable_record_is_reported_in_one_line(shop, url, command):
    flows.settle(shop, own(shop), answered())
    table = "oncekey.record" if url.startswith("postgresql") else "oncekey_record"
    shop.driver.run(saying(f"UPDATE {table} SET response_schema = 3"))
    options = () if command == "show" else ("--runs-again", "--reason", "x")
    result = oncekey("keys", command, KEY, *WHOSE, *options, "--store", url)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"oncekey: the record of a key (digest {key_digest(KEY)}) cannot be read: its response was stored by a later "
        "version of oncekey (response_schema 3; this one reads 2)\n"
    )
    listed = json.loads(oncekey("keys", "list", *WHOSE, "--store", url, "--json").stdout)
    assert [(line["key"], line["digest"]) for line in listed["items"]] == [(KEY, key_digest(KEY))]


def saying(sql):
    """One statement, as a transaction of the store's driver."""

    def body():
        yield Statement("spoil", sql, {})

    return Transaction("spoil", Mode.SINGLE, body)


def test_keys_show_reports_a_local_request_in_progress_without_a_row(shop, url, monkeypatch):
    # L8, F21
    if not url.startswith("postgresql"):
        lease = own(shop)
        assert shown(shop, url)["state"] == "in_progress"
        assert lease
        return
    monkeypatch.setenv("ONCEKEY_SECRET", "0123456789abcdef")
    with psycopg.connect(url) as connection:
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (lock_number("oncekey", ID, b"0123456789abcdef"),))
        said = shown(shop, url)
    assert (said["key"], said["state"], said["possible"]) == (KEY, "in_progress", [])


def test_list_and_its_filters(shop, url):
    flows.settle(shop, own(shop), answered())
    other = replace(ID, key=f"other-{uuid.uuid4().hex}")
    flows.begin(shop, a_claim(id=other, effects=Effects.INLINE, recovery=Recovery.UNKNOWN), Policy())

    def keys(*options):
        return json.loads(oncekey("keys", "list", *WHOSE, "--store", url, "--json", *options).stdout)

    everything = keys()
    assert {line["key"] for line in everything["items"]} == {KEY, other.key}
    assert everything["next"] is None
    assert set(everything["items"][0]) == {
        "key", "scope", "state", "outcome", "operation", "effects", "recovery_point", "attempts", "last_error",
        "status", "created_at", "last_run_at", "lease_until", "expires_at", "digest", "stale",
    }  # fmt: skip
    first = keys("--limit", "1")
    second = keys("--limit", "1", "--before", first["next"])
    assert {first["items"][0]["key"], second["items"][0]["key"]} == {KEY, other.key}
    assert [line["key"] for line in keys("--state", "completed")["items"]] == [KEY]
    assert [line["key"] for line in keys("--effects", "inline")["items"]] == [other.key]
    digest = next(line["digest"] for line in everything["items"] if line["key"] == KEY)
    assert [line["key"] for line in keys("--digest", digest)["items"]] == [KEY]
    assert keys("--older-than", "1h")["items"] == keys("--stale")["items"] == []
    text = oncekey("keys", "list", "--scope", SCOPE, "--store", url).stdout
    assert KEY in text
    assert "no matching keys" in oncekey("keys", "list", "--tenant", "nobody", "--store", url).stdout


def test_a_body_that_is_not_json_is_refused(shop, url, tmp_path):
    # a stored response is final
    doubt(shop)
    body = tmp_path / "note.txt"
    body.write_bytes(b'{"payment":"ch_1"')
    words = ("--store", url, "--status", "201", "--body", str(body), "--reason", "r")
    result = oncekey("keys", "resolve", KEY, *WHOSE, *words, "--executed")
    assert (result.exit_code, "--body is not valid JSON: " in result.stderr) == (2, True)
    assert shown(shop, url)["state"] == "unknown"
    assert oncekey("keys", "resolve", KEY, *WHOSE, *words, "--executed", "--content-type", "text/plain").exit_code == 0


def test_keys_resolve_settles_the_record_and_writes_the_audit_log(shop, url, tmp_path):
    # R138, row 19
    doubt(shop)
    body = tmp_path / "answer.json"
    body.write_bytes(b'{"id":"ch_7"}')
    (line,) = json.loads(oncekey("unknown", "list", "--store", url, "--json").stdout)["items"]
    assert (line["key"], line["last_error"], line["given_up"]) == (KEY, "call_uncertain", False)
    result = oncekey(
        "keys", "resolve", KEY, *WHOSE, "--store", url, "--executed", "--status", "201", "--body", str(body),
        "--header", "Location: /charges/7", "--reason", "seen in the dashboard", "--by", "ann", "--json",
    )  # fmt: skip
    said = json.loads(result.stdout)
    assert result.exit_code == 0
    assert (said["changed"], said["row"], said["from"], said["to"]) == (True, 19, "unknown", "completed")
    assert said["retry"] == "A retry receives the stored response (201). Nothing is executed."
    assert said["record"]["response"] == {
        "status": 201,
        "headers": [["content-type", "application/json"], ["location", "/charges/7"]],
        "body": '{"id":"ch_7"}',
    }
    entries = json.loads(oncekey("keys", "history", KEY, *WHOSE, "--store", url, "--json").stdout)["items"]
    entry = entries[-1]
    assert {name: entry[name] for name in ("from", "to", "trigger", "actor", "who", "why", "fence")} == {
        "from": "unknown", "to": "completed", "trigger": "executed", "actor": "operator", "who": "ann",
        "why": "seen in the dashboard", "fence": 1,
    }  # fmt: skip
    assert "seen in the dashboard" in oncekey("keys", "history", KEY, *WHOSE, "--store", url).stdout
    assert "no unknown outcomes" in oncekey("unknown", "list", "--store", url).stdout


def test_the_audit_distinguishes_a_refusal(shop, url):
    phased(shop)
    done = ("keys", "resolve", KEY, "--store", url, "--reason", "r")
    assert oncekey(*done, "--declined", "--result", '"no funds"').exit_code == 0
    assert oncekey(*done, "--executed", "--result", '{"id": "ch_9"}').exit_code == 0
    assert oncekey(*done, "--declined", "--result", '"no funds"').exit_code == 0
    entries = json.loads(oncekey("keys", "history", KEY, "--store", url, "--json").stdout)["items"]
    assert [entry["trigger"] for entry in entries] == ["declined", "replace", "declined"]


def test_the_body_may_come_from_standard_input(shop, url):
    doubt(shop)
    arguments = ["--declined", "--status", "402", "--body", "-", "--content-type", "text/plain", "--reason", "no"]
    result = CliRunner().invoke(
        make_app(), ["keys", "resolve", KEY, *WHOSE, "--store", url, *arguments], input=b"declined"
    )
    assert result.exit_code == 0
    assert f"{KEY} of acme: unknown -> completed (audited)" in result.stdout
    said = shown(shop, url)
    assert (said["outcome"], said["response"]["body"]) == ("failure", "declined")


def test_keys_resolve_stores_the_result_of_an_open_call(shop, url):
    # row 20, H5
    phased(shop)
    said = shown(shop, url)
    assert (said["open_call"]["phase"], said["open_call"]["downstream_key"]) == ("charge", "dk-1")
    wrong = refused("keys", "resolve", KEY, *WHOSE, "--store", url, "--executed", "--status", "201", "--reason", "r")
    assert "--result" in wrong["why"]
    result = oncekey(
        "keys", "resolve", KEY, *WHOSE, "--store", url, "--executed", "--result", '{"id": "ch_1"}', "--reason", "r"
    )
    assert "unknown -> failed_retryable (audited)" in result.stdout
    assert "resumes it after the step 'charge'" in result.stdout
    assert shown(shop, url)["steps"][-1] == {
        "name": "charge", "kind": "call", "result": '{"id":"ch_1"}', "by_hand": True,
    }  # fmt: skip


def test_keys_resolve_declined_stores_a_rejection_for_the_call(shop, url):
    phased(shop)
    oncekey("keys", "resolve", KEY, *WHOSE, "--store", url, "--declined", "--result", '"no funds"', "--reason", "r")
    assert shown(shop, url)["steps"][-1]["result"] == '{"$":"rejected","v":"no funds"}'


def test_keys_resolve_not_executed_requires_the_provider_lag_or_closed(shop, url):
    # U1, F34
    phased(shop)
    whole = ("keys", "resolve", KEY, *WHOSE, "--store", url, "--not-executed", "--reason", "not in the list")
    early = refused(*whole)
    assert "may still be under way" in early["why"]
    assert [one["row"] for one in early["possible"]] == [20, 20, 21]
    assert early["possible"][-1]["note"].startswith("or without --closed, checked after ")
    assert "does not settle" in refused("keys", "release", KEY, *WHOSE, "--store", url, "--reason", "impatient")["why"]
    # The operator asked before the waiting time was over, and types it after.
    late = refused(*whole, "--asked-at", "2020-01-01T00:00:00Z", "--provider-lag", "0s")
    assert late["changed"] is False
    assert oncekey(*whole, "--closed").exit_code == 0
    assert shown(shop, url)["state"] == "failed_retryable"


def test_release_never_takes_a_live_lease(shop, url):
    # A1, F39
    own(shop)
    before = shown(shop, url)
    said = refused("keys", "release", KEY, *WHOSE, "--store", url, "--reason", "impatient")
    assert "alive" in said["why"]
    text = oncekey("keys", "release", KEY, *WHOSE, "--store", url, "--reason", "impatient")
    assert (text.exit_code, text.stdout) == (1, "")
    assert "not done" in text.stderr
    after = shown(shop, url)
    assert {**after, "now": 0} == {**before, "now": 0}
    assert json.loads(oncekey("keys", "history", KEY, *WHOSE, "--store", url, "--json").stdout)["items"] == []


def test_keys_release_frees_a_key_with_an_expired_lease(shop, url):
    # row 14
    own(shop, lease=-HOUR)
    result = oncekey("keys", "release", KEY, *WHOSE, "--store", url, "--reason", "the host is gone")
    assert result.exit_code == 0
    assert "in_progress -> failed_retryable (audited)" in result.stdout
    assert "executes the operation, from the beginning" in result.stdout
    assert shown(shop, url)["last_error"] == "in_progress_lock_expired"


def test_release_of_what_is_done_changes_nothing(shop, url):
    # R54
    flows.settle(shop, own(shop), answered())
    before = shown(shop, url)
    said = refused("keys", "release", KEY, *WHOSE, "--store", url, "--reason", "impatient")
    assert "only a key in progress whose lease has expired, or an unknown one, can be released" in said["why"]
    after = shown(shop, url)
    assert (after["version"], after["response"]) == (before["version"], before["response"])


@pytest.mark.parametrize(
    "wanted",
    [("release",), ("bust",), ("resolve", "--not-executed"), ("resolve", "--executed", "--status", "201")],
    ids=lambda words: "".join(words[:2]),
)
def test_a_refused_change_of_a_success_lists_the_commands_that_work(shop, url, wanted):
    verb, *more = wanted
    flows.settle(shop, own(shop), answered())
    text = oncekey("keys", verb, KEY, *more, "--store", url, "--reason", "asked")
    assert "Possible now:" in text.stderr
    assert "No manual change" not in text.stderr
    assert "a payment would be made twice" in text.stderr
    said = refused("keys", verb, KEY, *more, "--store", url, "--reason", "asked")
    commands = [one["command"] for one in said["possible"]]
    assert [command.split()[1:3] for command in commands] == [["keys", "extend"], ["keys", "bust"]]
    for command in commands:
        done = oncekey(*shlex.split(command.replace("...", "asked"))[1:], "--store", url)
        assert done.exit_code == 0, done.stderr
    text = oncekey("keys", "bust", KEY, "--store", url, "--reason", "asked").stderr
    assert text.endswith("No manual change is possible now.\n")


def test_keys_bust_of_a_success_requires_runs_again(shop, url):
    # R106, row 32
    flows.settle(shop, own(shop), answered())
    said = refused("keys", "bust", KEY, *WHOSE, "--store", url, "--reason", "wrong price")
    assert "made twice" in said["why"]
    assert [one["row"] for one in said["possible"]] == [35, 32]
    result = oncekey("keys", "bust", KEY, *WHOSE, "--store", url, "--reason", "wrong price", "--runs-again")
    assert "completed -> failed_retryable (audited)" in result.stdout
    again = flows.begin(shop, a_claim(id=ID), Policy())
    assert again.lease.fence == 3  # the bust put it up, and so did the take-over


def test_keys_bust_of_a_failure_needs_no_runs_again(shop, url):
    flows.settle(shop, own(shop), answered(status=402))
    assert oncekey("keys", "bust", KEY, *WHOSE, "--store", url, "--reason", "limit raised").exit_code == 0


def test_extend_keeps_an_answer_for_longer(shop, url):
    # R268, row 35
    flows.settle(shop, own(shop), answered())
    before = shown(shop, url)["expires_at"]
    result = oncekey("keys", "extend", KEY, *WHOSE, "--store", url, "--for", "7d", "--reason", "a flow of several days")
    assert f"{KEY} of acme: kept until {shown(shop, url)['expires_at']} (audited)" in result.stdout
    assert "A retry receives the stored response" in result.stdout
    assert shown(shop, url)["expires_at"] > before
    again = refused("keys", "extend", KEY, *WHOSE, "--store", url, "--for", "1h", "--reason", "shorter")
    assert "it is already kept until" in again["why"]
    assert oncekey("keys", "extend", KEY, *WHOSE, "--store", url, "--reason", "no span").exit_code == 2


def test_keys_resolve_refuses_an_outdated_record_version(shop, url):
    doubt(shop)
    version = shown(shop, url)["version"]
    whole = ("keys", "resolve", KEY, *WHOSE, "--store", url, "--executed", "--status", "200", "--reason", "r")
    assert "changed since" in refused(*whole, "--version", str(version - 1))["why"]
    assert oncekey(*whole, "--version", str(version)).exit_code == 0


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)  # nothing of it reaches the store
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["show", KEY, "--principal", "bob"], "needs --tenant"),
        (["show", KEY, *WHOSE, "--scope", "x"], "one or the other"),
        (["list", "--older-than", "soon"], "is not a duration"),
        (["list", "--before", "???"], "--before"),
        (["list", "--digest", "zz"], "--digest zz is not hexadecimal"),
        (["release", KEY, *WHOSE, "--reason", "  "], "--reason is empty"),
        (["release", KEY, *WHOSE], "--reason"),
        (["release", KEY, *WHOSE, "--reason", "r", "--by", " "], "--by is empty"),
        (["bust", KEY, *WHOSE, "--reason", ""], "--reason is empty"),
        (["bust", KEY, *WHOSE, "--reason", "..."], "--reason is empty"),
        (["resolve", KEY, *WHOSE, "--reason", "r"], "one of --executed"),
        (["resolve", KEY, *WHOSE, "--reason", "r", "--executed", "--declined"], "you passed --executed and --declined"),
        (["resolve", KEY, *WHOSE, "--reason", "r", "--executed", "--not-executed"], "pass only one of --executed, "),
        (["resolve", KEY, *WHOSE, "--reason", "r", "--not-executed", "--status", "200"], "no response"),
        (["resolve", KEY, *WHOSE, "--reason", "r", "--executed", "--closed"], "need --not-executed"),
        (["resolve", KEY, *WHOSE, "--reason", "r", "--executed", "--status", "402"], "--declined"),
        (["resolve", KEY, *WHOSE, "--reason", "r", "--declined", "--status", "200"], "is a failure"),
        (["resolve", KEY, *WHOSE, "--reason", "r", "--executed", "--body", "x"], "--status"),
        (["resolve", KEY, *WHOSE, "--reason", "r", "--executed", "--status", "200", "--body", "nowhere"], "cannot be"),
        (["resolve", KEY, *WHOSE, "--reason", "r", "--executed", "--result", "{"], "is not JSON"),
        (["resolve", KEY, *WHOSE, "--reason", "r", "--not-executed", "--asked-at", "noon"], "is not a timestamp"),
    ],
)
def test_keys_usage_error_is_one_line_and_changes_nothing(shop, url, arguments, sentence):
    doubt(shop)
    before = shown(shop, url)
    result = oncekey("keys", *arguments, "--store", url)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert {**shown(shop, url), "now": 0} == {**before, "now": 0}


@pytest.mark.parametrize(
    ("store", "sentence"),
    [("memory:", "no command can read it"), ("sqlite:///nowhere.db", "the file nowhere.db does not exist")],
)
def test_keys_command_rejects_an_invalid_store_url(tmp_path, monkeypatch, store, sentence):
    monkeypatch.chdir(tmp_path)
    result = oncekey("keys", "list", "--store", store)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_keys_command_on_a_store_without_tables_names_migrate(tmp_path):
    (tmp_path / "empty.db").touch()
    result = oncekey("keys", "list", "--store", f"sqlite:///{tmp_path / 'empty.db'}")
    assert result.exit_code == 2
    assert "migrate" in result.stderr


def test_cli_scope_options_match_the_scopes_of_requests(shop, url):
    # namespace, tenant and principal give the scope that requests with them get

    for options, scope in (
        (("--tenant", "acme", "--namespace", "eu"), bound_scope(BindTo.TENANT, "eu", "acme")),
        (("--tenant", "acme", "--principal", "bob"), bound_scope(BindTo.PRINCIPAL, "-", "acme", principal="bob")),
    ):
        claim = a_claim(id=RecordId(scope, KEY))
        flows.begin(shop, claim, Policy())
        said = json.loads(oncekey("keys", "show", KEY, *options, "--store", url, "--json").stdout)
        assert said["scope"] == scope


def test_keys_show_escapes_control_characters_from_clients(shop, url):
    flows.settle(shop, own(shop, path="/a\x1b[2J\nb"), Retryable("gone"))
    text = oncekey("keys", "show", KEY, *WHOSE, "--store", url, "--verbose").stdout
    assert "\x1b" not in text
    assert "/a\\x1b[2J\\nb" in text


def test_commands_never_log_the_idempotency_key(shop, url, caplog):
    # R195: keys are shown to who asks for them, and nowhere else
    caplog.set_level(logging.DEBUG)
    own(shop, Effects.INLINE, Recovery.UNKNOWN, lease=-HOUR)
    result = oncekey("sweep", "--once", "--store", url, "--json")
    swept = {"operation": "create_order", "to": "unknown", "keys": 1}
    assert json.loads(result.stdout) == {"moved": 1, "by": [swept]}
    said = shown(shop, url)
    assert (said["state"], said["last_error"]) == ("unknown", "in_progress_lock_expired")
    whole = ("keys", "resolve", KEY, *WHOSE, "--store", url, "--executed", "--status", "200", "--reason", "seen")
    assert oncekey(*whole, "--json").exit_code == 0
    assert "sweeper" in caplog.text
    assert KEY not in caplog.text
    assert KEY not in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("command", "teaches"),
    [
        (("keys", "resolve"), ["a retry", "--closed", "To correct a wrong one", "Exit code 1"]),
        (("keys", "release"), ["A live lease is never released", "a retry"]),
        (("keys", "bust"), ["--runs-again", "next retry executes"]),
        (("keys", "show"), ["Changes nothing", "GET"]),
        (("keys", "list"), ["Changes nothing", "JSON"]),
        (("keys", "history"), ["Changes nothing", "JSON"]),
        (("unknown", "list"), ["downstream key", "keys resolve"]),
        (("dlq", "retry"), ["window", "emit", "defer"]),
        (("dlq", "discard"), ["never delivered"]),
        (("doctor",), ["Exit code 0", "JSON"]),
        (("stats",), ["duplicates", "JSON"]),
        (("sweep",), ["audited"]),
        (("reap",), ["--app"]),
    ],
)
def test_command_help_explains_its_options_and_terms(command, teaches):
    text = " ".join(CliRunner().invoke(make_app(), [*command, "--help"], env={"COLUMNS": "400"}).stdout.split())
    assert [word for word in teaches if word not in text] == []
    assert not re.search(r"\brows? \d", text)  # the table's own numbers are for --verbose


def test_keys_commands_find_a_key_without_scope_or_by_prefix(shop, url):
    # unique: neither its tenant nor all of it is needed
    flows.settle(shop, own(shop), answered())
    for typed in (KEY, KEY[:9]):
        said = json.loads(oncekey("keys", "show", typed, "--store", url, "--json").stdout)
        assert (said["key"], said["scope"]) == (KEY, SCOPE)
    moved = oncekey("keys", "bust", KEY[:9], "--store", url, "--reason", "wrong price", "--runs-again")
    assert f"{KEY} of acme: completed -> failed_retryable" in moved.stdout
    assert len(json.loads(oncekey("keys", "history", KEY[:9], "--store", url, "--json").stdout)["items"]) == 1


def test_ambiguous_key_prefix_lists_matches_and_changes_nothing(shop, url):
    flows.settle(shop, own(shop), answered(status=402))
    others = [RecordId(scope_of("-", "globex corp"), KEY), RecordId(SCOPE, f"{KEY}-2")]
    for other in others:
        flows.begin(shop, a_claim(id=other), Policy())
    text = oncekey("keys", "bust", KEY, "--store", url, "--reason", "wrong price")
    assert (text.exit_code, text.stdout) == (1, "")
    assert "2 keys match" in text.stderr
    assert f"  {KEY} --tenant acme\n" in text.stderr
    assert f"  {KEY} --tenant 'globex corp'\n" in text.stderr
    assert f"{KEY}-2" not in text.stderr  # the whole key comes before its being a beginning
    said = json.loads(oncekey("keys", "show", KEY[:9], "--store", url, "--json").stdout)
    assert {one["state"] for one in said["found"]} == {"in_progress"}  # unfinished ones come before finished ones
    assert len(said["found"]) == 2
    assert shown(shop, url)["state"] == "completed"
    assert json.loads(oncekey("keys", "show", f"{KEY}-", "--store", url, "--json").stdout)["key"] == f"{KEY}-2"
    short = oncekey("keys", "show", "ord", "--tenant", "nobody", "--store", url)
    assert "no such key" in short.stderr


def test_key_prefix_shorter_than_4_characters_finds_nothing(shop, url):
    flows.settle(shop, own(shop), answered())
    assert "4 characters" in oncekey("keys", "show", KEY[:3], "--store", url).stderr
    own(shop, id=RecordId(SCOPE, f"{KEY}-2"))
    for words in ((), WHOSE):
        for short in (KEY[:1], KEY[:3], "zz"):
            text = oncekey("keys", "show", short, *words, "--store", url)
            assert (text.exit_code, text.stdout) == (1, "")
            assert "no such key" in text.stderr
            assert ("4 characters" in text.stderr) is (short != "zz" or not words)
    assert "pass --tenant to find it" in oncekey("keys", "show", "elsewhere", "--store", url).stderr


def test_ambiguous_key_prefix_names_the_options_that_help(shop, url):
    def advice(*words):
        return oncekey("keys", "show", *words, "--store", url).stderr.splitlines()[0].partition(": 2 keys match ")[2]

    other = scope_of("-", "globex")
    for made in (RecordId(SCOPE, f"{KEY}-1"), RecordId(SCOPE, f"{KEY}-2"), RecordId(other, f"{KEY}-3")):
        own(shop, id=made)
    assert "3 keys match" in oncekey("keys", "show", KEY[:9], "--store", url).stderr
    assert advice(KEY[:9], *WHOSE) == f"{KEY[:9]}: give a longer prefix"
    own(shop, id=RecordId(other, f"{KEY}-2"))
    assert advice(f"{KEY}-2") == f"{KEY}-2: pass the options of one"
    text = oncekey("keys", "show", KEY[:9], "--store", url).stderr
    assert text.splitlines()[0].endswith("4 keys match " + KEY[:9] + ": give a longer prefix, or add --tenant")


@pytest.mark.parametrize("key", ["-begins-with-a-dash-0001", "it's quoted and spaced", "100% \u00fc \u2603 *"])
def test_commands_are_ready_to_be_copied(shop, url, key):
    # typed into a shell as they are shown, with the reason and the result filled in
    doubt(shop, id=RecordId(SCOPE, key))
    said = json.loads(oncekey("keys", "show", "--store", url, "--json", "--", key).stdout)
    command = next(one["command"] for one in said["possible"] if "--closed" in one["command"])
    words = shlex.split(command.replace("'...'", "seen"))
    assert words[0] == "oncekey"
    assert oncekey(*words[1:3], "--store", url, *words[3:]).exit_code == 0
    assert flows.find(shop, RecordId(SCOPE, key)).record.state.value == "failed_retryable"


def test_keys_show_prints_the_next_steps_first(shop, url):
    phased(shop)
    text = oncekey("keys", "show", KEY, "--store", url).stdout
    lines = text.splitlines()
    assert lines[0] == "Unknown: the call 'charge' may have been made, and its reply was lost."
    assert lines[1] == "Why: an external call got no reply."
    assert "     dk-1" in lines
    assert f"    oncekey keys resolve {KEY} --tenant acme --executed --result JSON --reason '...'" in lines
    assert not re.search(r"\brow \d|guard|fence|incarnation", text)
    refused_text = oncekey("keys", "bust", KEY, "--store", url, "--reason", "impatient").stderr
    assert "only a stored response can be busted; this one is unknown" in refused_text
    assert "not possible from" not in refused_text
    verbose = oncekey("keys", "bust", KEY, "--store", url, "--reason", "impatient", "--verbose").stderr
    assert "Table of moves: bust is not possible from unknown" in verbose


def test_an_inline_key_shows_its_downstream_key(shop, url):
    # named on the command line, or by a worker's application
    lease = doubt(shop)
    seed = flows.find(shop, ID).record.seed
    assert lease
    expected = downstream_key(seed, "charge")
    assert "--call NAME" in oncekey("keys", "show", KEY, "--store", url).stdout
    assert expected in oncekey("keys", "show", KEY, "--store", url, "--call", "charge").stdout
    listed = oncekey("unknown", "list", "--store", url, "--call", "create_order=charge")
    assert expected in listed.stdout
    drive(shop.store.upkeep.beat("host:1:aa", (), SECOND, {"create_order": ["charge"]}), shop.driver.run)
    assert expected in oncekey("keys", "show", KEY, "--store", url).stdout
    (line,) = json.loads(oncekey("unknown", "list", "--store", url, "--json").stdout)["items"]
    assert line["downstream_keys"] == {"charge": expected}


def test_keys_show_describes_the_result_by_the_last_one_stored(shop, url):
    # of any key, without anything of its content, and nothing that could be sent as it is
    phased(shop)
    other = flows.begin(
        shop,
        a_claim(id=RecordId(SCOPE, "another-key-of-the-same-call"), effects=Effects.PHASED, recovery=Recovery.RESUME),
        Policy(),
    ).lease
    call = Announcement("charge", "dk-2", "digest", 1, None, 5 * SECOND, 30 * SECOND)
    drive(shop.store.phases.announce(other, (), (), call), shop.driver.run)
    result = MemoEntry("charge", EntryKind.CALL, '{"id":"ch_secret","amount":7,"at":{"$":"decimal","v":"1.5"}}')
    drive(shop.store.phases.result(other, (), (result,), SECOND), shop.driver.run)
    said = shown(shop, url)
    assert said["result_shape"] == {"id": "text", "amount": "a whole number", "at": "Decimal"}
    assert "ch_secret" not in json.dumps(said)
    text = oncekey("keys", "show", KEY, "--store", url).stdout
    assert '{"id": <text>, "amount": <a whole number>, "at": <Decimal>}' in text
    assert "\n  It happened, with the values from the provider instead of <…>:\n" in text
    command = next(one["command"] for one in said["possible"] if "--executed" in one["command"])
    taken = oncekey(*shlex.split(command.replace("'...'", "seen"))[1:], "--store", url)
    assert (taken.exit_code, "is not JSON" in taken.stderr) == (2, True)


@pytest.mark.parametrize(
    ("settlement", "begin", "expiring"),
    [
        (None, own, False),
        (answered(), own, True),
        (Retryable("refused"), own, True),
        (None, doubt, False),
        (None, phased, False),
    ],
    ids=["in progress", "completed", "retryable", "unknown", "unknown with steps"],
)
def test_keys_show_prints_the_expiry_of_records_that_expire(shop, url, settlement, begin, expiring):
    # of a record that does not, the date is only that from which it would
    lease = begin(shop)
    if settlement is not None:
        flows.settle(shop, lease, settlement)
    for options in ((), ("--verbose",)):
        text = oncekey("keys", "show", KEY, *WHOSE, "--store", url, *options).stdout
        assert bool(re.search("^expires at ", text, re.MULTILINE)) is expiring
    assert shown(shop, url)["expires_at"] is not None


def expired_lease(shop, url):
    """A PHASED record with an open call, whose owner died and whom a worker swept."""
    lease = own(shop, Effects.PHASED, Recovery.RESUME, lease=-HOUR)
    call = Announcement("charge", "dk-1", "digest", 1, None, 5 * SECOND, -HOUR)
    drive(shop.store.phases.announce(lease, (), (), call), shop.driver.run)
    assert oncekey("sweep", "--once", "--store", url).exit_code == 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--executed", "--result", '{"id": "ch_1"}'), "ann recorded the outcome of its call"),
        (("--declined", "--result", '"no funds"'), "ann recorded that its call was declined"),
        (("--not-executed", "--closed"), "ann released it: it was not executed"),
    ],
    ids=["executed", "declined", "not executed"],
)
def test_settled_record_is_not_explained_by_its_expired_lease(shop, url, options, why):
    expired_lease(shop, url)
    assert shown(shop, url)["why"] == "its lease expired without a settlement"
    resolve = ("keys", "resolve", KEY, *WHOSE, "--store", url, "--reason", "seen", "--by", "ann")
    assert oncekey(*resolve, *options).exit_code == 0
    assert shown(shop, url)["why"] == why
    text = oncekey("keys", "show", KEY, *WHOSE, "--store", url).stdout
    assert f"\nWhy: {why}.\n" in text

    # The audit of the next run names no expired lease either, and that run explains itself.
    claim = a_claim(id=ID, effects=Effects.PHASED, recovery=Recovery.RESUME, owner="worker-8")
    lease = flows.begin(shop, claim, Policy()).lease
    entries = json.loads(oncekey("keys", "history", KEY, *WHOSE, "--store", url, "--json").stdout)["items"]
    assert [(entry["trigger"], entry["from"], entry["why"]) for entry in entries[2:]] == [
        ("take_over", "failed_retryable", "retryable")
    ]
    flows.settle(shop, lease, Doubtful("handler_raised"))
    assert shown(shop, url)["why"] == "its handler raised an error"


def test_take_over_of_a_swept_record_is_explained_by_its_state(shop, url):
    own(shop, lease=-HOUR)
    assert oncekey("sweep", "--once", "--store", url).exit_code == 0
    assert shown(shop, url)["why"] == "its lease expired without a settlement"
    own(shop, owner="worker-8")
    entries = json.loads(oncekey("keys", "history", KEY, *WHOSE, "--store", url, "--json").stdout)["items"]
    assert [entry["why"] for entry in entries] == [LEASE_RAN_OUT, "retryable"]


SHOP = """
from dataclasses import dataclass
from oncekey import PHASED, Once, Operation

once = Once("sqlite:///unused.db")

@dataclass
class Charge:
    id: str

async def charge(*, key: str) -> Charge:
    return Charge(key)

@once.protect(effects=PHASED, operation="create_order")
async def create_order(op: Operation) -> None:
    await op.call("charge", charge, repeatable=False, result=Charge)
"""


def test_keys_resolve_validates_the_result_against_the_declared_type(shop, url, tmp_path, monkeypatch):
    (tmp_path / "declaring_shop.py").write_text(SHOP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "declaring_shop", raising=False)  # of a folder that may be gone with its source
    importlib.invalidate_caches()
    phased(shop)
    whole = ("keys", "resolve", KEY, "--store", url, "--executed", "--reason", "seen")
    said = refused(*whole, "--app", "declaring_shop:once", "--result", '{"id": 7}')
    assert said["why"] == (
        "--result is not Charge: at .id: it is a whole number, and text was declared, which the handler declares for "
        "'charge'"
    )
    assert shown(shop, url)["state"] == "unknown"
    assert oncekey(*whole, "--result", '{"wrong": 7}').exit_code == 0  # without --app nothing checks it
    # It can be replaced, until the next step is stored.
    text = oncekey("keys", "show", KEY, "--store", url).stdout
    assert "The result given by hand is wrong; it was something else:" in text
    again = oncekey(*whole, "--app", "declaring_shop:once", "--result", '{"id": "ch_9"}')
    assert "failed_retryable -> failed_retryable (audited)" in again.stdout
    assert shown(shop, url)["steps"][-1]["result"] == '{"id":"ch_9"}'
    entries = json.loads(oncekey("keys", "history", KEY, "--store", url, "--json").stdout)["items"]
    assert [entry["trigger"] for entry in entries] == ["executed", "replace"]


def test_a_key_that_the_reaper_deleted_is_explained(shop, url):
    """By its own line if it was the only one of its tenant, else by the line about all of them."""
    upkeep, mover = shop.store.upkeep, Mover(Actor.REAPER, "worker-7")
    alone = RecordId(scope_of("-", "alone"), "a-key-of-its-own")
    for record_id in (ID, RecordId(SCOPE, "another-key"), alone):
        flows.settle(shop, own(shop, id=record_id, ttl=1), answered())
    gone = drive(upkeep.purge(Expired(-HOUR, 2**62), 10, mover=mover), shop.driver.run)
    assert gone.moved == 3

    refusal = refused("keys", "show", KEY, *WHOSE, "--store", url)
    assert "no such key: it may have expired: worker-7 last deleted keys of this tenant" in refusal["why"]
    assert "(expired: 2 keys, expiry 2" in refusal["why"]
    [batch] = json.loads(oncekey("keys", "history", KEY, *WHOSE, "--store", url, "--json").stdout)["items"]
    assert (batch["incarnation"], batch["fence"], batch["operation"]) == (None, None, None)
    assert (batch["from"], batch["to"], batch["who"]) == ("completed", None, "worker-7")
    assert batch["why"].startswith("expired: 2 keys")

    named = ("a-key-of-its-own", "--tenant", "alone", "--store", url)
    assert "its record expired, and worker-7 deleted it at 2" in refused("keys", "show", *named)["why"]
    [line] = json.loads(oncekey("keys", "history", *named, "--json").stdout)["items"]
    assert (line["why"], line["operation"], line["fence"]) == ("expired", "create_order", 1)
    for key in ("later-1", "later-2"):
        flows.settle(shop, own(shop, id=RecordId(alone.scope, key), ttl=1), answered())
    assert drive(upkeep.purge(Expired(-HOUR, 2**62), 10, mover=mover), shop.driver.run).moved == 2
    assert "its record expired, and worker-7 deleted it at 2" in refused("keys", "show", *named)["why"]

    # A key that is used again has a record: lines about others are left out.
    own(shop)
    assert json.loads(oncekey("keys", "history", KEY, *WHOSE, "--store", url, "--json").stdout)["items"] == []


def test_tenant_finds_the_keys_of_its_principals(shop, url):
    bound = RecordId(bound_scope(BindTo.PRINCIPAL, "-", "acme", principal="ann"), KEY)
    doubt(shop, id=bound)

    for listed in (("keys", "list"), ("unknown", "list")):
        found = oncekey(*listed, *WHOSE, "--store", url, "--json").stdout
        assert [one["scope"] for one in json.loads(found)["items"]] == [bound.scope]
        assert json.loads(oncekey(*listed, "--tenant", "acm", "--store", url, "--json").stdout)["items"] == []
    assert "acme, principal ann" in oncekey("keys", "show", KEY, *WHOSE, "--store", url).stdout
    history = oncekey("keys", "history", "no-such-key", *WHOSE, "--store", url)
    assert "pass --principal" in history.stdout + history.stderr
