"""What Flask has of its own, by its test client: order, views, error handlers, streams, the session as transaction."""

from __future__ import annotations

import shutil
import sqlite3
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, text

from flask_apps.conftest import with_tables
from flask_apps.shop import Shop


def sent(key: str | None = None, **more: str) -> dict[str, str]:
    return {"Authorization": "Bearer alpha", "Idempotency-Key": key or uuid.uuid4().hex, **more}


def items(shop: Shop, table: str = "orders") -> list[str]:
    """What anybody else sees."""
    engine = create_engine(shop.url)
    with engine.connect() as connection:
        found = [item for (item,) in connection.execute(text(f"SELECT item FROM {table} ORDER BY id"))]
    engine.dispose()
    return found


def test_the_commit_precedes_every_after_request_hook(shop: Shop) -> None:
    # R17, R87
    client, headers = shop.app.test_client(), sent(Origin="here")
    first = client.post("/orders", json={"item": "tea"}, headers=headers)
    order = ["before_request", "login_required", "handler", "after_request", "teardown"]
    assert shop.events == order
    assert (first.status_code, first.headers["X-After"]) == (201, "here")
    shop.events.clear()
    again = client.post("/orders", json={"item": "tea"}, headers={**headers, "Origin": "there"})
    assert (again.status_code, again.data) == (201, first.data)
    assert again.headers["Idempotent-Replayed"] == "true"
    # What after_request adds is fresh, and so is the session's cookie, which is never stored.
    assert (again.headers["X-After"], len(again.headers.getlist("Set-Cookie"))) == ("there", 1)
    assert again.headers["Set-Cookie"] != first.headers["Set-Cookie"]
    assert shop.events == [event for event in order if event != "handler"]
    assert (items(shop), shop.runs) == (["tea"], ["local"])


def test_authentication_runs_before_the_key_check_in_flask(shop: Shop) -> None:
    # R11, R37, R198
    client, headers = shop.app.test_client(), sent()
    assert client.post("/orders", json={"item": "tea"}, headers=headers).status_code == 201
    other = client.post("/orders", json={"item": "milk"}, headers=headers)
    assert (other.status_code, other.get_json()["code"]) == (422, "idempotency_key_reused_with_different_payload")
    stranger = client.post("/orders", json={"item": "tea"}, headers={**headers, "Authorization": "Bearer nobody"})
    assert stranger.status_code == 401
    missing = client.post("/orders", json={"item": "tea"}, headers={"Authorization": "Bearer alpha"})
    assert (missing.status_code, missing.headers["X-After"]) == (400, "none")
    beta = client.post("/orders", json={"item": "beta's"}, headers={**headers, "Authorization": "Bearer beta"})
    assert (beta.status_code, items(shop)) == (201, ["tea", "beta's"])
    status = client.get(f"/idempotency-keys/{headers['Idempotency-Key']}", headers=headers)
    assert (status.status_code, status.get_json()["state"]) == (200, "completed")
    assert client.get(f"/idempotency-keys/{headers['Idempotency-Key']}").status_code == 401
    page = client.get(shop.policy.docs_url, headers=sent())
    assert (page.status_code, b"Idempotency-Key" in page.data) == (200, True)


def test_pending_rows_are_flushed_before_error_handlers_run(shop: Shop) -> None:
    # an IntegrityError of a handler that leaves the commit to others
    client = shop.app.test_client()
    assert client.post("/orders", json={"item": "tea"}, headers=sent()).status_code == 201
    headers = sent()
    for replayed in (False, True):
        answer = client.post("/orders", json={"item": "tea", "does": "forget to commit"}, headers=headers)
        assert (answer.status_code, answer.get_json()) == (409, {"error": "taken"})
        assert ("Idempotent-Replayed" in answer.headers) is replayed
    assert client.post("/orders", json={"item": "milk", "does": "forget to commit"}, headers=sent()).status_code == 201
    assert (items(shop), shop.runs) == (["tea", "milk"], ["local"] * 3)


@pytest.mark.parametrize("does", ["raise", "abort", "begin first"])
def test_an_exception_in_a_flask_view_rolls_back(shop: Shop, does: str) -> None:
    # L6: a final no that was raised is stored without its rows, a 500 is not stored
    client, headers = shop.app.test_client(), sent()
    first = client.post("/orders", json={"item": "tea", "does": does}, headers=headers)
    again = client.post("/orders", json={"item": "tea", "does": does}, headers=headers)
    assert (first.status_code, again.status_code) == ((418, 418) if does == "abort" else (500, 500))
    assert (len(shop.runs), items(shop)) == (1 if does == "abort" else 2, [])


