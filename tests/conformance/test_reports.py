"""What a run leaves: text, JSON, JUnit and a page, none of which gives credentials away."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree.ElementTree import fromstring

import pytest

from conformance.aiming import shop_target
from conformance.fronts import Front
from conformance.shop import Bug, Shop
from harness.browser import chromium
from oncekey import __version__
from oncekey_check import CLAUSES, CheckProfile, CheckReport, Failed, check
from oncekey_check.clauses import Exchange, Harm
from oncekey_check.judging import difference
from oncekey_check.raw_http import Address, Answer, RawRequest
from oncekey_check.reports import dangers, missing, plain, to_html, to_json, to_junit, to_sarif
from oncekey_check.scripts import invocation, transcript

FAST = [clause for clause in CLAUSES if not clause.id.startswith(("races", "hang-ups"))]


@pytest.fixture(scope="module")
def report() -> CheckReport:
    """The findings of a shop that has much to find."""
    bugs = (Bug.NO_FINGERPRINT, Bug.GLOBAL_SCOPE, Bug.REPLAY_200, Bug.LOST_LOCATION, Bug.NO_ECHO)
    with Shop(*bugs) as shop:
        return check(shop_target(shop, fail=None, slow=None), profile=CheckProfile.STRICT_MONEY, clauses=FAST)


def test_the_three_most_dangerous_come_first(report: CheckReport) -> None:
    first = dangers(report)
    assert len(first) == 3
    assert first[0].startswith("Tenant B received tenant A's order, and its own never happened\n  leaked; critical")
    assert first[1].startswith("Another body under a used key received the first response: the second order never")
    assert all("expected:" in text and "seen:" in text and "curl -si -X POST" in text for text in first)
    assert plain(report).startswith("Problems, worst first\n\nTenant B received tenant A's order")
    assert [finding.harm for finding in report.dangers] == [Harm.LEAKED, Harm.LOST, Harm.WRONG]


def test_findings_are_ordered_by_their_harm_and_overlaps_have_one_cause() -> None:
    bugs = (Bug.CLAIMS_LATE, Bug.NO_FINGERPRINT, Bug.GLOBAL_SCOPE, Bug.QUOTES_KEPT, Bug.MISSING_RUNS, Bug.REPLAY_200)
    with Shop(*bugs) as shop:
        found = check(shop_target(shop, fail=None), profile=CheckProfile.STRICT_MONEY)
    harms = [group.root.harm or 0 for group in found.groups]
    assert harms == sorted(harms, reverse=True)
    assert {Harm.TWICE, Harm.LEAKED, Harm.LOST, Harm.UNPROTECTED} <= set(harms)
    assert found.groups[0].root.clause.id == "races.50"
    follow = {one.clause.id for one in found.groups[0].consequences}
    assert {"races.while-running", "hang-ups.sent", "mismatches.while-running"} <= follow
    headlines = [group.root.headline for group in found.groups]
    assert json.loads(to_json(found))["headlines"] == headlines
    for text in (plain(found), unescape(to_html(found))):
        places = [text.index(headline) for headline in headlines]
        assert places == sorted(places)
    rest = plain(found).partition("Also wrong\n")[2].partition("\n\n")[0].splitlines()
    assert len(rest) == len(headlines) - 3 + 1
    assert rest[-1].startswith("  --html FILE shows the fix and the script of each finding")


def test_text_report_names_options_that_enable_more_clauses(report: CheckReport) -> None:
    assert "--fail-header would allow judging 3 more" in missing(report)
    assert "--slow-header would allow judging 2 more" in missing(report)


def test_json_has_every_clause_and_the_counts(report: CheckReport) -> None:
    document = json.loads(to_json(report))
    assert [clause["id"] for clause in document["clauses"]] == [clause.id for clause in FAST]
    results = [clause["result"] for clause in document["clauses"]]
    for word in ("passed", "failed", "advice", "skipped"):
        assert results.count(word) == document[word] > 0
    assert document["matches"] == []
    assert document["profile"] == "strict-money"
    assert len(document["most_dangerous"]) == 3


def test_junit_counts_what_failed_and_what_was_skipped(report: CheckReport) -> None:
    root = fromstring(to_junit(report))
    assert len(root.findall(".//failure")) == len(report.failed)
    assert len(root.findall(".//skipped")) == len(report.skipped) + len(report.undecided)
    assert len(root.findall(".//testcase")) == len(report.asked)
    assert sum(int(suite.attrib["failures"]) for suite in root) == len(report.failed)


def test_sarif_has_a_rule_for_each_clause_and_a_result_for_each_finding(report: CheckReport) -> None:
    document = json.loads(to_sarif(report))
    (run,) = document["runs"]
    rules = {rule["id"]: rule for rule in run["tool"]["driver"]["rules"]}
    assert document["version"] == "2.1.0"
    assert set(rules) == {finding.clause.id for finding in report.asked}
    assert all(rule["help"]["text"].endswith(".") and rule["helpUri"].startswith("https://") for rule in rules.values())
    levels = {result["ruleId"]: result["level"] for result in run["results"]}
    failed, advice = ({finding.clause.id for finding in found} for found in (report.failed, report.advice))
    assert {name for name, level in levels.items() if level == "error"} == failed
    assert {name for name, level in levels.items() if level == "note"} == advice
    place = run["results"][0]["locations"][0]
    assert place["physicalLocation"]["artifactLocation"]["uri"] == "orders"
    assert place["logicalLocations"][0]["fullyQualifiedName"] == "POST /orders"
    assert "Bearer" not in to_sarif(report).replace("${AUTHORIZATION}", "")


def test_reports_name_every_clause_and_the_fix_of_every_finding(report: CheckReport) -> None:
    page, text = unescape(to_html(report)), plain(report)
    for finding in report.asked:
        assert f"<code>{finding.clause.id}</code>" in page
        assert finding.clause.id in text
    for finding in report.failed:
        assert finding.clause.fix in page
    assert f"  fix:       {report.dangers[0].clause.fix}" in text


def test_behaviour_forbidden_by_another_profile_counts_as_allowed() -> None:
    only = [clause for clause in CLAUSES if clause.id == "mismatches.status"]
    with Shop() as shop:
        strict = check(shop_target(shop), profile=CheckProfile.IETF, clauses=only)
        other = check(shop_target(shop), profile=CheckProfile.STRIPE, clauses=only)
    assert "allowed   mismatches.status" in plain(strict)
    assert "1 allowed" in plain(strict).splitlines()[-1]
    assert strict.passed == strict.failed == []
    (finding,) = other.failed
    assert finding.verdict.expected == "another body under a used key: 400"


@pytest.mark.parametrize("partial", [True, False])
def test_only_a_whole_run_lists_the_profiles_without_a_broken_guarantee(report: CheckReport, partial: bool) -> None:
    assert report.partial  # it left clauses out
    some = replace(report, findings=tuple(report.passed), partial=partial)
    line = "rofiles without a broken guarantee"
    assert [line in text for text in (plain(some), to_html(some))] == [not partial] * 2
    assert (": ietf, stripe, conflict, strict-money" in plain(some)) is not partial
    document = json.loads(to_json(some))
    assert (document["partial"], len(document["matches"])) == (partial, 0 if partial else len(CheckProfile))


def test_run_that_ends_early_is_partial() -> None:
    with Shop() as shop:
        assert check(shop_target(shop), time_limit=0).partial
        assert check(shop_target(shop), clauses=CLAUSES[:1]).partial


BOTH = (b'{"id":1,"at":{"city":"Oslo","zip":7}}', b'{"id":1,"at":{"city":"Rome"}}')


@pytest.mark.parametrize(
    ("one", "two", "found"),
    [
        (b'{"id": 399, "n": 1}', b'{"id": 400, "n": 1}', "another body: id 400 instead of 399"),
        (*BOTH, 'another body: at.city "Rome" instead of "Oslo"'),
        (b'{"id":1}', b'{"id":1,"x\\u001b[1m":2}', r'another body: with "x\u001b[1m"'),
        (b'{"id":1,"n":2}', b'{"id":1}', "another body: without n"),
        (b"1", b"2", "another body: 2 instead of 1"),
        (b'{"id":1}', b'{"id": 1}', "the same JSON in another spelling"),
        (b"order 7 placed", b"order 8 placed", 'another body: from byte 6 "8 placed" instead of "7 placed"'),
        (b"order", b"order 8", 'another body: from byte 5 " 8" instead of ""'),
        (b'"%s"' % (b"x" * 99), b"1", f'another body: 1 instead of "{"x" * 39}…'),
    ],
)
def test_difference_of_two_bodies_is_shown(one: bytes, two: bytes, found: str) -> None:
    assert difference(Answer(201, "", (), one), Answer(201, "", (), two)) == found


def test_difference_prefers_values_that_do_not_change_in_every_response() -> None:
    one, two = (Answer(201, "", (("Location", f"/{body}"),), body.encode()) for body in ("[1, 1]", "[2, 2]"))
    assert difference(one, two, frozenset({(0,)})) == "another body: 1 2 instead of 1"
    assert difference(one, replace(two, body=one.body)) == 'Location: "/[2, 2]" instead of "/[1, 1]"'
    assert difference(one, one) == ""


@pytest.mark.parametrize(
    ("bug", "clause"), [(Bug.QUOTES_KEPT, "keys.two-spellings"), (Bug.PARAMETERS_KEPT, "keys.parameters")]
)
def test_report_shows_how_the_second_response_differs(bug: Bug, clause: str) -> None:
    only = [one for one in CLAUSES if one.id == clause]
    with Shop(bug) as shop:
        (finding,) = check(shop_target(shop, count_address=None), clauses=only).failed
    assert isinstance(finding.verdict, Failed)
    assert re.fullmatch(r"201, [0-9]+ bytes, another body: id \S+ instead of \S+", finding.verdict.seen)


class _Page(HTMLParser):
    """The tags that are open, and every address that the page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.texts: list[str] = []
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
            elif tag == "a":
                self.texts.append(value or "")
            elif name in {"src", "href", "srcset", "action"}:
                self.loaded.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_report_is_well_formed_and_loads_no_resources(report: CheckReport) -> None:
    page = _Page()
    text = to_html(report)
    page.feed(text)
    assert (page.open, page.loaded) == ([], [])
    assert page.links == page.ids == {finding.clause.id for finding in (*report.failed, *report.advice)}
    assert page.texts
    assert all(text.startswith("https://") for text in page.texts)
    assert "@import" not in text
    assert "url(" not in text


