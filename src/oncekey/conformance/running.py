"""The run: every clause in turn, bounded in requests and in time, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from oncekey.conformance.catalogue import CLAUSES, planned
from oncekey.conformance.clauses import (
    Clause,
    Exchange,
    Failed,
    Need,
    Passed,
    Profile,
    Skipped,
    Undecided,
    UndecidedError,
    Verdict,
)
from oncekey.conformance.probe import Probe
from oncekey.conformance.sighting import take_aim
from oncekey.conformance.target import Target

MOST_DANGEROUS = 3
"""Findings that are told before all others."""

MOST_SHOWN = 6
"""Exchanges of a finding that are kept: the first ones and the last."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A clause, and what came of it."""

    clause: Clause
    verdict: Verdict
    seconds: float = 0.0

    def fails_in(self, profile: Profile) -> bool:
        """Whether the API breaks a promise of this profile."""
        return profile in self.clause.must and self._wrong_in(profile)

    def advises_in(self, profile: Profile) -> bool:
        """Whether the API could do better by this profile."""
        return profile in self.clause.should and self._wrong_in(profile)

    def is_asked_in(self, profile: Profile) -> bool:
        """Whether the profile says anything about it."""
        return profile in self.clause.must or profile in self.clause.should

    def _wrong_in(self, profile: Profile) -> bool:
        return isinstance(self.verdict, Failed) and profile in self.verdict.only


@dataclass(frozen=True, slots=True)
class Report:
    """Everything about one run."""

    target: Target
    profile: Profile
    findings: tuple[Finding, ...]
    sent: int
    seconds: float
    began_at: float = field(default_factory=time.time)

    @property
    def asked(self) -> list[Finding]:
        """What the profile asks for."""
        return [finding for finding in self.findings if finding.is_asked_in(self.profile)]

    @property
    def failed(self) -> list[Finding]:
        """The broken promises, the most dangerous first."""
        broken = [finding for finding in self.findings if finding.fails_in(self.profile)]
        return sorted(broken, key=lambda finding: -finding.clause.severity)

    @property
    def dangers(self) -> list[Finding]:
        """The three most dangerous findings; an area has a second one only if there are not three areas."""
        heads = list({finding.clause.area: finding for finding in reversed(self.failed)}.values())
        heads.sort(key=self.failed.index)
        rest = [finding for finding in self.failed if finding not in heads]
        return [*heads, *rest][:MOST_DANGEROUS]

    @property
    def advice(self) -> list[Finding]:
        """What is allowed and could be better, the most useful first."""
        found = [finding for finding in self.findings if finding.advises_in(self.profile)]
        return sorted(found, key=lambda finding: -finding.clause.severity)

    @property
    def skipped(self) -> list[Finding]:
        """What was not tried."""
        unjudged = [finding for finding in self.asked if isinstance(finding.verdict, Skipped)]
        return [finding for finding in unjudged if not isinstance(finding.verdict, Undecided)]

    @property
    def undecided(self) -> list[Finding]:
        """What was tried, and could not be judged by what was seen."""
        return [finding for finding in self.asked if isinstance(finding.verdict, Undecided)]

    @property
    def passed(self) -> list[Finding]:
        """What is as it should be."""
        others = (*self.failed, *self.advice, *self.skipped, *self.undecided)
        return [finding for finding in self.asked if finding not in others]

    @property
    def matches(self) -> list[Profile]:
        """The profiles of which no promise is broken."""
        return [profile for profile in Profile if not any(found.fails_in(profile) for found in self.findings)]


def check(
    target: Target,
    *,
    profile: Profile = Profile.IETF,
    clauses: Iterable[Clause] = CLAUSES,
    time_limit: float = 600.0,
    progress: Callable[[Clause, int, int], None] = lambda clause, number, of: None,  # noqa: ARG005  (nobody listens)
) -> Report:
    """Try an API, clause by clause.

    Clauses outside the profile are tried as well: that is how the report knows which profile the API matches.

    Raises:
        CannotCheckError: The API does not answer, or not as it was described.
    """
    chosen = tuple(clauses)
    began = time.monotonic()
    # Waiting for a request that still runs may take more than planned, and is bounded too.
    probe = take_aim(target, profile, 3 * planned(chosen))
    findings = []
    for number, clause in enumerate(chosen, 1):
        progress(clause, number, len(chosen))
        started = time.monotonic()
        if started - began > time_limit:
            findings.append(Finding(clause, Skipped("the time was up", "--time-limit")))
            continue
        findings.append(Finding(clause, _judge(clause, probe), time.monotonic() - started))
    return Report(probe.target, profile, tuple(findings), probe.sent, time.monotonic() - began)


def _judge(clause: Clause, probe: Probe) -> Verdict:
    for need in clause.needs:
        if probe.target.lacks(need):
            return Skipped(f"it needs {need}", need)
    if clause.sight and probe.blind:
        return Undecided("the answers to two fresh keys are equal, and effects are not counted", Need.COUNT)
    probe.trail = []
    try:
        verdict = clause.judge(probe)
    except UndecidedError as error:
        return error.verdict
    if isinstance(verdict, Failed):
        return replace(verdict, exchange=_shortened(verdict.exchange or probe.trail))
    return verdict


def _shortened(trail: Sequence[Exchange]) -> tuple[Exchange, ...]:
    if len(trail) <= MOST_SHOWN:
        return tuple(trail)
    return (*trail[: MOST_SHOWN - 2], *trail[-2:])


def word_for(finding: Finding, profile: Profile) -> str:
    """One word for what came of a clause in a profile."""
    match finding.verdict:
        case Undecided():
            return "undecided"
        case Skipped():
            return "skipped"
        case Failed() if finding.fails_in(profile):
            return "FAILED"
        case Failed() if finding.advises_in(profile):
            return "advice"
        case Passed() | Failed():
            return "passed"
