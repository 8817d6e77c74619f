"""The report for programs: JSON."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from oncekey.conformance.clauses import Failed, Passed, Skipped, Verdict
from oncekey.conformance.curl import shortened, transcript
from oncekey.conformance.invocation import invocation
from oncekey.conformance.references import references
from oncekey.conformance.repeating import script
from oncekey.conformance.running import Finding, Report


def to_json(report: Report) -> str:
    """The whole report, with the clauses outside the profile as well."""
    causes = {one.clause.id: group.root.clause.id for group in report.groups for one in group.consequences}
    document = {
        "oncekey": report.version,
        "command": invocation(report.target, report.profile),
        "url": str(report.target.address),
        "method": report.target.method,
        "profile": report.profile.value,
        "matches": [profile.value for profile in report.matches],
        "began_at": datetime.fromtimestamp(report.began_at, UTC).isoformat(timespec="seconds"),
        "seconds": round(report.seconds, 3),
        "requests": report.sent,
        "passed": len(report.passed),
        "failed": len(report.failed),
        "advice": len(report.advice),
        "skipped": len(report.skipped),
        "undecided": len(report.undecided),
        "known": len(report.known_findings),
        "headlines": [group.root.headline for group in report.groups],
        "most_dangerous": [finding.clause.id for finding in report.dangers],
        "clauses": [_clause(finding, report, causes.get(finding.clause.id)) for finding in report.findings],
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def _clause(finding: Finding, report: Report, cause: str | None) -> dict[str, object]:
    clause = finding.clause
    asked = finding.is_asked_in(report.profile)
    return {
        "id": clause.id,
        "area": clause.area.value,
        "title": report.spoken(clause.title),
        "why": clause.why,
        "severity": clause.severity.name.lower(),
        "references": [{"name": text.name, "url": text.url} for text in references(clause.id)],
        "result": report.word(finding).lower() if asked else "not asked",
        "seconds": round(finding.seconds, 3),
        **_details(finding, report),
        **({} if cause is None else {"caused_by": cause}),
    }


def _details(finding: Finding, report: Report) -> dict[str, object]:
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
