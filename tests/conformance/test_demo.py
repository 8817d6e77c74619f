"""The demo keeps every promise that can be judged, in each flavour."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.aiming import broken, demo_target
from harness.demo import Demo
from harness.served import Served
from oncekey.core.policy import Policy
from oncekey_check import CLAUSES, CheckProfile, CheckReport, Need, Passed, Skipped, check, planned
from oncekey_demo.app import create_app

# The demo has no second operation and no switch that makes it fail.
UNTOLD = {Need.OTHER_URL, Need.FAIL, Need.DECLINED, Need.LARGE, Need.SAME_CALLER}
# What needs more than a URL is tried in test_reach.py.
FURTHER = {Need.ALSO, Need.LEASE, Need.CRASH, Need.OUTAGE}


def unjudged(report: CheckReport) -> set[str]:
    """The clauses that were not tried, or that the answers did not decide."""
    return {finding.clause.id for finding in report.findings if isinstance(finding.verdict, Skipped)}


def untold() -> set[str]:
    """The clauses that need what the tester is not given here. Every other clause has to be judged."""
    return {clause.id for clause in CLAUSES if {*clause.needs} & {*UNTOLD, *FURTHER}}


@pytest.mark.parametrize("kept_in", ["sqlite", "postgresql"])
def test_demo_passes_the_ietf_and_strict_money_profiles(
    tmp_path: Path, kept_in: str, request: pytest.FixtureRequest
) -> None:
    # R1 among them: the clause keys.field-name sends the field in other cases; R38 where a key in flight has no row;
    # R241-R243, R247, R248, R257-R259, R262: races, other bodies and tenants, missing keys, replays, other methods;
    # R264: clients that hang up at each part of a request
    store = None if kept_in == "sqlite" else request.getfixturevalue("postgres_dsn")
    with Demo(tmp_path, store=store) as demo:
        report = check(demo_target(demo.url), profile=CheckProfile.IETF)
    assert broken(report, CheckProfile.IETF, CheckProfile.STRICT_MONEY) == set()
    assert unjudged(report) == untold()
    assert [finding.verdict for finding in report.findings if finding.clause.id == "keys.field-name"] == [Passed()]
    assert report.matches == [CheckProfile.IETF, CheckProfile.STRICT_MONEY]
    assert report.sent <= planned()


def test_demo_in_stripe_flavor_passes_the_stripe_profile(tmp_path: Path) -> None:
    # C7
    app = create_app(f"sqlite:///{tmp_path}/demo.db", Policy(flavor="stripe"))
    with Served(app) as served:
        report = check(demo_target(f"http://127.0.0.1:{served.port}"), profile=CheckProfile.STRIPE)
    assert broken(report, CheckProfile.STRIPE) == set()
    assert unjudged(report) == untold()
    assert report.matches == [CheckProfile.STRIPE]
