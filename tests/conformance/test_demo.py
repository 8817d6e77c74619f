"""The demo keeps every promise that can be judged, in each flavour."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.aiming import broken, demo_target
from harness.demo import Demo
from harness.served import Served
from oncekey.conformance import Need, Profile, check, planned
from oncekey.core.policy import Policy
from oncekey.demo.app import create_app

# The demo has no second operation and no switch that makes it fail.
UNTOLD = {Need.OTHER_URL, Need.FAIL, Need.DECLINED, Need.LARGE, Need.SAME_CALLER}
# What needs more than a URL is tried in test_reach.py.
FURTHER = {Need.ALSO, Need.LEASE, Need.CRASH, Need.OUTAGE}


@pytest.mark.parametrize("kept_in", ["sqlite", "postgresql"])
def test_the_demo_keeps_every_promise_of_the_draft_and_of_money(
    tmp_path: Path, kept_in: str, request: pytest.FixtureRequest
) -> None:
    # R1 among them: the clause keys.field-name sends the field in other cases; R38 where a key in flight has no row
    store = None if kept_in == "sqlite" else request.getfixturevalue("postgres_dsn")
    with Demo(tmp_path, store=store) as demo:
        report = check(demo_target(demo.url), profile=Profile.IETF)
    assert broken(report, Profile.IETF, Profile.STRICT_MONEY) == set()
    assert report.matches == [Profile.IETF, Profile.STRICT_MONEY]
    assert {need for finding in report.skipped for need in finding.clause.needs} <= {
        *UNTOLD,
        *FURTHER,
        Need.COUNT,
        Need.SLOW,
    }
    assert report.sent <= planned()


def test_the_demo_in_the_other_flavour_keeps_every_promise_of_it(tmp_path: Path) -> None:
    # C7
    app = create_app(f"sqlite:///{tmp_path}/demo.db", Policy(flavor="stripe"))
    with Served(app) as served:
        report = check(demo_target(f"http://127.0.0.1:{served.port}"), profile=Profile.STRIPE)
    assert broken(report, Profile.STRIPE) == set()
    assert report.matches == [Profile.STRIPE]
