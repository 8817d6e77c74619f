"""Views of functions and classes by Django's own client: what is stored, what is rolled back, and what is refused."""

from __future__ import annotations

import io
import logging
import threading
import uuid
from typing import Any

import pytest
from django.db import close_old_connections, connections, transaction
from django.test import Client, RequestFactory, override_settings

from django_shop.asking import new_key, post, replayed, sold, stored
from harness.patience import PATIENCE, wait_until
from oncekey import LOCAL, SINGLE_TENANT, ConfigurationError, testing
from oncekey.observe.events import Keyless


def of(alias: str):
    from django_shop import on_default, on_lite

    return on_default if alias == "default" else on_lite


def test_a_django_view_runs_once_and_replays(alias: str) -> None:
    # R17, R87, R90
    key = new_key()
    first = post("/orders", key=key)
    again = post("/orders", key=f'"{key}"')
    other = post("/orders", {"item": "milk"}, key=key)
    stranger = post("/orders", key=key, by="bob")
    assert (first.status_code, first.json(), replayed(first)) == (201, {"item": "tea", "attempt": 1}, False)
    assert (again.status_code, again.content, replayed(again)) == (201, first.content, True)
    assert first.headers["Idempotency-Key"] == key
    assert first.headers["Idempotency-Key-Expires"] == again.headers["Idempotency-Key-Expires"]
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused_with_different_payload")
    assert (stranger.status_code, replayed(stranger)) == (201, False)
    assert (sold(), stored(alias)) == (["tea", "tea"], 2)


def test_missing_and_malformed_keys_are_rejected(alias: str) -> None:
    assert post("/orders", key=None).json()["code"] == "idempotency_key_missing"
    assert post("/orders", key="short").status_code == 400
    assert post("/orders", key=f"{new_key()}, {new_key()}").status_code == 400  # as servers join two lines
    assert (sold(), stored(alias)) == ([], 0)


def test_class_based_views_are_protected_by_method(alias: str) -> None:
    key = new_key()
    first, again = post("/things", key=key), post("/things", key=key)
    assert (first.content, again.content, replayed(again)) == (b"made", b"made", True)
    assert first.headers["Content-Type"] == again.headers["Content-Type"] == "text/plain"
    assert Client().get("/things", headers={"Idempotency-Key": key}).content == b"things"
    assert sold() == ["a thing"]


@pytest.mark.parametrize("does", ["raise", "teapot", "forbidden"])
def test_exceptions_and_retryable_errors_store_nothing(atomic: bool, does: str) -> None:
    key = new_key()
    first = post("/orders", {"item": "tea", "does": does}, key=key)
    assert first.status_code in {403, 500, 503}
    assert (sold(), stored("default")) == ([], 0)
    assert not replayed(post("/orders", {"item": "tea", "does": does}, key=key))


def test_returned_errors_commit_and_raised_ones_roll_back(atomic: bool) -> None:
    # R91, L6
    returned, raised = new_key(), new_key()
    assert post("/orders", {"item": "kept", "does": "refuse"}, key=returned).status_code == 409
    assert post("/orders", {"item": "lost", "does": "missing"}, key=raised).status_code == 404
    assert sold() == ["kept"]
    assert replayed(post("/orders", {"item": "kept", "does": "refuse"}, key=returned))
    again = post("/orders", {"item": "lost", "does": "missing"}, key=raised)
    assert (again.status_code, replayed(again), stored("default")) == (404, True, 2)


def test_a_template_error_rolls_back_before_the_commit(atomic: bool) -> None:
    # Pitfall 1: a broken template is a 500 without rows and without a record.
    response = post("/orders", {"item": "tea", "does": "template"})
    assert (response.status_code, sold(), stored("default")) == (500, [], 0)


def test_render_callbacks_are_part_of_the_stored_response(alias: str) -> None:
    key, body = new_key(), {"item": "tea", "does": "render callback"}
    first, again = post("/orders", body, key=key), post("/orders", body, key=key)
    assert [(one.content, one.headers["Location"]) for one in (first, again)] == [(b"final", "/orders/5")] * 2
    assert (replayed(first), replayed(again)) == (False, True)


