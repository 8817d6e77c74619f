"""Other packages judged by the tester over a socket: what it finds is true, and it is what the page shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench.prepared import PINS

from peers.by_hand import PROOFS, Client
from peers.judging import PAGE, PEERS, Peer, all_judged, results, table, written

Judged = tuple[dict[Peer, str], dict[Peer, dict[str, Any]]]


@pytest.fixture(scope="module")
def judged() -> Iterator[Judged]:
    with all_judged() as found:
        yield found


def test_comparison_page_shows_the_measured_results(judged: Judged) -> None:
    """`python tests/peers/judging.py --write` writes the table."""
    assert table(judged[1]) == written()


def test_the_page_names_the_versions_that_are_pinned() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [peer.name for peer in PEERS if not re.search(rf"\[{peer.name}\]\(\S+\) \| {peer.version} \|", page)] == []


@pytest.mark.parametrize("path", [*PINS.glob("*.txt"), *PINS.glob("*/package*.json")], ids=lambda path: path.name)
def test_pins_name_no_place_to_download_from(path: Path) -> None:
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if '"url": ' not in line]  # of sponsors
    assert not re.search(r"://|resolved", "\n".join(kept))


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_each_peer_finding_is_confirmed_by_plain_requests(peer: Peer, judged: Judged) -> None:
    urls, reports = judged
    found = {name for name, result in results(reports[peer]).items() if result in {"failed", "advice"}}
    shop = Client(urls[peer])
    assert found
    assert {name for name in found if not PROOFS[name](shop)} == set()


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_passed_peer_clauses_are_not_refuted_by_plain_requests(peer: Peer, judged: Judged) -> None:
    urls, reports = judged
    kept = {name for name, result in results(reports[peer]).items() if result == "passed" and name in PROOFS}
    shop = Client(urls[peer])
    assert kept
    assert {name for name in kept if PROOFS[name](shop)} == set()


def test_every_peer_run_completed_with_the_same_clauses(judged: Judged) -> None:
    reports = judged[1].values()
    assert {report["stopped"] for report in reports} <= {"", None}
    assert len({tuple(results(report)) for report in reports}) == 1
