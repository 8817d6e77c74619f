"""Dead letters in the console: filters, payloads, what is refused, and one order for many of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from console.trouble import ACME, OUTBOX_KEY, PHASED_KEY, ZETA, fill, opened, put
from console.visiting import BOB, Visitor, console_on, said
from harness import flows
from harness.pages import Page
from oncekey.console.dossier import token_of
from oncekey.console.letters import MANY
from oncekey.console.orders import DOCS
from oncekey.core.errors import CommitAmbiguousError, StoreUnavailableError
from oncekey.core.model import HOUR, MINUTE, SECOND, Effects, EntryKind, Intent, MemoEntry, ParcelKind, RecordId, State
from oncekey.core.transitions import Actor, Mover, Note, Trigger
from oncekey.engine import operate
from operate.rows import a_parcel, bury

OUTBOX = RecordId(ZETA, OUTBOX_KEY)
WHY = "the warehouse is back"


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'shop.db'}"
    return request.getfixturevalue("empty_dsn" if request.param == "postgresql" else "empty_mariadb")


@pytest.fixture
def world(url):
    with opened(url) as world:
        fill(world, finished=0)
        yield world


def dead(world, key, topic="order_created", kind=ParcelKind.EMIT):
    made = []

    def parcel(record):
        made.append(replace(a_parcel(record, kind), topic=topic))
        return made[0]

    put(world, State.COMPLETED, Effects.LOCAL, key, parcels=[parcel])
    return made[0]


def hopeless(world, key="refund-lost"):
    """A call whose window has passed: it may have been made, and may not be repeated."""
    now = world.clock.now
    sent = Intent("send_refund", f"dk-{key}", "digest", 5, now - HOUR, now - 59 * MINUTE, now - MINUTE)
    return put(
        world, State.UNKNOWN, Effects.OUTBOX, key, last_error="dead_letter", intent=sent, at=2 * HOUR,
        parcels=[lambda record: replace(a_parcel(record), topic="send_refund")], lease_until=None,
        call_timeout=2 * HOUR,
    )  # fmt: skip


def letter_of(world, key):
    letters = world.go(world.store.outbox.dead_letters(99))
    return next(one for one in letters if one.parcel.record_id.key == key)


def notes(world, record_id):
    entries = world.go(world.store.audit.history(record_id))
    return [(one.note.trigger, one.note.who, one.note.why) for one in entries if one.note.actor is Actor.OPERATOR]


def chosen(page):
    return re.search(r'name="chosen" value="([^"]*)"', page.text)[1]


async def test_dead_letters_are_filtered(url, world):
    dead(world, "bulk-1", topic="receipt")
    async with Visitor(console_on(url)) as visitor:
        await visitor.log_in()

        async def found(query):
            return (await visitor.get(f"letters?{query}")).text.count('class="line"')

        assert await found("") == 5
        assert await found("topic=receipt") == 1
        assert await found("kind=defer") == await found("tenant=zeta") == 1
        assert await found("error=uncertain") == 5
        assert await found("error=warehouse") == await found("older=9d") == 0
        assert "No match" in said(await visitor.get("letters?topic=none"))
        assert "Enter an age as 90s" in said(await visitor.get("letters?older=soon"))


async def test_showing_a_dead_letter_payload_is_audited(url, world):
    parcel = dead(world, "bulk-1")
    async with Visitor(console_on(url)) as visitor:
        await visitor.log_in(BOB)
        assert "&#34;amount&#34;: 7" not in (await visitor.get(f"letter/{parcel.id}")).text
        assert notes(world, parcel.record_id) == []
        shown = await visitor.post(f"letter/{parcel.id}", why="the customer called")
        assert "&#34;amount&#34;: 7" in shown.text
        assert (await visitor.post(f"letter/{parcel.id}", proof="forged")).status_code == 403
    assert notes(world, parcel.record_id) == [(Trigger.DISCLOSE, "bob", "the customer called")]


async def test_console_does_not_offer_actions_that_would_be_refused(url, world):
    record = hopeless(world)
    letter = letter_of(world, record.id.key)
    async with Visitor(console_on(url)) as visitor:
        await visitor.log_in()
        page = await visitor.get(f"letter/{letter.parcel.id}")
        assert f"/letter/{letter.parcel.id}/move/retry" not in page.text
        assert f"/letter/{letter.parcel.id}/move/discard" in page.text
        assert "Not possible now Retry send_refund : sending it again is not known to be safe" in said(page)
        assert f'href="{DOCS}/runbooks/outbox.md#oncekeydeadletters"' in page.text
        form = await visitor.get(f"letter/{letter.parcel.id}/move/retry")
        assert "Not possible now sending it again is not known to be safe" in said(form)
        assert '<form class="card stack"' not in form.text
        record_page = await visitor.get(f"record/{token_of(record.id)}")
        assert "/move/retry" not in record_page.text
        assert "/move/release" not in record_page.text
        assert "Not possible now" in said(record_page)
        offered = said(await visitor.get(f"record/{token_of(OUTBOX)}")).partition("Not possible now")
        assert "Retry send_refund" in offered[0]
        assert "Send send_refund again" not in offered[0]  # a retry of the letter does the same
        assert "Resume create_refund : its call is in the outbox or among the dead letters" in offered[2]
        listed = await visitor.get("letters")
        assert f"/letter/{letter.parcel.id}/move/" not in listed.text


async def test_record_page_explains_each_action_and_its_client_response(url, world):
    async with Visitor(console_on(url)) as visitor:
        await visitor.log_in()
        words = said(await visitor.get(f"record/{token_of(RecordId(ACME, PHASED_KEY))}"))
        assert "Confirm charge_created The call was made. The handler resumes after it" in words
        assert "Repeat charge_created The call was not made and can no longer arrive. The next retry" in words
        assert "→ retryable" not in words.partition("Timeline")[0]
        assert "Expires" not in words
        live = said(await visitor.get(f"record/{token_of(RecordId(ACME, 'checkout-7731'))}"))
        assert "Not possible now Release the key : its owner may be running" in live
        assert "Expires" not in live
        assert "Expires" in said(await visitor.get(f"record/{token_of(RecordId(ACME, 'cart-00000'))}"))
        steps = (MemoEntry("paid", EntryKind.PHASE, "1"),)
        resumable = put(world, State.FAILED_RETRYABLE, Effects.PHASED, "resumable", memo=steps, recovery_point="paid")
        for record_id in (resumable.id, RecordId(ACME, "refund-881")):  # a pending one
            assert "Expires" not in said(await visitor.get(f"record/{token_of(record_id)}"))


async def test_impossible_actions_are_listed_only_for_the_current_state(url, world):
    """Also while a worker holds one of its messages, which forbids every order."""
    done = put(world, State.COMPLETED, Effects.LOCAL, "sending", parcels=[lambda one: a_parcel(one, ParcelKind.EMIT)])
    letter = letter_of(world, done.id.key)
    assert world.go(world.store.operate.revive(letter, an_audit_line(world, letter.parcel)))
    assert world.go(world.store.outbox.due("worker", (letter.parcel.topic,), 1, MINUTE))
    async with Visitor(console_on(url)) as visitor:
        await visitor.log_in()
        refused = said(await visitor.get(f"record/{token_of(done.id)}")).partition("Not possible now")[2]
    assert refused.startswith(" Remove the stored response : a worker holds a parcel of it")
    assert not re.search("Confirm|declined|Retry", refused.partition("Timeline")[0])


@pytest.mark.parametrize("order", ["retry", "discard"])
async def test_bulk_action_changes_exactly_the_previewed_dead_letters(url, world, order):
    parcels = [dead(world, f"bulk-{number}", topic="receipt") for number in range(3)]
    async with Visitor(console_on(url)) as visitor:
        await visitor.log_in()
        preview = await visitor.get(f"letters/move/{order}?topic=receipt")
        assert f"{order.title()} 3 dead letters" in said(preview)
        assert "receipt emit call_uncertain 3" in said(preview)
        late = dead(world, "bulk-late", topic="receipt")
        done = await visitor.post(f"letters/move/{order}", chosen=chosen(preview), reason=WHY)
        verb = "retried" if order == "retry" else "discarded"
        assert f"3 dead letters {verb}" in said(done)
    trigger = Trigger.DLQ_RETRY if order == "retry" else Trigger.DISCARD
    for parcel in parcels:
        assert notes(world, parcel.record_id) == [(trigger, "ann", WHY)]
        back = world.go(flows.find_parcel(world.store.outbox, parcel.id))
        assert (back is not None) is (order == "retry")
    assert world.go(world.store.outbox.find_dead_letter(late.id)) is not None


async def test_bulk_action_skips_and_reports_letters_changed_since_preview(url, world):
    again, gone, same = (dead(world, f"bulk-{number}", topic="receipt") for number in range(3))
    lost = hopeless(world)
    async with Visitor(console_on(url)) as visitor:
        await visitor.log_in()
        preview = await visitor.get("letters/move/retry")
        assert "1 dead letter is left out send_refund" in said(preview)
        assert str(letter_of(world, lost.id.key).parcel.id) not in chosen(preview)
        world.go(world.store.operate.discard(letter_of(world, "bulk-1"), an_audit_line(world, gone)))
        world.clock.now += SECOND
        died_again(world, letter_of(world, "bulk-0"))
        await visitor.post(
            f"record/{token_of(OUTBOX)}/move/executed", status="201", reason="seen there", confirmed="yes"
        )
        done = said(await visitor.post("letters/move/retry", chosen=chosen(preview), reason=WHY))
        assert "4 dead letters retried" in done  # bulk-2 and the three of the fixture
        assert "3 dead letters were left out" in done
        assert f"{again.id} it has changed since you looked" in done
        assert f"{gone.id} there is no dead letter with this id" in done
    assert world.go(flows.find_parcel(world.store.outbox, same.id)) is not None
    assert world.go(world.store.outbox.find_dead_letter(again.id)) is not None
    assert world.record(OUTBOX).response.status == 201


async def test_bulk_discard_skips_a_letter_that_would_settle_a_request(url, world):
    letter = letter_of(world, OUTBOX_KEY)
    async with Visitor(console_on(url)) as visitor:
        await visitor.log_in()
        shown = f"{letter.parcel.id}.{letter.died_at}."  # as if its request had been settled when it was shown
        done = said(await visitor.post("letters/move/discard", chosen=shown, reason=WHY))
    assert "the outcome of its request is unknown, and would be settled, too" in done
    assert world.record(OUTBOX).state is State.UNKNOWN


def an_audit_line(world, parcel):
    record = world.record(parcel.record_id)
    return Note.of(record, record.state, Trigger.DISCARD, Mover(Actor.OPERATOR, "eve"), "first")


def died_again(world, letter):
    """The letter as it is after a retry that failed again: the same parcel, with another time of death."""
    assert world.go(world.store.operate.revive(letter, an_audit_line(world, letter.parcel)))
    bury(world, letter.parcel)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (StoreUnavailableError, "not done: the store does not respond"),
        (CommitAmbiguousError, "the change may have been made"),
    ],
)
async def test_bulk_action_reports_each_letter_after_a_store_failure(url, world, monkeypatch, error, why):
    parcels = [dead(world, f"bulk-{number}", topic="receipt") for number in range(3)]
    retry, tried = operate.retry, []

    def failing(store, letter_id, command, mover, *, notify):
        tried.append(letter_id)
        if len(tried) == 2:
            raise error("away")
        return (yield from retry(store, letter_id, command, mover, notify=notify))

    monkeypatch.setattr(operate, "retry", failing)
    async with Visitor(console_on(url)) as visitor:
        await visitor.log_in()
        preview = await visitor.get("letters/move/retry?topic=receipt")
        words = said(await visitor.post("letters/move/retry", chosen=chosen(preview), reason=WHY))
    assert "1 dead letter retried" in words
    assert "2 dead letters were left out" in words
    assert re.search(rf"{tried[1]} [^.]*{why}", words)
    assert sum(bool(notes(world, parcel.record_id)) for parcel in parcels) == 1


async def test_bulk_action_requires_reason_csrf_token_and_operate_role(url, world):
    parcel = dead(world, "bulk-1", topic="receipt")
    async with Visitor(console_on(url)) as visitor:
        await visitor.log_in()
        path, token = "letters/move/retry", chosen(await visitor.get("letters/move/retry?topic=receipt"))
        refused = await visitor.post(path, chosen=token, reason=" ")
        assert refused.status_code == 422
        assert "Enter a reason" in said(refused)
        assert chosen(refused) == token
        assert (await visitor.post(path, chosen=token, reason=WHY, proof="forged")).status_code == 403
        for wrong in (
            "",
            "x",
            f"{parcel.id}",
            f"{parcel.id}.x.",
            " ".join(f"{parcel.id}.{one}." for one in range(MANY + 1)),
        ):
            assert (await visitor.post(path, chosen=wrong, reason=WHY)).status_code == 400
        for unknown in ("letters/move/executed", "letters/move/x"):
            assert (await visitor.get(unknown)).status_code == 404
    async with Visitor(console_on(url)) as reader:
        await reader.log_in(BOB)
        assert "letters/move" not in (await reader.get("letters")).text
        assert (await reader.get(path)).status_code == 403
        assert (await reader.post(path, chosen=token, reason=WHY)).status_code == 403
    assert notes(world, parcel.record_id) == []


async def test_a_preview_is_bounded(url, world, monkeypatch):
    monkeypatch.setattr("oncekey.console.letters.MANY", 2)
    for number in range(3):
        dead(world, f"bulk-{number}", topic="receipt")
    async with Visitor(console_on(url)) as visitor:
        await visitor.log_in()
        words = said(await visitor.get("letters/move/retry?topic=receipt"))
        assert "Retry 2 dead letters" in words
        assert "These are the first 2 that match." in words


async def test_an_audit_line_leads_to_its_record(url, world):
    parcel = dead(world, "bulk-1")
    async with Visitor(console_on(url)) as visitor:
        await visitor.log_in()
        await visitor.post(f"letter/{parcel.id}")
        (link,) = set(re.findall(r'href="/(incarnation/[^"]+)"', (await visitor.get("audit")).text))
        assert (await visitor.get(link)).headers["location"] == f"/record/{token_of(parcel.record_id)}"
        for strange in ("incarnation/nonsense", f"incarnation/{parcel.id}"):
            assert (await visitor.get(strange)).status_code == 404
        everybody = said(await visitor.get("audit?who=all"))
        assert everybody.count("checked with the provider: still unknown") == 1
        assert re.search(r"3 times since .* no answer in 10 s", everybody)


def test_every_runbook_link_of_the_console_exists():
    root = Path(__file__).parents[2]
    templates = (root / "src/oncekey/console/orders.py", root / "src/oncekey/console/pages.py")
    links = {link for one in templates for link in re.findall(r"(?:runbooks|howto)/[\w#.-]+", one.read_text("utf-8"))}
    assert len(links) >= 5
    for link in links:
        page, _, heading = link.partition("#")
        assert not heading or heading in Page(root / "docs" / page).anchors()
        assert (root / "docs" / page).is_file()
