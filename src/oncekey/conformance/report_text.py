"""The report for a terminal, as lines; colours are the command's business."""

from __future__ import annotations

from collections.abc import Iterator

from oncekey.conformance.clauses import Area, Failed, Skipped
from oncekey.conformance.curl import steps
from oncekey.conformance.running import MOST_DANGEROUS, Finding, Report, word_for


def verdict_line(report: Report) -> str:
    """The whole run in one sentence."""
    counts = f"{len(report.passed)} passed, {len(report.failed)} failed, {len(report.advice)} advice, "
    counts += f"{len(report.skipped)} skipped, {len(report.undecided)} undecided"
    matches = ", ".join(report.matches) or "none"
    return f"{counts} by the profile {report.profile}; profiles without a broken promise: {matches}"


def rows(report: Report) -> Iterator[tuple[Area, list[tuple[str, str, str]]]]:
    """The table by area: the result, the clause, and what there is to say about it."""
    for area in Area:
        found = [finding for finding in report.asked if finding.clause.area is area]
        if found:
            yield area, [_row(finding, report) for finding in found]


def dangers(report: Report) -> list[str]:
    """The most dangerous findings, each as a few lines with the commands that repeat it."""
    return [told(finding) for finding in report.dangers or report.advice[:MOST_DANGEROUS]]


def told(finding: Finding) -> str:
    """A finding as a few lines."""
    clause, verdict = finding.clause, finding.verdict
    assert isinstance(verdict, Failed)
    lines = [
        f"{clause.severity.name}  {clause.title}  ({clause.id})",
        f"  why it matters: {clause.why}",
        f"  expected:       {verdict.expected}",
        f"  seen:           {verdict.seen}",
        "  to repeat it, with another key:",
        *(f"    {line}" for line in steps(verdict.exchange)),
    ]
    return "\n".join(lines)


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
        lines += ["The most dangerous findings" if report.failed else "Advice", "", *(f"{one}\n" for one in found)]
    for area, table in rows(report):
        lines.append(area.value)
        lines += [f"  {word:8} {title}{f' ({note})' if note else ''}" for word, title, note in table]
    return "\n".join([*lines, "", *missing(report), verdict_line(report)])


def _row(finding: Finding, report: Report) -> tuple[str, str, str]:
    word, verdict = word_for(finding, report.profile), finding.verdict
    note = ""
    if isinstance(verdict, Skipped):
        note = verdict.because
    elif isinstance(verdict, Failed) and word != "passed":
        note = f"seen: {verdict.seen}"
    return word, finding.clause.title, note
