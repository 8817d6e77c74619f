"""`conformance.md`: the clauses of `oncekey-check`, and the broken shops that show that each of them is awake."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Final

from oncekey_check import CLAUSES, Area, Clause, Profile, planned
from oncekey_check.catalogue import references

from .markdown import code, table, title
from .markdown import page as put_together

TESTS: Final = Path(__file__).resolve().parents[2] / "tests"

_PROFILES: Final = (
    (
        "`ietf`",
        "the IETF draft, revision 07",
        "quoted keys; a missing key is 400, another body 422, a request that still runs 409",
    ),
    (
        "`stripe`",
        "what Stripe does, and many after it",
        "bare keys, which may be left out; another body is 400; server errors may be stored; replays are marked",
    ),
    (
        "`conflict`",
        "as `stripe`, for the many APIs that answer 409",
        "another body is 409, also while the first request runs; replays need no marker",
    ),
    (
        "`strict-money`",
        "the draft, with all that it leaves open decided on the safe side",
        "replays are marked and say how long keys live; bodies are compared by their meaning; short keys are refused",
    ),
)


def page() -> str:
    """The page."""
    return put_together(
        title("Conformance clauses"),
        f"[`oncekey-check`](cli.md#oncekey-check) tries {len(CLAUSES)} clauses with about {planned()} requests; "
        "[Check an API](../howto/check-an-api.md) shows how. A clause is a promise (must) or advice (should), by "
        "profile. Only a broken promise makes the exit code 1. A clause that needs *sight* is about effects or "
        "replays: where two fresh keys get equal answers and there is no `--count-url`, they cannot be seen, and the "
        "clause is undecided.",
        "## Profiles",
        table(("Profile", "What it is", "Where it differs"), _PROFILES),
        "## Clauses",
        *(part for area in Area for part in _area(area)),
        "## Broken shops",
        "A tester that never complains proves nothing. Each of these servers is right but for one thing, and a test "
        "sees that exactly these clauses fail by `ietf` or `strict-money`. A shop without a bug passes all of them.",
        table(("A shop that …", "fails"), _bugs()),
        "These are seen only with the help of the API's owner, and a test tries them likewise.",
        table(
            ("A shop that …", "fails"), [(what, code(*clauses)) for what, clauses in _table("mutants").REACHED.items()]
        ),
        "No bug breaks these:",
        table(("Clause", "Why"), [(code(name), why) for name, why in _table("mutants").UNKILLED.items()]),
        "## Odd shops",
        "A tester that complains of everybody proves nothing either. These servers are odd, and not wrong: a test sees "
        "that each report says what is true of it, by `ietf` or `strict-money`, and nothing else.",
        table(("A shop that …", "is reported for", "undecided, with a count"), _ways()),
    )


def _area(area: Area) -> list[str]:
    rows = [_row(clause) for clause in CLAUSES if clause.area is area]
    head = ("Clause", "Promise, and why", "Severity", "Must", "Should", "Needs", "Public text")
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


def _profiles(chosen: frozenset[Profile]) -> str:
    return "all" if chosen == set(Profile) else ", ".join(profile.value for profile in Profile if profile in chosen)


def _bugs() -> list[tuple[str, str]]:
    return [(f"{bug.value}", code(*clauses)) for bug, clauses in _table("mutants").KILLS.items()]


def _ways() -> list[tuple[str, str, str]]:
    odd = _table("odd")
    return [(way.value, code(*said), code(*odd.UNDECIDED.get(way, ()))) for way, said in odd.SAID.items()]


def _table(name: str) -> ModuleType:
    """The tests' own tables, which are no part of any installed package."""
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    return import_module(f"conformance.{name}")
