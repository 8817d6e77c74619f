"""The console in a real Chromium: what an operator does at night, with the keyboard and on a phone."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest
from playwright.sync_api import expect

from console.trouble import ACME, INLINE_KEY, NASTY, OUTBOX_KEY, PHASED_KEY, ZETA, fill, noted, opened, put
from console.visiting import ANN, BOB, TOKENS
from harness.browser import chromium
from harness.served import Served
from oncekey.console import Console, Ledger
from oncekey.console.access import IDLE, Sessions
from oncekey.console.dossier import token_of
from oncekey.core.model import Effects, EntryKind, Intent, MemoEntry, ParcelKind, RecordId, State, StoredResponse
from oncekey.core.resolution import AnnouncedCall, CallReport
from oncekey.core.transitions import Actor, Mover, Note, Trigger
from oncekey.reconcile import LedgerEntry
from operate.rows import a_parcel

PATIENCE = 30_000
SHOTS = "ONCEKEY_TEST_SHOTS"
"""The environment variable that names a folder for pictures of every page; without it they are not kept."""
AXE = Path(__file__).parent / "vendor" / "axe.min.js"
BERLIN = {"timezone_id": "Europe/Berlin", "locale": "en-GB"}


class Clock:
    """The sessions' clock, which a test may put forward."""

    def __init__(self):
        self.ahead = 0.0

    def __call__(self):
        return time.time() + self.ahead


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def clock():
    return Clock()


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    return f"sqlite:///{tmp_path_factory.mktemp('console') / 'shop.db'}"


@pytest.fixture(scope="module")
def world(url):
    with opened(url) as world:
        fill(world, finished=120)
        yield world


@pytest.fixture(scope="module")
def served(url, world, clock):
    booked = [LedgerEntry("dk-of-nobody", NASTY, Decimal(4200), "EUR"), LedgerEntry(NASTY, "ch_7", Decimal(1), NASTY)]
    books = Ledger(lambda _: booked)
    with Served(Console(url, tokens=TOKENS, sessions=Sessions(clock=clock), ledger=books)) as running:
        yield f"http://127.0.0.1:{running.port}"


@pytest.fixture
def visit(browser, served):
    """Opens pages whose every fault fails the test: errors of scripts, and requests to anywhere else."""
    contexts, broken = [], []

    def opening(**options):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **BERLIN, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        expect.set_options(timeout=PATIENCE)
        page.on("pageerror", lambda error: broken.append(f"script: {error}"))
        page.on("console", lambda said: broken.append(said.text) if "Content Security Policy" in said.text else None)
        page.on("request", lambda sent: broken.append(sent.url) if not sent.url.startswith(served) else None)
        return page

    yield opening
    for context in contexts:
        context.close()
    assert broken == []


def log_in(page, served, token=ANN):
    page.goto(f"{served}/login")
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("heading", name="Recent activity")).to_be_visible()


def press(page, *keys):
    page.wait_for_load_state("load")  # the page is shown before its script listens to the keyboard
    for key in keys:
        page.keyboard.press(key)


def look_for(page, key):
    press(page, "/")
    expect(page.get_by_role("searchbox", name="Find a key")).to_be_focused()
    page.keyboard.type(key)
    with page.expect_navigation():
        page.keyboard.press("Enter")


def find(page, key):
    look_for(page, key)
    expect(page.get_by_role("heading", name="What to do")).to_be_visible()


def test_an_unknown_request_is_found_settled_and_audited(visit, served, world):
    page = visit()
    log_in(page, served)
    expect(page.get_by_role("status")).to_contain_text("need attention")
    find(page, INLINE_KEY)
    expect(page.locator(".meaning")).to_contain_text("Unknown: its handler may have called the provider")
    page.get_by_role("link", name="Confirm create_payment").click()
    expect(page.get_by_role("complementary")).to_contain_text("The next retry gets the response that you enter")
    page.get_by_label("Status").fill("201")
    page.get_by_label("Response body that the client gets").fill('{"id": "pay_1"}')
    page.get_by_label("Reason", exact=True).fill("seen in their dashboard")
    page.get_by_role("button", name="Preview").click()
    expect(page.get_by_text("A retry receives the stored response (201)")).to_be_visible()
    page.get_by_role("button", name="Confirm create_payment").click()
    expect(page.get_by_role("status")).to_contain_text("The timeline has the audit line")
    last = page.locator(".timeline li.operator").last
    expect(last).to_contain_text("resolved: executed")
    expect(last).to_contain_text("seen in their dashboard")
    expect(last).to_contain_text("by ann")
    record = world.record(RecordId(ACME, INLINE_KEY))
    assert (record.state, record.response.body) == (State.COMPLETED, b'{"id": "pay_1"}')
    page.get_by_role("link", name="Audit").click()
    expect(page.locator("tbody tr").first).to_contain_text("seen in their dashboard")


