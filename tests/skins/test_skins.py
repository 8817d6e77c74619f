"""The acceptance suite of all skins: one service, over real sockets, on real servers and stores.

Each test says which ability of the table in docs/reference/frameworks.md it proves (`proves`), and runs on every skin
that has it; what the table denies is proved to be refused (`denies`).
"""

from __future__ import annotations

import http.client
import json
from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from conformance.aiming import JSON, broken
from harness.patience import wait_until
from harness.provider import Provider
from harness.proxy import Proxy
from harness.served import Wire
from harness.tables import leases_run_out
from oncekey.core.errors import ConfigurationError
from oncekey.core.model import INLINE, LOCAL, OUTBOX, PHASED
from oncekey.frameworks.listing import listed
from oncekey.frameworks.openapi import document_of
from oncekey.once import Once
from oncekey.once.route_report import Protection, route_lines
from oncekey_check import Address, CheckProfile, Target, check
from skins.on_asgi import BY_PATH
from skins.rows import ABILITIES, KILLED_ON_SQLITE, ON_SQLITE, SKINS, TABLE, Skin
from skins.served import NAMELESS, RESUMED
from skins.service import ITSELF, READER, ROUTES, STEPS, STRANGER, WRITER, Service
from skins.stage import Stage, new_key, stages

PROVED: set[tuple[str, str]] = set()
"""A line of the table, and an ability that a test runs on it."""
DENIED: set[tuple[str, str]] = set()
REFUSED = (
    ({RESUMED: "another"}, "as the tenant 'another', but it belongs to"),
    ({NAMELESS: "nothing"}, "as the tenant None, but it belongs to"),
    ({NAMELESS: "raises"}, " before its handler was called"),
)
"""Workers whose request the application does not authenticate as its caller, and what the log then has."""
WITHOUT_STATUS = frozenset({"django", "example"})
"""Skins whose application serves no status resource."""


def proves(*abilities: str, sqlite: Container[str] = (), one_server: bool = False) -> Callable[[Any], Any]:
    """Run a test on every skin that has these abilities."""
    chosen = stages(*abilities, sqlite=sqlite, one_server=one_server)
    PROVED.update((SKINS[one.values[0][0]].row, ability) for one in chosen for ability in abilities)
    return pytest.mark.parametrize("stage", chosen, indirect=True)


def denies(*abilities: str) -> Callable[[Any], Any]:
    """Run a test on every skin that has none of these abilities."""
    names = [name for name, skin in SKINS.items() if skin.can.isdisjoint(abilities)]
    DENIED.update((SKINS[name].row, ability) for name in names for ability in abilities)
    return pytest.mark.parametrize("name", names)


def denies_served(ability: str) -> Callable[[Any], Any]:
    """The same for a test that needs its server."""
    chosen = stages(without=ability)
    DENIED.update((SKINS[one.values[0][0]].row, ability) for one in chosen)
    return pytest.mark.parametrize("stage", chosen, indirect=True)


