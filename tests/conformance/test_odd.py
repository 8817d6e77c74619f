"""The tester accuses nobody: an API that is odd, but not wrong, is told what is true of it and nothing else."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from xml.etree.ElementTree import fromstring

import pytest

from conformance.aiming import broken, shop_target
from conformance.fronts import Front
from conformance.odd import PROFILES, SAID, SUPPLIED, UNDECIDED
from conformance.shop import Bug, Shop, Way
from harness.patience import PATIENCE
from oncekey_check import (
    CLAUSES,
    Address,
    Area,
    CheckProfile,
    CheckReport,
    Clause,
    Failed,
    Inconclusive,
    Passed,
    Severity,
    Skipped,
    Target,
    check,
    planned,
    probe,
)
from oncekey_check.carrier import KEY, Carrier
from oncekey_check.reports import missing, to_json, to_junit, verdict_line

AT_ONCE = 12
UNCOUNTED = [way for way in Way if way is not Way.PAGED]  # a page that is full matters to who counts
BOTH = (CheckProfile.IETF, CheckProfile.STRICT_MONEY)


def _check(*ways: Bug | Way, counted: bool = True, clauses: Iterable[Clause] = CLAUSES) -> CheckReport:
    with Shop(*ways) as shop:
        described = shop_target(shop) if counted else shop_target(shop, count_address=None)
        return check(described, profile=CheckProfile.STRICT_MONEY, clauses=clauses)


def _undecided(report: CheckReport) -> set[str]:
    """Return what the shop leaves undecided; that requests did not meet is the doing of a busy machine."""
    found = {finding.clause.id: finding.verdict for finding in report.findings}
    return {
        name
        for name, verdict in found.items()
        if isinstance(verdict, Inconclusive) and verdict.pass_this != "a slower --slow-header"
    }


def _only(*names: str) -> list[Clause]:
    return [clause for clause in CLAUSES if clause.id in names]


@pytest.fixture(scope="module")
def counted() -> dict[Way, CheckReport]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(Way, pool.map(_check, Way), strict=True))


@pytest.fixture(scope="module")
def uncounted() -> dict[Way, CheckReport]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(UNCOUNTED, pool.map(lambda way: _check(way, counted=False), UNCOUNTED), strict=True))


@pytest.mark.parametrize("way", Way, ids=lambda way: way.name)
def test_unusual_shop_gets_only_correct_findings(way: Way, counted: dict[Way, CheckReport]) -> None:
    assert broken(counted[way], *BOTH) == set(SAID[way])
    if way not in (*SUPPLIED, Way.LATER):  # whether a page has changed already is decided by chance
        assert _undecided(counted[way]) == set(UNDECIDED.get(way, ()))


@pytest.mark.parametrize("way", UNCOUNTED, ids=lambda way: way.name)
def test_unusual_shop_without_a_count_gets_no_further_findings(way: Way, uncounted: dict[Way, CheckReport]) -> None:
    assert broken(uncounted[way], *BOTH) == set(SAID[way])
    assert _undecided(uncounted[way]) >= set(UNDECIDED.get(way, ()))


def test_unusual_shops_get_no_critical_findings(
    counted: dict[Way, CheckReport], uncounted: dict[Way, CheckReport]
) -> None:
    for report in (*counted.values(), *uncounted.values()):
        assert Severity.CRITICAL not in {finding.clause.severity for finding in report.failed}


RIGHT = [
    *(way for way in Way if not SAID[way] or way in PROFILES),
    Way.REPLAY_IS_200,
    Way.BODY_MARKER,
]
"""The shops that are right, however unusual they are."""


ELSEWHERE = [*PROFILES, *PROFILES, Way.PAGED]
"""Further runs: two with the profile that a shop follows, and a second one of the shop that is not run uncounted."""


@pytest.fixture(scope="module")
def again() -> dict[Way, list[CheckReport]]:
    """Return the reports of the further runs, twelve at a time."""

    def run(way: Way) -> CheckReport:
        profile = PROFILES.get(way, CheckProfile.STRICT_MONEY)
        stripe = profile is CheckProfile.STRIPE
        with Shop(way, stripe=stripe) as shop:
            return check(shop_target(shop, key_optional=stripe), profile=profile)

    found: dict[Way, list[CheckReport]] = {way: [] for way in ELSEWHERE}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for way, report in zip(ELSEWHERE, pool.map(run, ELSEWHERE), strict=True):
            found[way].append(report)
    return found


@pytest.mark.parametrize("way", RIGHT, ids=lambda way: way.name)
def test_correct_shop_passes_repeated_checks_under_load(
    way: Way, counted: dict[Way, CheckReport], uncounted: dict[Way, CheckReport], again: dict[Way, list[CheckReport]]
) -> None:
    seen = [] if way in PROFILES else [runs[way] for runs in (counted, uncounted) if way in runs]
    reports = [*seen, *again.get(way, ())]
    assert len(reports) == 2
    assert [(found.clause.id, found.headline) for report in reports for found in report.failed] == []
    assert not any(report.stopped for report in reports)


def test_at_least_40_test_servers_include_15_correct_ones() -> None:
    assert len(RIGHT) >= 15
    assert len(Bug) + len(Way) >= 40


def test_shop_with_keys_in_the_body_passes_repeated_checks() -> None:
    carrier = Carrier(member="client_token")

    def run(_: int) -> CheckReport:
        with Shop() as shop, Front(shop.url, member="client_token") as front:
            target = shop_target(
                shop, address=Address.parse(f"{front.url}/orders"), other_address=None, carrier=carrier
            )
            return check(target, profile=CheckProfile.IETF)

    with ThreadPoolExecutor(2) as pool:
        for report in pool.map(run, range(2)):
            assert [(found.clause.id, found.headline) for found in report.failed] == []


def test_delayed_count_does_not_look_like_a_second_order() -> None:
    only = _only(
        "replays.one-effect", "mismatches.nothing-happens", "races.2", "races.10", "keys.case", "hang-ups.sent"
    )

    def run(late: float, *bugs: Bug) -> set[str]:
        with Shop(Way.ACCEPTED, Way.LATER, *bugs) as shop:
            shop.late = late
            return {found.clause.id for found in check(shop_target(shop), clauses=only).failed}

    twice = {"replays.one-effect", "races.2", "races.10", "hang-ups.sent"}
    cases = [(late, *bugs) for late in (0.003, 0.15) for bugs in ((), (Bug.RUNS_AGAIN,))]
    with ThreadPoolExecutor(len(cases)) as pool:  # they wait most of the time
        assert list(pool.map(lambda case: run(*case), cases)) == [set(), twice, set(), twice]


def test_run_continues_after_rate_limits_or_paging_during_lag_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "_LONGEST", 0.05)  # seconds until a limit that names no time is tried again
    limited: list[int] = []

    def answer(headers: Message) -> tuple[int, bytes] | None:
        """Execute a request without a key, which is a finding, and refuse everything after it."""
        limited.extend([1] if KEY not in headers else [])
        return (429, b"") if len(limited) > 1 and KEY in headers else None

    with Shop(Bug.MISSING_RUNS) as shop, Front(shop.url, answer=answer) as front:
        target = shop_target(shop, address=Address.parse(f"{front.url}/orders"))
        report = check(target, clauses=_only("keys.missing"))
    assert _undecided(report) == {"keys.missing"}
    with Shop(Bug.MISSING_RUNS, Way.PAGED) as shop:
        shop.page = 12
        assert check(shop_target(shop), clauses=_only("keys.missing")).sent < 100


@pytest.mark.parametrize("dies_at", [60, 61])
def test_a_server_that_dies_in_the_middle_ends_the_run_with_what_was_seen(dies_at: int) -> None:
    with Shop() as shop:
        shop.dies_at = dies_at
        report = check(shop_target(shop, patience=0.3), profile=CheckProfile.STRICT_MONEY)
    assert report.failed == []
    assert report.stopped.startswith("the API stopped responding (")
    assert len(report.passed) > 5
    assert report.findings[-1].verdict == Skipped(f"not tried: {report.stopped}")
    assert "Stopped early: the API stopped responding" in verdict_line(report)


def test_an_interrupted_run_reports_what_was_seen() -> None:
    def interrupt(_: Clause, number: int, __: int) -> None:
        if number == 4:
            raise KeyboardInterrupt

    with Shop() as shop:
        report = check(shop_target(shop), progress=interrupt)
    assert report.stopped == f"interrupted in {CLAUSES[3].id}"
    assert [type(found.verdict) for found in report.findings[:4]] == [Passed, Passed, Passed, Skipped]
    assert len(report.findings) == len(CLAUSES)


def test_the_estimate_of_requests_is_close(counted: dict[Way, CheckReport]) -> None:
    with Shop() as shop:
        target = shop_target(shop)
        sent = check(target, profile=CheckProfile.STRICT_MONEY).sent
    assert abs(planned(CLAUSES, target) - sent) < sent / 10


def test_every_unusual_shop_has_expected_findings() -> None:
    assert set(SAID) == set(Way)
    assert set(UNDECIDED) < set(Way)


def test_optional_keys_are_reported_once_unless_declared(counted: dict[Way, CheckReport]) -> None:
    assert [finding.clause.id for finding in counted[Way.OPTIONAL].failed] == ["keys.missing"]
    with Shop(Way.OPTIONAL) as shop:
        report = check(shop_target(shop, key_optional=True), profile=CheckProfile.STRICT_MONEY, clauses=CLAUSES[:12])
    assert report.failed == []
    assert "keys.missing" in _undecided(report)


def test_ignored_malformed_key_is_reported_even_if_keys_are_optional() -> None:
    # R6, R10
    about_keys = [clause for clause in CLAUSES if clause.area is Area.KEYS]
    report = _check(Way.OPTIONAL, Bug.MALFORMED_IGNORED, clauses=about_keys)
    assert broken(report, *BOTH) == {"keys.missing", "keys.malformed"}


def test_race_losers_with_500_do_not_fail_the_effect_clauses(counted: dict[Way, CheckReport]) -> None:
    passed = {finding.clause.id for finding in counted[Way.LOSERS_500].findings if finding.verdict == Passed()}
    assert {"races.2", "races.10", "races.50", "hang-ups.sent", "hang-ups.retried", "races.answered"} <= passed


def test_type_clause_is_inconclusive_if_the_api_coerces_types() -> None:
    ways = (Way.STRICT, Way.COERCES)
    report = _check(*ways, clauses=_only("mismatches.types"))
    assert [finding.verdict for finding in report.findings] == [Inconclusive('this API treats "2" as 2')]


def test_type_confusion_is_found_in_an_api_that_only_accepts_numbers() -> None:
    # a shop that refuses "2" for 2, and answers it under a used key all the same
    report = _check(Way.STRICT, Bug.TYPES_MIXED, Way.NUMBERS_ONLY, clauses=_only("mismatches.types"))
    assert [finding.clause.id for finding in report.failed] == ["mismatches.types"]


@pytest.mark.parametrize("page", [5, 8, 13, 21])
def test_count_that_stops_growing_mid_run_causes_no_finding(page: int) -> None:
    with Shop(Way.PAGED) as shop:
        shop.page = page
        report = check(shop_target(shop, slow=None), profile=CheckProfile.STRICT_MONEY, clauses=_by_count())
    assert report.failed == []
    assert "replays.one-effect" in _undecided(report)


def test_resource_that_changes_between_reads_is_not_a_stored_response() -> None:
    reads: list[object] = []

    def answer(headers: Message) -> tuple[int, bytes] | None:
        """Show the order of the clause with the second read after it, whichever of the two has the key."""
        reads.append(headers)
        return 200, b"new" if len(reads) > 3 else b"old"

    with Shop() as shop, Front(shop.url, answer=answer, answers="GET") as front:
        target = shop_target(shop, address=Address.parse(f"{front.url}/orders"), count_address=None)
        report = check(target, clauses=_only("others.get-current"))
    assert len(reads) == 4
    assert report.failed == []


def _by_count() -> list[Clause]:
    return [clause for clause in CLAUSES if clause.area in {Area.KEYS, Area.REPLAYS, Area.OTHERS}]


def test_rejected_other_tenant_leaves_tenant_clauses_undecided() -> None:
    stranger = (("Authorization", "Bearer stranger"),)
    with Shop() as shop:
        report = check(shop_target(shop, other_tenant=stranger), clauses=_only("tenants.independent", "tenants.unseen"))
    assert _undecided(report) == {"tenants.independent", "tenants.unseen"}


def test_error_status_with_the_first_response_body_is_a_finding() -> None:
    about_place = _only("mismatches.query", "mismatches.endpoint")
    for bugs in ((), (Bug.QUERY_IGNORED, Bug.ENDPOINT_IGNORED)):
        with Shop(*bugs) as shop:
            shop.replay_status = 409
            report = check(shop_target(shop), profile=CheckProfile.STRICT_MONEY, clauses=about_place)
        assert len(report.failed) == len(bugs)
    assert report.failed[0].verdict.seen.endswith("the body of the first response")


class _Rivals:
    """Answers the first request of a pair when the second has come; `alone` requests before that meet no other."""

    def __init__(self, alone: int = 0) -> None:
        self.alone, self.come, self.met = alone, itertools.count(1), threading.Event()

    def __call__(self, headers: Message) -> None:
        if "X-Late" not in headers:
            return
        match next(self.come) - self.alone:
            case 1:
                assert self.met.wait(PATIENCE)
            case 2:
                self.met.set()


def _late(shop: Shop, front: Front) -> Target:
    return shop_target(shop, address=Address.parse(f"{front.url}/orders"), slow=("X-Late", "1"))


def test_retry_after_clause_is_undecided_if_both_requests_run() -> None:
    with (
        Shop(Bug.MISSING_RUNS) as shop,
        Front(shop.url, unprotected=lambda headers: "X-Late" in headers, answer=_Rivals()) as front,
    ):
        report = check(_late(shop, front), clauses=_only("races.retry-after"))
    assert _undecided(report) == {"races.retry-after"}


def test_requests_that_did_not_overlap_are_left_out_of_the_finding() -> None:
    with Shop(Bug.BODY_IN_KEY) as shop, Front(shop.url, answer=_Rivals(alone=2)) as front:
        (finding,) = check(_late(shop, front), clauses=_only("mismatches.while-running")).failed
    assert finding.headline == "Another body was executed while the first request was running: 2 orders from one key"
    assert len({dict(exchange.request.headers)[KEY] for exchange in finding.verdict.exchange}) == 1
    assert len(finding.verdict.exchange) == 2


# Blind is undecided


def _blind(*bugs: Bug) -> CheckReport:
    return _check(Way.CONSTANT, *bugs, counted=False)


def test_equal_responses_without_a_count_leave_effect_clauses_undecided(uncounted: dict[Way, CheckReport]) -> None:
    for report in (uncounted[Way.CONSTANT], _blind(Bug.RUNS_AGAIN)):
        for finding in report.findings:
            if finding.clause.sight:
                assert isinstance(finding.verdict, Skipped), finding.clause.id
        assert len(_undecided(report)) > 30
        assert report.failed == []


def test_every_effect_or_replay_clause_requires_sight() -> None:
    without = {clause.id for clause in CLAUSES if not clause.sight and "--count-url" not in clause.needs}
    judged_by_refusals = ("keys.", "mismatches.", "leaks.", "tenants.", "failures.", "others.")
    assert {name for name in without if not name.startswith(judged_by_refusals)} == {
        "replays.expiry",
        "races.losers",
        "races.retry-after",
        # These are judged by a status, or have a control of their own.
        "crashes.answered",
        "outages.closed",
        "outages.reported",
        "finals.declined",
    }


def test_count_reveals_bugs_behind_equal_responses(counted: dict[Way, CheckReport]) -> None:
    assert _undecided(counted[Way.CONSTANT]) == {"tenants.unseen"}
    seen = ("replays.one-effect", "races.10", "hang-ups.answered")
    assert broken(_check(Way.CONSTANT, Bug.RUNS_AGAIN, clauses=_only(*seen)), *BOTH) == set(seen)
    seen = ("mismatches.query", "keys.whole", "keys.parameters")
    bugs = (Bug.QUERY_IGNORED, Bug.KEY_PREFIX, Bug.PARAMETERS_KEPT)
    assert broken(_check(Way.CONSTANT, *bugs, clauses=_only(*seen)), *BOTH) == set(seen)


def test_re_execution_of_all_retries_is_reported_by_retry_clauses_only() -> None:
    spelt = ("keys.quoted", "keys.two-spellings", "keys.field-name", "replays.white-space", "hang-ups.slowly")
    report = _check(Bug.RUNS_AGAIN, clauses=_only(*spelt))
    assert _undecided(report) == set(spelt)
    assert {finding.verdict.because for finding in report.undecided} == {"a plain retry is also executed again"}


def test_reports_distinguish_undecided_from_skipped_clauses(uncounted: dict[Way, CheckReport]) -> None:
    report = uncounted[Way.CONSTANT]
    because = "the responses to two fresh keys are equal, and effects are not counted"
    document = json.loads(to_json(report))
    found = [clause for clause in document["clauses"] if clause["result"] == "undecided"]
    assert len(found) == document["undecided"] == len(report.undecided)
    assert {"because": because, "pass_this": "--count-url"}.items() <= next(
        clause for clause in found if clause["id"] == "races.50"
    ).items()
    skipped = fromstring(to_junit(report)).findall(".//skipped")
    assert len(skipped) == len(report.undecided) + len(report.skipped)
    assert f"{because}; pass --count-url" in [case.attrib["message"] for case in skipped]
    assert f"{len(report.undecided)} undecided" in verdict_line(report)
    waiting = sum(finding.verdict.pass_this == "--count-url" for finding in (*report.undecided, *report.skipped))
    assert f"--count-url would allow judging {waiting} more" in missing(report)


def test_a_finding_is_never_undecided(counted: dict[Way, CheckReport]) -> None:
    for report in counted.values():
        groups = (report.passed, report.failed, report.advice, report.allowed, report.skipped, report.undecided)
        assert sum(map(len, groups)) == len(report.asked)
        assert all(isinstance(finding.verdict, Failed) for finding in (*report.failed, *report.advice))
