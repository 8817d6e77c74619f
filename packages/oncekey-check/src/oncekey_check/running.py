"""Runs every clause in turn, with limits on requests and time, and collects the findings.

A baseline has the known findings, so that continuous integration fails on new ones only. The file names the clauses
that failed and the harm that was observed. A known finding that does more harm than before is a new one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version

from oncekey_check.carrier import Place
from oncekey_check.catalogue import ABOUT_HEADERS, CLAUSES, NOT_IN_PATH, planned
from oncekey_check.clauses import (
    LIKELY,
    Area,
    CheckProfile,
    Clause,
    Exchange,
    Failed,
    Harm,
    Inconclusive,
    InconclusiveError,
    Need,
    Passed,
    Skipped,
    Verdict,
    Way,
)
from oncekey_check.errors import CheckError
from oncekey_check.headlines import Evidence, Group, grouped, headline_of
from oncekey_check.judging import is_marked
from oncekey_check.probe import Probe, SilentError, take_aim
from oncekey_check.raw_http import Answer
from oncekey_check.target import Target

MOST_DANGEROUS = 3
"""How many causes the report shows first, in full."""

_DISTURBED = frozenset({0, 429, 502, 503, 504})
_CUT = frozenset({Way.CUT, Way.INTERRUPTED})
"""Ways of sending for which a missing response is expected."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A clause and its verdict."""

    clause: Clause
    verdict: Verdict
    seconds: float = 0.0
    sent: int = 0
    """How many requests were sent for it."""
    evidence: Evidence = field(default_factory=Evidence)
    harm: Harm | None = None
    """The harm that was observed, if the clause failed."""
    headline: str = ""

    def fails_in(self, profile: CheckProfile) -> bool:
        """Whether the API breaks a guarantee of this profile."""
        return profile in self.clause.must and self._wrong_in(profile) and not self._mild_in(profile)

    def advises_in(self, profile: CheckProfile) -> bool:
        """Whether this profile advises something that the API does not do."""
        advised = profile in self.clause.should or (profile in self.clause.must and self._mild_in(profile))
        return advised and self._wrong_in(profile)

    def is_asked_in(self, profile: CheckProfile) -> bool:
        """Whether the clause belongs to the profile."""
        return profile in self.clause.must or profile in self.clause.should

    def _wrong_in(self, profile: CheckProfile) -> bool:
        return isinstance(self.verdict, Failed) and profile in self.verdict.only

    def _mild_in(self, profile: CheckProfile) -> bool:
        return isinstance(self.verdict, Failed) and profile in self.verdict.mild


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Everything about one run."""

    target: Target
    profile: CheckProfile
    findings: tuple[Finding, ...]
    sent: int
    seconds: float
    began_at: float = field(default_factory=time.time)
    version: str = field(default_factory=lambda: version("oncekey-check"))
    known: frozenset[str] = frozenset()
    """The clauses whose failure is in the baseline."""
    stopped: str = ""
    """Why the run ended before its last clause; empty if it did not."""
    partial: bool = False
    """Whether clauses were left out by `--only` or `--skip`, or not reached before the run ended."""

    @property
    def asked(self) -> list[Finding]:
        """The requirements of the profile."""
        return [finding for finding in self.findings if finding.is_asked_in(self.profile)]

    @property
    def failed(self) -> list[Finding]:
        """The broken guarantees that are not in the baseline, worst first."""
        return [finding for finding in self._broken if finding.clause.id not in self.known]

    @property
    def known_findings(self) -> list[Finding]:
        """The broken guarantees that are in the baseline."""
        return [finding for finding in self._broken if finding.clause.id in self.known]

    @property
    def _broken(self) -> list[Finding]:
        return _ranked(finding for finding in self.findings if finding.fails_in(self.profile))

    @property
    def groups(self) -> list[Group]:
        """The broken guarantees by cause, worst first."""
        return sorted(grouped(self.failed), key=lambda group: _rank(group.root), reverse=True)

    @property
    def dangers(self) -> list[Finding]:
        """The causes of the worst effects."""
        return [group.root for group in self.groups[:MOST_DANGEROUS]]

    @property
    def advice(self) -> list[Finding]:
        """Allowed behaviour that could be improved, most useful first."""
        return _ranked(finding for finding in self.findings if finding.advises_in(self.profile))

    @property
    def skipped(self) -> list[Finding]:
        """Clauses that were not tried."""
        unjudged = [finding for finding in self.asked if isinstance(finding.verdict, Skipped)]
        return [finding for finding in unjudged if not isinstance(finding.verdict, Inconclusive)]

    @property
    def undecided(self) -> list[Finding]:
        """Clauses that were tried, but could not be judged."""
        return [finding for finding in self.asked if isinstance(finding.verdict, Inconclusive)]

    @property
    def passed(self) -> list[Finding]:
        """The clauses that the API satisfies."""
        return [finding for finding in self.asked if isinstance(finding.verdict, Passed)]

    @property
    def allowed(self) -> list[Finding]:
        """Findings that this profile allows and another one forbids."""
        return [finding for finding in self.asked if word_for(finding, self.profile) == "allowed"]

    @property
    def matches(self) -> list[CheckProfile]:
        """The profiles without a broken guarantee; none in a partial run, in which other clauses might have failed."""
        if self.partial:
            return []
        return [profile for profile in CheckProfile if not any(found.fails_in(profile) for found in self.findings)]

    def word(self, finding: Finding) -> str:
        """One word for the verdict on a clause."""
        known = finding.clause.id in self.known and finding.fails_in(self.profile)
        return "known" if known else word_for(finding, self.profile)

    def in_api_words(self, text: str) -> str:
        """A sentence, with the names of this API's headers."""
        return self.target.carrier.in_api_words(text)


