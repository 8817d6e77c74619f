"""PHASED and OUTBOX: steps, resumption, workers."""

from __future__ import annotations

import asyncio

import pytest
from django.core.exceptions import PermissionDenied
from django.db import connections

from django_shop.asking import new_key, post, replayed, sold, stored
from oncekey.workers.service import Service
from oncekey.workers.tasks import tasks_for


def charges() -> list[str]:
    from django_shop.models import Payment

    return list(Payment.objects.values_list("charge", flat=True))


@pytest.mark.parametrize("path", ["/payments", "/apayments"])
def test_a_retry_resumes_a_django_view_after_its_last_step(alias: str, path: str) -> None:
    from django_shop.site import world

    connections.settings[alias]["ATOMIC_REQUESTS"] = alias == "default" and path == "/payments"
    key = new_key()
    failed = post(path, {"amount": 5, "does": "fail_once"}, key=key)
    done = post(path, {"amount": 5, "does": "fail_once"}, key=key)
    again = post(path, {"amount": 5, "does": "fail_once"}, key=key)
    assert (failed.status_code, done.status_code, replayed(done), replayed(again)) == (500, 201, False, True)
    assert (len(world.charges), charges()) == (1, ["ch_1"])


def test_a_django_call_that_was_not_executed_can_be_retried(alias: str) -> None:
    from django_shop.site import world

    key = new_key()
    first = post("/payments", {"amount": 5, "does": "not_executed"}, key=key)
    assert (first.status_code, first.json()["code"]) == (500, "idempotency_execution_failed")
    assert post("/payments", {"amount": 5, "does": "not_executed"}, key=key).status_code == 500
    assert len(set(world.charges)) == 1
    assert len(world.charges) == 2


def worked(once) -> tuple[int, int]:
    """Run the workers until nothing is due."""

    async def work():
        await once.start()
        try:
            return await Service(tasks_for(once)).once()
        finally:
            await once.stop()

    done = asyncio.run(work())
    return done.done, done.failed


def test_a_worker_completes_an_outbox_view(alias: str) -> None:
    from django_shop import on_default, on_lite

    once = (on_default if alias == "default" else on_lite).once
    key = new_key()
    # On PostgreSQL it runs inside Django's transaction; on SQLite @once.protect excludes the function from it.
    connections.settings[alias]["ATOMIC_REQUESTS"] = True
    first = post("/shipments", key=key)
    assert (first.status_code, sold(), stored(alias)) == (202, ["tea"], 1)
    done, failed = worked(once)
    assert (done >= 1, failed) == (True, 0)
    again = post("/shipments", key=key)
    assert (again.json(), replayed(again)) == ({"shipped": "tea"}, True)


def test_a_django_topic_closes_the_connection_of_its_thread(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody else can: the thread ends with the call. Django's pool would wait forever for the connection.
    from django_shop import on_default, on_lite

    once = (on_default if alias == "default" else on_lite).once
    others = {name: topic for name, topic in once.topics._topics.items() if name != "ship"}
    monkeypatch.setattr(once.topics, "_topics", others)
    used = []

    @once.topic("ship", repeatable=True)
    def ship(message):
        used.append(connections[alias])
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT 1")
        return {"shipped": message.payload["item"]}

    assert post("/shipments", key=new_key()).status_code == 202
    assert worked(once)[1] == 0
    assert [one.connection for one in used] == [None]


@pytest.mark.parametrize("path", ["/payments", "/apayments", "/payments-of-forms", "/apayments-of-forms"])
def test_a_worker_resumes_a_phased_django_view(alias: str, path: str) -> None:
    # The request is sent through the project and its middleware, which checks CSRF tokens of views for forms.
    from django_shop import on_default, on_lite

    once = (on_default if alias == "default" else on_lite).once
    key = new_key()
    assert post(path, {"amount": 5, "does": "fail_once"}, key=key).status_code == 500
    table = "oncekey.work" if alias == "default" else "oncekey_record"
    with connections[alias].cursor() as cursor:
        cursor.execute(f"SELECT count(*) FROM {table} WHERE request IS NOT NULL")
        assert cursor.fetchone() == (1,)
    _make_due(alias)
    done, failed = worked(once)
    assert (done >= 1, failed) == (True, 0)
    assert charges() == ["ch_1"]
    assert replayed(post(path, {"amount": 5, "does": "fail_once"}, key=key))


@pytest.mark.parametrize("path", ["/payments", "/apayments"])
@pytest.mark.parametrize("fails", [None, PermissionDenied("no member")], ids=["none", "raises"])
def test_a_worker_that_the_tenant_function_rejects_runs_nothing(
    alias: str, path: str, fails: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from django_shop import on_default, on_lite
    from django_shop.site import world

    def rejecting(request) -> None:
        if fails is not None:
            raise fails

    once = (on_default if alias == "default" else on_lite).once
    key = new_key()
    assert post(path, {"amount": 5, "does": "fail_once"}, key=key).status_code == 500
    _make_due(alias)
    with monkeypatch.context() as patched:
        patched.setattr(once.threads, "_tenant", rejecting)
        assert worked(once)[1] == 1
    assert (len(world.charges), charges()) == (1, [""])
    assert post(path, {"amount": 5, "does": "fail_once"}, key=key).status_code == 201


def _make_due(alias: str) -> None:
    """As if the pause before a completer may take it up were over."""
    table, work = ("oncekey.record", "oncekey.work") if alias == "default" else ("oncekey_record", "oncekey_record")
    with connections[alias].cursor() as cursor:
        cursor.execute(f"UPDATE {work} SET reconcile_after = 0")
        cursor.execute(f"UPDATE {table} SET last_run_at = 0")
