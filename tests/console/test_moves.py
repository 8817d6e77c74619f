"""Moves by hand: said beforehand, confirmed, done by the engine, and audited with the operator's name."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import pytest

from console.trouble import ACME, INLINE_KEY, OUTBOX_KEY, PHASED_KEY, ZETA, fill, opened, put
from console.visiting import Visitor, console_on, said
from harness import flows
from oncekey.console.dossier import token_of
from oncekey.core.deferred import DEAD_LETTER
from oncekey.core.model import (
    HOUR,
    MINUTE,
    Effects,
    Outcome,
    ParcelKind,
    RecordId,
    State,
    StoredResponse,
)
from oncekey.core.transitions import Actor, Trigger
from oncekey.engine.operation import Operation
from oncekey.observe import Operated
from oncekey.once import Once
from outbox.sending import Post

INLINE, PHASED, OUTBOX = RecordId(ACME, INLINE_KEY), RecordId(ACME, PHASED_KEY), RecordId(ZETA, OUTBOX_KEY)
WHY = "seen at the provider as ch_1"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'shop.db'}"
    return request.getfixturevalue("empty_dsn")


@pytest.fixture
def world(url):
    with opened(url) as world:
        fill(world, finished=2)
        yield world


class Desk:
    """Ann at her desk."""

    def __init__(self, visitor, world):
        self.visitor, self.world = visitor, world

    def page(self, record_id):
        return f"record/{token_of(record_id)}"

    def notes(self, record_id):
        entries = self.world.go(self.world.store.audit.history(record_id))
        return [(one.note.trigger, one.note.who, one.note.why) for one in entries if one.note.actor is Actor.OPERATOR]

    def letter(self, kind):
        letters = self.world.go(self.world.store.outbox.dead_letters(50))
        return next(one.parcel for one in letters if one.parcel.kind is kind)

    async def do(self, path, **fields):
        """Fill in the form, read what will happen, and confirm it with what the second page carries."""
        form = await self.visitor.get(path)
        assert form.status_code == 200, said(form)
        version = re.search(r'name="version" value="(\d*)"', form.text)
        preview = await self.visitor.post(path, version=version[1], **fields)
        assert preview.status_code == 200, said(preview)
        assert "This will happen" in said(preview)
        carried = dict(
            re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', preview.text.partition('id="confirm"')[2])
        )
        carried = {name: value.replace("&#34;", '"').replace("&#39;", "'") for name, value in carried.items()}
        done = await self.visitor.post(path, **carried)
        assert done.status_code == 303, said(done)
        return said(preview), done.headers["location"].lstrip("/")


@pytest.fixture
def at_desk(url, world):
    async def working(body):
        async with Visitor(console_on(url)) as visitor:
            await visitor.log_in()
            await body(Desk(visitor, world))

    return working


async def test_operator_stores_a_response_for_an_unknown_inline_request(at_desk, world):
    async def body(ann):
        assert "The next retry gets the response that you enter, such as 201." in said(
            await ann.visitor.get(f"{ann.page(INLINE)}/move/executed")
        )
        preview, there = await ann.do(
            f"{ann.page(INLINE)}/move/executed",
            status="201",
            body='{"id": "pay_1"}',
            content_type="application/json",
            reason=WHY,
        )
        assert "unknown → completed" in preview
        assert "A retry receives the stored response (201). Nothing is executed." in preview
        assert "Done. The timeline has the audit line." in said(await ann.visitor.get(there))
        assert f"resolved: executed unknown → completed {WHY} by ann" in said(await ann.visitor.get(there))
        assert ann.notes(INLINE) == [(Trigger.EXECUTED, "ann", WHY)]

    await at_desk(body)
    record = world.record(INLINE)
    assert (record.state, record.outcome) == (State.COMPLETED, Outcome.SUCCESS)
    assert record.response == StoredResponse(201, ((b"content-type", b"application/json"),), b'{"id": "pay_1"}')


async def test_observers_receive_an_event_for_an_operator_action(url, world):
    events = []
    once = Once(url, observers=[events.append])
    async with once.lifespan(), Visitor(console_on(once)) as visitor:
        await visitor.log_in()
        path = f"record/{token_of(INLINE)}/move/executed"
        await Desk(visitor, world).do(path, status="201", body="{}", content_type="application/json", reason=WHY)
    moved = [event for event in events if isinstance(event, Operated)]
    assert [(event.trigger, event.to, event.who) for event in moved] == [(Trigger.EXECUTED, State.COMPLETED, "ann")]


async def test_confirming_a_decline_stores_a_failure(at_desk, world):
    async def body(ann):
        _, there = await ann.do(f"{ann.page(INLINE)}/move/declined", status="402", body="", reason=WHY)
        assert f"resolved: declined unknown → completed {WHY} by ann" in said(await ann.visitor.get(there))
        assert "resolved: declined" in said(await ann.visitor.get("audit"))
        assert ann.notes(INLINE) == [(Trigger.DECLINED, "ann", WHY)]

    await at_desk(body)
    record = world.record(INLINE)
    assert (record.outcome, record.response) == (Outcome.FAILURE, StoredResponse(402, (), b""))


async def test_the_result_of_a_phased_call_is_given_and_replaced(at_desk, world):
    async def body(ann):
        preview, _ = await ann.do(f"{ann.page(PHASED)}/move/executed", result='{"charge": "ch_1"}', reason=WHY)
        assert "after the step 'charge_created'; finished steps are not repeated" in preview
        record = world.record(PHASED)
        assert (record.state, record.memo[-1].by_hand) == (State.FAILED_RETRYABLE, True)
        assert json.loads(record.memo[-1].result) == {"charge": "ch_1"}
        again = said(await ann.visitor.get(ann.page(PHASED)))
        assert "Replace the result of charge_created The result that was entered by hand was wrong." in again
        await ann.do(f"{ann.page(PHASED)}/move/executed", result='{"charge": "ch_2"}', reason="a slip")
        assert json.loads(world.record(PHASED).memo[-1].result) == {"charge": "ch_2"}
        assert ann.notes(PHASED) == [(Trigger.EXECUTED, "ann", WHY), (Trigger.REPLACE, "ann", "a slip")]

    await at_desk(body)


async def test_not_executed_requires_that_the_call_can_no_longer_arrive(at_desk, world):
    put(
        world,
        State.UNKNOWN,
        Effects.INLINE,
        "fresh",
        last_error="handler_raised",
        at=0,
        deadline=world.clock.now + HOUR,
    )
    fresh = RecordId(ACME, "fresh")

    async def body(ann):
        path = f"{ann.page(fresh)}/move/not-executed"
        await ann.visitor.get(path)
        early = await ann.visitor.post(path, reason=WHY)
        assert early.status_code == 422
        assert "a call may still be under way" in said(early)
        preview, _ = await ann.do(path, closed="yes", reason=WHY)
        assert "A retry executes the operation, from the beginning." in preview
        assert ann.notes(fresh) == [(Trigger.NOT_EXECUTED, "ann", f"{WHY} (the reference was closed at the provider)")]

    await at_desk(body)
    assert world.record(fresh).state is State.FAILED_RETRYABLE


async def test_a_stuck_record_is_released(at_desk, world):
    stuck = RecordId(ACME, "checkout-7701")

    async def body(ann):
        await ann.do(f"{ann.page(stuck)}/move/release", reason="web-1 is gone")
        assert ann.notes(stuck) == [(Trigger.SWEEP, "ann", "web-1 is gone")]

    await at_desk(body)
    assert world.record(stuck).state is State.FAILED_RETRYABLE


async def test_operator_busts_a_stored_failure(at_desk, world):
    put(
        world, State.COMPLETED, Effects.LOCAL, "refused", outcome=Outcome.FAILURE,
        response=StoredResponse(422, (), b"{}"),
    )  # fmt: skip
    refused = RecordId(ACME, "refused")

    async def body(ann):
        await ann.do(f"{ann.page(refused)}/move/bust", reason="the rule was wrong")

    await at_desk(body)
    assert (world.record(refused).state, world.record(refused).response) == (State.FAILED_RETRYABLE, None)


async def test_bust_clears_the_replay_cache_before_the_store(url, world, monkeypatch):
    put(
        world, State.COMPLETED, Effects.LOCAL, "refused", outcome=Outcome.FAILURE,
        response=StoredResponse(422, (), b"{}"),
    )  # fmt: skip
    refused, once, told = RecordId(ACME, "refused"), Once(url), []
    forget = once.forget

    async def heard(record_id):
        told.append((record_id, world.record(refused).state))
        return await forget(record_id)

    monkeypatch.setattr(once, "forget", heard)
    async with once.lifespan(), Visitor(console_on(once)) as visitor:
        await visitor.log_in()
        await Desk(visitor, world).do(f"record/{token_of(refused)}/move/bust", reason="the rule was wrong")
    assert told == [(refused, State.COMPLETED)]


async def test_retrying_a_deferred_call_makes_its_record_pending(at_desk, world):
    async def body(ann):
        letter = ann.letter(ParcelKind.DEFER)
        preview, there = await ann.do(f"letter/{letter.id}/move/retry", reason="the provider is back")
        assert "unknown → pending" in preview
        assert there.startswith(ann.page(OUTBOX))
        assert world.go(flows.find_parcel(world.store.outbox, letter.id)) is not None
        assert ann.notes(OUTBOX) == [(Trigger.DLQ_RETRY, "ann", "the provider is back")]

    await at_desk(body)
    assert world.record(OUTBOX).state is State.PENDING


@pytest.mark.parametrize("own", [False, True], ids=["usual answer", "own answer"])
async def test_discarding_a_deferred_call_stores_a_response(at_desk, world, own):
    answer = {"status": "409", "body": '{"no": 1}', "content_type": "application/json"} if own else {}

    async def body(ann):
        letter = ann.letter(ParcelKind.DEFER)
        _, there = await ann.do(f"letter/{letter.id}/move/discard", reason="cancelled", **answer)
        page = said(await ann.visitor.get(there))
        assert "dead letter discarded unknown → completed cancelled by ann" in page
        assert "Nothing. To try again, the client sends a new key." in page
        assert world.go(world.store.outbox.find_dead_letter(letter.id)) is None

    await at_desk(body)
    record = world.record(OUTBOX)
    assert (record.outcome, record.response.status) == (Outcome.FAILURE, 409 if own else 500)
    if not own:
        assert json.loads(record.response.body)["retryable"] is False


async def test_a_call_that_was_sent_again_shows_its_earlier_sends(at_desk, world):
    world.clock.now -= HOUR
    post = Post(world)
    parcel = post.deferred()

    def dies():
        (held,) = post.claim()
        taken = post.take_up(held)
        post.go(post.box.park(taken.lease, taken.held, Trigger.DEAD_LETTER, DEAD_LETTER, "time-out"))

    async def body(ann):
        page = ann.page(parcel.record_id)
        once = said(await ann.visitor.get(page))
        assert "announced, no result yet; sent once since" in once
        assert "earlier sends" not in once
        assert "defer, 1 attempt since it was queued dead letter" in once
        await ann.do(f"{page}/move/not-executed", closed="yes", reason="closed there")
        world.clock.now += HOUR + MINUTE
        dies()
        twice = said(await ann.visitor.get(page))
        assert "its earlier sends were declared not executed at" in twice
        assert "defer, 1 attempt since it was queued again at" in twice
        assert f"call {post.topic} announced again" in twice

    dies()
    await at_desk(body)


@pytest.mark.parametrize("verb", ["retry", "discard"])
async def test_console_retries_or_discards_a_message_without_its_record(at_desk, world, verb):
    async def body(ann):
        letter = ann.letter(ParcelKind.EMIT)
        preview, there = await ann.do(f"letter/{letter.id}/move/{verb}", reason="the warehouse is back")
        assert "→" not in preview
        assert there.startswith("letters")
        back = world.go(flows.find_parcel(world.store.outbox, letter.id))
        assert (back is not None) is (verb == "retry")
        trigger = Trigger.DLQ_RETRY if verb == "retry" else Trigger.DISCARD
        assert ann.notes(letter.record_id) == [(trigger, "ann", "the warehouse is back")]

    await at_desk(body)


@pytest.mark.parametrize(
    ("order", "fields", "why"),
    [
        ("executed", {"status": "201", "reason": ""}, "Enter a reason"),
        ("executed", {"status": "201", "reason": " ... "}, "Enter a reason"),
        ("executed", {"reason": WHY}, "from 200 to 599"),
        ("executed", {"status": "٢٠١", "reason": WHY}, "from 200 to 599"),
        ("executed", {"status": "402", "reason": WHY}, "If the provider declined the call, record that instead"),
        ("declined", {"status": "201", "reason": WHY}, "201 is not a failure"),
        ("executed", {"status": "201", "body": "{", "reason": WHY}, "The body is not valid JSON"),
        ("executed", {"status": "201", "body": "x", "content_type": "a\nb", "reason": WHY}, "Enter a content type"),
        ("executed", {"status": "201", "reason": WHY, "version": "6"}, "it has changed since you read it"),
        ("release", {"reason": WHY}, "a call may have been made. Check with the provider"),
        ("bust", {"reason": WHY}, "only a stored response can be busted"),
    ],
)
async def test_invalid_operator_action_changes_nothing_and_shows_the_reason(at_desk, world, order, fields, why):
    async def body(ann):
        path = f"{ann.page(INLINE)}/move/{order}"
        for confirmed in ({}, {"confirmed": "yes"}):
            answer = await ann.visitor.post(path, **fields, **confirmed)
            assert answer.status_code == 422
            assert why in said(answer)
        assert ann.notes(INLINE) == []

    await at_desk(body)
    assert (world.record(INLINE).state, world.record(INLINE).version) == (State.UNKNOWN, 7)


async def test_a_result_that_is_no_json_changes_nothing(at_desk, world):
    async def body(ann):
        path = f"{ann.page(PHASED)}/move/executed"
        answer = await ann.visitor.post(path, result="ch_1", reason=WHY, confirmed="yes")
        assert answer.status_code == 422
        assert "The result is not valid JSON" in said(answer)
        assert "ch_1</textarea>" in answer.text  # what was typed is not lost

    await at_desk(body)
    assert world.record(PHASED).state is State.UNKNOWN


async def test_a_refusal_is_not_described_as_a_result(at_desk, world):
    async def body(ann):
        form = said(await ann.visitor.get(f"{ann.page(PHASED)}/move/declined"))
        assert "The provider's refusal, as JSON" in form
        assert "The handler receives it as the value of RejectedError" in form
        assert "What the call returned" not in form
        assert "had the shape" not in form
        wrong = await ann.visitor.post(f"{ann.page(PHASED)}/move/declined", result="no funds", reason=WHY)
        assert "The refusal is not valid JSON" in said(wrong)
        preview, _ = await ann.do(f"{ann.page(PHASED)}/move/declined", result='"no funds"', reason=WHY)
        assert "Refusal of the provider" in preview
        assert "Result of the call" not in preview

    await at_desk(body)
    assert json.loads(world.record(PHASED).memo[-1].result) == {"$": "rejected", "v": "no funds"}


@dataclass
class Charge:
    id: str


async def charge(*, key: str) -> Charge:
    return Charge(key)


async def create_order(op: Operation) -> None:
    await op.call("charge_created", charge, repeatable=False, result=Charge)


async def test_a_mounted_console_compares_a_result_with_the_handler(url, world):
    once = Once(url)
    once.protect(effects=Effects.PHASED, operation="create_order")(create_order)
    path = f"record/{token_of(PHASED)}/move/executed"
    async with once.lifespan(), Visitor(console_on(once)) as visitor:
        await visitor.log_in()
        assert "does not have your application" not in said(await visitor.get(path))
        for confirmed in ({}, {"confirmed": "yes"}):
            wrong = await visitor.post(path, result='{"id": 5}', reason=WHY, **confirmed)
            assert wrong.status_code == 422
            assert "at .id: it is a whole number, and text was declared" in said(wrong)
            assert "which the handler declares for 'charge_created'" in said(wrong)
        assert world.record(PHASED).state is State.UNKNOWN
        await Desk(visitor, world).do(path, result='{"id": "ch_1"}', reason=WHY)
    assert world.record(PHASED).state is State.FAILED_RETRYABLE


async def test_a_console_without_the_application_says_that_results_are_not_checked(at_desk):
    async def body(ann):
        form = said(await ann.visitor.get(f"{ann.page(PHASED)}/move/executed"))
        assert "This console does not have your application" in form

    await at_desk(body)


async def test_late_confirmation_is_rejected_if_the_record_changed(at_desk, world):
    async def body(ann):
        path = f"{ann.page(INLINE)}/move/executed"
        fields = {"status": "201", "reason": WHY, "version": "7"}
        assert "This will happen" in said(await ann.visitor.post(path, **fields))
        await ann.do(f"{ann.page(INLINE)}/move/declined", status="402", reason="somebody was quicker")
        late = await ann.visitor.post(path, **fields, confirmed="yes")
        assert late.status_code == 422
        assert "it has changed since you read it" in said(late)
        assert len(ann.notes(INLINE)) == 1

    await at_desk(body)
    assert world.record(INLINE).response.status == 402


async def test_action_for_another_kind_of_item_returns_404(at_desk, world):
    async def body(ann):
        letter = ann.letter(ParcelKind.EMIT)
        for path in (
            f"{ann.page(INLINE)}/move/retry",
            f"letter/{letter.id}/move/executed",
            f"{ann.page(INLINE)}/move/x",
        ):
            assert (await ann.visitor.get(path)).status_code == 404

    await at_desk(body)


async def test_bodies_keep_their_line_ends(at_desk, world):
    async def body(ann):
        await ann.visitor.get(f"{ann.page(INLINE)}/move/executed")
        done = await ann.visitor.post(
            f"{ann.page(INLINE)}/move/executed", status="200", body="one\r\ntwo", content_type="text/plain", reason=WHY,
            confirmed="yes",
        )  # fmt: skip
        assert done.status_code == 303

    await at_desk(body)
    assert world.record(INLINE).response.body == b"one\ntwo"
