"""The reports: text for a terminal, one HTML page, JSON for programs, JUnit XML and SARIF for pipelines.

The command adds the colours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from html import escape
from typing import Final
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from oncekey_check.catalogue import references
from oncekey_check.clauses import Area, Failed, Passed, Skipped, Verdict
from oncekey_check.headlines import Group
from oncekey_check.running import MOST_DANGEROUS, CheckReport, Finding
from oncekey_check.scripts import invocation, script, shortened, transcript

DETAILS: Final = "--html FILE shows the fix and the script of each finding; --scripts FOLDER writes the scripts"
MARK: Final = "# ---- 8< ----"
"""The line before and after a script."""


def verdict_line(report: CheckReport) -> str:
    """The whole run in one sentence. A partial run does not show which profiles the API matches."""
    stopped = f"Stopped early: {report.stopped}. " if report.stopped else ""
    matches = "" if report.partial else f"; profiles without a broken guarantee: {_matches(report)}"
    return f"{stopped}{counts(report)} by the profile {report.profile}{matches}"


def _matches(report: CheckReport) -> str:
    return ", ".join(report.matches) or "none"


def counts(report: CheckReport) -> str:
    """The number of clauses by result."""
    words = [f"{len(report.passed)} passed", f"{len(report.failed)} failed", f"{len(report.advice)} advice"]
    words += [f"{len(report.allowed)} allowed"] if report.allowed else []
    words += [f"{len(report.known_findings)} known"] if report.known else []
    skipped, undecided = len(report.skipped), len(report.undecided)
    if skipped or undecided:
        words.append(f"{skipped + undecided} not judged ({skipped} skipped, {undecided} undecided)")
    return ", ".join(words)


def run_line(report: CheckReport) -> str:
    """The command of the run, so that a reader of the report can repeat it."""
    return f"oncekey-check {report.version}: {invocation(report.target, report.profile)}"


def rows(report: CheckReport) -> Iterator[tuple[Area, list[tuple[str, str, str, str]]]]:
    """The table by area: the result, the clause's id and title, and a remark."""
    for area in Area:
        found = [finding for finding in report.asked if finding.clause.area is area]
        if found:
            yield area, [_row(finding, report) for finding in found]


def dangers(report: CheckReport) -> list[str]:
    """The causes of the worst effects, each as a few lines with a script that reproduces it."""
    if report.failed:
        return [headline(group, report) for group in report.groups[:MOST_DANGEROUS]]
    return [headline(Group(finding), report) for finding in report.advice[:MOST_DANGEROUS]]


def headline(group: Group, report: CheckReport) -> str:
    """A finding as a few lines, with the findings that follow from it."""
    clause, verdict = group.root.clause, group.root.verdict
    assert isinstance(verdict, Failed)
    assert group.root.harm is not None
    lines = [
        group.root.headline,
        f"  {group.root.harm.words}; {clause.severity.name.lower()}; {clause.id}",
        f"  guarantee: {report.in_api_words(clause.title)}. {clause.why}",
        f"  expected:  {verdict.expected}",
        f"  seen:      {verdict.seen}",
        f"  fix:       {report.in_api_words(clause.fix)}",
        *(f"  read:      {text.name}, {text.url}" for text in references(clause.id)),
        *(f"  follows:   {one.headline} ({one.clause.id})" for one in group.consequences),
        "  to reproduce it, save the lines between the marks and run them with bash:",
        # Not indented: a here-document in it would not end.
        MARK,
        *script(report.target, verdict.exchange),
        MARK,
    ]
    return "\n".join(lines)


def further(report: CheckReport) -> list[str]:
    """The headlines of the causes that the report does not show in full, and where their details are."""
    rest = report.groups[MOST_DANGEROUS:]
    lines = [f"{group.root.headline} ({group.root.clause.id}{_more(group)})" for group in rest]
    return [*lines, DETAILS] if rest else []


