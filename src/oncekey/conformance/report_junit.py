"""The report for continuous integration: JUnit's XML."""

from __future__ import annotations

import re
from typing import Final
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from oncekey.conformance.clauses import Area, Failed, Skipped
from oncekey.conformance.curl import shortened, transcript
from oncekey.conformance.invocation import invocation
from oncekey.conformance.references import references
from oncekey.conformance.repeating import script
from oncekey.conformance.running import Finding, Report

_ILLEGAL: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(report: Report) -> str:
    """One suite for each area; advice is no failure, and is in the output of its case."""
    root = Element("testsuites", name=f"oncekey check {report.target.address}", time=f"{report.seconds:.3f}")
    for area in Area:
        found = [finding for finding in report.asked if finding.clause.area is area]
        if found:
            _suite(root, area, found, report)
    indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{tostring(root, encoding="unicode")}\n'


def _suite(root: Element, area: Area, found: list[Finding], report: Report) -> None:
    failed = [finding for finding in found if report.word(finding) == "FAILED"]
    skipped = [finding for finding in found if isinstance(finding.verdict, Skipped) or report.word(finding) == "known"]
    counts = {"tests": len(found), "failures": len(failed), "skipped": len(skipped), "errors": 0}
    suite = SubElement(root, "testsuite", {"name": area.value, **{name: str(count) for name, count in counts.items()}})
    properties = SubElement(suite, "properties")
    SubElement(properties, "property", name="oncekey", value=report.version)
    SubElement(properties, "property", name="command", value=_legal(invocation(report.target, report.profile)))
    for finding in found:
        case = SubElement(
            suite,
            "testcase",
            classname=f"oncekey.check.{report.profile.value}.{area.value}",
            name=f"{finding.clause.id}: {report.spoken(finding.clause.title)}",
            time=f"{finding.seconds:.3f}",
        )
        _outcome(case, finding, report)


def _outcome(case: Element, finding: Finding, report: Report) -> None:
    verdict = finding.verdict
    if isinstance(verdict, Skipped):
        told = f"; pass {verdict.pass_this}" if verdict.pass_this else ""
        SubElement(case, "skipped", message=_legal(f"{verdict.because}{told}"))
    elif report.word(finding) == "known":
        SubElement(case, "skipped", message=_legal(f"in the baseline: {finding.headline}"))
    elif isinstance(verdict, Failed) and (finding.fails_in(report.profile) or finding.advises_in(report.profile)):
        message = _legal(f"{finding.headline}: expected {verdict.expected}; seen {verdict.seen}")
        texts = "\n".join(f"{one.name}: {one.url}" for one in references(finding.clause.id))
        lines = "\n".join(script(report.target, verdict.exchange))
        text = _legal("\n\n".join([finding.clause.why, texts, lines, *map(transcript, shortened(verdict.exchange))]))
        if finding.fails_in(report.profile):
            SubElement(case, "failure", message=message, type=finding.clause.severity.name).text = text
        else:
            SubElement(case, "system-out").text = f"advice: {message}\n\n{text}"


def _legal(text: str) -> str:
    """XML has no way to write some characters, not even escaped."""
    return _ILLEGAL.sub("\ufffd", text)