def test_a_dead_letter_is_sent_again(visit, served, world):
    page = visit()
    log_in(page, served)
    page.get_by_role("link", name=re.compile("^Dead letters")).first.click()
    row = page.locator(".queue li", has_text=OUTBOX_KEY)
    row.get_by_role("link", name="Open").click()
    page.get_by_role("link", name="Retry send_refund").click()
    page.get_by_label("Reason", exact=True).fill("the provider is back")
    page.get_by_role("button", name="Preview").click()
    expect(page.locator(".lead")).to_contain_text("pending")
    page.get_by_role("button", name="Retry send_refund").click()
    expect(page.locator(".timeline li.operator").last).to_contain_text("dead letter retried")
    assert world.record(RecordId(ZETA, OUTBOX_KEY)).state is State.PENDING


def test_dead_letters_of_one_kind_are_retried_together(visit, served, world):
    page = visit()
    log_in(page, served)
    page.get_by_role("status").get_by_role("link", name="dead letters").click()
    for number in range(2):
        dying = [lambda owner: replace(a_parcel(owner, ParcelKind.EMIT), topic="bulk_topic")]
        put(world, State.COMPLETED, Effects.LOCAL, f"bulk-{number}", parcels=dying)
    page.get_by_label("Topic").fill("bulk_topic")
    page.get_by_role("button", name="Filter").click()
    expect(page.locator(".queue li")).to_have_count(2)
    page.get_by_role("link", name="Retry…").click()
    expect(page.get_by_role("heading", name="Retry 2 dead letters")).to_be_visible()
    page.get_by_label("Reason", exact=True).fill("the receiver is back")
    page.get_by_role("button", name="Retry 2 dead letters").click()
    expect(page.get_by_role("heading", name="2 dead letters retried")).to_be_visible()
    page.get_by_role("link", name="Audit").last.click()
    page.locator("tbody tr", has_text="bulk_topic").first.get_by_role("link").click()
    expect(page.locator("h1")).to_contain_text("bulk-")


def test_record_contents_are_hidden_until_requested(visit, served):
    page = visit()
    log_in(page, served, BOB)
    find(page, PHASED_KEY)
    expect(page.get_by_text("o_1017")).to_have_count(0)
    page.get_by_role("button", name="Show the contents").click()
    expect(page.get_by_text("o_1017")).to_be_visible()
    expect(page.locator(".timeline li.operator").last).to_contain_text("contents shown")
    expect(page.locator(".timeline li.operator").last).to_contain_text("by bob")


def test_read_role_is_refused_operator_actions(visit, served, world):
    page = visit()
    log_in(page, served, BOB)
    find(page, PHASED_KEY)
    expect(page.get_by_role("link", name="Confirm charge_created")).to_have_count(0)
    page.goto(f"{served}/record/{token_of(RecordId(ACME, PHASED_KEY))}/move/executed")
    expect(page.get_by_role("heading", name="Read-only access")).to_be_visible()


def test_browser_form_with_a_forged_csrf_token_is_rejected(visit, served, world):
    page = visit()
    log_in(page, served)
    page.goto(f"{served}/record/{token_of(RecordId(ACME, 'checkout-7701'))}/move/release")
    page.get_by_label("Reason", exact=True).fill("x")
    page.evaluate("document.querySelector('#move [name=proof]').value = 'forged'")
    page.get_by_role("button", name="Preview").click()
    expect(page.get_by_role("heading", name="The form was rejected")).to_be_visible()
    assert world.record(RecordId(ACME, "checkout-7701")).state is State.IN_PROGRESS