@pytest.mark.parametrize("pending", [True, False], ids=["pending", "flushed"])
@pytest.mark.parametrize("does", ["raise", "abort", "roll back", "remove", "go on after remove", "go on after close"])
@pytest.mark.parametrize("path", ["/orders", "/optional"])
def test_a_commit_in_a_later_hook_writes_nothing(shop: Shop, path: str, does: str, *, pending: bool) -> None:
    # an audit line in after_request, or "commit if there was no error" in teardown_request
    client, headers = shop.app.test_client(), sent(Commits="after_request, teardown_request")
    for _ in range(2):
        order = {"item": "tea", "does": does, "pending": pending}
        answer = client.post(path, json=order, headers=headers)
        assert answer.status_code == (418 if does == "abort" else 500)
    assert items(shop) == []
    unkeyed = {name: value for name, value in headers.items() if name != "Idempotency-Key"}
    if path == "/optional":
        assert client.post(path, json=order, headers=unkeyed).status_code == (418 if does == "abort" else 500)
        assert items(shop) == []
    assert client.post(path, json={"item": "milk"}, headers=sent()).status_code == 201
    assert items(shop) == ["milk"]


def test_objects_added_in_before_request_survive_a_replay(shop: Shop) -> None:
    @shop.app.before_request
    def note() -> None:
        shop.db.session.add(shop.refund(item="seen", tenant="alpha"))

    client, headers = shop.app.test_client(), sent(Commits="after_request")
    for replayed in (None, "true"):
        answer = client.post("/orders", json={"item": "tea"}, headers=headers)
        assert (answer.status_code, answer.headers.get("Idempotent-Replayed")) == (201, replayed)
    assert items(shop, "refunds") == ["seen", "seen"]


def test_a_returned_404_commits_its_rows(shop: Shop) -> None:
    client, headers = shop.app.test_client(), sent()
    for _ in range(2):
        assert client.post("/orders", json={"item": "tea", "status": 404}, headers=headers).status_code == 404
    assert (items(shop), shop.runs) == (["tea"], ["local"])


@pytest.mark.parametrize("does", ["commit as text", "commit the connection"])
def test_an_explicit_commit_in_a_flask_view_returns_500(
    shop: Shop, does: str, caplog: pytest.LogCaptureFixture
) -> None:
    # L5, F16
    client, headers = shop.app.test_client(), sent()
    assert client.post("/orders", json={"item": "tea", "does": does}, headers=headers).status_code == 500
    assert "ended by oncekey" in caplog.text
    assert items(shop) == []


@pytest.mark.parametrize("does", ["roll back", "swallow", "remove"])
def test_a_success_without_its_rows_is_never_stored(shop: Shop, does: str, caplog: pytest.LogCaptureFixture) -> None:
    # F20, ADR 0023: the handler says 201, and its rows are gone
    client, headers = shop.app.test_client(), sent()
    for _ in range(2):
        answer = client.post("/orders", json={"item": "tea", "does": does}, headers=headers)
        assert (answer.status_code, answer.get_json()["code"]) == (500, "idempotency_execution_failed")
    assert "its rows are gone" in caplog.text
    assert (items(shop), len(shop.runs)) == ([], 2)


def test_a_409_after_a_rollback_is_stored(shop: Shop) -> None:
    client, headers = shop.app.test_client(), sent()
    for _ in range(2):
        order = {"item": "tea", "does": "roll back", "status": 409}
        assert client.post("/orders", json=order, headers=headers).status_code == 409
    assert (items(shop), shop.runs) == ([], ["local"])


def test_a_flask_view_may_use_savepoints(shop: Shop) -> None:
    # `with db.session.begin():` is one of them
    client = shop.app.test_client()
    order = {"item": "tea", "does": "swallow in a savepoint"}
    assert client.post("/orders", json=order, headers=sent()).status_code == 201
    assert client.post("/orders", json={"item": "milk", "does": "begin"}, headers=sent()).status_code == 201
    assert items(shop) == ["tea", "milk", "milk too"]


