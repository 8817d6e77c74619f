"""Django's own `TestCase`, whose transaction all of a test is in (pitfall 16)."""

from __future__ import annotations

import io
import unittest
from typing import Any

import pytest

from django_shop.asking import new_key, post, replayed, sold, stored


def run(body: Any, alias: str) -> unittest.TestResult:
    """Run a test as a test runner of Django's does."""
    from django.test import TestCase

    case: Any = type("Case", (TestCase,), {"test": lambda self: body(self), "databases": {alias}})
    result = unittest.TestResult()
    unittest.TestSuite([case("test")]).run(result)
    return result


def outcome(result: unittest.TestResult) -> list[str]:
    return [text for _, text in (*result.errors, *result.failures)]


@pytest.mark.parametrize("path", ["/orders", "/rest/bookings", "/payments"])
def test_replays_work_inside_a_django_testcase(alias: str, path: str) -> None:
    seen: list[Any] = []

    def body(case: Any) -> None:
        key = new_key()
        asked = {"amount": 5} if path == "/payments" else {"item": "tea"}
        first, again = post(path, asked, key=key), post(path, asked, key=key)
        other = post(path, {"item": "milk", "amount": 6}, key=key)
        seen.append((first.status_code, again.content == first.content, replayed(again), other.status_code))

    assert outcome(run(body, alias)) == []
    assert seen == [(201, True, True, 422)]
    assert (sold(), stored(alias)) == ([], 0)


def test_a_worker_does_not_see_the_rows_of_a_testcase(postgres: str) -> None:
    from django.core.management import call_command

    out = io.StringIO()

    def body(case: Any) -> None:
        assert post("/shipments", key=new_key()).status_code == 202
        call_command("oncekey", "worker", "--once", stdout=out)

    assert outcome(run(body, postgres)) == []
    assert out.getvalue().splitlines()[-1] == "0 done"


def test_on_commit_hooks_are_captured_in_a_testcase(alias: str) -> None:
    from django_shop.site import world

    seen: list[Any] = []

    def body(case: Any) -> None:
        with case.captureOnCommitCallbacks(using=alias) as hooks:
            post("/orders", {"item": "tea", "does": "hook"})
        seen.append((len(hooks), list(world.hooks)))

    assert outcome(run(body, alias)) == []
    assert seen == [(1, [])]


def test_rollbacks_work_inside_a_django_testcase(alias: str) -> None:
    seen: list[Any] = []

    def body(case: Any) -> None:
        kept = post("/orders", {"item": "kept"}).status_code
        raised = post("/orders", {"item": "lost", "does": "missing"}).status_code
        undone = post("/orders", {"item": "lost", "does": "set_rollback"}).status_code
        seen.append((kept, raised, undone, sold()))

    assert outcome(run(body, alias)) == []
    assert seen == [(201, 404, 500, ["kept"])]


def test_atomic_requests_work_inside_a_testcase(postgres: str) -> None:
    from django.db import connections

    seen: list[Any] = []

    def body(case: Any) -> None:
        key = new_key()
        seen.extend((post("/rest/orders/", key=key).status_code, replayed(post("/rest/orders/", key=key))))

    connections.settings[postgres]["ATOMIC_REQUESTS"] = True
    assert outcome(run(body, postgres)) == []
    assert seen == [201, True]