@pytest.mark.parametrize("write", [plain, to_json, to_junit, to_html])
def test_no_report_has_a_credential_in_it(write, report: CheckReport) -> None:
    assert "Bearer" not in write(report)


@pytest.mark.parametrize("write", [plain, to_json, to_junit, to_html])
def test_reports_contain_version_options_and_references(write, report: CheckReport) -> None:
    text = unescape(write(report))
    assert __version__ in text
    assert "oncekey-check" in text
    assert "--other-tenant-header" in text
    assert "OTHER_AUTHORIZATION" in text
    assert "datatracker.ietf.org/doc/html/draft-ietf-httpapi-idempotency-key-header-07#section-" in text
    assert not re.search(r"\bR[0-9]{1,3}\b", text)


def test_report_contains_a_command_that_repeats_the_run(report: CheckReport) -> None:
    words = shlex.split(invocation(report.target, report.profile))
    assert words[:2] == ["oncekey-check", str(report.target.address)]
    assert words[words.index("--body") + 1] == report.target.body.decode()
    assert words[words.index("--header") + 3] == "Authorization: ${AUTHORIZATION}"
    assert words[words.index("--other-tenant-header") + 1] == "Authorization: ${OTHER_AUTHORIZATION}"
    assert "--unsafe-methods" in words


