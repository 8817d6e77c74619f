"""Every requirement has a test that cites it, is itself a page, or has a page that states how oncekey differs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.pages import ROOT

HIGHEST = 275
CITED = re.compile(r"\bR([1-9][0-9]{0,2})\b(?:(?:-| to )R([1-9][0-9]{0,2})\b)?( in part\b)?")
LONGEST_RANGE = 13
"""A range labels what one test or module is about, such as a table of counters. It proves nothing of them."""

PAGES = {
    94: (
        "docs/explanation/limits.md",
        "## Identical responses are oncekey's contract",
        "receives the same status and bytes; that is not part of the standard",
    ),
    109: (
        "docs/explanation/limits.md",
        "## The handler must be right by itself",
        "does not make the operation correct",
    ),
    183: (
        "docs/howto/redis.md",
        "| a restart without `appendonly` | everything since the last snapshot |",
        "| a failover without `wait` | writes that the replica had not received",
        "| a failover with `wait=1`, several replicas | writes that the promoted replica had not received",
        "| a partition with a primary on each side (split brain) |",
    ),
    197: ("docs/explanation/security.md", "- TLS in front of the application"),
    231: (
        "docs/explanation/limits.md",
        "## The header is not a standard",
        "Revision 07 of 15 October 2025 is the last one; it expired on 18 April 2026",
        "Check the draft's status before you promise conformance",
    ),
    234: (
        "docs/explanation/decision-guide.md",
        "**1. Is the method idempotent, or does the route need a key?**",
        "**2. Is the fingerprint made of raw bytes or of a canonical form?**",
        "**3. Another payload under the same key: 400, 409 or 422?**",
        "**4. An external call and a write that cannot be one transaction: outbox, saga or the provider's key?**",
        "**5. Is a replay byte for byte the original?**",
        "**6. How long does a key live?**",
        "**7. The store is down: refuse, or run and risk a duplicate?**",
        "**8. The handler failed: release the claim, or hold it?**",
    ),
    235: (
        "docs/explanation/request-flow.md",
        "## Nine stages",
        *(f"| {role} | " for role in ("Client", "Handler", "Record", "Your database", "Worker", "Provider")),
        "stores records, messages and business rows",
    ),
    238: (
        "docs/howto/operators.md",
        "| `keys bust` |",
        "## Unknown keys",
        "## Dead letters",
        "[TTL and lease](limits.md#lease-how-long-a-dead-owner-blocks-a-key)",
    ),
    239: (
        "docs/explanation/limits.md",
        "| Sagas and distributed transactions |",
        "| Exactly-once processing of streams |",
        "| Uniqueness in the database |",
        "| A product for deduplicating webhook deliveries |",
        "| A general outbox or event bus |",
        "| A general library for retries and back-off |",
    ),
    240: (
        "docs/explanation/README.md",
        "A network can lose a response after the work was done.",
        "If it sends again, a `POST` may create a second order",
    ),
}
"""Requirements that ask for a page and nothing else, with the page and words of it."""

ALSO_PAGES = {
    13: (
        "docs/howto/enrol-a-route.md",
        "| creates something that matters: a payment, an order, a booking | yes, always",
        "| starts an asynchronous operation | yes |",
        "| sends a notification or an e-mail | yes |",
        "| creates something harmless: a tag, a comment | if you like",
        "| is a query by `POST` that changes nothing | no |",
    ),
    169: (
        "docs/howto/sizing.md",
        "| Deletion of a million expired records, with audit entries, under load |",
        "| 99th percentile of that load, against the same load without deletion |",
    ),
}
"""Requirements that ask for a page or a published figure as well as for what tests show."""

DIFFERENT = {
    30: ("docs/howto/tenant-scope.md", "There is no foreign key from a record"),
    76: ("docs/howto/sizing.md", "oncekey does not claim several thousand protected writes per second"),
    77: (
        "docs/explanation/request-flow.md",
        "1. The application authenticates and validates.",
        "a request without a key and with an invalid body gets the 422 of the validation",
    ),
    103: (
        "docs/reference/problems.md",
        "A PHASED route sends it instead of 502 or 504 when the reply of a call that may not be repeated is lost.",
    ),
    152: (
        "docs/reference/schema.md",
        "No index contains a column that heartbeats write, so that renewals stay heap-only updates.",
        "CREATE INDEX record_running ON oncekey.record (created_at, scope, key) WHERE state = 'in_progress'",
    ),
    218: ("docs/howto/client.md", "Responses stay until `journal.forget(key)`"),
}
"""Requirements that oncekey deliberately does not meet as they are written, with the page that states it.

No test cites them as proven: a test that shows the rest cites them as `R77 in part`.
"""


def citations(text: str) -> list[tuple[range, bool]]:
    """The numbers of each citation, and whether it is one in part."""
    return [(range(int(first), int(last or first) + 1), bool(part)) for first, last, part in CITED.findall(text)]


def cited_in(text: str, *, in_part: bool = False) -> set[int]:
    """The numbers that a test's source names one by one, as proven or in part."""
    return {numbers[0] for numbers, part in citations(text) if part is in_part and len(numbers) == 1}


def sources() -> list[str]:
    return [path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]


def test_every_requirement_is_cited_documented_or_listed_as_different() -> None:
    cited = set().union(*map(cited_in, sources()))
    assert sorted(set(range(1, HIGHEST + 1)) - cited - set(PAGES) - set(DIFFERENT)) == []
    assert sorted(cited & set(PAGES)) == []  # a page that a test is about needs no line here
    assert sorted(set(ALSO_PAGES) - cited) == []


def test_only_different_requirements_are_cited_in_part() -> None:
    texts = sources()
    assert sorted(set().union(*map(cited_in, texts)) & set(DIFFERENT)) == []
    assert sorted(set().union(*(cited_in(text, in_part=True) for text in texts)) - set(DIFFERENT)) == []


@pytest.mark.parametrize("number", sorted(PAGES | ALSO_PAGES | DIFFERENT))
def test_listed_page_contains_the_required_words(number: int) -> None:
    page, *words = (PAGES | ALSO_PAGES | DIFFERENT)[number]
    text = " ".join((ROOT / page).read_text("utf-8").split())
    assert [one for one in words if one not in text] == []
    assert words


def test_no_number_is_in_two_lists() -> None:
    assert len(PAGES | ALSO_PAGES | DIFFERENT) == len(PAGES) + len(ALSO_PAGES) + len(DIFFERENT)


def test_citations_are_short_ranges_of_existing_requirements() -> None:
    for text in sources():
        assert [
            numbers
            for numbers, _ in citations(text)
            if len(numbers) not in range(1, LONGEST_RANGE + 1) or max(numbers) > HIGHEST
        ] == []


def test_citation_parser_reads_numbers_and_ranges() -> None:
    assert cited_in("# R1, R22 and R199-R201; R3 to R5, R7") == {1, 7, 22}
    assert [len(numbers) for numbers, _ in citations("# R1, R199-R201; R3 to R4")] == [1, 3, 2]
    assert cited_in("# PR12, R0, R1234, HR7") == set()
    both = "# R76, R77 in part, R78 in parts"
    assert (cited_in(both), cited_in(both, in_part=True)) == ({76, 78}, {77})
