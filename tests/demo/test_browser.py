"""The demo's page in a real Chromium: what a person sees after each button, on a screen of 1280 by 800."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from harness.browser import BrowserMissingError, chromium, program
from harness.demo import Demo

WIDTH, HEIGHT = 1280, 800
PATIENCE = 30_000
QUICK = ("--lease", "1", "--call-timeout", "1", "--interval", "0.5")
FAULTS = ("delay:3", "hang-after", "error-before", "error-after", "drop-before", "drop-after", "decline")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """A demo that goes on by itself after a second, so that a test can watch it."""
    with Demo(tmp_path_factory.mktemp("demo"), *QUICK) as running:
        yield running


@pytest.fixture
def page(browser: Browser, demo: Demo) -> Iterator[Page]:
    opened = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    opened.set_default_timeout(PATIENCE)
    expect.set_options(timeout=PATIENCE)
    broken: list[str] = []
    opened.on("pageerror", lambda error: broken.append(str(error)))
    opened.goto(demo.url)
    yield opened
    opened.close()
    assert broken == []


def _headline(page: Page) -> Locator:
    return page.locator("#headline")


def _press(page: Page, action: str) -> None:
    page.locator(f"[data-action={action}]").click()
    expect(page.locator("body:not([aria-busy])")).to_be_attached()


def _strike(page: Page, fault: str) -> None:
    page.locator(f"[data-fault='{fault}']").click()
    expect(page.locator("body:not([aria-busy])")).to_be_attached()


def _choose(page: Page, route: str) -> None:
    page.locator("#route").select_option(route)


def _count(page: Page, name: str) -> Locator:
    return page.locator(f"#counts dt:text-is('{name}') + dd")


def _in_sight(page: Page, element: Locator) -> bool:
    box = element.bounding_box()
    assert box is not None
    below = box["y"] + box["height"]
    return page.evaluate("scrollY") == 0 and box["y"] >= 0 and below <= HEIGHT and box["x"] + box["width"] <= WIDTH


def test_send_buttons_and_verdict_are_visible_without_scrolling(page: Page) -> None:
    for route in ("/orders", "/payments", "/transfers", "/notifications"):
        _choose(page, route)
        assert _in_sight(page, page.locator("#verdict"))
        for button in page.locator("#request button:visible").all():
            assert _in_sight(page, button), button.inner_text()
        _press(page, "twice")
        assert _in_sight(page, page.locator("#verdict"))


@pytest.mark.parametrize("fault", FAULTS)
def test_the_verdict_of_every_fault_is_in_sight(page: Page, fault: str) -> None:
    _strike(page, fault)
    expect(_headline(page)).not_to_have_text(re.compile("Sending|Nothing was sent"))
    assert _in_sight(page, page.locator("#verdict"))
    assert _in_sight(page, page.locator("#explanation"))


def test_the_verdict_stays_in_sight_when_the_page_is_scrolled(page: Page) -> None:
    for _ in range(4):
        page.locator("#new-key").click()
        _press(page, "twice")
    page.mouse.wheel(0, 300)
    page.wait_for_function("() => scrollY > 200")  # a mere expression is refused from the second look on (CSP)
    box = page.locator("#headline").bounding_box()
    assert box is not None
    assert 0 <= box["y"] < HEIGHT


def test_it_counts_the_charges_of_this_request_alone(page: Page, demo: Demo) -> None:
    # Somebody else's payments come between the two looks at the ledger.
    def meddle(route: Route) -> None:
        for _ in range(3 if route.request.method == "POST" else 0):
            assert demo.post("/payments", str(uuid.uuid4())).status_code == 201
        route.continue_()

    page.route("**/payments", meddle)
    _press(page, "twice")
    expect(_headline(page)).to_have_text("One charge: payment completed")
    expect(_count(page, "Charged")).to_have_text("once")
    expect(_count(page, "Sent")).to_have_text("twice")


def test_page_reports_a_double_charge_after_the_worker_repeats_the_call(page: Page) -> None:
    page.locator("#dedup").uncheck()
    _strike(page, "drop-after")
    # The worker repeats the call after the page has shown the first charge.
    expect(_headline(page)).to_have_text("Charged twice")
    expect(page.locator("#explanation")).to_contain_text("two charges for this one request")
    expect(page.locator("#verdict")).to_have_class(re.compile(r"\bbad\b"))
    expect(page.locator("#requests .fate").first).to_contain_text("Charged twice")
    expect(page.locator("#ledger tr.twice")).to_have_count(2)


def test_page_follows_an_interrupted_request_until_a_worker_completes_it(page: Page) -> None:
    _strike(page, "drop-after")
    expect(_headline(page)).to_have_text("One charge: payment completed")
    expect(page.locator("#explanation")).to_contain_text("finished the request without it")
    expect(_count(page, "Charged")).to_have_text("once")


def test_an_unknown_outcome_is_followed_until_the_webhook_settles_it(page: Page) -> None:
    _choose(page, "/notifications")
    page.locator("#repeatable").uncheck()
    _strike(page, "drop-after")
    expect(_headline(page)).to_have_text("One charge: notification completed")
    expect(_count(page, "Status")).to_have_text("completed")


def test_page_reports_a_completed_transfer(page: Page) -> None:
    _choose(page, "/transfers")
    _press(page, "once")
    expect(page.locator("#answers .badge")).to_have_text("202 Accepted")
    expect(_headline(page)).to_have_text("One charge: transfer completed")
    expect(page.locator("#verdict")).to_have_class(re.compile(r"\bgood\b"))
    expect(page.locator("#requests .badge").first).to_have_text("completed")


def test_a_declined_card_is_a_final_answer_without_a_charge(page: Page) -> None:
    _strike(page, "decline")
    expect(_headline(page)).to_have_text("No charges: final response 402")
    expect(page.locator("#verdict")).to_have_class(re.compile(r"\bgood\b"))


def test_concurrent_button_sends_both_requests_with_a_new_key(page: Page) -> None:
    _choose(page, "/orders")
    page.locator("#delay").fill("0.5")
    _press(page, "once")
    used = page.locator("#key").input_value()
    _press(page, "together")
    assert page.locator("#key").input_value() != used
    badges = page.locator("#answers .badge").all_inner_texts()
    assert sorted(badges) == ["201 Created", "409 Conflict"]
    expect(_headline(page)).to_have_text("One order: order completed")
    expect(page.locator("#explanation")).to_contain_text("executed nothing")


def test_page_reports_a_rejected_different_body(page: Page) -> None:
    _press(page, "altered")
    expect(_headline(page)).to_have_text("One charge; the other body was refused")


def test_without_a_key_nothing_is_executed(page: Page) -> None:
    _press(page, "keyless")
    expect(_headline(page)).to_have_text("Refused: no key")
    expect(page.locator("#requests li")).to_have_count(0)


def test_no_column_and_no_text_is_cut(page: Page) -> None:
    for route in ("/orders", "/payments", "/transfers"):
        _choose(page, route)
        _press(page, "twice")
        expect(page.locator("#rows tr").first).to_contain_text("cus_1001")
        for scroller in page.locator(".scroller").all():
            assert scroller.evaluate("it => it.scrollWidth <= it.clientWidth")
        cut = "cells => cells.filter(it => it.scrollWidth > it.clientWidth).map(it => it.textContent)"
        assert page.locator("td, th, button, dd").evaluate_all(cut) == []
        assert page.locator("#body").evaluate("it => it.scrollHeight <= it.clientHeight")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("width", [360, 768])
def test_a_small_screen_is_not_scrolled_sideways(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": HEIGHT})
    _press(page, "twice")
    expect(_headline(page)).to_have_text("One charge: payment completed")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_page_for_api_consumers_can_be_read_on_a_phone(page: Page, demo: Demo) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto(f"{demo.url}/idempotency")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("parseFloat(getComputedStyle(document.body).fontSize)") >= 16
    assert page.evaluate("getComputedStyle(document.querySelector('td')).display") == "block"
    assert page.evaluate("getComputedStyle(document.querySelector('td code')).fontWeight") == "600"


def test_a_reload_keeps_the_list_and_the_verdict(page: Page) -> None:
    _press(page, "twice")
    page.locator("#new-key").click()
    _strike(page, "decline")
    before = page.locator("#requests li").all_inner_texts()
    assert len(before) == 2
    page.reload()
    expect(_headline(page)).to_have_text("No charges: final response 402")
    expect(page.locator("#requests li")).to_have_count(2)
    assert page.locator("#requests li").all_inner_texts() == before
    page.locator("#requests button").nth(1).click()
    expect(_headline(page)).to_have_text("One charge: payment completed")
    expect(_count(page, "Sent")).to_have_text("three times")


def test_reload_continues_following_an_open_request(page: Page) -> None:
    _choose(page, "/transfers")
    _strike(page, "hang-after")
    page.reload()
    expect(_headline(page)).to_have_text("One charge: transfer completed")


def test_missing_browser_fails_with_the_install_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("ONCEKEY_TEST_BROWSER", raising=False)
    with pytest.raises(BrowserMissingError, match="apt-get install chromium"):
        program()
    monkeypatch.setenv("ONCEKEY_TEST_BROWSER", "no-such-browser")
    with pytest.raises(BrowserMissingError, match="no-such-browser"):
        program()
    fetched = tmp_path / "chrome"
    fetched.touch()
    monkeypatch.delenv("ONCEKEY_TEST_BROWSER")
    assert program(str(fetched)) == str(fetched)
