"""Webhooks at the door of a WSGI application: the same rules as under ASGI, by the letter of PEP 3333."""

from __future__ import annotations

import io
import json
from contextlib import asynccontextmanager
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

import psycopg
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from oncekey.core.errors import ConfigurationError, StoreUnavailableError
from oncekey.core.resolution import sign
from oncekey.once import Once
from phased.bank import paying
from phased.conftest import make_bank
from reconcile.test_webhooks import (
    NEXT,
    NOW,
    SECRET,
    event_of,
    evidence,
    parse,
)


@pytest.fixture(params=["sqlite", "psycopg"])
def bank(request, tmp_path):
    """An application with a blocking handler."""
    made = make_bank(request, tmp_path, request.param, blocking=True)
    if request.param == "psycopg":
        with psycopg.connect(made.database.dsn, autocommit=True) as connection:
            connection.execute("TRUNCATE oncekey.call, oncekey.evidence, oncekey.audit")
    return made


@asynccontextmanager
async def doubted(bank):
    """A payment that was charged, and whose answer was lost; and the webhook that hears of it."""
    async with bank.process(paying(repeatable=False)) as process:
        bank.provider.faults.append(TimeoutError())
        assert (await process.send()).status == 409
        hook = process.once.webhook_wsgi(secret=[SECRET, NEXT], parse=parse, clock=lambda: NOW, max_body=10_000)
        yield process, hook


class Unread(io.BytesIO):
    """A body that nobody may read."""

    def read(self, *_):
        raise AssertionError("it was read")


def post(hook, event, *, secret=SECRET, at=NOW, signature=None, method="POST", stream=None, **environ):
    """What a server does with one request; the validator complains about every breach of the protocol."""
    body = event if isinstance(event, bytes) else json.dumps(event).encode()
    environ = {"CONTENT_LENGTH": str(len(body)), "QUERY_STRING": "", **environ, "REQUEST_METHOD": method}
    environ = {name: value for name, value in environ.items() if value is not None}
    environ["wsgi.input"] = stream or io.BytesIO(body)
    if signature != "":
        environ["HTTP_ONCEKEY_SIGNATURE"] = signature or sign(body, secret, at)
    setup_testing_defaults(environ)
    begun = []
    answer = validator(hook)(environ, lambda status, headers, _=None: begun.append((status, dict(headers))))
    try:
        content = b"".join(answer)
    finally:
        answer.close()
    ((status, headers),) = begun
    assert method == "HEAD" or headers["Content-Length"] == str(len(content))
    return int(status[:3]), json.loads(content)["detail"] if content else None


async def test_a_wsgi_webhook_stores_the_result_and_a_retry_resumes(bank):  # R136, F22, F36
    async with doubted(bank) as (process, hook):
        assert post(hook, event_of(bank)) == (200, "Settled.")
        assert bank.state == "failed_retryable"
        retried = await process.send()
        assert (retried.status, retried.json()["paid"]) == (201, {"by": "ch_1"})
        assert process.once.reconciles
    assert (bank.effects, bank.provider.charges) == (["order", "paid"], 1)


@pytest.mark.parametrize(
    "how",
    [
        {"secret": b"another secret 0000"},
        {"signature": "t=1,v1=00"},
        {"signature": ""},
        {"at": NOW - 301},
        {"at": NOW + 301},
        {"CONTENT_LENGTH": None},
        {"CONTENT_LENGTH": "3"},
    ],
    ids=["forged", "nonsense", "none", "stale", "from the future", "no length", "cut off"],
)
async def test_an_invalid_wsgi_webhook_signature_returns_401(bank, how):  # R136
    async with doubted(bank) as (_, hook):
        assert post(hook, event_of(bank), **how)[0] == 401
        body = json.dumps(event_of(bank)).encode()
        twice = f"{sign(body, SECRET, NOW)},{sign(body, SECRET, NOW)}"  # as a server joins two lines
        assert post(hook, body, signature=twice)[0] == 401
        assert post(hook, body.replace(b"ch_1", b"ch_2"), signature=sign(body, SECRET, NOW))[0] == 401
        assert (bank.state, evidence(bank)) == ("unknown", [])


async def test_a_repeated_wsgi_webhook_changes_nothing(bank):  # R136
    async with doubted(bank) as (_, hook):
        told = [post(hook, event_of(bank), secret=secret) for secret in (SECRET, NEXT, SECRET)]
        assert told == [(200, "Settled."), (200, "Known."), (200, "Known.")]
        version = (await bank.record()).version
        assert post(hook, event_of(bank), at=NOW + 60) == (200, "Known.")
        assert ((await bank.record()).version, evidence(bank)) == (version, [("evt_1", "settled")])


async def test_an_oversized_wsgi_webhook_is_not_read(bank):
    async with doubted(bank) as (_, hook):
        assert post(hook, b"", CONTENT_LENGTH="10001", stream=Unread())[0] == 413
        assert post(hook, b"", CONTENT_LENGTH="9" * 4000, stream=Unread())[0] == 413
        chunked = {"CONTENT_LENGTH": None, "wsgi.input_terminated": True}
        assert post(hook, b" " * 10_001, **chunked)[0] == 413
        assert (bank.state, evidence(bank)) == ("unknown", [])
        assert post(hook, event_of(bank), **chunked) == (200, "Settled.")


async def test_unreadable_and_unrelated_wsgi_webhooks_change_nothing(bank):
    async with doubted(bank) as (_, hook):
        assert post(hook, b"{")[0] == 400
        assert post(hook, {"type": "ping"}) == (200, "Not about a call.")
        assert post(hook, event_of(bank, event_id="e" * 600))[0] == 422
        assert post(hook, event_of(bank), method="GET") == (405, "Send webhooks with POST.")
        assert post(hook, event_of(bank), method="HEAD") == (405, None)
        assert (bank.state, evidence(bank)) == ("unknown", [])


async def test_a_wsgi_webhook_returns_503_during_an_outage(bank, monkeypatch):
    async with doubted(bank) as (process, hook):

        def away(*_):
            raise StoreUnavailableError("away")

        with monkeypatch.context() as patch:
            patch.setattr(type(process.once.blocking().driver), "run", away)
            assert post(hook, event_of(bank))[0] == 503
        assert post(hook, event_of(bank)) == (200, "Settled.")


async def test_a_short_wsgi_webhook_secret_is_rejected(bank):
    async with bank.process() as process:
        with pytest.raises(ConfigurationError):
            process.once.webhook_wsgi(secret="short", parse=parse)
        assert not process.once.reconciles


def test_webhook_wsgi_rejects_an_async_engine():
    engine = create_async_engine("postgresql+asyncpg://localhost/none")
    with pytest.raises(ConfigurationError, match="webhook_wsgi"):
        Once(engine).webhook_wsgi(secret=SECRET, parse=parse)
