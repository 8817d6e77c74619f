"""`conformance.md`: the clauses of `oncekey-check`, and the broken shops that test each of them."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Final

from oncekey_check import CLAUSES, Area, CheckProfile, Clause, planned
from oncekey_check.catalogue import references

from .markdown import code, table, title
from .markdown import page as put_together

TESTS: Final = Path(__file__).resolve().parents[2] / "tests"

_PROFILES: Final = (
    (
        "`ietf`",
        "the IETF draft, revision 07",
        "quoted keys; a missing key returns 400, another body 422, a request in progress 409",
    ),
    (
        "`stripe`",
        "the behaviour of Stripe and similar APIs",
        "bare, optional keys; another body returns 400; server errors may be stored; replays are marked",
    ),
    (
        "`conflict`",
        "like `stripe`, for APIs that return 409",
        "another body returns 409, also while the first request runs; replays need no marker",
    ),
    (
        "`strict-money`",
        "the draft, with the safe choice wherever it leaves one",
        "replays are marked and include the expiry; bodies are compared by their meaning; short keys are refused",
    ),
)


def page() -> str:
    """The page."""
    return put_together(
        title("Conformance clauses"),
        f"[`oncekey-check`](cli.md#oncekey-check) tries {len(CLAUSES)} clauses with about "
        f"{round(planned(), -1)} requests; [Check an API](../howto/check-an-api.md) explains how to run it. "
        "A clause is a requirement (must) or advice (should), depending on the profile. Only a broken requirement sets "
        "the exit code to 1. A clause that needs *sight* is about effects or replays: if two new keys receive equal "
        "responses and there is no `--count-url`, the clause is undecided.",
        "## Profiles",
        table(("Profile", "Based on", "Rules"), _PROFILES),
        "## Clauses",
        *(part for area in Area for part in _area(area)),
        "## Broken shops",
        "To test the tester, each of these servers has one bug. A test checks that exactly these clauses fail with "
        "`ietf` or `strict-money`. A shop without a bug passes all of them.",
        table(("A shop that …", "fails"), _bugs()),
        "These bugs are detected only with options that the API's owner provides; a test covers them in the same way.",
        table(
            ("A shop that …", "fails"), [(what, code(*clauses)) for what, clauses in _table("mutants").REACHED.items()]
        ),
        "No bug breaks these clauses:",
        table(("Clause", "Why"), [(code(name), why) for name, why in _table("mutants").UNKILLED.items()]),
        "## Unusual shops",
        "These servers are unusual, but correct. A test checks that each report contains exactly these findings with "
        "`ietf` or `strict-money`.",
        table(("A shop that …", "is reported for", "undecided, with a count"), _ways()),
    )


def _area(area: Area) -> list[str]:
    rows = [_row(clause) for clause in CLAUSES if clause.area is area]
    head = ("Clause", "Rule and reason", "Severity", "Must", "Should", "Needs", "Source")
    return [f"### {area.value.capitalize()}", table(head, rows)]


def _row(clause: Clause) -> tuple[str, ...]:
    return (
        code(clause.id),
        f"**{clause.title}.** {clause.why}",
        clause.severity.name.lower(),
        _profiles(clause.must),
        _profiles(clause.should),
        ", ".join((*(code(need) for need in clause.needs), *(("sight",) if clause.sight else ()))),
        ", ".join(f"[{text.short}]({text.url})" for text in references(clause.id)),
    )


def _profiles(chosen: frozenset[CheckProfile]) -> str:
    return (
        "all"
        if chosen == set(CheckProfile)
        else ", ".join(profile.value for profile in CheckProfile if profile in chosen)
    )


def _bugs() -> list[tuple[str, str]]:
    return [(f"{bug.value}", code(*clauses)) for bug, clauses in _table("mutants").KILLS.items()]


def _ways() -> list[tuple[str, str, str]]:
    odd = _table("odd")
    return [(way.value, code(*said), code(*odd.UNDECIDED.get(way, ()))) for way, said in odd.SAID.items()]


def _table(name: str) -> ModuleType:
    """A table of the tests, which no installed package contains."""
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    return import_module(f"conformance.{name}")
