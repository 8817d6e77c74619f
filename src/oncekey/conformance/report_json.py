"""The report for programs: JSON."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from oncekey.conformance.clauses import Failed, Passed, Skipped, Verdict
from oncekey.conformance.curl import steps, transcript
from oncekey.conformance.running import Finding, Report, word_for


def to_json(report: Report) -> str:
    """The whole report, with the clauses outside the profile as well."""
    document = {
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
        "most_dangerous": [finding.clause.id for finding in report.dangers],
        "clauses": [_clause(finding, report) for finding in report.findings],
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def _clause(finding: Finding, report: Report) -> dict[str, object]:
    clause = finding.clause
    asked = finding.is_asked_in(report.profile)
    return {
        "id": clause.id,
        "area": clause.area.value,
        "title": clause.title,
        "why": clause.why,
        "severity": clause.severity.name.lower(),
        "requirements": list(clause.requirements),
        "result": word_for(finding, report.profile).lower() if asked else "not asked",
        "seconds": round(finding.seconds, 3),
        **_details(finding.verdict),
    }


def _details(verdict: Verdict) -> dict[str, object]:
    match verdict:
        case Passed():
            return {}
        case Skipped():
            return {"because": verdict.because, "pass_this": str(verdict.pass_this)}
        case Failed():
            return {
                "expected": verdict.expected,
                "seen": verdict.seen,
                "wrong_in": sorted(profile.value for profile in verdict.only),
                "repeat": steps(verdict.exchange),
                "exchange": [transcript(exchange) for exchange in verdict.exchange],
            }