def check(
    target: Target,
    *,
    profile: CheckProfile = CheckProfile.IETF,
    clauses: Iterable[Clause] = CLAUSES,
    time_limit: float = 600.0,
    progress: Callable[[Clause, int, int], None] = lambda clause, number, of: None,  # noqa: ARG005  (the default shows nothing)
) -> CheckReport:
    """Try an API, clause by clause.

    Clauses outside the profile are tried as well, so that the report can list the profiles that the API matches.

    Raises:
        CannotCheckError: The API does not respond, or not as described.
    """
    chosen = tuple(clauses)
    began = time.monotonic()
    # Waiting for a running request may take more than planned, and is limited too.
    probe = take_aim(target, profile, 3 * planned(chosen))
    findings: list[Finding] = []
    stopped, late = "", False
    try:
        for number, clause in enumerate(chosen, 1):
            progress(clause, number, len(chosen))
            started, sent = time.monotonic(), probe.sent
            late = started - began > time_limit
            if late:
                findings.append(Finding(clause, Skipped("the time limit was reached", "--time-limit")))
                continue
            found = _unsupplied(clause, probe) or _judged(clause, probe, profile)
            findings.append(replace(found, seconds=time.monotonic() - started, sent=probe.sent - sent))
            if number == len(chosen) or chosen[number].area is not clause.area:
                findings = _still_executed(probe, findings, clause.area)
    except SilentError as error:
        stopped = f"{error} in {clause.id}"
    except KeyboardInterrupt:
        stopped = f"interrupted in {clause.id}"
    findings += [Finding(clause, Skipped(f"not tried: {stopped}")) for clause in chosen[len(findings) :]]
    partial = bool(stopped or late) or not {clause.id for clause in CLAUSES} <= {clause.id for clause in chosen}
    seconds = time.monotonic() - began
    return CheckReport(probe.target, profile, tuple(findings), probe.sent, seconds, stopped=stopped, partial=partial)


def _judged(clause: Clause, probe: Probe, profile: CheckProfile) -> Finding:
    """The finding of a clause, after a failure was checked for other causes.

    A counted second effect is proof. Any other failure may be a refusal for another reason, so one plain request under
    a fresh key follows it: an API that refuses that one too is sold out or limits its callers, and an API that does not
    respond at all ends the run. A leak must be observed twice, because values can be equal by chance; so must a failure
    in which a response was missing or came from a gateway or a rate limit, because a restart looks like that. The first
    failure of a run must not come from a lagging count, which includes effects of earlier requests.
    """
    finding = _judge(clause, probe, profile)
    if isinstance(finding.verdict, Failed) and probe.search_lag():
        finding = _judge(clause, probe, profile)
    if not isinstance(finding.verdict, Failed) or _is_counted(finding):
        return finding
    refused = _refusal_of_plain_request(probe)
    if refused:
        return Finding(clause, Inconclusive(refused))
    if clause.area is not Area.LEAKS and not _is_disturbed(finding.verdict):
        return finding
    second = _judge(clause, probe, profile)
    if isinstance(second.verdict, Failed) and not _is_counted(second):
        refused = _refusal_of_plain_request(probe)
    return Finding(clause, Inconclusive(refused)) if refused else second


def _is_counted(finding: Finding) -> bool:
    return (finding.evidence.effects or 0) > 1


def _is_disturbed(verdict: Failed) -> bool:
    """Whether a response was missing, or came from a gateway or a rate limit."""
    return any(exchange.answer.status in _DISTURBED for exchange in verdict.exchange if exchange.mode.way not in _CUT)


def _unsupplied(clause: Clause, probe: Probe) -> Finding | None:
    """The finding of a clause that cannot be judged because the API refused the last plain request, and still does."""
    refused = probe.refusal and _refusal_of_plain_request(probe)
    return Finding(clause, Inconclusive(refused)) if refused else None


def _refusal_of_plain_request(probe: Probe) -> str:
    """Why the API does not execute a plain request under a fresh key at the moment; empty if it does.

    Raises:
        SilentError: The API no longer responds.
    """
    try:
        answer = probe.plain()
        refused = "" if answer.ok else f"a plain request under a fresh key is now also refused ({answer.status})"
    except InconclusiveError as error:
        refused = str(error)
    probe.refusal = refused
    return refused


