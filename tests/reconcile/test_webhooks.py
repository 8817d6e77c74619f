"""Webhooks at the door of an application: who is believed, and what a message does, whenever it comes."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from frameworks.shop import new_key
from harness.asgi import Caller
from harness.patience import PATIENCE
from oncekey import INLINE, Once, Operation
from oncekey.core.errors import ConfigurationError, StoreUnavailableError
from oncekey.core.resolution import sign
from oncekey.core.resolvers import Executed, Rejected, Sighting, Undecided
from oncekey.workers.reconciler import Reconciler
from oncekey.workers.tasks import reconciler_of
from phased.bank import Call, paying

SECRET, NEXT = b"whsec_0123456789abcdef", b"whsec_fedcba9876543210"
NOW = 1_800_000_000


def parse(event):
    if event["type"] == "ping":
        return None
    charge = event["charge"]
    said = {
        "charge.succeeded": Executed({"id": charge["id"], **charge.get("more", {})}),
        "charge.pending": Undecided(),
    }.get(event["type"], Rejected({"why": "card"}))
    return Sighting(said, downstream_key=charge.get("downstream_key"), provider_id=charge["id"], event_id=event["id"])


def event_of(bank, kind="charge.succeeded", event_id="evt_1", **charge):
    (key,) = bank.provider.keys[-1:]
    return {"id": event_id, "type": kind, "charge": {"id": "ch_1", "downstream_key": key, **charge}}


async def post(process, event, *, secret=SECRET, at=NOW, signature=None, headers=None):
    body = event if isinstance(event, bytes) else json.dumps(event).encode()
    lines = [("Oncekey-Signature", signature or sign(body, secret, at))] if headers is None else headers
    return await Caller(process.app, "POST", "/hooks", headers=lines, body=body).run()


@asynccontextmanager
async def serving(bank, **options):
    async with bank.process(paying(repeatable=False), **options) as process:
        process.once.webhook(
            process.app, "/hooks", secret=[SECRET, NEXT], parse=parse, clock=lambda: NOW, max_body=10_000
        )
        yield process


@asynccontextmanager
async def doubted(bank):
    """A payment that was charged, and whose answer was lost."""
    async with serving(bank) as process:
        bank.provider.faults.append(TimeoutError())
        assert (await process.send()).status == 409
        assert bank.state == "unknown"
        assert (await process.send()).status == 409  # R139: nobody runs it again
        yield process


def evidence(bank):
    table = "oncekey_evidence" if "sqlite" in bank.database.url else "oncekey.evidence"
    return bank.database.execute(f"SELECT event_id, verdict FROM {table} ORDER BY id")


async def test_a_webhook_stores_the_result_and_a_retry_resumes(bank):  # R136, F22, F36, H5
    async with doubted(bank) as process:
        reply = await post(process, event_of(bank))
        assert (reply.status, reply.json()["detail"]) == (200, "Settled.")
        assert bank.state == "failed_retryable"
        retried = await process.send()
        assert (retried.status, retried.json()["paid"]) == (201, {"by": "ch_1"})
        assert (await process.send()).body == retried.body
    assert (bank.effects, bank.provider.charges) == (["order", "paid"], 1)  # the payment's row is settled, too


async def test_a_decline_by_webhook_is_stored_as_rejected(bank):  # R107
    async with doubted(bank) as process:
        assert (await post(process, event_of(bank, "charge.failed"))).status == 200
        record = await bank.record()
        assert record.memo[-1].result.startswith('{"$":"rejected"')


@pytest.mark.parametrize(
    "how",
    [
        {"secret": b"another secret 0000"},
        {"signature": "t=1,v1=00"},
        {"signature": f"t={NOW}"},
        {"headers": []},
        {"headers": [("Oncekey-Signature", "x"), ("Oncekey-Signature", "y")]},
        {"at": NOW - 301},
        {"at": NOW + 301},
    ],
    ids=["forged", "nonsense", "unsigned", "none", "two", "stale", "from the future"],
)
async def test_an_invalid_webhook_signature_returns_401(bank, how):  # R136
    async with doubted(bank) as process:
        assert (await post(process, event_of(bank), **how)).status == 401
        body = json.dumps(event_of(bank)).encode()
        other = body.replace(b"ch_1", b"ch_2")
        assert (await post(process, other, signature=sign(body, SECRET, NOW))).status == 401
        assert (bank.state, evidence(bank)) == ("unknown", [])


async def test_unreadable_and_unrelated_webhooks_change_nothing(bank):
    async with doubted(bank) as process:
        for body in (b"{", b"[]", b'"charge"', b'{"type": "charge.succeeded", "id": "e"}', b'{"type": 1, "charge": 2}'):
            assert (await post(process, body)).status == 400
        assert (await post(process, {"type": "ping"})).status == 200
        assert (await post(process, b" " * 10_001)).status == 413
        nameless = {"id": "e", "type": "charge.succeeded", "charge": {"id": ""}}
        assert (await post(process, nameless)).status == 422
        assert (await post(process, event_of(bank, event_id="e" * 600))).status == 422
        assert (bank.state, evidence(bank)) == ("unknown", [])


@pytest.mark.parametrize("wrong", ["\ud800", "a\0b", "\u20ac" * 200, 7, 0, 1.5, True, ["x"], [], {"x": 1}])
@pytest.mark.parametrize("place", ["event_id", "id", "downstream_key"])
async def test_non_text_webhook_fields_return_422(bank, place, wrong):
    async with doubted(bank) as process:
        assert (await post(process, event_of(bank, **{place: wrong}))).status == 422
        assert (bank.state, evidence(bank)) == ("unknown", [])


@pytest.mark.parametrize("wrong", ["\ud800", {"\ud800": 1}, float("nan")])
async def test_an_unstorable_webhook_result_returns_422(bank, wrong):
    async with doubted(bank) as process:
        assert (await post(process, event_of(bank, more={"x": wrong}))).status == 422
        assert (bank.state, evidence(bank)) == ("unknown", [])


async def test_both_webhook_secrets_are_accepted_during_rotation(bank):
    async with doubted(bank) as process:
        assert (await post(process, event_of(bank), secret=NEXT)).status == 200
        assert bank.state == "failed_retryable"


async def test_a_repeated_webhook_returns_200_and_changes_nothing(bank):  # R136
    async with doubted(bank) as process:
        for _ in range(3):
            assert (await post(process, event_of(bank))).status == 200
        assert evidence(bank) == [("evt_1", "settled")]
        version = (await bank.record()).version
        assert (await post(process, event_of(bank), at=NOW + 60)).status == 200
        assert (await bank.record()).version == version


async def test_a_reused_event_id_logs_an_error_and_applies_both(bank, caplog):
    async with doubted(bank) as process:
        assert (await post(process, event_of(bank, "charge.pending"))).json()["detail"] == "Kept."
        assert (await post(process, event_of(bank))).json()["detail"] == "Settled."
        assert (await post(process, event_of(bank))).json()["detail"] == "Known."
        assert bank.state == "failed_retryable"
    assert len([line for line in caplog.messages if "event id 'evt_1' for two different messages" in line]) == 1


async def test_a_webhook_name_belongs_to_one_secret(bank):
    async with serving(bank) as process:
        process.once.webhook(process.app, "/again", secret=[b"the next secret 123", NEXT], parse=parse)
        process.once.webhook(process.app, "/other", secret=b"another secret 0000", parse=parse, name="account-2")
        with pytest.raises(ConfigurationError, match="account-2"):
            process.once.webhook(process.app, "/third", secret=b"another secret 0000", parse=parse)


async def test_a_later_contradicting_webhook_never_overwrites(bank, caplog):  # U2
    async with doubted(bank) as process:
        await post(process, event_of(bank))
        assert (await process.send()).status == 201
        before = await bank.record()
        reply = await post(process, event_of(bank, "charge.failed", "evt_2"))
        assert (reply.status, reply.json()["detail"]) == (200, "Stored; it contradicts the record.")
        assert await bank.record() == before
    assert evidence(bank) == [("evt_1", "settled"), ("evt_2", "contradicts")]
    assert "contradicts" in caplog.text


async def test_an_early_webhook_is_compared_with_the_result(bank, caplog):  # U3, F36
    async with serving(bank) as process:
        await process.send_and_freeze("after charge")
        reply = await post(process, event_of(bank))
        assert (reply.json()["detail"], bank.state) == ("Kept.", "in_progress")
        assert (await post(process, event_of(bank, "charge.failed", "evt_2"))).json()["detail"] == "Kept."
        assert (await process.wake()).status == 201
        reconciler = reconciler_of(process.once)
        assert await reconciler.run_once() == 0
    assert evidence(bank) == [("evt_1", "agrees"), ("evt_2", "contradicts")]
    assert (reconciler.counts["contradictions"], "contradicts" in caplog.text) == (1, True)


async def test_an_early_webhook_is_applied_once_the_record_is_unknown(bank):  # U3, F36
    async with serving(bank) as dead, serving(bank) as process:
        await dead.send_and_freeze("after charge")
        assert (await post(process, event_of(bank))).json()["detail"] == "Kept."
        bank.lease_over()
        assert (await process.send()).status == 409  # row 15, by whoever comes
        assert bank.state == "unknown"
        assert await reconciler_of(process.once).run_once() == 1
        assert (await process.send()).status == 201
    assert (bank.effects, bank.provider.charges) == (["order", "paid"], 1)


async def test_a_provider_id_reported_earlier_identifies_the_call(bank):  # R136, F36
    async with serving(bank) as dead, serving(bank) as process:
        await dead.send_and_freeze("after charge")
        await post(process, event_of(bank, "charge.pending", "evt_0"))  # tells both names
        bank.lease_over()
        await process.send()
        reply = await post(process, event_of(bank, event_id="evt_1", downstream_key=None))
        assert reply.json()["detail"] == "Settled."
        assert (await process.send()).status == 201


async def test_a_webhook_settles_only_its_own_call(bank):
    def twice(op):
        yield Call(name="first", repeatable=False)
        yield Call(name="second", repeatable=False)
        return {}

    async with bank.process(twice) as process:
        process.once.webhook(process.app, "/hooks", secret=SECRET, parse=parse, clock=lambda: NOW)
        bank.provider.faults.extend([None, TimeoutError()])
        assert (await process.send()).status == 409
        first, second = bank.provider.keys
        assert (await post(process, event_of(bank, downstream_key=first))).json()["detail"] == "Known."
        assert bank.state == "unknown"
        told = await post(process, event_of(bank, event_id="evt_2", downstream_key=second))
        assert told.json()["detail"] == "Settled."


async def test_a_webhook_returns_503_during_an_outage(bank, monkeypatch):
    async with doubted(bank) as process:
        driver = process.once.asynchronous().driver

        async def away(_):
            raise StoreUnavailableError("away")

        with monkeypatch.context() as patch:
            patch.setattr(type(driver), "run", lambda _, transaction: away(transaction))
            assert (await post(process, event_of(bank))).status == 503
        assert (await post(process, event_of(bank))).status == 200
        assert bank.state == "failed_retryable"


async def test_a_short_webhook_secret_is_rejected(bank):
    async with bank.process() as process:
        for secret in ("", "short", [], [SECRET, b"short"]):
            with pytest.raises(ConfigurationError):
                process.once.webhook(process.app, "/hooks", secret=secret, parse=parse)


async def test_adding_a_webhook_enables_the_reconciler(bank):
    async with bank.process() as process:
        assert not process.once.reconciles
        process.once.webhook(process.app, "/hooks", secret=SECRET, parse=parse)
        assert process.once.reconciles
        assert isinstance(reconciler_of(process.once), Reconciler)


@asynccontextmanager
async def inline_bank(bank):
    """A process whose INLINE handler asks the provider, and whose resolver names its call."""
    once = Once(bank.database.url, migrate=True)
    app = FastAPI(lifespan=once.lifespan)
    once.install(app, tenant=lambda _: "acme")
    once.webhook(app, "/hooks", secret=SECRET, parse=parse, clock=lambda: NOW)
    process = Serving(once, app)

    @once.resolver("charge_card", call="charge")
    async def ask(_):
        return Undecided()

    @app.post("/charges")
    @once.protect(effects=INLINE, operation="charge_card")
    async def charge(op: Operation, answer: int) -> JSONResponse:
        process.keys.append(op.downstream_key("charge"))
        for happen in process.meanwhile:
            await happen(process.keys[-1])
        return JSONResponse({"status": answer}, answer)

    async with once.lifespan(app):
        yield process


@dataclass
class Serving:
    once: Once
    app: FastAPI
    keys: list[str] = field(default_factory=list)
    meanwhile: list[Any] = field(default_factory=list)

    async def charge(self, answer):
        headers = [("Idempotency-Key", new_key())]
        reply = await Caller(self.app, "POST", f"/charges?answer={answer}", headers=headers).run()
        (installation,) = self.once._installed.values()
        assert await installation.running_work.wait(PATIENCE)
        return reply


def event_about(key, kind):
    return {"id": f"evt_{key}", "type": kind, "charge": {"id": f"ch_{key}", "downstream_key": key}}


SAID = {"contradicts": "Stored; it contradicts the record.", "agrees": "Known."}


@pytest.mark.parametrize(
    ("answer", "kind", "verdict"),
    [
        (402, "charge.succeeded", "contradicts"),
        (201, "charge.failed", "contradicts"),
        (201, "charge.succeeded", "agrees"),
    ],
)
async def test_an_inline_response_is_compared_with_a_webhook(bank, caplog, answer, kind, verdict):  # R136, U3
    async with inline_bank(bank) as process:
        assert (await process.charge(answer)).status == answer
        reply = await post(process, event_about(process.keys[0], kind))
        assert (reply.status, reply.json()["detail"]) == (200, SAID[verdict])
        alarms = [line for line in caplog.messages if "contradicts the record" in line]
        assert len(alarms) == (verdict == "contradicts")
    assert [found for _, found in evidence(bank)] == [verdict]


async def test_a_webhook_during_an_inline_handler_is_compared_later(bank, caplog):  # U3
    async with inline_bank(bank) as process:
        process.meanwhile.append(lambda key: post(process, event_about(key, "charge.succeeded")))
        await process.charge(402)
        assert [found for _, found in evidence(bank)] == [None]
        await reconciler_of(process.once).run_once()
        assert [line for line in caplog.messages if "contradicts the stored outcome of 'charge'" in line]
    assert [found for _, found in evidence(bank)] == ["contradicts"]


async def test_a_verify_function_may_replace_the_secret(bank):
    seen = []

    def verify(headers, body):
        seen.append((headers["x-own"], body))
        if headers["x-own"] == "broken":
            raise KeyError("signature")
        return "yes" if headers["x-own"] == "truthy" else headers["x-own"] == "genuine, genuine"

    async with bank.process(paying(repeatable=False)) as process:
        process.once.webhook(process.app, "/hooks", verify=verify, parse=parse)
        bank.provider.faults.append(TimeoutError())
        assert (await process.send()).status == 409
        body = json.dumps(event_of(bank)).encode()
        for own in ("forged", "broken", "truthy"):
            assert (await post(process, body, headers=[("X-Own", own)])).status == 401
        assert (await post(process, body, headers=[])).status == 401
        assert bank.state == "unknown"
        reply = await post(process, body, headers=[("X-Own", "genuine"), ("x-own", "genuine")])
        assert (reply.status, reply.json()["detail"]) == (200, "Settled.")
    assert seen[-1] == ("genuine, genuine", body)


@pytest.mark.parametrize("given", [{}, {"secret": []}, {"secret": SECRET, "verify": lambda headers, body: True}])
async def test_a_webhook_requires_a_secret_or_a_verify_function(bank, given):
    async with bank.process() as process:
        for make in (process.once.webhook_asgi, process.once.webhook_wsgi):
            with pytest.raises(ConfigurationError):
                make(parse=parse, **given)
        assert not process.once.reconciles