def test_a_failed_deferred_constraint_returns_500(atomic: bool) -> None:
    # Pitfall 3: the foreign key is checked by COMMIT, after the record was written.
    key = new_key()
    response = post("/orders", {"item": "tea", "does": "orphan"}, key=key)
    assert (response.status_code, response.json()["code"]) == (500, "idempotency_execution_failed")
    assert (sold(), stored("default")) == ([], 0)


def test_a_failing_on_commit_hook_does_not_undo_the_commit(atomic: bool, caplog: pytest.LogCaptureFixture) -> None:
    # Pitfall 3, the other way round.
    key = new_key()
    response = post("/orders", {"item": "tea", "does": "hook_fails"}, key=key)
    assert (response.status_code, sold(), stored("default")) == (201, ["tea"], 1)
    assert replayed(post("/orders", {"item": "tea", "does": "hook_fails"}, key=key))
    assert "on_commit function failed after the commit, which is final: ZeroDivisionError" in caplog.text


def test_on_commit_hooks_run_once_after_the_commit(atomic: bool) -> None:
    from django_shop.site import world

    key = new_key()
    assert post("/orders", {"item": "tea", "does": "hook"}, key=key).status_code == 201
    assert replayed(post("/orders", {"item": "tea", "does": "hook"}, key=key))
    assert world.hooks == ["ran"]


@pytest.mark.parametrize("does", ["set_rollback", "swallow", "swallow_sql", "close", "left_open"])
def test_a_success_without_its_rows_returns_500(atomic: bool, does: str, caplog: pytest.LogCaptureFixture) -> None:
    # Pitfall 4
    key = new_key()
    response = post("/orders", {"item": "tea", "does": does}, key=key)
    assert response.status_code == 500
    assert (sold(), stored("default")) == ([], 0)
    assert post("/orders", key=new_key()).status_code == 201


def test_closing_old_connections_does_no_harm(atomic: bool) -> None:
    # Pitfall 4: Django closes what is too old, also inside of a transaction.
    response = post("/orders", {"item": "tea", "does": "close_old"})
    assert (response.status_code == 201) == (sold() == ["tea"]) == (stored("default") == 1)


@pytest.mark.parametrize("does", ["commit", "raw_commit"])
def test_a_view_cannot_end_the_transaction(alias: str, does: str) -> None:
    # Pitfall 5
    response = post("/orders", {"item": "tea", "does": does})
    assert (response.status_code, sold()) == (500, [])


def test_oncekey_does_not_change_the_search_path(postgres: str) -> None:
    # Pitfall 5: django-tenants sets the search path on it.
    assert post("/orders", {"item": "tea", "does": "search_path"}).status_code == 201


def test_isolation_is_always_read_committed(atomic: bool) -> None:
    # Pitfall 6
    connections.close_all()
    connections.settings["default"]["OPTIONS"]["isolation_level"] = 2  # REPEATABLE READ
    try:
        response = post("/orders", {"item": "tea", "does": "isolation"})
    finally:
        del connections.settings["default"]["OPTIONS"]["isolation_level"]
        connections.close_all()
    assert response.json() == {"isolation": "read committed"}


def test_another_thread_is_outside_of_the_transaction(postgres: str) -> None:
    # Pitfall 7, which no library can close: docs/howto/django.md says so.
    assert post("/orders", {"item": "tea", "does": "thread"}).status_code == 500
    assert sold() == ["from a thread"]


def test_another_database_is_outside_of_the_transaction(postgres: str) -> None:
    # Pitfall 7: one view, one database.
    from django_shop.models import Order

    Order.objects.using("lite").all().delete()
    assert post("/orders", {"item": "tea", "does": "elsewhere"}).status_code == 500
    assert sold() == []
    assert [one.item for one in Order.objects.using("lite").all()] == ["in another database"]


def upload(path: str, key: str, content: bytes, **more) -> object:
    file = io.BytesIO(content)
    file.name = "photo.jpg"
    headers = {"Idempotency-Key": key, "Authorization": "Bearer ann"} | more.pop("headers", {})
    return Client(raise_request_exception=False, **more).post(path, {"file": file}, headers=headers)