def test_another_sites_form_changes_nothing(visit, served, world, browser):
    page = visit()
    log_in(page, served)
    page.goto(f"{served}/record/{token_of(RecordId(ACME, 'checkout-7701'))}/move/release")
    proof = page.locator("#move [name=proof]").get_attribute("value")
    address = page.url
    page.goto("about:blank")  # no page of this site, though in the same browser, and it even knows the proof
    page.set_content(
        f'<form method="post" action="{address}"><input name="proof" value="{proof}"><input name="reason" value="x">'
        '<input name="confirmed" value="yes"><button>Go</button></form>'
    )
    page.get_by_role("button", name="Go").click()
    expect(page.get_by_role("heading")).to_contain_text(re.compile("session has ended|was rejected"))
    assert world.record(RecordId(ACME, "checkout-7701")).state is State.IN_PROGRESS


def test_a_session_that_is_over_leads_back_to_the_login(visit, served, clock):
    page = visit()
    log_in(page, served)
    page.goto(f"{served}/records")
    clock.ahead += IDLE + 1
    try:
        page.get_by_role("link", name="Unknown").first.click()
        expect(page.get_by_role("heading", name="oncekey console")).to_be_visible()
        page.get_by_label("Token").fill(ANN)
        page.get_by_role("button", name="Log in").click()
        expect(page).to_have_url(re.compile("/(unknown|records\\?state=unknown)"))
    finally:
        clock.ahead = 0.0


def test_a_link_that_carries_its_token_logs_in(visit, served):
    page = visit()
    page.goto(f"{served}/login#{ANN}")
    expect(page.get_by_role("heading", name="Recent activity")).to_be_visible()
    assert ANN not in page.url


def test_console_displays_hostile_text_without_executing_it(visit, served, world, url):
    """Key, tenant, operation, path, errors, steps, bodies, headers, topics, evidence and reasons, on every page."""
    memo = (MemoEntry(NASTY, EntryKind.PHASE, json.dumps(NASTY)),)
    key = f"nasty-{NASTY}"
    intent = Intent(NASTY, "nasty-call", "digest", 1, world.clock.now, world.clock.now + 5, None)
    record = put(
        world, State.UNKNOWN, Effects.PHASED, key, scope=NASTY, operation=NASTY, path=f"/{NASTY}", last_error=NASTY,
        memo=memo, recovery_point=NASTY, intent=intent,
    )  # fmt: skip
    call = AnnouncedCall(record.id, record.incarnation, NASTY, NASTY, "nasty-call", None, 0)
    world.go(world.store.reconcile.add_call(call))
    world.go(world.store.reconcile.name(call, NASTY))
    world.go(world.store.reconcile.add(CallReport(NASTY, NASTY, json.dumps(NASTY), "nasty-call")))
    noted(world, Note.of(record, State.UNKNOWN, Trigger.STILL_UNKNOWN, Mover(Actor.OPERATOR, NASTY), NASTY))
    answer = StoredResponse(200, ((b"x-nasty", NASTY.encode()),), b"<script>document.title='owned'</script>")
    put(world, State.COMPLETED, Effects.LOCAL, f"done-{NASTY}", scope=NASTY, response=answer)
    dying = [lambda owner: replace(a_parcel(owner, ParcelKind.EMIT), topic=NASTY, payload=json.dumps(NASTY))]
    put(world, State.COMPLETED, Effects.LOCAL, f"sent-{NASTY}", scope=NASTY, parcels=dying)
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection, connection:
        said = "UPDATE oncekey_dead_letter SET first_error = ?, last_error = ? WHERE aggregatetype = ?"
        assert connection.execute(said, (f"first {NASTY}", NASTY, NASTY)).rowcount == 1
    page = visit()
    log_in(page, served)

    def harmless(words="<img src=x", name=""):
        page.wait_for_load_state("load")
        assert words in page.locator("main").inner_text(), page.url
        assert page.locator("main img, main script").count() == 0
        assert page.title() != "owned"
        assert page.title().startswith(name)

    for path in ("/records", "/unknown", "/letters", "/audit?who=all", "/records?state=completed"):
        page.goto(f"{served}{path}")
        harmless()
    page.goto(f"{served}/records?{urlencode(dict.fromkeys(('state', 'tenant', 'operation', 'error', 'older'), NASTY))}")
    assert page.get_by_label("Operation").input_value() == NASTY
    harmless("Enter an age as 90s")
    page.goto(f"{served}/letters")
    page.locator(".queue li", has_text="<img src=x").get_by_role("link").first.click()
    harmless(f"first {NASTY}", "Dead letter")
    page.get_by_role("link", name="Discard").click()
    page.get_by_label("Reason", exact=True).fill(NASTY)
    page.get_by_role("button", name="Preview").click()
    harmless()
    for name in (key, f"done-{NASTY}"):
        page.goto(f"{served}/record/{token_of(RecordId(NASTY, name))}")
        page.get_by_role("button", name="Show the contents").click()
        expect(page.locator("h1")).to_contain_text(name)
        harmless(name=name[:5])
    page.goto(f"{served}/record/{token_of(record.id)}/move/executed")
    page.get_by_label("What the call returned").fill("<script>document.title='owned'</script>")
    page.get_by_label("Reason", exact=True).fill(NASTY)
    page.get_by_role("button", name="Preview").click()
    harmless("The result is not valid JSON")  # and what was typed is still there
    page.get_by_label("What the call returned").fill(json.dumps(NASTY))
    page.get_by_role("button", name="Preview").click()
    expect(page.get_by_role("heading", name="This will happen")).to_be_visible()
    harmless()
    page.goto(f"{served}/ledger")
    page.get_by_role("button", name="Compare").click()
    harmless("orphan charge", "Ledger")
    assert page.get_by_text(NASTY[:9]).count() > 0
    look_for(page, f"nasty-of-nobody-{NASTY}")
    harmless("Key not found", "Found")
    page.goto(f"{served}/{quote(NASTY)}")
    harmless("There is no such page")


