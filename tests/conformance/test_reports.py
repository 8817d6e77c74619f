"""What a run leaves: text, JSON, JUnit and a page, none of which gives credentials away."""

from __future__ import annotations

import json
import shlex
import subprocess
from html.parser import HTMLParser
from xml.etree.ElementTree import fromstring

import pytest

from conformance.aiming import shop_target
from conformance.shop import Bug, Shop
from oncekey.conformance import CLAUSES, Failed, Profile, Report, Severity, check
from oncekey.conformance.clauses import Exchange
from oncekey.conformance.curl import curl_line, steps, transcript
from oncekey.conformance.report_html import to_html
from oncekey.conformance.report_json import to_json
from oncekey.conformance.report_junit import to_junit
from oncekey.conformance.report_text import dangers, missing, plain
from oncekey.conformance.shots import Address, Answer, Shot

pytestmark = pytest.mark.xdist_group("conformance")

FAST = [clause for clause in CLAUSES if not clause.id.startswith(("races", "hang-ups"))]


@pytest.fixture(scope="module")
def report() -> Report:
    """The findings of a shop that has much to find."""
    bugs = (Bug.NO_FINGERPRINT, Bug.GLOBAL_SCOPE, Bug.REPLAY_200, Bug.LOST_LOCATION, Bug.NO_ECHO)
    with Shop(*bugs) as shop:
        return check(shop_target(shop, fail=None, slow=None), profile=Profile.STRICT_MONEY, clauses=FAST)


def test_the_three_most_dangerous_come_first(report: Report) -> None:
    first = dangers(report)
    assert len(first) == 3
    assert all(text.startswith("CRITICAL") for text in first[:2])
    assert all("expected:" in text and "seen:" in text and "curl -i -X POST" in text for text in first)
    assert plain(report).startswith("The most dangerous findings")
    assert len({finding.clause.area for finding in report.dangers}) == 3
    assert [finding.clause.severity for finding in report.dangers[:2]] == [Severity.CRITICAL] * 2


def test_the_text_says_what_to_pass_to_judge_more(report: Report) -> None:
    assert "--fail-header would let 3 more be judged" in missing(report)
    assert "--slow-header would let 2 more be judged" in missing(report)


def test_json_has_every_clause_and_the_counts(report: Report) -> None:
    document = json.loads(to_json(report))
    assert [clause["id"] for clause in document["clauses"]] == [clause.id for clause in FAST]
    results = [clause["result"] for clause in document["clauses"]]
    for word in ("passed", "failed", "advice", "skipped"):
        assert results.count(word) == document[word] > 0
    assert document["matches"] == []
    assert document["profile"] == "strict-money"
    assert len(document["most_dangerous"]) == 3


def test_junit_counts_what_failed_and_what_was_skipped(report: Report) -> None:
    root = fromstring(to_junit(report))
    assert len(root.findall(".//failure")) == len(report.failed)
    assert len(root.findall(".//skipped")) == len(report.skipped) + len(report.undecided)
    assert len(root.findall(".//testcase")) == len(report.asked)
    assert sum(int(suite.attrib["failures"]) for suite in root) == len(report.failed)


class _Page(HTMLParser):
    """The tags that are open, and every address that the page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.links: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in {"meta", "br"}:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.add(value or "")
            if name == "href" and (value or "").startswith("#"):
                self.links.add((value or "")[1:])
            elif name in {"src", "href", "srcset", "action"}:
                self.loaded.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(report: Report) -> None:
    page = _Page()
    text = to_html(report)
    page.feed(text)
    assert (page.open, page.loaded) == ([], [])
    assert page.links == page.ids == {finding.clause.id for finding in (*report.failed, *report.advice)}
    assert "@import" not in text
    assert "url(" not in text


@pytest.mark.parametrize("write", [plain, to_json, to_junit, to_html])
def test_no_report_has_a_credential_in_it(write, report: Report) -> None:
    assert "Bearer" not in write(report)


def test_the_commands_say_when_somebody_else_asks(report: Report) -> None:
    finding = next(found for found in report.failed if found.clause.id == "tenants.independent")
    assert isinstance(finding.verdict, Failed)
    assert [line.endswith("# as the other tenant") for line in steps(finding.verdict.exchange)] == [False, True]


def test_a_volley_is_repeated_as_a_volley() -> None:
    with Shop(Bug.CHECK_THEN_INSERT) as shop:
        found = check(shop_target(shop), clauses=[clause for clause in CLAUSES if clause.id == "races.10"])
    (finding,) = found.failed
    assert isinstance(finding.verdict, Failed)
    first, *_ = steps(finding.verdict.exchange)
    assert first.startswith("for i in $(seq 10); do curl -i -X POST ")
    assert first.endswith(" & done; wait")


ADDRESS = Address.parse("http://shop.example/orders?a='b'")


def test_a_command_has_the_words_that_were_sent() -> None:
    shot = Shot("POST", ADDRESS, (("A", "it's"), ("Idempotency-Key", ""), ("X-Api-Key", "s3cret")), b'{"a": "$b"}')
    words = shlex.split(curl_line(shot))
    assert words == [
        *("curl", "-i", "-X", "POST", str(ADDRESS), "-H", "A: it's", "-H", "Idempotency-Key;"),
        *("-H", "X-Api-Key: $X_API_KEY", "--data-binary", '{"a": "$b"}'),
    ]


def test_a_command_repeats_what_was_sent() -> None:
    with Shop() as shop:
        target = shop_target(shop)
        plain_shot = Shot(
            "POST", target.address, (*target.headers, ("Idempotency-Key", '"a-key-of-a-report"')), target.body
        )
        done = subprocess.run(
            ["bash", "-c", curl_line(plain_shot)],
            env={"AUTHORIZATION": "Bearer alpha", "PATH": "/usr/local/bin:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert "HTTP/1.1 201" in done.stdout
        assert len(shop.orders) == 1


def test_a_page_and_xml_take_whatever_an_api_says() -> None:
    hostile = Answer(200, "OK", (("Set-Cookie", "visit=1"),), b"<script>alert(1)</script>\x00\x1b]]>\xff")
    exchange = Exchange(Shot("POST", ADDRESS, (), b"x" * 5000), hostile)
    clause = FAST[0]
    with Shop(Bug.MISSING_RUNS) as shop:
        found = check(shop_target(shop), clauses=[clause])
    (finding,) = found.failed
    object.__setattr__(finding, "verdict", Failed("<b>", hostile.body.decode("latin-1"), (exchange,)))
    assert "<script>" not in to_html(found)
    assert fromstring(to_junit(found)).find(".//failure") is not None
    assert json.loads(to_json(found))["failed"] == 1
    assert "visit=1" not in transcript(exchange)
    assert len(transcript(exchange)) < 2500


def test_the_time_limit_ends_the_run() -> None:
    with Shop() as shop:
        report = check(shop_target(shop), clauses=FAST[:3], time_limit=0)
    assert [str(finding.verdict) for finding in report.findings] == [
        "Skipped(because='the time was up', pass_this='--time-limit')"
    ] * 3