def test_the_body_is_read_before_the_csrf_check(alias: str) -> None:
    # Pitfall 8: the body is read twice, by CSRF's form and by us, and is larger than what Django keeps in memory.
    client = Client(enforce_csrf_checks=True, raise_request_exception=False)
    token = "a" * 32
    client.cookies["csrftoken"] = token
    key, content = new_key(), b"x" * 4_000_000
    boundary = uuid.uuid4().hex
    body = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="csrfmiddlewaretoken"\r\n\r\n{token}\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="photo.jpg"\r\n'
        "Content-Type: image/jpeg\r\n\r\n"
    ).encode()
    body += content + f"\r\n--{boundary}--\r\n".encode()
    first, again = [
        client.post(
            "/upload",
            body,
            content_type=f"multipart/form-data; boundary={boundary}",
            headers={"Idempotency-Key": key, "Authorization": "Bearer ann"},
        )
        for _ in range(2)
    ]
    assert (first.status_code, first.json(), replayed(again)) == (201, {"bytes": 4_000_000}, True)
    assert sold() == ["photo.jpg"]


def test_a_large_csrf_exempt_upload_is_read(alias: str) -> None:
    # Pitfall 8: `request.body` would refuse what the parser of forms takes.
    response = upload("/upload-exempt", new_key(), b"x" * 4_000_000)
    assert (response.status_code, response.json()) == (201, {"bytes": 4_000_000})


def test_unprotected_views_read_their_body_normally(alias: str) -> None:
    response = post("/spied", {"item": "tea"})
    assert response.json() == {"body": '{"item": "tea"}'}


def test_middleware_that_consumed_the_body_is_reported(alias: str) -> None:
    with (
        override_settings(MIDDLEWARE=["django_shop.meddling.Reads", "oncekey.django.Middleware"]),
        pytest.raises(ConfigurationError, match="has consumed the body"),
    ):
        post("/orders", client=Client())


def test_cookies_and_custom_headers_are_not_replayed(alias: str) -> None:
    # Pitfall 12
    key = new_key()
    first = post("/orders", {"item": "tea", "does": "cookie"}, key=key)
    again = post("/orders", {"item": "tea", "does": "cookie"}, key=key)
    assert (first.cookies["seen"].value, first.headers["X-Own"]) == ("yes", "1")
    assert replayed(again)
    assert not again.cookies
    assert "X-Own" not in again.headers


def test_outer_middleware_runs_again_on_a_replay(alias: str) -> None:
    # Pitfall 12: compression is chosen by each request for itself.
    key, body = new_key(), {"item": "tea" * 200}
    first = post("/orders", body, key=key, headers={"Accept-Encoding": "gzip"})
    again = post("/orders", body, key=key)
    assert first.headers["Content-Encoding"] == "gzip"
    assert "Content-Encoding" not in again.headers
    assert again.json()["item"] == "tea" * 200


def test_streams_are_drained_before_their_first_byte(alias: str) -> None:
    key = new_key()
    first = post("/orders", {"item": "tea", "does": "stream"}, key=key)
    again = post("/orders", {"item": "tea", "does": "stream"}, key=key)
    assert first.streaming
    assert first.getvalue() == again.content == b"".join(b"piece %d;" % number for number in range(20))
    assert (replayed(again), stored(alias)) == (True, 1)


def test_a_connection_killed_while_idle_is_replaced(atomic: bool) -> None:
    # Pitfall 13
    assert post("/orders").status_code == 201
    _kill_main()
    response = post("/orders", {"item": "milk"})
    assert (response.status_code, sold()) == (201, ["milk", "tea"])


def _kill_main() -> None:
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        pid = cursor.fetchone()[0]
    other = connections.create_connection("default")
    with other.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s)", [pid])
    other.close()


def test_a_connection_killed_during_a_view_returns_503(atomic: bool) -> None:
    # Pitfall 13
    key = new_key()
    response = post("/orders", {"item": "tea", "does": "kill"}, key=key)
    assert response.status_code == (500 if atomic else 503)  # the end of its savepoint raises it, before ours is asked
    close_old_connections()
    assert (sold(), stored("default")) == ([], 0)
    assert post("/orders", key=key).status_code == 201