def test_keyboard_shortcuts_reach_every_console_page(visit, served):
    page = visit()
    log_in(page, served)
    for key, path in (("u", "/unknown"), ("r", "/records"), ("a", "/audit"), ("d", "/letters"), ("o", "/")):
        press(page, "g", key)
        expect(page).to_have_url(re.compile(f"{re.escape(path)}$"))
    page.goto(f"{served}/records")
    press(page, "j", "j", "k")
    first = page.locator(".list a").first
    expect(first).to_be_focused()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("/record/"))
    press(page, "?")
    expect(page.get_by_role("dialog")).to_be_visible()
    press(page, "Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_show_more_extends_the_list_in_place(visit, served):
    page = visit()
    log_in(page, served)
    page.goto(f"{served}/records?state=completed")
    expect(page.locator(".list tbody:not(.more) tr")).to_have_count(50)
    page.get_by_role("link", name="Show more").click()
    expect(page.locator(".list tbody:not(.more) tr")).to_have_count(100)
    expect(page).to_have_url(f"{served}/records?state=completed")


def test_times_are_local_with_utc_in_the_tooltip(visit, served, world):
    pages = {zone: visit(timezone_id=zone) for zone in ("Europe/Berlin", "America/New_York")}
    shown = {}
    for zone, page in pages.items():
        log_in(page, served)
        page.goto(f"{served}/record/{token_of(RecordId(ACME, PHASED_KEY))}")
        begun = page.locator(".timeline time").first
        expect(begun).not_to_contain_text("UTC")
        shown[zone] = begun.inner_text(), begun.get_attribute("title")
    (berlin, utc), (york, same) = shown.values()
    assert berlin != york
    assert utc == same
    assert utc.endswith("UTC")


def test_overview_draws_charts_and_refreshes(visit, served, world):
    page = visit()
    log_in(page, served)
    expect(page.locator("#charts[data-drawn]")).to_be_attached()
    expect(page.locator(".chart canvas")).to_have_count(5)
    before = page.locator("#live").inner_html()
    put(world, State.UNKNOWN, Effects.INLINE, f"late-{time.time_ns()}", last_error="handler_raised", at=1)
    page.wait_for_function("before => document.querySelector('#live').innerHTML !== before", arg=before)


SCREENS = {"desktop": {"width": 1280, "height": 900}, "phone": {"width": 360, "height": 800}}
LOOKS = {
    ("light", "desktop"): {},
    ("light", "phone"): {"rules": {"color-contrast": {"enabled": False}}},
    ("dark", "desktop"): {"runOnly": ["color-contrast"]},
    ("dark", "phone"): None,
}
"""What axe is asked: a phone has other places, and the dark other colours."""
RECORD = f"/record/{token_of(RecordId(ACME, PHASED_KEY))}"


def every_page(page, served):
    """Goes through all pages with one login, as people do, and says where it is."""
    page.goto(f"{served}/login")
    yield "login"
    log_in(page, served)
    expect(page.locator("#charts[data-drawn]")).to_be_attached()
    yield "overview"
    for name, path in {
        "records": "/records",
        "nothing": "/records?operation=none-such",
        "unknown": "/unknown",
        "letters": "/letters",
        "record": RECORD,
        "outbox": f"/record/{token_of(RecordId(ZETA, OUTBOX_KEY))}",
        "stuck": f"/record/{token_of(RecordId(ACME, 'checkout-7701'))}",
        "done": f"/record/{token_of(RecordId(ACME, 'order-2026-11-0000'))}",
        "audit": "/audit?who=all",
        "ledger": "/ledger",
        "missing": "/nowhere",
    }.items():
        page.goto(f"{served}{path}")
        yield name
    page.goto(f"{served}/ledger")
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("status")).to_contain_text("difference")
    yield "ledger-differences"
    look_for(page, "cart-0")
    expect(page.get_by_role("heading", name="Keys that match")).to_be_visible()
    yield "found"
    look_for(page, "none-such-key")
    yield "found-nothing"
    page.goto(f"{served}{RECORD}")
    page.get_by_role("button", name="Show the contents").click()
    expect(page.get_by_text("o_1017")).to_be_visible()
    yield "record-contents"
    page.goto(f"{served}{RECORD}/move/executed")
    yield "move"
    page.get_by_label("What the call returned").fill("not JSON")
    page.get_by_label("Reason", exact=True).fill("seen in their dashboard")
    page.get_by_role("button", name="Preview").click()
    expect(page.get_by_role("alert")).to_be_visible()
    yield "move-refused"
    page.get_by_label("What the call returned").fill('{"id": "ch_1", "amount_cents": 4200, "status": "captured"}')
    page.get_by_role("button", name="Preview").click()
    expect(page.get_by_role("heading", name="This will happen")).to_be_visible()
    yield "preview"
    page.goto(f"{served}/letters")
    page.locator(".queue li").last.get_by_role("link").first.click()
    expect(page.get_by_role("heading", name="What to do")).to_be_visible()
    yield "letter"
    page.get_by_role("button", name="Show the payload").click()
    expect(page.locator("pre")).to_be_visible()
    yield "letter-payload"
    page.goto(f"{served}/letters/move/retry")
    expect(page.get_by_role("heading", name="This will happen")).to_be_visible()
    yield "letters-move"
    page.goto(f"{served}/letters?topic=none-such")
    yield "letters-no-match"
    page.goto(f"{served}/letters")
    page.locator(".queue li").last.get_by_role("link").first.click()
    page.get_by_role("link", name="Discard").click()
    expect(page.get_by_label("Reason", exact=True)).to_be_visible()
    yield "letter-move"
    page.evaluate("document.querySelector('#move [name=proof]').value = 'forged'")
    page.get_by_label("Reason", exact=True).fill("x")
    page.get_by_role("button", name="Preview").click()
    expect(page.get_by_role("heading", name="The form was rejected")).to_be_visible()
    yield "refused"
    page.goto(f"{served}/audit")
    press(page, "?")
    expect(page.get_by_role("dialog")).to_be_visible()
    yield "keyboard"


