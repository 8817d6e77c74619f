"""The result of a run: figures to read, a document for programs, and the story of each broken promise."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, Self

from oncekey.core.model import State
from oncekey.testing.checker import Rule
from oncekey.torture.nemesis import Trouble
from oncekey.torture.proxy import Loss
from oncekey.torture.verdict import BrokenPromise, story_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oncekey.torture.plan import Plan
    from oncekey.torture.verdict import RunEvidence

SHOWN: Final = 5
_CRASHES: Final = (Trouble.KILL_SERVER, Trouble.KILL_WORKER)
_PAUSES: Final = (Trouble.PAUSE_SERVER, Trouble.PAUSE_WORKER)


class Stage(StrEnum):
    """What a run is doing."""

    STARTING = "starting"
    TROUBLE = "trouble"
    HEALING = "all well again, workers finish"
    ASKING = "everybody asks once more"
    CHECKING = "checking"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run in figures."""

    plan: Plan
    seconds: float
    keys: int
    requests: int
    answers: Mapping[str, int]
    faults: Mapping[str, int]
    crashes: int
    pauses: int
    ambiguous_commits: int
    resumed: int
    delivered_again: int
    states: Mapping[str, int]
    charges: int
    findings: tuple[BrokenPromise, ...]
    stories: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(
        cls,
        plan: Plan,
        evidence: RunEvidence,
        findings: list[BrokenPromise],
        *,
        counted: Counter[str],
        faults: Counter[Trouble],
        lost: Counter[Loss],
        seconds: float,
    ) -> Self:
        """Compute the figures from the evidence."""
        bad = list(dict.fromkeys(finding.key for finding in findings))[:SHOWN]
        return cls(
            plan=plan,
            seconds=seconds,
            keys=len(evidence.intended_requests),
            requests=len(evidence.operations),
            answers=dict(counted.most_common()),
            faults={kind.value: count for kind, count in faults.most_common()},
            crashes=sum(faults[kind] for kind in _CRASHES),
            pauses=sum(faults[kind] for kind in _PAUSES),
            ambiguous_commits=lost[Loss.COMMIT_REPLY] + lost[Loss.COMMIT_REQUEST],
            resumed=_resumed(evidence),
            delivered_again=sum(n - 1 for names in evidence.deliveries.values() for n in names.values()),
            states=dict(Counter(record.state.value for record in evidence.records.values()).most_common()),
            charges=sum(map(len, evidence.charges.values())),
            findings=tuple(findings),
            stories={key: story_of(evidence, key) for key in bad},
        )

    @property
    def clean(self) -> bool:
        """Whether every promise was kept."""
        return not self.findings

    @property
    def unknown(self) -> int:
        """Records whose outcome is unknown."""
        return self.states.get(State.UNKNOWN.value, 0)

    @property
    def duplicates(self) -> int:
        """Keys that were executed more than once."""
        return self._keys_with(Rule.ONE_EFFECT)

    @property
    def lost(self) -> int:
        """Keys that a server acknowledged, and whose effect or answer is missing."""
        return self._keys_with(Rule.NO_LOST_ACK)

    def _keys_with(self, rule: Rule) -> int:
        return len({finding.key for finding in self.findings if finding.rule == rule})

    def document(self) -> dict[str, Any]:
        """For programs."""
        return {
            "ok": self.clean,
            "seed": self.plan.seed,
            "store": self.plan.shown,
            "seconds": round(self.seconds, 1),
            "keys": self.keys,
            "requests": self.requests,
            "answers": dict(self.answers),
            "faults": dict(self.faults),
            "crashes": self.crashes,
            "pauses": self.pauses,
            "ambiguous_commits": self.ambiguous_commits,
            "resumed": self.resumed,
            "delivered_again": self.delivered_again,
            "states": dict(self.states),
            "unknown": self.unknown,
            "charges": self.charges,
            "duplicates": self.duplicates,
            "lost": self.lost,
            "violations": [
                {
                    "rule": finding.rule.value,
                    "key": finding.key,
                    "sentence": finding.sentence,
                    "story": list(self.stories.get(finding.key, ())),
                }
                for finding in self.findings
            ],
            "command": self.plan.command,
        }


def _resumed(evidence: RunEvidence) -> int:
    """How often a next owner went on with a record, counted by the fences."""
    count = 0
    ordered = sorted(evidence.writes, key=lambda write: (write.key, write.at))
    for _, group in groupby(ordered, key=lambda write: (write.key, write.incarnation)):
        fences = [write.fence for write in group]
        count += max(fences) - fences[0]
    return count
