"""The report for a terminal, as lines; colours are the command's business."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from oncekey.conformance.causes import Group
from oncekey.conformance.clauses import Area, Failed, Skipped
from oncekey.conformance.invocation import invocation
from oncekey.conformance.references import references
from oncekey.conformance.repeating import script
from oncekey.conformance.running import MOST_DANGEROUS, Finding, Report

MARK: Final = "# ---- 8< ----"
"""The line before and after a script."""


def verdict_line(report: Report) -> str:
    """The whole run in one sentence."""
    counts = f"{len(report.passed)} passed, {len(report.failed)} failed, {len(report.advice)} advice, "
    counts += f"{len(report.skipped)} skipped, {len(report.undecided)} undecided"
    counts += f", {len(report.known_findings)} known" if report.known else ""
    matches = ", ".join(report.matches) or "none"
    return f"{counts} by the profile {report.profile}; profiles without a broken promise: {matches}"


def run_line(report: Report) -> str:
    """What was run: a reader who was not there can run it again."""
    return f"oncekey {report.version}: {invocation(report.target, report.profile)}"


def rows(report: Report) -> Iterator[tuple[Area, list[tuple[str, str, str]]]]:
    """The table by area: the result, the clause, and what there is to say about it."""
    for area in Area:
        found = [finding for finding in report.asked if finding.clause.area is area]
        if found:
            yield area, [_row(finding, report) for finding in found]


def dangers(report: Report) -> list[str]:
    """The causes of the worst effects, each as a few lines with the script that repeats it."""
    if report.failed:
        return [told(group, report) for group in report.groups[:MOST_DANGEROUS]]
    return [told(Group(finding), report) for finding in report.advice[:MOST_DANGEROUS]]


def told(group: Group, report: Report) -> str:
    """A finding as a few lines, with those that follow from it."""
    clause, verdict = group.root.clause, group.root.verdict
    assert isinstance(verdict, Failed)
    assert group.root.harm is not None
    lines = [
        group.root.headline,
        f"  {group.root.harm.words}; {clause.severity.name.lower()}; {clause.id}",
        f"  promise:   {report.spoken(clause.title)}. {clause.why}",
        f"  expected:  {verdict.expected}",
        f"  seen:      {verdict.seen}",
        *(f"  read:      {text.name}, {text.url}" for text in references(clause.id)),
        *(f"  follows:   {one.headline} ({one.clause.id})" for one in group.consequences),
        "  to repeat it, save what is between the marks and run it with bash:",
        # Not indented: a here-document in it would not end.
        MARK,
        *script(report.target, verdict.exchange),
        MARK,
    ]
    return "\n".join(lines)


def further(report: Report) -> list[str]:
    """The headlines of the causes that are not told in full."""
    return [f"{group.root.headline} ({group.root.clause.id}{_more(group)})" for group in report.groups[MOST_DANGEROUS:]]


def missing(report: Report) -> list[str]:
    """What to pass so that more can be judged: the option, and how many clauses wait for it."""
    waiting: dict[str, int] = {}
    for finding in (*report.skipped, *report.undecided):
        if isinstance(finding.verdict, Skipped) and finding.verdict.pass_this:
            option = str(finding.verdict.pass_this)
            waiting[option] = waiting.get(option, 0) + 1
    return [f"{option} would let {count} more be judged" for option, count in sorted(waiting.items())]


def plain(report: Report) -> str:
    """All of it as plain text."""
    lines: list[str] = []
    found = dangers(report)
    if found:
        lines += ["What is wrong, the worst first" if report.failed else "Advice", "", *(f"{one}\n" for one in found)]
    if others := further(report):
        lines += ["Also wrong", *(f"  {line}" for line in others), ""]
    for area, table in rows(report):
        lines.append(area.value)
        lines += [f"  {word:8} {title}{f' ({note})' if note else ''}" for word, title, note in table]
    return "\n".join([*lines, "", *missing(report), run_line(report), verdict_line(report)])


def _more(group: Group) -> str:
    return f", and {len(group.consequences)} that follow from it" if group.consequences else ""


def _row(finding: Finding, report: Report) -> tuple[str, str, str]:
    word, verdict = report.word(finding), finding.verdict
    note = ""
    if isinstance(verdict, Skipped):
        note = verdict.because
    elif isinstance(verdict, Failed) and word != "passed":
        note = f"seen: {verdict.seen}"
    return word, report.spoken(finding.clause.title), note