@pytest.fixture(scope="module")
def stage(
    request: pytest.FixtureRequest, provider: Provider, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    """A skin on a store, served for all tests that want it."""
    name, store = request.param
    folder = tmp_path_factory.mktemp(f"{name}-{store}")
    with ExitStack() as stack:
        proxy, url = None, f"sqlite:///{folder}/shop.db"
        if store == "postgresql":
            server = request.getfixturevalue("postgres_server")
            database = f"skins_{new_key()}"
            url = server.create_database(database)
            stack.callback(server.drop_database, database)
            proxy = stack.enter_context(Proxy.before(url))
        yield stack.enter_context(Stage(SKINS[name], url, folder, provider, proxy=proxy))


# Keys


@proves("INLINE", sqlite=ON_SQLITE)
def test_a_request_runs_once_and_its_retry_is_replayed(stage: Stage) -> None:
    key, order, before = new_key(), {"item": "tea"}, stage.charges
    first = stage.send("/charges", order, key=key)
    again = stage.send("/charges", order, key=f'"{key}"')
    other = stage.send("/charges", {"item": "milk"}, key=key)
    elsewhere = stage.send("/exports", order, key=key)
    stranger = stage.send("/charges", order, key=key, token=STRANGER)
    assert (first.status, first.replayed) == (201, False), stage.log
    assert (again.status, again.body, again.replayed) == (201, first.body, True)  # R87
    assert first.headers["idempotency-key"] == key  # R17
    assert first.headers["content-type"] == again.headers["content-type"]
    assert (other.status, other.json()["code"]) == (422, "idempotency_key_reused_with_different_payload")  # R37
    assert elsewhere.status == 422  # R26
    assert (stranger.status, stranger.replayed) == (201, False)  # R27
    assert stage.charges - before == 2


@proves("INLINE")
def test_a_tenant_that_equals_the_credential_is_rejected(stage: Stage) -> None:
    key, order = new_key(), {"item": "tea"}
    assert stage.send("/charges", order, key=key).status == 201
    before = stage.charges
    assert stage.send("/charges", order, key=key, token=ITSELF).status == 500
    scopes = stage.rows(f"SELECT scope FROM oncekey.record WHERE key = '{key}'")
    assert (stage.charges, len(scopes), ITSELF in str(scopes)) == (before, 1, False)
    assert ITSELF not in stage.log


@proves("INLINE")
def test_invalid_keys_are_rejected_on_every_framework(stage: Stage) -> None:
    before = stage.charges
    missing = stage.send("/charges", {}, key="")
    refused = [stage.send("/charges", {}, key=key) for key in ("short", '""', '"unfinished-and-long', "a" * 256)]
    assert (missing.status, missing.json()["code"]) == (400, "idempotency_key_missing")  # R11
    assert [reply.status for reply in refused] == [400] * 4  # R8, R9, R10
    with Wire(stage.port) as wire:  # R7: a server may hand two lines on as one
        lines = ("POST /charges HTTP/1.1", "Host: shop", f"Authorization: Bearer {WRITER}")
        lines += ("Content-Type: application/json", "Content-Length: 2", "Connection: close")
        keys = (f"Idempotency-Key: {new_key()}", f"Idempotency-Key: {new_key()}")
        wire.say(*lines, *keys, body=b"{}")
        assert wire.hear()[0] == 400
    with Wire(stage.port) as wire:  # another field, which some servers keep and none takes for a key
        wire.say(*lines, f"Idempotency_Key: {new_key()}", body=b"{}")
        assert wire.hear()[0] == 400
    assert stage.charges == before


@proves("chunks")
def test_a_chunked_body_is_fingerprinted(stage: Stage) -> None:
    key = new_key()
    whole, same = (
        stage.send("/charges", {"item": "tea"}, key=key),
        stage.send_chunks("/charges", b'{"item":', b'"tea"}', key=key),
    )
    other = stage.send_chunks("/charges", b'{"item":', b'"milk"}', key=key)
    assert (whole.status, same.body, same.replayed, other.status) == (201, whole.body, True, 422)


@proves("INLINE")
def test_unauthorized_callers_receive_no_replay(stage: Stage) -> None:
    # R20, R186, R198
    key = new_key()
    assert stage.send("/charges", {}, key=key).status == 201
    for token, status in (("", 401), ("token-of-nobody", 401), (READER, 403)):
        reply = stage.send("/charges", {}, key=key, token=token)
        assert (reply.status, reply.replayed) == (status, False)
    assert stage.send("/charges", {}, key=key).replayed


@proves("INLINE")
def test_duplicates_of_a_running_request_are_rejected(stage: Stage) -> None:
    before = stage.charges
    with stage.held("/charges") as held:
        same = stage.send("/charges", held.order, key=held.key)
        other = stage.send("/charges", {**held.order, "item": "milk"}, key=held.key)
        first = held.release()
    assert (same.status, same.json()["code"]) == (409, "idempotency_key_in_progress")  # R79
    assert int(same.headers["retry-after"]) > 0
    assert other.status == 422  # R38
    again = stage.send("/charges", held.order, key=held.key)
    assert (first.status, again.body, again.replayed, stage.charges - before) == (201, first.body, True, 1)


@proves("INLINE")
def test_inline_statuses_that_imply_no_execution_become_409(stage: Stage) -> None:
    # F5, R101, R113: the charge was made, and the second provider of the handler had enough
    before = stage.charges
    for status in (401, 403, 408, 425, 429):
        key, order = new_key(), {"status": status}
        for reply in (stage.send("/charges", order, key=key), stage.send("/charges", order, key=key)):
            assert (reply.status, reply.json()["code"]) == (409, "idempotency_outcome_unknown"), stage.log
            assert int(reply.headers["retry-after"]) > 0
    assert stage.charges - before == 5


@proves("wait")
def test_a_waiting_duplicate_receives_the_response(stage: Stage) -> None:
    # R82
    with stage.held("/waiting") as held:
        waiting = stage.meanwhile("/waiting", held)
        first = held.release()
    assert (first.status, waiting.result().body, waiting.result().replayed) == (201, first.body, True)


@proves("stream")
def test_streams_are_stored_and_endless_ones_rejected(stage: Stage) -> None:
    key, before = new_key(), stage.charges
    first, again = stage.send("/exports", {}, key=key), stage.send("/exports", {}, key=key)
    assert (first.status, first.body[:4], first.body[-6:]) == (201, b"one ", b" three")
    assert (again.body, again.replayed, again.headers["content-type"]) == (
        first.body,
        True,
        first.headers["content-type"],
    )
    endless = stage.send("/events", {})
    assert (endless.status, endless.json()["code"]) == (500, "idempotency_execution_failed")
    assert stage.charges == before


@proves("INLINE")
def test_a_retry_after_a_disconnect_receives_the_response(stage: Stage) -> None:
    before = stage.charges
    left = stage.leave("/charges")
    found = stage.settled("/charges", left.order, left.key)
    assert (found.status, found.replayed, stage.charges - before) == (201, True, 1), stage.log


# Effects


@proves("LOCAL", sqlite=ON_SQLITE)
def test_a_row_commits_with_its_key(stage: Stage) -> None:
    key, item = new_key(), new_key()
    replies = [stage.send("/orders", {"item": item}, key=key) for _ in range(2)]
    assert [reply.status for reply in replies] == [201, 201], stage.log
    assert replies[1].headers["location"] == replies[0].headers["location"]
    assert stage.rows(f"SELECT id FROM orders WHERE item = '{item}'") == [(replies[0].json()["id"],)]


@proves("PHASED", sqlite=ON_SQLITE)
def test_a_phased_payment_runs_its_steps_once(stage: Stage) -> None:
    key, before = new_key(), stage.charges
    first, again = (stage.send("/payments", {}, key=key) for _ in range(2))
    assert (first.status, again.body, again.replayed) == (201, first.body, True), stage.log
    paid = first.json()
    assert stage.rows(f"SELECT charge FROM payments WHERE id = '{paid['id']}'") == [(paid["charge"],)]
    assert stage.charges - before == 1
    # Arguments that do not fit are found before the call is announced, so its outcome is not unknown.
    key = new_key()
    assert [stage.send("/payments", {"surplus": ["x"]}, key=key).status for _ in range(2)] == [500, 500]
    table = "oncekey_record" if stage.url.startswith("sqlite") else "oncekey.record"
    ((state, error),) = stage.rows(f"SELECT state, last_error FROM {table} WHERE key = '{key}'")
    assert (state, error != "call_uncertain") == ("failed_retryable", True), stage.log
    assert stage.charges - before == 1


@proves("OUTBOX", sqlite=ON_SQLITE)
def test_an_outbox_request_returns_202_until_a_worker_completes_it(stage: Stage) -> None:
    # The first request and each retry get the same 202 until the worker is done, whatever success the handler returns.
    orders = {new_key(): order for order in ({"status": 202}, {"status": 200}, {"status": 201}, {"quiet": True})}
    for key, order in orders.items():
        place = None if stage.skin.name in WITHOUT_STATUS else f"/idempotency-keys/{key}"
        first, again = (stage.send("/transfers", order, key=key) for _ in range(2))
        assert (first.status, again.status) == (202, 202), stage.log
        assert (first.replayed, again.replayed) == (False, False)
        assert again.body == first.body
        if "quiet" in order:
            assert first.json() == {"state": "pending"} | ({} if place is None else {"status_url": place})
        else:
            assert first.json()["state"] == "sent"
            assert stage.rows(f"SELECT item FROM orders WHERE id = '{first.json()['id']}'") == [("transfer",)]
        for one in (first, again):
            assert one.headers["content-type"].startswith("application/json")
            assert one.headers["content-length"] == str(len(one.body))
            assert one.headers["cache-control"] == "no-store"
            assert (one.headers["retry-after"], one.headers["idempotency-key"]) == ("1", key)
            assert one.headers.get("location") == place
    with stage.worker():
        done = [stage.settled("/transfers", order, key) for key, order in orders.items()]
    assert [(one.status, one.replayed, "charge" in one.json()) for one in done] == [(201, True, True)] * 4, stage.log


@proves("OUTBOX", "resume", one_server=True)
def test_a_worker_delivers_and_resumes_without_the_client(stage: Stage) -> None:
    # R120, R122: kill -9 in a payment, and nobody sends it again before it is done
    paying, key, before = new_key(), new_key(), stage.charges
    promised = stage.send("/transfers", {}, key=key)
    assert (promised.status, stage.charges - before) == (202, 0), stage.log
    unpaid = "SELECT count(*) FROM payments WHERE charge IS NULL"
    order = {"die": "payment_created"}
    ((others,),) = stage.rows(unpaid)  # payments of other tests, whose call is always refused
    stage.dies("/payments", order, paying)
    assert stage.rows(unpaid) == [(others + 1,)]
    for environment, refusal in REFUSED:  # R27
        logged = len(stage.log)
        with stage.worker("completer", **environment):  # it is killed, and must hold no parcel
            wait_until(partial(_is_logged, stage, refusal, logged), lambda: stage.log, every=0.05)
    assert stage.rows(unpaid) == [(others + 1,)]
    with stage.worker():
        done = stage.settled("/transfers", {}, key)
        wait_until(lambda: stage.rows(unpaid) == [(others,)], lambda: stage.log, every=0.05)
        paid = stage.settled("/payments", order, paying)
    assert (done.status, done.replayed, paid.status, paid.replayed) == (201, True, 201, True), stage.log
    assert stage.rows(f"SELECT item FROM orders WHERE id = '{done.json()['id']}'") == [("transfer",)]
    assert stage.charges - before == 2


def _is_logged(stage: Stage, line: str, after: int) -> bool:
    return line in stage.log[after:]


@proves("LOCAL")
def test_a_failed_deferred_trigger_returns_500(stage: Stage) -> None:
    # F20: a constraint that the database checks at the COMMIT, after the record was written; every skin says the same
    key, order, rows = new_key(), {"item": "impossible"}, "SELECT id FROM orders WHERE item = 'impossible'"
    stage.rows(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$BEGIN RAISE EXCEPTION 'refused' USING ERRCODE = 'check_violation'; END$$"
    )
    stage.rows(
        "CREATE CONSTRAINT TRIGGER late AFTER INSERT ON orders DEFERRABLE INITIALLY DEFERRED FOR EACH ROW "
        "WHEN (new.item = 'impossible') EXECUTE FUNCTION refuse()"
    )
    refused = stage.send("/orders", order, key=key)
    assert (refused.status, refused.json()["code"]) == (500, "idempotency_execution_failed"), stage.log
    assert stage.rows(rows) == []
    stage.rows("DROP TRIGGER late ON orders")
    mended = stage.send("/orders", order, key=key)
    assert (mended.status, mended.replayed, len(stage.rows(rows))) == (201, False, 1)


# Crashes and outages


@proves("LOCAL", sqlite=KILLED_ON_SQLITE)
def test_a_retry_runs_after_a_kill_before_the_commit(stage: Stage) -> None:
    # P1, L1: kill -9 leaves neither a row nor a key that is taken
    rows = "SELECT id FROM orders WHERE item = 'held'"
    with stage.held("/orders") as held:
        stage.kill()
        with pytest.raises((http.client.HTTPException, OSError)):
            held.reply.result()
    assert stage.rows(rows) == []
    first = stage.settled("/orders", held.order, held.key)
    again = stage.send("/orders", held.order, key=held.key)
    assert (first.status, first.replayed, again.body, again.replayed) == (201, False, first.body, True), stage.log
    assert stage.rows(rows) == [(first.json()["id"],)]


@proves("PHASED", "resume", sqlite=KILLED_ON_SQLITE, one_server=True)
def test_a_retry_resumes_after_a_kill_at_each_step(stage: Stage) -> None:
    # R116, R117, R260: kill -9; what was done is not done again
    before, orders = stage.charges, {step: ({"die": step}, new_key()) for step in STEPS}
    for order, key in orders.values():
        stage.dies("/payments", order, key)
    leases_run_out(stage.url)
    for step, (order, key) in orders.items():
        reply = stage.settled("/payments", order, key)
        again = stage.send("/payments", order, key=key)
        assert (reply.status, again.body, again.replayed) == (201, reply.body, True), (step, stage.log)
        paid = reply.json()
        assert stage.rows(f"SELECT charge FROM payments WHERE id = '{paid['id']}'") == [(paid["charge"],)]
    assert stage.charges - before == len(STEPS)


@proves("INLINE")
def test_a_store_outage_returns_503_on_every_framework(stage: Stage) -> None:
    # R110, R250: closed, and nothing was executed
    key, before = new_key(), stage.charges
    assert stage.proxy is not None
    stage.proxy.shut()
    stage.proxy.cut()
    try:
        reply = stage.send("/charges", {}, key=key)
        assert (reply.status, reply.json()["code"]) == (503, "idempotency_store_unavailable")
        assert int(reply.headers["retry-after"]) > 0
        assert stage.charges == before
    finally:
        stage.proxy.reopen()
    assert stage.settled("/charges", {}, key).status == 201
    assert stage.charges - before == 1


# Tools


@pytest.mark.parametrize("stage", stages("INLINE", one_server=True), indirect=True)
def test_the_conformance_tester_reports_no_failures(stage: Stage) -> None:
    url = f"http://127.0.0.1:{stage.port}/orders"
    target = Target(
        address=Address.parse(url),
        body=b'{"item": "teapot", "quantity": 2}',
        headers=(JSON, ("Authorization", f"Bearer {WRITER}")),
        other_tenant=(("Authorization", f"Bearer {STRANGER}"),),
        slow=("X-Delay", "0.3"),
        count_address=Address.parse(url),
    )
    report = check(target, profile=CheckProfile.IETF)
    assert broken(report, CheckProfile.IETF, CheckProfile.STRICT_MONEY) == set(), stage.log
    assert report.matches == [CheckProfile.IETF, CheckProfile.STRICT_MONEY]


def made(name: str, folder: Path) -> tuple[Once, list[Any]]:
    """A skin's application, unserved."""
    url = f"sqlite:///{folder}/shop.db"
    once = SKINS[name].once(url)
    SKINS[name].make(Service(once, url, "http://127.0.0.1:1"))
    return once, list(once.served)


@proves("audit", one_server=True)
def test_the_audit_lists_every_route(stage: Stage) -> None:
    # R133, R190, R252
    lines = json.loads(stage.command("audit", "--json"))["lines"]
    expected = {route.path: route.effects for route in ROUTES}
    if "LOCAL" not in stage.skin.can:
        expected = {route.path: INLINE for route in BY_PATH}
    assert {line["path"]: line["effects"] for line in lines} == expected
    assert {line["verdict"] for line in lines} == {Protection.PROTECTED}


@proves("OpenAPI", one_server=True)
def test_the_openapi_command_describes_every_route(stage: Stage, tmp_path: Path) -> None:
    # R228, R229: the command fails where it misses one
    plain = {"openapi": "3.1.0", "info": {"title": "shop", "version": "1"}}
    paths = {route.path: {"post": {"responses": {}}} for route in ROUTES}
    file = tmp_path / "openapi.json"
    file.write_text(json.dumps({**plain, "paths": paths}))
    files = () if TABLE[stage.skin.row]["can"]["OpenAPI"] == "its own document" else (str(file),)
    described = json.loads(stage.command("openapi", *files))
    for route in ROUTES:
        operation = described["paths"][route.path]["post"]
        assert "Idempotency-Key" in {one["name"] for one in operation["parameters"] if one.get("in") == "header"}
        assert {"400", "409", "422", "503"} <= set(operation["responses"])


# What the table denies


@denies_served("chunks")
def test_a_body_in_chunks_is_refused(stage: Stage) -> None:
    key, before = new_key(), stage.charges
    refused = stage.send_chunks("/charges", b'{"item":', b'"tea"}', key=key)
    assert (refused.status, refused.json()["code"]) == (411, "idempotency_body_length_missing")
    assert stage.charges == before
    assert stage.send("/charges", {"item": "milk"}, key=key).status == 201  # it has not used the key


@denies("LOCAL", "PHASED", "OUTBOX", "resume")
def test_enrolment_by_path_accepts_only_inline(name: str, tmp_path: Path) -> None:
    once, (_,) = made(name, tmp_path)
    for effects in (LOCAL, PHASED, OUTBOX):
        with pytest.raises(ConfigurationError, match="INLINE"):
            once.by_path(effects=effects, operation="other")  # type: ignore[call-overload]
    assert not any(enrolment.completes for shared in once.served.values() for enrolment in shared.patterns)


@denies("OpenAPI")
def test_opaque_applications_have_no_openapi_document(name: str, tmp_path: Path) -> None:
    _, (app,) = made(name, tmp_path)
    assert (listed(app), document_of(app)) == (None, None)


@denies("audit")
def test_opaque_applications_have_no_listed_routes(name: str, tmp_path: Path) -> None:
    once, apps = made(name, tmp_path)
    assert route_lines([once], apps) == []


# The table


def test_the_framework_table_matches_the_suite() -> None:
    said = {(row, ability): said for row, line in TABLE.items() for ability, said in line["can"].items()}
    assert {row for row, _ in said} == {skin.row for skin in SKINS.values()}
    assert {ability for _, ability in said} == set(ABILITIES)
    assert {place for place, can in said.items() if can} == PROVED
    assert {place for place, can in said.items() if not can} == DENIED


def test_the_framework_table_lists_the_tested_servers() -> None:
    served: dict[str, list[str]] = defaultdict(list)
    for skin in SKINS.values():
        served[skin.row].append(server_of(skin))
    assert served == {name: row["servers"] for name, row in TABLE.items()}


def server_of(skin: Skin) -> str:
    """As the table calls it."""
    program, *words = skin.server
    if "--preload" in words:
        return f"{program} --preload"
    return f"{program} {words[1]}" if words else program