def test_reports_group_consequences_under_their_cause(report: CheckReport) -> None:
    roots = {group.root.clause.id: {one.clause.id for one in group.consequences} for group in report.groups}
    assert "mismatches.status" in roots["mismatches.nothing-happens"]
    told = {clause["id"]: clause.get("caused_by") for clause in json.loads(to_json(report))["clauses"]}
    assert told["mismatches.status"] == "mismatches.nothing-happens"
    assert told["mismatches.nothing-happens"] is None
    assert "follows:   Another body under a used key received the wrong status (mismatches.status)" in plain(report)


def test_api_that_ignores_keys_yields_one_grouped_finding() -> None:
    with Shop(Bug.MISSING_RUNS) as shop, Front(shop.url, unprotected=lambda _: True) as front:
        target = shop_target(shop, address=Address.parse(f"{front.url}/orders"), slow=None, fail=None)
        found = check(target, profile=CheckProfile.STRICT_MONEY, clauses=FAST)
    assert len(found.failed) > 5
    assert [group.root.headline for group in found.groups if group.root.harm is Harm.TWICE] == [
        "3 orders from one key: the request was sent three times"
    ]
    assert len(found.groups[0].consequences) > 5


OTHER_BODY = "A retry received another body"
OTHER_BODIES = (Bug.NEW_BODY_REPLAYED, Bug.NO_MARKER, Bug.NO_FINGERPRINT, Bug.QUOTES_KEPT)