def missing(report: CheckReport) -> list[str]:
    """The options that would allow more clauses to be judged, and how many each."""
    waiting: dict[str, int] = {}
    for finding in (*report.skipped, *report.undecided):
        if isinstance(finding.verdict, Skipped) and finding.verdict.pass_this:
            option = str(finding.verdict.pass_this)
            waiting[option] = waiting.get(option, 0) + 1
    return [f"{option} would allow judging {count} more" for option, count in sorted(waiting.items())]


def plain(report: CheckReport) -> str:
    """The whole report as plain text."""
    lines: list[str] = []
    found = dangers(report)
    if found:
        lines += ["Problems, worst first" if report.failed else "Advice", "", *(f"{one}\n" for one in found)]
    if others := further(report):
        lines += ["Also wrong", *(f"  {line}" for line in others), ""]
    for area, table in rows(report):
        lines.append(area.value)
        lines += [f"  {word:9} {name:26} {title}{f' ({note})' if note else ''}" for word, name, title, note in table]
    return "\n".join([*lines, "", *missing(report), run_line(report), verdict_line(report)])


def _more(group: Group) -> str:
    return f", and {len(group.consequences)} that follow from it" if group.consequences else ""


def _row(finding: Finding, report: CheckReport) -> tuple[str, str, str, str]:
    verdict = finding.verdict
    note = ""
    if isinstance(verdict, Skipped):
        note = verdict.because
    elif isinstance(verdict, Failed):
        note = f"seen: {verdict.seen}"
        note += f", which the profile {report.profile} allows" if report.word(finding) == "allowed" else ""
    return report.word(finding), finding.clause.id, report.in_api_words(finding.clause.title), note


_STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --bad: #c62828; --good: #2e7d32; --warn: #8f5200; --dim: #636363; }
@media (prefers-color-scheme: dark) { :root { --bad: #ef9a9a; --good: #81c784; --warn: #ffb74d; --dim: #a8a8a8; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
body { background: Canvas; color: CanvasText; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
.verdict { font-size: 1.1rem; padding: .8rem 1rem; border-left: .4rem solid var(--good); background: #8881; }
.verdict.bad { border-color: var(--bad); }
table { border-collapse: collapse; width: 100%; } caption { text-align: left; font-weight: 600; padding: .6rem 0; }
th, td { text-align: left; vertical-align: top; padding: .35rem .6rem; border-bottom: 1px solid var(--line); }
td:first-child { width: 6rem; font-weight: 600; white-space: nowrap; }
code, pre { font: .85rem/1.45 ui-monospace, monospace; }
.FAILED { color: var(--bad); } .passed { color: var(--good); } .advice { color: var(--warn); }
.skipped, .undecided, .known, .allowed, .dim { color: var(--dim); } td code { color: var(--dim); }
@media (max-width: 40rem) { body { margin: 1rem auto; } h1 { font-size: 1.2rem; } td:first-child { width: auto; } }
article { border: 1px solid var(--line); padding: .2rem 1rem 1rem; margin: 1rem 0; }
article.FAILED { border-left: .4rem solid var(--bad); color: inherit; }
pre { background: #8881; padding: .7rem; white-space: pre-wrap; }
"""


def to_html(report: CheckReport) -> str:
    """The page."""
    groups = report.groups
    title = f"Idempotency of {report.target.method} {report.target.address}"
    began = datetime.fromtimestamp(report.began_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    run = f"{report.sent} requests in {report.seconds:.0f} seconds"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="dim">oncekey-check {escape(report.version)}, profile {escape(report.profile)}, {began}: {run}</p>',
        _verdict(report),
        _findings("Problems, worst first", groups[:MOST_DANGEROUS], report),
        _findings("Also wrong", groups[MOST_DANGEROUS:], report),
        _findings("Known problems (in the baseline)", [Group(finding) for finding in report.known_findings], report),
        _findings("Advice", [Group(finding) for finding in report.advice], report),
        f"<h2>The run</h2>\n<pre>{escape(invocation(report.target, report.profile))}</pre>",
        "<h2>All clauses</h2>",
        *(_area(area, report) for area in Area),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body>\n</html>\n"
    )


def _verdict(report: CheckReport) -> str:
    matches = "" if report.partial else f" Profiles without a broken guarantee: {_matches(report)}."
    bad = " bad" if report.failed or report.stopped else ""
    word = "Guarantees are broken." if report.failed else "No guarantee that could be judged is broken."
    stopped = f"The run stopped early: {escape(report.stopped)}. " if report.stopped else ""
    return f'<p class="verdict{bad}"><strong>{stopped}{word}</strong> {counts(report)}.{matches}</p>'


def _findings(heading: str, groups: list[Group], report: CheckReport) -> str:
    if not groups:
        return ""
    return "\n".join([f"<h2>{heading}</h2>", *(_group(group, report) for group in groups)])


def _group(group: Group, report: CheckReport) -> str:
    follow = "\n".join(_consequence(finding, report) for finding in group.consequences)
    heading = f"<p>From the same cause, {len(group.consequences)} more:</p>" if follow else ""
    return (
        f'<article class="{report.word(group.root)}" id="{escape(group.root.clause.id)}">'
        f"<h3>{escape(group.root.headline)}</h3>{_finding(group.root, report)}{heading}{follow}</article>"
    )


def _consequence(finding: Finding, report: CheckReport) -> str:
    return (
        f'<details id="{escape(finding.clause.id)}"><summary>{escape(finding.headline)}</summary>'
        f"{_finding(finding, report)}</details>"
    )


def _finding(finding: Finding, report: CheckReport) -> str:
    clause, verdict = finding.clause, finding.verdict
    assert isinstance(verdict, Failed)
    assert finding.harm is not None
    exchange = "\n\n".join(map(transcript, shortened(verdict.exchange)))
    texts = ", ".join(f'<a href="{escape(one.url)}">{escape(one.name)}</a>' for one in references(clause.id))
    lines = "\n".join(script(report.target, verdict.exchange))
    return (
        f'<p><span class="dim">{finding.harm.words}; {clause.severity.name.lower()}; {escape(clause.id)}</span><br>'
        f"<strong>Guarantee</strong> {escape(report.in_api_words(clause.title))}. {escape(clause.why)}<br>"
        f"<strong>Expected</strong> {escape(verdict.expected)}<br><strong>Observed</strong> {escape(verdict.seen)}<br>"
        f"<strong>Fix</strong> {escape(report.in_api_words(clause.fix))}<br>"
        f"<strong>Read</strong> {texts}</p>"
        f"<details><summary>Script to reproduce it</summary><pre>{escape(lines)}</pre></details>"
        f"<details><summary>Requests and responses</summary><pre>{escape(exchange)}</pre></details>"
    )


def _area(area: Area, report: CheckReport) -> str:
    found = [finding for finding in report.asked if finding.clause.area is area]
    if not found:
        return ""
    rows = "\n".join(_table_row(finding, report) for finding in found)
    head = '<tr><th scope="col">Result</th><th scope="col">Clause</th></tr>'
    return f"<table><caption>{escape(area.value.capitalize())}</caption>\n{head}\n{rows}\n</table>"


def _table_row(finding: Finding, report: CheckReport) -> str:
    word, verdict = report.word(finding), finding.verdict
    more = ""
    if isinstance(verdict, Skipped):
        named = not verdict.pass_this or verdict.pass_this in verdict.because
        headline = "" if named else f"; pass <code>{escape(verdict.pass_this)}</code>"
        more = f'<br><span class="dim">{escape(verdict.because)}{headline}</span>'
    elif word == "allowed" and isinstance(verdict, Failed):
        more = f'<br><span class="dim">{escape(verdict.seen)}</span>'
    elif isinstance(verdict, Failed):
        more = f'<br><a href="#{escape(finding.clause.id)}">{escape(finding.headline)}</a>'
    title = f"<code>{escape(finding.clause.id)}</code> {escape(report.in_api_words(finding.clause.title))}"
    return f'<tr><td class="{word}">{word}</td><td>{title}{more}</td></tr>'


def to_json(report: CheckReport) -> str:
    """The whole report, including clauses outside the profile."""
    causes = {one.clause.id: group.root.clause.id for group in report.groups for one in group.consequences}
    document = {
        "oncekey-check": report.version,
        "command": invocation(report.target, report.profile),
        "url": str(report.target.address),
        "method": report.target.method,
        "profile": report.profile.value,
        "matches": [profile.value for profile in report.matches],
        "partial": report.partial,
        "began_at": datetime.fromtimestamp(report.began_at, UTC).isoformat(timespec="seconds"),
        "seconds": round(report.seconds, 3),
        "requests": report.sent,
        "passed": len(report.passed),
        "failed": len(report.failed),
        "advice": len(report.advice),
        "skipped": len(report.skipped),
        "undecided": len(report.undecided),
        "allowed": len(report.allowed),
        "stopped": report.stopped,
        "known": len(report.known_findings),
        "headlines": [group.root.headline for group in report.groups],
        "most_dangerous": [finding.clause.id for finding in report.dangers],
        "clauses": [_clause(finding, report, causes.get(finding.clause.id)) for finding in report.findings],
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def _clause(finding: Finding, report: CheckReport, cause: str | None) -> dict[str, object]:
    clause = finding.clause
    asked = finding.is_asked_in(report.profile)
    return {
        "id": clause.id,
        "area": clause.area.value,
        "title": report.in_api_words(clause.title),
        "why": clause.why,
        "fix": report.in_api_words(clause.fix),
        "severity": clause.severity.name.lower(),
        "references": [{"name": text.name, "url": text.url} for text in references(clause.id)],
        "result": report.word(finding).lower() if asked else "not asked",
        "seconds": round(finding.seconds, 3),
        "requests": finding.sent,
        **_details(finding, report),
        **({} if cause is None else {"caused_by": cause}),
    }


def _details(finding: Finding, report: CheckReport) -> dict[str, object]:
    verdict: Verdict = finding.verdict
    match verdict:
        case Passed():
            return {}
        case Skipped():
            return {"because": verdict.because, "pass_this": str(verdict.pass_this)}
        case Failed():
            return {
                "headline": finding.headline,
                "harm": None if finding.harm is None else finding.harm.name.lower(),
                "effects": finding.evidence.effects,
                "expected": verdict.expected,
                "seen": verdict.seen,
                "wrong_in": sorted(profile.value for profile in verdict.only),
                "repeat": script(report.target, verdict.exchange),
                "exchange": [transcript(exchange) for exchange in shortened(verdict.exchange)],
            }


_ILLEGAL: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(report: CheckReport) -> str:
    """One suite per area; advice is not a failure, and is in the output of its case."""
    root = Element("testsuites", name=f"oncekey-check {report.target.address}", time=f"{report.seconds:.3f}")
    for area in Area:
        found = [finding for finding in report.asked if finding.clause.area is area]
        if found:
            _suite(root, area, found, report)
    indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{tostring(root, encoding="unicode")}\n'


def _suite(root: Element, area: Area, found: list[Finding], report: CheckReport) -> None:
    failed = [finding for finding in found if report.word(finding) == "FAILED"]
    skipped = [finding for finding in found if isinstance(finding.verdict, Skipped) or report.word(finding) == "known"]
    counts = {"tests": len(found), "failures": len(failed), "skipped": len(skipped), "errors": 0}
    suite = SubElement(root, "testsuite", {"name": area.value, **{name: str(count) for name, count in counts.items()}})
    properties = SubElement(suite, "properties")
    SubElement(properties, "property", name="oncekey-check", value=report.version)
    SubElement(properties, "property", name="command", value=_legal(invocation(report.target, report.profile)))
    for finding in found:
        case = SubElement(
            suite,
            "testcase",
            classname=f"oncekey_check.{report.profile.value}.{area.value}",
            name=f"{finding.clause.id}: {report.in_api_words(finding.clause.title)}",
            time=f"{finding.seconds:.3f}",
        )
        _outcome(case, finding, report)


def _outcome(case: Element, finding: Finding, report: CheckReport) -> None:
    verdict = finding.verdict
    if isinstance(verdict, Skipped):
        headline = f"; pass {verdict.pass_this}" if verdict.pass_this else ""
        SubElement(case, "skipped", message=_legal(f"{verdict.because}{headline}"))
    elif report.word(finding) == "known":
        SubElement(case, "skipped", message=_legal(f"in the baseline: {finding.headline}"))
    elif isinstance(verdict, Failed) and (finding.fails_in(report.profile) or finding.advises_in(report.profile)):
        message = _legal(f"{finding.headline}: expected {verdict.expected}; seen {verdict.seen}")
        texts = "\n".join(f"{one.name}: {one.url}" for one in references(finding.clause.id))
        lines = "\n".join(script(report.target, verdict.exchange))
        fix = f"Fix: {report.in_api_words(finding.clause.fix)}"
        shown = map(transcript, shortened(verdict.exchange))
        text = _legal("\n\n".join([finding.clause.why, fix, texts, lines, *shown]))
        if finding.fails_in(report.profile):
            SubElement(case, "failure", message=message, type=finding.clause.severity.name).text = text
        else:
            SubElement(case, "system-out").text = f"advice: {message}\n\n{text}"


_LEVELS: Final = {"FAILED": "error", "known": "error", "advice": "note"}


def to_sarif(report: CheckReport) -> str:
    """SARIF 2.1.0, which code hosts show next to a change. Findings of a baseline are marked as unchanged."""
    found = [finding for finding in report.asked if report.word(finding) in _LEVELS]
    name = f"{report.target.method} {report.target.address.path}"
    document = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "oncekey-check",
                        "version": report.version,
                        "rules": [_rule(finding, report) for finding in report.asked],
                    }
                },
                "invocations": [
                    {
                        "commandLine": invocation(report.target, report.profile),
                        "executionSuccessful": not report.stopped,
                    }
                ],
                "results": [_result(finding, report, name) for finding in found],
            }
        ],
    }
    return f"{json.dumps(document, indent=2, ensure_ascii=False)}\n"


def _rule(finding: Finding, report: CheckReport) -> dict[str, object]:
    clause, texts = finding.clause, references(finding.clause.id)
    return {
        "id": clause.id,
        "shortDescription": {"text": report.in_api_words(clause.title)},
        "fullDescription": {"text": clause.why},
        "help": {"text": report.in_api_words(clause.fix)},
        **({"helpUri": texts[0].url} if texts else {}),
        "defaultConfiguration": {"level": "error" if report.profile in clause.must else "note"},
    }


def _result(finding: Finding, report: CheckReport, name: str) -> dict[str, object]:
    verdict = finding.verdict
    assert isinstance(verdict, Failed)
    fix = report.in_api_words(finding.clause.fix)
    text = f"{finding.headline}. Expected: {verdict.expected}. Seen: {verdict.seen}. {fix}"
    return {
        "ruleId": finding.clause.id,
        "level": _LEVELS[report.word(finding)],
        "message": {"text": text},
        "locations": [
            {
                # Code hosts show results only next to a file; an API has none, so its path is used.
                "physicalLocation": {
                    "artifactLocation": {"uri": report.target.address.path.strip("/") or "api"},
                    "region": {"startLine": 1},
                },
                "logicalLocations": [{"fullyQualifiedName": name, "kind": "resource"}],
            }
        ],
        "partialFingerprints": {"clause/v1": f"{name} {finding.clause.id}"},
        "baselineState": "unchanged" if report.word(finding) == "known" else "new",
    }


def _legal(text: str) -> str:
    """A text without characters that XML cannot contain, even escaped."""
    return _ILLEGAL.sub("\ufffd", text)