def test_a_django_store_outage_returns_503_without_running(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from django_shop.site import world

    assert post("/orders").status_code == 201
    connections.close_all()
    monkeypatch.setitem(connections.settings["default"], "PORT", "1")
    down = post("/orders")
    unkeyed = post("/optional", key=None)
    monkeypatch.undo()
    connections.close_all()
    assert (down.status_code, unkeyed.status_code, world.runs) == (503, 503, ["orders"])
    of("default").once.threads.breaker.worked()


@pytest.mark.parametrize("path", ["/optional", "/aoptional"])
def test_a_keyless_request_notifies_the_observers(alias: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(of(alias).once.threads, "notify", seen.append)
    assert post(path, key=None).status_code in {200, 201}
    assert seen == [Keyless(path.removeprefix("/"))]


def test_twelve_django_threads_with_one_key_run_once(alias: str) -> None:
    # P1
    from django_shop.site import world

    key, answers = new_key(), []

    def ask() -> None:
        try:
            answers.append(post("/orders", {"item": "tea", "does": "wait"}, key=key).status_code)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=ask) for _ in range(12)]
    threads[0].start()
    assert world.entered.acquire(timeout=PATIENCE)
    for thread in threads[1:]:
        thread.start()
    for thread in threads[1:]:
        thread.join(PATIENCE)
    world.go.set()
    threads[0].join(PATIENCE)
    assert sorted(answers) == [201] + [409] * 11
    assert sold() == ["tea"]


def test_a_waiting_django_duplicate_receives_the_first_response(atomic: bool) -> None:
    # R82: also while the transaction of ATOMIC_REQUESTS is open around it
    from django_shop.site import world

    key, answers = new_key(), []

    def ask() -> None:
        try:
            answers.append(post("/waiting", {"item": "tea", "does": "wait"}, key=key))
        finally:
            connections.close_all()

    threads = [threading.Thread(target=ask) for _ in range(2)]
    threads[0].start()
    assert world.entered.acquire(timeout=PATIENCE)
    threads[1].start()
    wait_until(lambda: _backends() > 1, "the second request has not come")
    world.go.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted((one.status_code, replayed(one)) for one in answers) == [(201, False), (201, True)]
    assert sold() == ["tea"]


def _backends() -> int:
    """How many others are connected."""
    with connections["default"].cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        return int(cursor.fetchone()[0])


def test_heartbeats_use_a_separate_connection(alias: str) -> None:
    response = post("/beating", {})
    assert (response.status_code, response.json()) == (201, {"seen": 3})


def test_an_optional_key_view_emits_with_and_without_a_key(alias: str) -> None:
    connections.settings[alias]["ATOMIC_REQUESTS"] = alias == "default"
    key = new_key()
    keyed, plain = post("/optional", key=key), post("/optional", {"item": "milk"}, key=None)
    assert (keyed.json(), plain.json()) == ({"key": key}, {"key": None})
    assert post("/optional", {"item": "lost", "does": "raise"}, key=None).status_code == 500
    assert (sold(), stored(alias)) == (["milk", "tea"], 1)
    table = "oncekey.outbox" if alias == "default" else "oncekey_outbox"
    with connections[alias].cursor() as cursor:
        cursor.execute(f"SELECT count(*) FROM {table}")
        assert cursor.fetchone() == (2,)


def test_a_failed_inline_view_is_unknown(alias: str) -> None:
    key, other = new_key(), new_key()
    first, again = post("/inline", {}, key=key), post("/inline", {}, key=key)
    assert (first.status_code, replayed(again)) == (201, True)
    assert post("/inline", {"does": "raise"}, key=other).status_code == 500
    unknown = post("/inline", {"does": "raise"}, key=other)
    assert (unknown.status_code, unknown.json()["code"]) == (409, "idempotency_outcome_unknown")


def test_system_exit_in_a_django_view_rolls_back(alias: str) -> None:
    # gunicorn raises SystemExit in a handler that takes too long
    with pytest.raises(SystemExit):
        post("/orders", {"item": "tea", "does": "exit"})
    assert (sold(), stored(alias)) == ([], 0 if alias == "default" else 1)
    assert not connections[alias].in_atomic_block