def _roots(*bugs: Bug, counted: bool) -> dict[str, tuple[Harm | None, str, str, set[str]]]:
    """Check a shop, and return the harm, headline, fix and consequences of each cause, the worst first."""
    clauses = [clause for clause in CLAUSES if not clause.id.startswith(("hang-ups", "tenants", "leaks"))]
    with Shop(*bugs) as shop:
        count = {} if counted else {"count_address": None}
        found = check(shop_target(shop, **count), profile=CheckProfile.IETF, clauses=clauses)
    assert "replays.bytes" not in {finding.clause.id for finding in (*found.failed, *found.advice)}
    return {
        group.root.clause.id: (
            group.root.harm,
            group.root.headline,
            group.root.clause.fix,
            {one.clause.id for one in group.consequences},
        )
        for group in found.groups
    }


def test_another_body_for_a_retry_is_a_wrong_response_if_the_effect_happened_once() -> None:
    roots = _roots(*OTHER_BODIES, counted=True)
    harm, headline, fix, follow = roots["replays.many"]
    assert (harm, headline, follow) == (
        Harm.WRONG,
        f"{OTHER_BODY}, although the effect happened once",
        {"replays.headers"},
    )
    assert fix.startswith("Store the response with the key")
    assert next(iter(roots)) == "keys.two-spellings"
    lost = "Another body under a used key received a success, but the second order never happened"
    assert roots["mismatches.nothing-happens"][:2] == (Harm.LOST, lost)
    assert not any("received the first response" in headline for _, headline, _, _ in roots.values())


def test_a_counted_race_is_not_attributed_to_another_body_for_retries() -> None:
    roots = _roots(*OTHER_BODIES, Bug.CHECK_THEN_INSERT, counted=True)
    harm, headline, fix, follow = next(iter(roots.values()))
    assert harm is Harm.TWICE
    assert headline.endswith("orders from one key: 50 identical requests arrived at the same moment")
    assert fix.startswith("Claim the key with one INSERT")
    assert {"races.2", "races.10"} <= follow
    assert roots["replays.many"][:2] == (Harm.WRONG, f"{OTHER_BODY}, although the effect happened once")


@pytest.mark.parametrize("bugs", [OTHER_BODIES, (*OTHER_BODIES, Bug.CHECK_THEN_INSERT)], ids=["locked", "racing"])
def test_without_a_count_another_body_is_no_proof_of_another_effect(bugs: tuple[Bug, ...]) -> None:
    roots = _roots(*bugs, counted=False)
    harm, headline, _, follow = roots["replays.many"]
    assert (harm, follow) == (Harm.WRONG, {"replays.headers"})
    assert headline == f"{OTHER_BODY}: without --count-url it is not known whether the effect happened again"
    assert roots["mismatches.nothing-happens"][1] == "Another body under a used key received a success"
    assert not any(harm is Harm.TWICE or "executed" in headline for harm, headline, _, _ in roots.values())


ADDRESS = Address.parse("http://shop.example/orders?a='b'")


def test_reports_escape_hostile_responses() -> None:
    hostile = Answer(200, "OK", (("Set-Cookie", "visit=1"),), b"<script>alert(1)</script>\x00\x1b]]>\xff")
    exchange = Exchange(RawRequest("POST", ADDRESS, (), b"x" * 5000), hostile)
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
        "Skipped(because='the time limit was reached', pass_this='--time-limit')"
    ] * 3


AXE = Path(__file__).parents[1] / "console" / "vendor" / "axe.min.js"
_CLIPPED = """[...document.querySelectorAll("html, body, body *")]
    .filter(it => it.clientWidth && it.scrollWidth > it.clientWidth).map(it => it.outerHTML.slice(0, 120))"""


def test_html_report_is_accessible_on_desktop_and_phone_in_both_themes(report: CheckReport) -> None:
    far = replace(report.target, address=ADDRESS.at(f"/orders/{'x' * 300}"))
    faults: dict[tuple[int, str], object] = {}
    with chromium() as browser:
        page = browser.new_page()
        page.set_content(to_html(replace(report, target=far)))
        page.evaluate("document.querySelectorAll('details').forEach(it => { it.open = true; })")
        page.evaluate(AXE.read_text("utf-8"))
        for width, scheme in ((1280, "light"), (360, "dark")):
            page.set_viewport_size({"width": width, "height": 800})
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate("document.documentElement.scrollWidth") == width
            assert page.evaluate(_CLIPPED) == []
            found = page.evaluate(
                "axe.run({resultTypes: ['violations'], runOnly: ['color-contrast', 'list', 'link-name']})"
            )
            assert found["passes"]
            faults[width, scheme] = [(one["id"], one["nodes"][0]["html"][:120]) for one in found["violations"]]
    assert faults == {(1280, "light"): [], (360, "dark"): []}