def test_session_writes_before_the_view_are_rejected(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    client = shop.app.test_client()
    assert client.post("/orders", json={"item": "tea"}, headers=sent(Seen="yes")).status_code == 500
    assert "from before the handler" in caplog.text
    assert (items(shop), shop.runs) == ([], [])


def test_writing_to_another_bind_is_rejected(
    open_shop: Callable[..., Shop], url: str, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    # never a second connection for business rows
    elsewhere = f"sqlite:///{tmp_path}/elsewhere.db"
    shop = open_shop(url, binds={"elsewhere": elsewhere})
    with shop.app.app_context():
        shop.db.create_all("elsewhere")
    client = shop.app.test_client()
    order = {"item": "tea", "does": "write elsewhere"}
    assert client.post("/orders", json=order, headers=sent()).status_code == 500
    assert "__bind_key__" in caplog.text
    with shop.app.app_context():
        assert shop.db.session.query(shop.note).count() == 0
    assert items(shop) == []


@pytest.mark.parametrize("setting", ["TESTING", "PROPAGATE_EXCEPTIONS"])
def test_a_propagated_flask_error_rolls_back_and_frees_the_pool(shop: Shop, setting: str) -> None:
    # no after_request runs, teardown comes first, and no connection stays out
    shop.app.config[setting] = True
    client, headers = shop.app.test_client(), sent()
    with pytest.raises(ValueError, match="stumbled"):
        client.post("/orders", json={"item": "tea", "does": "raise"}, headers=headers)
    with shop.app.app_context():
        assert shop.db.engine.pool.checkedout() == 0
    assert items(shop) == []
    shop.go_on.set()
    again = client.post("/orders", json={"item": "tea", "does": "wait"}, headers=sent())
    assert (again.status_code, items(shop)) == (201, ["tea"])


def test_system_exit_in_a_flask_view_rolls_back(shop: Shop) -> None:
    # gunicorn raises SystemExit in a handler that takes too long, and Flask lets it pass
    client, headers = shop.app.test_client(), sent()
    for _ in range(2):  # the key is free again at once
        with pytest.raises(SystemExit, match="too long"):
            client.post("/orders", json={"item": "tea", "does": "exit"}, headers=headers)
        assert items(shop) == []
    with shop.app.app_context():
        assert shop.db.engine.pool.checkedout() == 0
    assert client.post("/orders", json={"item": "tea"}, headers=sent()).status_code == 201


def test_a_failing_after_request_hook_keeps_the_stored_response(shop: Shop) -> None:
    # the client gets 500, the record says 201, and a retry replays it
    client, headers = shop.app.test_client(), sent()
    failed = client.post("/orders", json={"item": "tea"}, headers={**headers, "Fails-After": "yes"})
    again = client.post("/orders", json={"item": "tea"}, headers=headers)
    assert (failed.status_code, again.status_code) == (500, 201)
    assert (again.headers["Idempotent-Replayed"], items(shop), shop.runs) == ("true", ["tea"], ["local"])


@pytest.mark.parametrize(
    ("name", "status", "body"), [("file", 200, b"of a file"), ("stream", 201, b"11"), ("plain", 204, b"")]
)
def test_flask_files_streams_and_class_views_are_replayed(shop: Shop, name: str, status: int, body: bytes) -> None:
    client, headers = shop.app.test_client(), sent()
    first = client.post(f"/stock/{name}", headers=headers)
    again = client.post(f"/stock/{name}", headers=headers)
    assert (first.status_code, first.data, again.status_code, again.data) == (status, body, status, body)
    assert again.headers.get("Content-Type") == first.headers.get("Content-Type")
    assert (again.headers["Idempotent-Replayed"], items(shop)) == ("true", [name])


def test_a_blueprint_error_handler_response_is_replayed(shop: Shop) -> None:
    client, headers = shop.app.test_client(), sent()
    for _ in range(2):
        answer = client.post("/stock/sold-out", headers=headers)
        assert (answer.status_code, answer.get_json()) == (410, {"error": "sold out"})
    assert items(shop) == []


def test_a_flask_body_that_fails_halfway_rolls_back(shop: Shop) -> None:
    client, headers = shop.app.test_client(), sent()
    for _ in range(2):
        assert client.post("/stock/broken", headers=headers).status_code == 500
    assert items(shop) == []


def test_async_flask_views_are_replayed(shop: Shop) -> None:
    client, headers = shop.app.test_client(), sent()
    first = client.post("/async", json={"item": "tea"}, headers=headers)
    again = client.post("/async", json={"item": "tea"}, headers=headers)
    assert (first.status_code, again.data, again.headers["Idempotent-Replayed"]) == (201, first.data, "true")
    headers = sent()
    for _ in range(2):
        assert client.put("/stock/milk", headers=headers).get_json() == {"put": "milk"}
    assert (items(shop), shop.runs) == (["tea", "milk"], ["local"])


def test_flask_serves_inline_outbox_and_keyless_views(shop: Shop) -> None:
    client, headers = shop.app.test_client(), sent()
    for _ in range(2):
        assert client.post("/charges", json={}, headers=headers).get_json() == {"charges": 1}
    headers = sent()
    for _ in range(2):
        assert client.post("/parcels", json={"item": "parcel"}, headers=headers).status_code == 202
    for item in ("tea", "milk"):
        alone = client.post("/optional", json={"item": item}, headers={"Authorization": "Bearer alpha"})
        assert alone.status_code == 201
    gone = client.post("/optional", json={"item": "x", "does": "raise"}, headers={"Authorization": "Bearer alpha"})
    assert (gone.status_code, items(shop)) == (500, ["parcel", "tea", "milk"])
    assert client.get("/orders", headers=sent()).get_json() == {"total": 3}


def test_phases_write_through_the_session(shop: Shop) -> None:
    client, headers = shop.app.test_client(), sent()
    first = client.post("/payments", json={"item": "tea"}, headers=headers)
    again = client.post("/payments", json={"item": "tea"}, headers=headers)
    assert (first.status_code, first.data == again.data) == (201, True)
    assert (items(shop), shop.runs, len(shop.charges)) == (["tea paid"], ["phased"], 1)


def test_a_phased_flask_view_resumes_after_its_last_phase(shop: Shop) -> None:
    client, headers = shop.app.test_client(), sent()
    assert client.post("/payments", json={"item": "tea", "does": "raise"}, headers=headers).status_code == 500
    assert items(shop) == ["tea"]
    again = client.post("/payments", json={"item": "tea", "does": "raise"}, headers=headers)
    assert (again.status_code, again.get_json()["attempt"]) == (201, 2)
    assert (items(shop), len(shop.charges)) == (["tea paid"], 1)


def test_outside_of_a_phase_the_session_only_reads(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    client, headers = shop.app.test_client(), sent()
    failed = client.post("/payments", json={"item": "tea", "does": "write outside"}, headers=headers)
    assert failed.status_code == 500
    assert "read-only" in caplog.text
    assert items(shop) == ["tea"]


def test_a_deleted_sqlite_file_returns_503_until_restored(
    file_url: str, open_shop: Callable[..., Shop], tmp_path: Path
) -> None:
    shop = open_shop(file_url)
    client, path = shop.app.test_client(), tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as file:
        file.execute("PRAGMA journal_mode = WAL")
    assert client.post("/orders", json={"item": "tea"}, headers=sent()).status_code == 201
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(tmp_path / "copy.db")) as copy:
        source.backup(copy)
    for each in tmp_path.glob("shop.db*"):
        each.unlink()
    assert [client.post("/orders", json={"item": "milk"}, headers=sent()).status_code for _ in range(3)] == [503] * 3
    assert (shop.runs, path.exists()) == (["local"], False)
    shutil.move(tmp_path / "copy.db", path)
    answers = {
        item: client.post("/orders", json={"item": item}, headers=sent()).status_code
        for item in ("milk", "rice", "salt")
    }
    assert (set(answers.values()) <= {201, 503}, answers["salt"]) == (True, 201)
    assert items(shop) == ["tea", *(item for item, status in answers.items() if status == 201)]


def test_a_view_with_set_local_role_still_stores_its_record(tables_dsn: str, open_shop: Callable[..., Shop]) -> None:
    shop = open_shop(with_tables(tables_dsn.replace("postgresql:", "postgresql+psycopg:")))
    role = f"flask_{uuid.uuid4().hex}"
    with psycopg.connect(tables_dsn, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role}".encode())
    shop.does = lambda given: shop.db.session.execute(text(given["does"]))
    client, headers = shop.app.test_client(), sent()
    order = {"item": "tea", "does": f"SET LOCAL ROLE {role}"}
    assert [client.post("/orders", json=order, headers=headers).status_code for _ in range(2)] == [201, 201]
    assert items(shop) == ["tea"]
    order = {"item": "milk", "does": "SET LOCAL transaction_read_only = on"}
    failed = client.post("/orders", json=order, headers=sent())
    assert (failed.status_code, failed.get_json()["code"]) == (500, "idempotency_execution_failed")
    with psycopg.connect(tables_dsn, autocommit=True) as connection:
        connection.execute(f"DROP ROLE {role}".encode())


def test_connection_lost_in_before_request_returns_503(tables_dsn: str, open_shop: Callable[..., Shop]) -> None:
    # R110: the login reads through `db.session`
    shop = open_shop(with_tables(tables_dsn.replace("postgresql:", "postgresql+psycopg:")))
    client = shop.app.test_client()
    assert client.post("/orders", json={"item": "tea"}, headers=sent()).status_code == 201
    with psycopg.connect(tables_dsn, autocommit=True) as other:
        other.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    headers = sent()
    lost = client.post("/orders", json={"item": "milk"}, headers=headers)
    assert (lost.status_code, lost.headers["Retry-After"]) == (503, "1")
    assert lost.json["code"] == "idempotency_store_unavailable"
    assert client.post("/orders", json={"item": "milk"}, headers=headers).status_code == 201
    assert (items(shop), len(shop.runs)) == (["tea", "milk"], 2)
