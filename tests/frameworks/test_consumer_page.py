"""The page for API consumers: what it says follows the settings of each route."""

from __future__ import annotations

import html
import re
from typing import Any

import flask
import pytest
from fastapi import FastAPI

from harness.asgi import Caller
from oncekey import INLINE, OUTBOX, SINGLE_TENANT, Once, Operation, Policy, SyncOperation
from oncekey.core.model import Code
from oncekey.core.problems import PROBLEMS
from oncekey.frameworks.consumer_page import documentation, page

TAG = re.compile(r"<[^>]+>")


def an_api(**policy: Any) -> FastAPI:
    once, app = Once("sqlite:///unused.db", policy=Policy(**policy)), FastAPI()
    once.install(app, tenant=SINGLE_TENANT)

    @app.post("/payments")
    @once.protect(effects=INLINE, ttl=72 * 3600, key_format="uuid")
    async def pay(body: dict[str, Any]) -> dict[str, Any]:
        return body

    @app.patch("/notes/{number}")
    @once.protect(effects=INLINE, require_key=False, on_in_progress="wait", wait_max=5)
    async def note(number: int) -> int:
        return number

    @app.post("/transfers", status_code=202)
    @once.protect(effects=OUTBOX)
    async def transfer(op: Operation) -> None:
        op.defer("transfer", {})

    return app


def text_of(source: str) -> str:
    return " ".join(html.unescape(TAG.sub(" ", re.sub(r"<style>.*?</style>", "", source, flags=re.DOTALL))).split())


def rows(source: str) -> dict[str, str]:
    """The rows of tables by the text of their first cell."""
    found = re.findall(r"<tr><td>(.*?)</td>(.*?)</tr>", source, re.DOTALL)
    return {text_of(name): text_of(rest) for name, rest in found}


async def shown(app: FastAPI) -> str:
    reply = await Caller(app, "GET", "/idempotency").run()
    assert (reply.status, reply.header("content-type")) == (200, "text/html; charset=utf-8")
    return reply.body.decode()


async def test_each_route_has_its_own_settings() -> None:
    # R274, R230
    found = rows(await shown(an_api()))
    assert found["POST /payments"].startswith("required, a UUID, with or without double quotes")
    assert "3 days 409 with Retry-After" in found["POST /payments"]
    assert found["PATCH /notes/{number}"].startswith("optional, 16 to 255 characters")
    assert "24 hours the first request's response, for up to 5 seconds; then 409" in found["PATCH /notes/{number}"]
    assert "202 with Location" in found["POST /transfers"]


async def test_the_page_describes_the_status_resource_and_4xx_retries() -> None:
    # R274, R219
    source = await shown(an_api())
    assert "GET /idempotency-keys/{key} returns the state" in text_of(source)
    assert set(rows(source)) >= {"pending", "in_progress", "completed", "failed_retryable", "unknown"}
    assert rows(source)["other 4xx"] == "do not retry: fix the request and send it with a new key"
    assert "Keys are valid for 24 hours unless listed otherwise below." in text_of(source)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({}, "a request with it is a new request, and is executed again"),
        ({"on_expired": "gone"}, "A request with an expired key receives 410, and nothing is executed"),
        ({"max_request_age": 7200}, "Idempotency-First-Sent is more than 2 hours ago receives 412"),
    ],
)
async def test_the_page_describes_requests_with_expired_keys(policy: dict[str, Any], words: str) -> None:
    # R274
    assert words in text_of(await shown(an_api(**policy)))


def test_the_page_omits_a_disabled_status_resource() -> None:
    assert "idempotency-keys" not in page(Policy(), {}, None)


def test_the_page_lists_problem_statuses_by_route_policy() -> None:
    # R230: of Stripe's flavour, too
    once = Once("sqlite:///unused.db", policy=Policy(flavor="stripe", on_unknown=202))
    app = flask.Flask("api")

    @app.post("/orders")
    @once.protect(effects=INLINE, on_in_progress="accepted")
    def order(op: SyncOperation[Any]) -> dict[str, str]:
        return {}

    once.wsgi(app, tenant=SINGLE_TENANT)
    source = documentation(once.served[app]).body.decode()
    headings = dict(re.findall(r'<h3 id="([a-z-]+)">(.*?) <code>', source))
    assert set(headings) == {problem.slug for problem in PROBLEMS.values()}
    assert headings[PROBLEMS[Code.KEY_REUSED].slug] == "400"
    assert headings[PROBLEMS[Code.IN_PROGRESS].slug] == "202"
    assert headings[PROBLEMS[Code.OUTCOME_UNKNOWN].slug] == "202 or 503"
    assert "POST /orders" in rows(source)
