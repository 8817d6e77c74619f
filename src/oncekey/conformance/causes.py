"""Which findings follow from another one, so that a report has one entry for each thing that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from oncekey.conformance.headlines import Harm

if TYPE_CHECKING:
    from oncekey.conformance.running import Finding

_ANY: Final = frozenset(Harm)
_NOT_TWICE: Final = _ANY - {Harm.TWICE}


@dataclass(frozen=True, slots=True)
class Cause:
    """The first of `roots` that failed explains the findings of certain harms whose ids match."""

    roots: tuple[str, ...]
    explains: tuple[str, ...]
    harms: frozenset[Harm] = _ANY
    holds: Callable[[Finding], bool] = lambda root: root.harm is not None


def _answers_differ(root: Finding) -> bool:
    """The retry was executed and answered as a new request: the API does not look at keys at all."""
    return root.evidence.successes > 1


CAUSES: Final = (
    Cause(
        ("replays.one-effect", "replays.many"),
        (
            *("keys.*", "replays.*", "mismatches.*", "races.*", "hang-ups.*", "failures.*", "finals.*", "instances.*"),
            *("leases.*", "crashes.*", "outages.*", "leaks.told-apart", "leaks.mismatch", "others.described"),
        ),
        holds=_answers_differ,
    ),
    Cause(
        ("replays.one-effect",),
        ("keys.*", "replays.*", "races.*", "hang-ups.*", "instances.*", "leases.*", "crashes.*", "finals.*"),
        frozenset({Harm.TWICE}),
    ),
    Cause(("replays.one-effect",), ("keys.quoted", "keys.bare", "keys.longest", "keys.field-name")),
    Cause(
        ("mismatches.nothing-happens",),
        (
            *("mismatches.status", "mismatches.while-running", "mismatches.running-status", "mismatches.query"),
            *("mismatches.endpoint", "mismatches.method", "mismatches.every-member", "mismatches.types"),
            *("mismatches.large-integers", "mismatches.array-order", "mismatches.duplicate-names"),
            *("mismatches.surrogates", "mismatches.depth", "replays.chunked-other", "leaks.told-apart"),
        ),
    ),
    Cause(("mismatches.status",), ("mismatches.while-running", "mismatches.running-status", "leaks.told-apart")),
    Cause(("mismatches.while-running",), ("mismatches.running-status",)),
    Cause(
        ("races.answered", "races.losers", "races.while-running"),
        ("races.*", "hang-ups.sent", "hang-ups.retried", "instances.race"),
        _NOT_TWICE,
    ),
    Cause(("races.50", "races.10", "races.2"), ("races.*", "instances.race")),
    Cause(("mismatches.every-member",), ("mismatches.types", "mismatches.array-order")),
    Cause(("keys.missing",), ("keys.explained",)),
    Cause(
        ("keys.malformed",),
        ("keys.empty", "keys.doubled", "keys.too-long", "keys.too-short"),
        frozenset({Harm.UNPROTECTED}),
    ),
    Cause(("tenants.independent",), ("tenants.unseen",)),
    Cause(("replays.white-space",), ("replays.escapes",)),
    Cause(("hang-ups.body",), ("hang-ups.last-byte", "hang-ups.head")),
    Cause(("instances.replayed",), ("instances.race",)),
    Cause(("crashes.remembered",), ("crashes.*", "outages.remembered")),
    Cause(("outages.closed",), ("outages.told", "outages.recovered")),
)
"""From the most general cause to the most special one."""


@dataclass(frozen=True, slots=True)
class Group:
    """A finding, and those that follow from it."""

    root: Finding
    consequences: tuple[Finding, ...] = ()

    @property
    def all(self) -> tuple[Finding, ...]:
        """The whole group, the root first."""
        return (self.root, *self.consequences)


def grouped(findings: Sequence[Finding]) -> list[Group]:
    """The findings by their causes; the groups and their members keep the order of the findings."""
    by_id = {finding.clause.id: finding for finding in findings}
    parents: dict[str, str] = {}
    for cause in CAUSES:
        root = next((by_id[name] for name in cause.roots if name in by_id and cause.holds(by_id[name])), None)
        if root is None:
            continue
        top = _top(root.clause.id, parents)
        for name, finding in by_id.items():
            if name not in {top, root.clause.id} and name not in parents and _explained(cause, finding):
                parents[name] = top
    tops = [finding for finding in findings if finding.clause.id not in parents]
    return [Group(top, tuple(one for one in findings if _under(one, top, parents))) for top in tops]


def _explained(cause: Cause, finding: Finding) -> bool:
    return finding.harm in cause.harms and any(fnmatchcase(finding.clause.id, one) for one in cause.explains)


def _under(finding: Finding, top: Finding, parents: dict[str, str]) -> bool:
    return finding.clause.id in parents and _top(finding.clause.id, parents) == top.clause.id


def _top(name: str, parents: dict[str, str]) -> str:
    while name in parents:
        name = parents[name]
    return name