def _still_executed(probe: Probe, findings: list[Finding], area: Area) -> list[Finding]:
    """The findings; those of this area are undecided if the API now refuses plain requests.

    A clause that passes because of a refusal would then pass for the wrong reason.
    """
    refused = _refusal_of_plain_request(probe)
    if not refused:
        return findings
    return [
        Finding(found.clause, Inconclusive(refused), found.seconds, found.sent)
        if found.clause.area is area and isinstance(found.verdict, Passed)
        else found
        for found in findings
    ]


def _judge(clause: Clause, probe: Probe, profile: CheckProfile) -> Finding:
    place = probe.target.carrier.place
    if place is not Place.HEADER and clause.id in ABOUT_HEADERS:
        return Finding(clause, Skipped(f"it is about a header, but this API takes the key in the {place}"))
    if place is Place.PATH and clause.id in NOT_IN_PATH:
        return Finding(clause, Skipped("it is about a request without a key, but this API takes the key in the path"))
    for need in clause.needs:
        if probe.target.lacks(need):
            return Finding(clause, Skipped(f"it needs {need}", need))
    if clause.sight and probe.blind:
        because = "the responses to two fresh keys are equal, and effects are not counted"
        return Finding(clause, Inconclusive(because, Need.COUNT))
    probe.trail, probe.effects = [], None
    try:
        verdict = clause.judge(probe)
    except InconclusiveError as error:
        return Finding(clause, error.verdict)
    if not isinstance(verdict, Failed):
        return Finding(clause, verdict)
    in_api_words = probe.target.carrier.in_api_words
    trail = verdict.exchange or tuple(probe.trail)
    successes = _successes(probe, trail)
    evidence = Evidence(probe.effects, successes, differ_in_replays=not probe.habits.replays)
    harm, headline = headline_of(clause, verdict, evidence, probe.target.noun)
    expected = in_api_words(verdict.expected_in.get(profile, verdict.expected))
    verdict = replace(verdict, expected=expected, seen=in_api_words(verdict.seen), exchange=trail)
    return Finding(clause, verdict, evidence=evidence, harm=harm, headline=in_api_words(headline))


def _successes(probe: Probe, trail: Sequence[Exchange]) -> int:
    """How many different successes the operation returned; marked replays do not count."""
    found: list[Answer] = []
    for exchange in trail:
        answer = exchange.answer
        if exchange.request.method == probe.target.method and answer.ok and not is_marked(answer):
            found += [] if any(probe.same(known, answer) for known in found) else [answer]
    return len(found)


def _rank(finding: Finding) -> tuple[int, int, int, int]:
    """The order of findings: counted effects first, then the harm, then how often clients are affected."""
    effects = finding.evidence.effects or 0
    counted = effects if finding.harm is Harm.TWICE and effects > 1 else 0
    return counted, finding.harm or 0, -LIKELY.index(finding.clause.area), finding.clause.severity


def _ranked(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=_rank, reverse=True)


def word_for(finding: Finding, profile: CheckProfile) -> str:
    """One word for the verdict on a clause in a profile."""
    match finding.verdict:
        case Inconclusive():
            return "undecided"
        case Skipped():
            return "skipped"
        case Failed() if finding.fails_in(profile):
            return "FAILED"
        case Failed() if finding.advises_in(profile):
            return "advice"
        case Failed():
            return "allowed"
        case Passed():
            return "passed"


class BadBaselineError(CheckError):
    """The file is not a baseline for this run; the message says why."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """The known findings: the harm of each clause that failed, by one profile."""

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
            raise BadBaselineError("it is not a baseline: create one with --write-baseline") from None

    def applied(self, report: CheckReport) -> CheckReport:
        """The report in which known findings do not count as failures."""
        if self.profile != report.profile.value:
            raise BadBaselineError(
                f"it is a baseline of the profile {self.profile}, but this run uses {report.profile.value}"
            )
        known = {
            finding.clause.id
            for finding in report.failed
            if (finding.harm or 0) <= self.known.get(finding.clause.id, 0)
        }
        return replace(report, known=frozenset(known))

    def gone(self, report: CheckReport) -> list[str]:
        """The known clauses that passed in this run; those that could not be judged are not among them."""
        passed = {finding.clause.id for finding in report.passed}
        return [name for name in self.known if name in passed]


def written(report: CheckReport) -> str:
    """The file for the findings of a run, known ones included."""
    findings = sorted((*report.failed, *report.known_findings), key=lambda finding: finding.clause.id)
    known = {
        finding.clause.id: {"harm": finding.harm.name.lower(), "headline": finding.headline}
        for finding in findings
        if finding.harm is not None
    }
    document = {"oncekey-check": report.version, "profile": report.profile.value, "known": known}
    return f"{json.dumps(document, indent=2, ensure_ascii=False)}\n"
