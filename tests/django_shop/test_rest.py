"""Django REST framework: view sets, actions, functions, permissions of objects."""

from __future__ import annotations

import django.core.exceptions
import pytest
import rest_framework.exceptions
from django.db import connections
from django.test import Client

from django_shop.asking import new_key, post, replayed, sold, stored


def test_a_view_set_creates_once(atomic: bool) -> None:
    key = new_key()
    first, again = post("/rest/orders/", key=key), post("/rest/orders/", key=key)
    assert (first.status_code, again.content, replayed(again)) == (201, first.content, True)
    assert (sold(), stored("default")) == (["tea"], 1)


@pytest.mark.parametrize("path", ["/rest/bookings", "/rest/by-function"])
def test_function_and_class_api_views_are_replayed(alias: str, path: str) -> None:
    # Pitfall 2: `@api_view` keeps its function in a closure.
    connections.settings[alias]["ATOMIC_REQUESTS"] = alias == "default"
    key = new_key()
    first, again = post(path, key=key), post(path, key=key)
    assert (first.status_code, again.content, replayed(again)) == (201, first.content, True)
    assert sold() == ["tea"]


@pytest.mark.parametrize(
    "raised", [django.core.exceptions.PermissionDenied, rest_framework.exceptions.PermissionDenied]
)
@pytest.mark.parametrize("path", ["/rest/bookings", "/rest/orders/"])
def test_a_tenant_function_may_raise_permission_denied(
    alias: str, path: str, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    from django_shop import on_default, on_lite

    def no_member(request) -> str:
        raise raised

    monkeypatch.setattr((on_default if alias == "default" else on_lite).once.threads, "_tenant", no_member)
    refused = post(path, key=new_key())
    assert (refused.status_code, refused.json()["detail"][:3], sold(), stored(alias)) == (403, "You", [], 0)


def test_rest_authentication_runs_before_the_lookup(atomic: bool) -> None:
    key = new_key()
    assert post("/rest/bookings", key=key).status_code == 201
    stranger = post("/rest/bookings", key=key, by="")
    assert (stranger.status_code, replayed(stranger)) == (401, False)


def test_throttles_run_before_the_lookup_and_count_replays(postgres: str) -> None:
    key = new_key()
    first, again, throttled = (post("/rest/rare", key=key) for _ in range(3))
    assert (first.status_code, replayed(again)) == (201, True)
    assert (throttled.status_code, replayed(throttled), sold()) == (429, False, ["tea"])


def test_the_tenant_is_the_rest_framework_user(postgres: str) -> None:
    key = new_key()
    assert post("/rest/by-function", key=key, by="ann").json()["by"] == "ann"
    assert post("/rest/by-function", key=key, by="bob").json()["by"] == "bob"


def test_object_permissions_are_checked_before_a_replay(atomic: bool) -> None:
    # R198: `get_object()` checks it, which the handler does after the claim.
    from django_shop.site import world

    number, key = post("/rest/orders/").json()["id"], new_key()
    assert post(f"/rest/orders/{number}/pay/", {}, key=key).status_code == 201
    assert replayed(post(f"/rest/orders/{number}/pay/", {}, key=key))
    world.owners[number] = "bob"
    assert post(f"/rest/orders/{number}/pay/", {}, key=key).status_code == 403


def test_a_custom_authorization_hook_runs_before_a_replay(postgres: str) -> None:
    from django_shop.site import world

    key = new_key()
    assert post("/rest/authorised", {}, key=key).status_code == 201
    world.owners["authorised"] = "bob"
    assert post("/rest/authorised", {}, key=key).status_code == 403


def test_a_retried_delete_is_replayed_after_the_object_is_gone(atomic: bool) -> None:
    number, key = post("/rest/orders/").json()["id"], new_key()
    first = post(f"/rest/orders/{number}/", {}, key=key, method="delete")
    again = post(f"/rest/orders/{number}/", {}, key=key, method="delete")
    other = post(f"/rest/orders/{number}/", {}, key=new_key(), method="delete")
    assert (first.status_code, again.status_code, replayed(again)) == (204, 204, True)
    assert (other.status_code, replayed(other)) == (404, False)


def test_a_rest_validation_error_is_stored_without_rows(atomic: bool) -> None:
    # 2: mended under the same key it is another request.
    key = new_key()
    first = post("/rest/orders/", {"item": ""}, key=key)
    again = post("/rest/orders/", {"item": ""}, key=key)
    mended = post("/rest/orders/", {"item": "tea"}, key=key)
    assert (first.status_code, replayed(again), mended.status_code, sold()) == (400, True, 422, [])


def test_raised_rest_errors_roll_back_and_returned_ones_commit(atomic: bool) -> None:
    # 3: `dispatch` makes responses of exceptions, and under ATOMIC_REQUESTS sets the roll-back itself.
    raised, returned = new_key(), new_key()
    assert post("/rest/orders/", {"item": "lost", "does": "invalid"}, key=raised).status_code == 400
    assert post("/rest/bookings", {"item": "kept", "does": "refused"}, key=returned).status_code == 409
    assert sold() == ["kept"]
    assert replayed(post("/rest/orders/", {"item": "lost", "does": "invalid"}, key=raised))
    assert replayed(post("/rest/bookings", {"item": "kept", "does": "refused"}, key=returned))


def test_a_serialization_error_rolls_back(atomic: bool) -> None:
    # Pitfall 1
    response = post("/rest/bookings", {"item": "tea", "does": "unserialisable"})
    assert (response.status_code, sold(), stored("default")) == (500, [], 0)


def test_a_replay_keeps_the_first_content_type(postgres: str) -> None:
    key = new_key()
    first = post("/rest/bookings", key=key, headers={"Accept": "application/json"})
    again = post("/rest/bookings", key=key, headers={"Accept": "text/html"})
    assert again.headers["Content-Type"] == first.headers["Content-Type"] == "application/json"


def test_phased_rest_views_require_no_atomic_requests(atomic: bool) -> None:
    key = new_key()
    first, again = post("/rest/charges", {}, key=key), post("/rest/charges", {}, key=key)
    assert (first.status_code, replayed(again)) == (201, True)
    inside = post("/rest/wrapped", {}, client=Client(raise_request_exception=False))
    assert inside.status_code == (500 if atomic else 201)
