"""`async def` views: in the transaction of their key, to their end although the client leaves."""

from __future__ import annotations

import asyncio

import pytest
from django.test import AsyncClient, override_settings

from django_shop.asking import new_key, post, replayed, sold, stored
from harness.patience import PATIENCE
from oncekey import LOCAL

pytestmark = pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume")


async def apost(path: str, body=None, *, key: str | None = "", by: str = "ann"):
    headers = {"Authorization": f"Bearer {by}"}
    if key is not None:
        headers["Idempotency-Key"] = key or new_key()
    client = AsyncClient(raise_request_exception=False)
    return await client.post(path, body or {"item": "tea"}, content_type="application/json", headers=headers)


def in_loop(work):
    """Run it as a server does: a thread of its own for what a request does with its database."""
    from asgiref.sync import ThreadSensitiveContext
    from django.db import connections

    async def within():
        from asgiref.sync import sync_to_async

        async with ThreadSensitiveContext():
            try:
                return await work()
            finally:
                await sync_to_async(connections.close_all)()

    return asyncio.run(within())


def test_an_async_view_commits_with_its_key(alias: str) -> None:
    # Pitfall 11
    key = new_key()

    async def work():
        return [await apost("/aorders", key=key) for _ in range(2)]

    first, again = in_loop(work)
    assert (first.status_code, again.content, replayed(again)) == (201, first.content, True)
    assert (sold(), stored(alias)) == (["tea"], 1)


@pytest.mark.parametrize(("does", "status"), [("raise", 500), ("missing", 404), ("refuse", 409), ("set_rollback", 500)])
def test_exception_or_status_decides_an_async_views_commit(alias: str, does: str, status: int) -> None:
    async def work():
        return await apost("/aorders", {"item": "tea", "does": does})

    assert in_loop(work).status_code == status
    assert sold() == (["tea"] if does == "refuse" else [])


def test_another_thread_is_outside_of_the_transaction(postgres: str) -> None:
    # Pitfall 7
    async def work():
        return await apost("/aorders", {"item": "tea", "does": "elsewhere"})

    assert in_loop(work).status_code == 500
    assert sold() == ["from a thread"]


def test_def_views_are_served_by_asgi_too(alias: str) -> None:
    key = new_key()

    async def work():
        first = [await apost(path, key=key + str(number)) for number, path in enumerate(("/orders", "/rest/bookings"))]
        again = [await apost(path, key=key + str(number)) for number, path in enumerate(("/orders", "/rest/bookings"))]
        return first, again

    first, again = in_loop(work)
    assert [one.status_code for one in first] == [201, 201]
    assert [one.content for one in again] == [one.content for one in first]
    assert all(map(replayed, again))
    assert sold() == ["tea", "tea"]


def test_atomic_requests_work_under_asgi(postgres: str) -> None:
    from django.db import connections

    connections.settings[postgres]["ATOMIC_REQUESTS"] = True
    key = new_key()

    async def work():
        return [await apost("/orders", key=key) for _ in range(2)]

    # Django takes no project with async views under it; those that are not asked for are not looked at.
    first, again = in_loop(work)
    assert (first.status_code, replayed(again), sold()) == (201, True, ["tea"])


def test_async_views_are_outside_of_atomic_requests(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Django rejects them inside, with the first request
    from django.core.checks import run_checks
    from django.db import connections
    from django.http import JsonResponse
    from django.urls import path
    from django.views import View

    from django_shop.on_default import once, urlpatterns

    monkeypatch.setattr(once, "enrolled", dict(once.enrolled))

    class Inside(View):
        @once.protect(effects=LOCAL, operation="inside")
        async def post(self, request):
            return JsonResponse({}, status=201)

    connections.settings[postgres]["ATOMIC_REQUESTS"] = True
    key = new_key()

    async def work():
        return [await apost("/aorders", key=key) for _ in range(2)]

    routes = (*(one for one in urlpatterns if "aorders" in str(one.pattern)), path("inside", Inside.as_view()))
    with override_settings(ROOT_URLCONF=routes):
        first, again = in_loop(work)
        (said,) = [one.msg for one in run_checks() if one.id == "oncekey.E006"]
    assert (first.status_code, replayed(again), sold()) == (201, True, ["tea"])
    assert said.startswith("inside is `async def`, which Django does not call in a transaction, but ATOMIC_REQUESTS")


def test_streams_of_async_views_are_drained(alias: str) -> None:
    key = new_key()

    async def work():
        first = await apost("/ainline", {}, key=key)
        pieces = b"".join([piece async for piece in first.streaming_content]) if first.is_async else first.getvalue()
        return pieces, await apost("/ainline", {}, key=key)

    pieces, again = in_loop(work)
    assert pieces == again.content == b"piece 0;piece 1;piece 2;"
    assert replayed(again)


def test_async_views_accept_requests_without_a_key(alias: str) -> None:
    async def work():
        plain = await apost("/aoptional", key=None)
        failed = await apost("/aoptional", {"item": "lost", "does": "raise"}, key=None)
        key = new_key()
        return plain, failed, [await apost("/aoptional", {"item": "milk"}, key=key) for _ in range(2)]

    plain, failed, keyed = in_loop(work)
    assert (plain.json(), failed.status_code, replayed(keyed[1])) == ({"key": None}, 500, True)
    assert (sold(), stored(alias)) == (["milk", "tea"], 1)


def test_an_async_view_rejects_a_missing_key(alias: str) -> None:
    async def work():
        return await apost("/aorders", key=None)

    assert in_loop(work).json()["code"] == "idempotency_key_missing"


def test_async_views_are_served_under_wsgi(alias: str) -> None:
    key = new_key()
    first, again = post("/aorders", key=key), post("/aorders", key=key)
    assert (first.status_code, replayed(again), sold()) == (201, True, ["tea"])


def test_a_client_that_leaves_does_not_stop_the_view(alias: str) -> None:
    # Pitfall 10: Django cancels the view of whoever disconnects.
    from django_shop.site import world

    key = new_key()
    body = {"item": "tea", "does": "slow", "seconds": 0.2}

    async def work():
        asked = asyncio.create_task(apost("/aorders", body, key=key))
        assert await asyncio.to_thread(world.entered.acquire, timeout=PATIENCE)
        asked.cancel()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asked, PATIENCE)
        return await apost("/aorders", body, key=key)

    again = in_loop(work)
    assert (again.status_code, sold(), stored(alias)) == (201, ["tea"], 1)
    assert replayed(again)
