"""Content is sealed where rows are encoded: on every store, of whatever kind it is, and in the bytes it always had."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from uuid import UUID

import pytest

from oncekey.core.envelopes import disclose
from oncekey.core.flow import Mode, Transaction, adrive
from oncekey.core.memo import not_sent, rejected
from oncekey.core.model import (
    Completed,
    Effects,
    EntryKind,
    Lease,
    MemoEntry,
    Outcome,
    Parcel,
    ParcelKind,
    RecordId,
    Recovery,
    StoredResponse,
)
from oncekey.core.resolution import CallReport
from oncekey.engine import migrating
from oncekey.stores.rows import claim_params, memo_text, owner_proof, parcels_text, response_params
from oncekey.stores.sealed_content import SealedContent
from oncekey.testing.claims import a_claim
from oncekey.wire import aconnect, sealing
from sealing.looking import K1
from sealing.shop import MARK

BEFORE = json.loads((Path(__file__).parent / "stored_before.json").read_text())
"""What was written when sealing still was a store around a store, under the key of `BEFORE_SEAL`."""
BEFORE_SEAL = type(K1)({"k1": bytes(range(32))}, current="k1")
CLAIM = replace(
    a_claim(effects=Effects.PHASED, recovery=Recovery.RESUME),
    id=RecordId("acme", "golden-0000000000000000"),
    incarnation=UUID(int=7),
    fingerprint="f" * 64,
    request=b'0{"name":"Ada"}',
)
ANSWER = StoredResponse(201, ((b"content-type", b"application/json"), (b"location", b"/orders/7")), b'{"name":"Ada"}')
MEMO = (
    MemoEntry("first", EntryKind.PHASE, '{"name":"Ada"}'),
    rejected(MemoEntry("charge", EntryKind.CALL, '{"why":"Ada"}')),
    not_sent("later"),
)
PARCEL = Parcel(
    id=UUID(int=8),
    kind=ParcelKind.EMIT,
    record_id=CLAIM.id,
    incarnation=CLAIM.incarnation,
    topic="orders",
    payload='{"name":"Ada"}',
    downstream_key="d",
    position=0,
    order_by=None,
)
REPORT = CallReport("stripe", "evt_1", '{"name":"Ada"}', "d", None)


class Annotated(Completed):
    """A settlement of a kind that no part of oncekey lists."""


@asynccontextmanager
async def sealed(url, seal):
    """A sealed store, the same store as an application without a seal has it, and what runs the flows of both."""
    engine = sealing(aconnect(url), seal)
    try:
        run = partial(adrive, run=engine.driver.run)
        await run(migrating.up(engine.store.schema))
        yield engine.store, type(engine.store)(), run
    finally:
        await engine.close()


def saying(store, name, params):
    def body():
        return (yield store._statements.statement(name, params))

    return lambda: (yield Transaction(name, Mode.SINGLE, body))


async def test_unlisted_kind_of_content_is_sealed(any_url):
    async with sealed(any_url, K1) as (store, plain, run):
        claim = a_claim(effects=Effects.INLINE)
        lease = Lease.of((await run(store.claim(claim))).record)
        answer = StoredResponse(200, ((b"x-name", MARK.encode()),), MARK.encode())
        settled = await run(store.settle(lease, Annotated(answer, Outcome.SUCCESS)))
        assert (settled.ours, settled.snapshot.record.response) == (True, answer)
        stored = (await run(plain.find(claim.id))).record.response
        assert disclose(stored.body)[0] == "k1"
        assert MARK.encode() not in stored.body + b"".join(value for _, value in stored.headers)


@pytest.mark.parametrize(
    "content",
    [{"response_body": MARK.encode()}, {"response_headers": f'[["x-name", "{MARK}"]]'}, {"remark": MARK}],
    ids=lambda content: next(iter(content)),
)
async def test_a_statement_that_would_store_content_in_clear_is_refused(any_url, content):
    async with sealed(any_url, K1) as (store, plain, run):
        claim = a_claim(effects=Effects.INLINE)
        lease = Lease.of((await run(store.claim(claim))).record)
        closed = response_params(StoredResponse(200, (), b""), lease, SealedContent(K1))
        params = {**owner_proof(lease), "outcome": "success", **closed, **content}
        with pytest.raises(TypeError, match="neither sealed nor listed as readable"):
            await run(saying(store, "settle_completed", params)())
        assert (await run(plain.find(claim.id))).record.response is None


async def test_content_sealed_by_an_older_version_stays_readable(any_url):
    async with sealed(any_url, BEFORE_SEAL) as (store, plain, run):
        before = replace(CLAIM, request=BEFORE["request"].encode("latin-1"))
        lease = Lease.of((await run(plain.claim(before))).record)
        params = {
            **owner_proof(lease),
            "seen_memo": None,
            "memo": BEFORE["memo"],
            "recovery_point": "later",
            "lease": 1,
        }
        assert await run(saying(plain, "checkpoint", params)())
        begun = (await run(store.find(CLAIM.id))).record
        assert (begun.request, begun.memo) == (CLAIM.request, MEMO)
        # An owner compares the memo that it read byte by byte with the stored one.
        more = (*begun.memo, MemoEntry("second", EntryKind.PHASE, "1"))
        step = Transaction("step", Mode.SINGLE, partial(store.phases.checkpointing, lease, begun.memo, more, 1_000_000))
        assert (await run(one(step))).record.memo == more
        params = {**owner_proof(lease), "outcome": "success", **BEFORE["answer"]}
        params["response_body"] = params["response_body"].encode("latin-1")
        assert await run(saying(plain, "settle_completed", params)())
        assert (await run(store.find(CLAIM.id))).record.response == ANSWER
        assert (await run(store.recall(CLAIM.id))).finished.response == ANSWER
        if store.outbox is not None:
            put = partial(plain.parcels.putting, (replace(PARCEL, payload=BEFORE["payload"]),))
            await run(one(Transaction("put", Mode.SINGLE, put)))
            (held,) = await run(store.outbox.due("worker", ("orders",), 1, 1_000_000))
            assert held.parcel == PARCEL
        if store.reconcile is not None:
            await run(plain.reconcile.add(replace(REPORT, resolution=BEFORE["evidence"])))
            assert [one.report for one in await run(store.reconcile.undecided(9))] == [REPORT]


def one(transaction):
    return (yield transaction)


def test_sealed_bytes_have_not_changed():
    content = SealedContent(BEFORE_SEAL)
    for stored, response in (("answer", ANSWER), ("empty", StoredResponse(204, (), None))):
        params = response_params(response, CLAIM, content)
        assert {**params, "response_body": params["response_body"].decode("latin-1")} == BEFORE[stored]
    assert memo_text(MEMO, CLAIM, content) == BEFORE["memo"]
    assert claim_params(CLAIM, content)["request"].decode("latin-1") == BEFORE["request"]
    assert content.closed_accepted(CLAIM.request, CLAIM).decode("latin-1") == BEFORE["accepted"]
    assert json.loads(parcels_text((PARCEL,), content))[0]["payload"] == BEFORE["payload"]
    assert content.closed_report(REPORT) == BEFORE["evidence"]