def faults_of(page, asked):
    """What axe calls serious."""
    found = page.evaluate("asked => axe.run({resultTypes: ['violations'], ...asked})", asked)
    assert len(found["passes"]) > (5 if "runOnly" not in asked else 0), "axe has looked at nothing"
    return [
        (one["id"], [node["html"][:120] for node in one["nodes"]])
        for one in found["violations"]
        if one["impact"] in {"serious", "critical"}
    ]


def test_every_console_page_is_accessible_on_every_screen_size(visit, served):
    """No serious fault that axe knows, nothing wider than the screen; with a folder named, pictures of all."""
    page, faults = visit(), {}
    axe, folder = AXE.read_text("utf-8"), os.environ.get(SHOTS)
    for name in every_page(page, served):
        page.wait_for_load_state("load")
        page.evaluate(axe)
        for (scheme, screen), asked in LOOKS.items():
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # a colour on its way is none to judge
            page.set_viewport_size(SCREENS[screen])
            if asked is not None:
                faults[name, scheme, screen] = faults_of(page, asked)
            wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, f"{name} is {wide} pixels too wide on a {screen}"
            if folder:
                page.screenshot(path=Path(folder) / f"{name}-{scheme}-{screen}.png", full_page=True)
        page.set_viewport_size(SCREENS["desktop"])
    assert {look: found for look, found in faults.items() if found} == {}
