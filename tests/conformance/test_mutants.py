"""The tester is right about others: each bug breaks the clause that is there for it, and only related ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from conformance.aiming import broken, shop_target
from conformance.mutants import HEADLINES, KILLS, REACHED, UNKILLED
from conformance.shop import Bug, Shop
from oncekey_check import CLAUSES, CheckProfile, CheckReport, Failed, Need, Skipped, check
from oncekey_check.scripts import transcript

AT_ONCE = 12

# Shops that are wrong in two ways of which neither follows from the other.
TWO_FAULTS = {
    Bug.DEPTH_CRASH: ["keys.missing", "mismatches.depth"],
    Bug.TENANT_B_SEES_A: ["tenants.independent", "mismatches.nothing-happens"],
}

# What test_reach.py gives to the tester.
FURTHER = {Need.DECLINED, Need.LARGE, Need.ALSO, Need.LEASE, Need.CRASH, Need.OUTAGE}


def _check(*bugs: Bug) -> CheckReport:
    with Shop(*bugs) as shop:
        return check(shop_target(shop), profile=CheckProfile.STRICT_MONEY)


@pytest.fixture(scope="module")
def reports() -> dict[Bug, CheckReport]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(Bug, pool.map(_check, Bug), strict=True))


def test_the_correct_shop_passes_everything() -> None:
    report = _check()
    assert broken(report, CheckProfile.IETF, CheckProfile.STRICT_MONEY) == set()
    assert {finding.verdict.pass_this for finding in report.skipped} <= FURTHER
    assert report.matches == [CheckProfile.IETF, CheckProfile.STRICT_MONEY]


def test_the_correct_shop_in_the_other_flavour_passes_everything() -> None:
    # C7
    with Shop(stripe=True) as shop:
        report = check(shop_target(shop, key_optional=True), profile=CheckProfile.STRIPE)
    assert broken(report, CheckProfile.STRIPE) == set()
    assert (report.failed, report.advice) == ([], [])
    assert report.matches == [CheckProfile.STRIPE]


@pytest.mark.parametrize("bug", Bug, ids=lambda bug: bug.name)
def test_a_bug_breaks_its_clause_and_only_related_ones(bug: Bug, reports: dict[Bug, CheckReport]) -> None:
    assert broken(reports[bug], CheckProfile.IETF, CheckProfile.STRICT_MONEY) == set(KILLS[bug])


@pytest.mark.parametrize("bug", Bug, ids=lambda bug: bug.name)
def test_headline_describes_the_effect_of_the_bug(bug: Bug, reports: dict[Bug, CheckReport]) -> None:
    (finding,) = (one for one in reports[bug].findings if one.clause.id == KILLS[bug][0])
    assert finding.headline == HEADLINES[bug].format(effects=finding.evidence.effects)


def test_every_clause_is_broken_by_a_bug() -> None:
    alone = {name for clauses in (*KILLS.values(), *REACHED.values()) for name in clauses}
    assert {clause.id for clause in CLAUSES} - alone == set(UNKILLED)
    assert set(KILLS) == set(Bug)


def test_every_finding_contains_its_exchange_and_expectation(reports: dict[Bug, CheckReport]) -> None:
    for report in reports.values():
        for finding in report.findings:
            if isinstance(finding.verdict, Failed):
                assert finding.verdict.exchange
                assert finding.verdict.expected
                assert finding.verdict.seen


def test_transcript_reports_a_disconnected_client(reports: dict[Bug, CheckReport]) -> None:
    (finding,) = reports[Bug.HANGUP_FORGETS].failed
    assert "(no response: the client disconnected)" in transcript(finding.verdict.exchange[0])


@pytest.mark.parametrize("bug", Bug, ids=lambda bug: bug.name)
def test_findings_of_one_bug_are_grouped_under_one_cause(bug: Bug, reports: dict[Bug, CheckReport]) -> None:
    report = reports[bug]
    failed = {finding.clause.id for finding in report.failed}
    expected = [name for name in TWO_FAULTS.get(bug, KILLS[bug][:1]) if name in failed]
    assert [group.root.clause.id for group in report.groups] == expected


def test_the_most_dangerous_finding_comes_first(reports: dict[Bug, CheckReport]) -> None:
    harms = [finding.harm for finding in reports[Bug.NO_FINGERPRINT].failed]
    assert harms == sorted(harms, reverse=True)
    assert reports[Bug.NO_FINGERPRINT].failed[0].clause.id == "mismatches.nothing-happens"


def test_clause_without_its_option_is_skipped_and_names_the_option() -> None:
    nothing = dict.fromkeys(("slow", "fail", "count_address", "other_address"))
    with Shop() as shop:
        report = check(shop_target(shop, **nothing, other_tenant=(), same_caller=(), unothers=False))
    told = {clause.needs for clause in CLAUSES if clause.needs}
    assert len(told) > 5
    for finding in report.findings:
        lacking = set(finding.clause.needs) - {Need.OTHER_BODY, Need.JSON, Need.CREDENTIALS}
        assert isinstance(finding.verdict, Skipped) == bool(lacking), finding.clause.id
        if isinstance(finding.verdict, Skipped):
            assert finding.verdict.pass_this in lacking
    assert report.failed == []


def test_race_is_detected_from_responses_without_a_count() -> None:
    with Shop(Bug.CHECK_THEN_INSERT) as shop:
        report = check(shop_target(shop, count_address=None), clauses=[c for c in CLAUSES if c.id == "races.10"])
    assert [finding.clause.id for finding in report.failed] == ["races.10"]
