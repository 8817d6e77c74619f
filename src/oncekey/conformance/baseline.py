"""Findings that are known already: continuous integration fails on new ones only.

The file names the clauses that failed and the harm that was seen. A known finding that does more harm than it did is
a new one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from oncekey.conformance.headlines import Harm
from oncekey.conformance.running import Report
from oncekey.core.errors import OncekeyError


class BadBaselineError(OncekeyError):
    """The file is no baseline for this run; the message says why."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What is known: the harm of each clause that failed, by one profile."""

    profile: str
    known: Mapping[str, Harm]

    @classmethod
    def parse(cls, text: str) -> Baseline:
        """A baseline from its file."""
        try:
            document = json.loads(text)
            known = {str(name): Harm[finding["harm"].upper()] for name, finding in document["known"].items()}
            return cls(str(document["profile"]), known)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BadBaselineError("it is no baseline: --write-baseline makes one") from None

    def applied(self, report: Report) -> Report:
        """The report in which known findings do not count as failures."""
        if self.profile != report.profile.value:
            raise BadBaselineError(
                f"it is a baseline of the profile {self.profile}, and this run is by {report.profile.value}"
            )
        known = {
            finding.clause.id
            for finding in report.failed
            if (finding.harm or 0) <= self.known.get(finding.clause.id, 0)
        }
        return replace(report, known=frozenset(known))

    def gone(self, report: Report) -> list[str]:
        """The known clauses that passed in this run; those that could not be judged are not among them."""
        passed = {finding.clause.id for finding in report.passed}
        return [name for name in self.known if name in passed]


def written(report: Report) -> str:
    """The file for the findings of a run, known ones included."""
    findings = sorted((*report.failed, *report.known_findings), key=lambda finding: finding.clause.id)
    known = {
        finding.clause.id: {"harm": finding.harm.name.lower(), "headline": finding.headline}
        for finding in findings
        if finding.harm is not None
    }
    document = {"oncekey": report.version, "profile": report.profile.value, "known": known}
    return f"{json.dumps(document, indent=2, ensure_ascii=False)}\n"