def test_the_page_for_api_consumers_lists_the_views(alias: str) -> None:
    # R274
    page = Client().get("/idempotency")
    assert (page.status_code, page["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert "POST /rest/by-function" in page.content.decode()


def test_the_status_view_is_limited_to_the_keys_tenant(alias: str) -> None:
    key = new_key()
    post("/orders", key=key)
    client = Client()
    found = client.get(f"/idempotency-keys/{key}", headers={"Authorization": "Bearer ann"})
    strange = client.get(f"/idempotency-keys/{key}", headers={"Authorization": "Bearer bob"})
    assert (found.status_code, found.json()["state"]) == (200, "completed")
    assert strange.status_code == 404


def test_login_required_above_protection_runs_first(alias: str) -> None:
    # Pitfall 17
    from django.contrib.auth.models import User

    User.objects.all().delete()
    bob = User.objects.create_user("bob")
    client, key = Client(), new_key()
    client.force_login(bob)
    assert post("/private", {}, key=key, client=client).json() == {"user": "bob"}
    stranger = post("/private", {}, key=key, client=Client())
    assert (stranger.status_code, stranger.headers["Location"]) == (302, "/accounts/login/?next=/private")


def test_a_protection_above_a_login_is_refused(project: None) -> None:
    # Pitfall 17
    from django.contrib.auth.decorators import login_required, permission_required
    from django.utils.decorators import method_decorator
    from rest_framework.decorators import api_view

    from oncekey.django import Once

    once = Once(tenant=SINGLE_TENANT)

    def view(request):
        return None

    assert once.protect(effects=LOCAL)(view).__wrapped__ is view
    for inner in (login_required(view), permission_required("x")(view), method_decorator(login_required)(view)):
        with pytest.raises(ConfigurationError, match=r"above a decorator of django\.contrib\.auth"):
            once.protect(effects=LOCAL)(inner)
    with pytest.raises(ConfigurationError, match="above a whole view"):
        once.protect(effects=LOCAL)(api_view(["POST"])(view))


def test_unit_tests_can_call_the_wrapped_view(project: None) -> None:
    from django_shop import on_default

    view = on_default.once.enrolled["private"].__wrapped__
    request = RequestFactory().post("/private")
    request.user = type("User", (), {"username": "ann"})()
    assert view(request).status_code == 201
    with pytest.raises(RuntimeError, match=r"put 'oncekey\.django\.Middleware' last"):
        on_default.once.enrolled["private"](request)


def test_a_view_inside_of_another_transaction_is_refused(alias: str) -> None:
    with transaction.atomic(using=alias), pytest.raises(ConfigurationError, match="inside another atomic block"):
        post("/orders", client=Client())
    assert sold() == []


def test_query_logs_contain_no_keys(alias: str, caplog: pytest.LogCaptureFixture) -> None:
    key = new_key()
    caplog.set_level(logging.DEBUG)
    with override_settings(DEBUG=True):
        connections[alias].force_debug_cursor = True
        try:
            assert post("/orders", key=key).status_code == 201
            said = " ".join(one["sql"] for one in connections[alias].queries)
        finally:
            connections[alias].force_debug_cursor = False
    assert "django_shop_order" in said
    assert key not in said + caplog.text


def test_a_unit_test_may_pass_an_operation_to_a_view(alias: str) -> None:
    request = RequestFactory().post("/orders", '{"item": "tea"}', content_type="application/json")
    with transaction.atomic(using=alias):
        op = testing.sync_operation(connection=connections[alias])
        response = of(alias).once.enrolled["orders"](request, op=op)
    assert response.status_code == 201


def test_connection_lost_in_a_decorator_of_the_view_returns_503(atomic: bool) -> None:
    # R110: `login_required` above `protect` reads the session and the user
    from django.contrib.auth.models import User

    client, key = Client(raise_request_exception=False), new_key()
    client.force_login(User.objects.get_or_create(username="ann")[0])
    _kill_main()
    lost = post("/private", key=key, client=client)
    if atomic:  # the transaction is opened before the decorator runs, on a new connection
        assert lost.status_code == 201
        return
    assert (lost.status_code, lost.headers["Retry-After"]) == (503, "1")
    assert lost.json()["code"] == "idempotency_store_unavailable"
    close_old_connections()
    assert post("/private", key=key, client=client).status_code == 201
