"""The comparison, a pure function: the provider's charges against what our records say of each call.

An adapter is anything that yields `LedgerEntry`s; `oncekey.reconcile.books` reads them from CSV and JSON.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Final


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One charge in the provider's books."""

    downstream_key: str | None
    provider_id: str | None
    amount: Decimal | None = None
    currency: str | None = None
    at: str | None = None


class Belief(StrEnum):
    """What our record says of a call."""

    MADE = "made"
    REFUSED = "refused"
    OPEN = "open"
    """The outcome is not known yet."""
    GONE = "gone"
    """The record has expired: only the announcement of the call is left."""


@dataclass(frozen=True, slots=True)
class Expected:
    """One call of ours, and what its record says of it."""

    downstream_key: str
    belief: Belief
    operation: str
    scope: str
    key_digest: str
    provider_id: str | None = None
    amount: Decimal | None = None
    currency: str | None = None


class DifferenceKind(StrEnum):
    """How the books differ."""

    ORPHAN = "orphan_charge"
    MISSING = "missing_charge"
    TWICE = "charged_twice"
    REFUSED = "charged_though_refused"
    OPEN = "charged_while_unknown"
    AMOUNT = "amount_differs"
    CURRENCY = "currency_differs"


MEANING: Final = {
    DifferenceKind.ORPHAN: "the provider charged, and we never announced such a call",
    DifferenceKind.MISSING: "our record says that it was charged, and the provider has no such charge",
    DifferenceKind.TWICE: "the provider charged one call more than once",
    DifferenceKind.REFUSED: "our record says that it was not charged, and the provider has a charge",
    DifferenceKind.OPEN: "the provider charged, and our record does not know it yet",
    DifferenceKind.AMOUNT: "both have the charge, with different amounts",
    DifferenceKind.CURRENCY: "both have the charge, in different currencies",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference, which an operator has to look at."""

    kind: DifferenceKind
    ours: Expected | None
    theirs: LedgerEntry | None
    charges: int = 1


@dataclass(frozen=True, slots=True)
class Report:
    """What was compared, and where it differs."""

    charges: int
    calls: int
    agreed: int
    differences: tuple[Difference, ...]

    @property
    def agree(self) -> bool:
        """Whether the books agree."""
        return not self.differences


def compare(ledger: Iterable[LedgerEntry], expected: Iterable[Expected]) -> Report:
    """Match every charge with its call, by the downstream key or by the provider's id, and report the differences."""
    calls = _by_key(expected)
    named = {one.provider_id: one for one in calls.values() if one.provider_id is not None}
    found: dict[str, list[LedgerEntry]] = defaultdict(list)
    differences: list[Difference] = []
    charges = 0
    for entry in ledger:
        charges += 1
        ours = calls.get(entry.downstream_key or "") or named.get(entry.provider_id or "")
        if ours is None:
            differences.append(Difference(DifferenceKind.ORPHAN, None, entry))
        else:
            found[ours.downstream_key].append(entry)
    agreed = 0
    for key, ours in calls.items():
        against = list(_against(ours, found.get(key, [])))
        differences.extend(against)
        agreed += not against
    order = list(DifferenceKind)
    ranked = sorted(differences, key=lambda one: order.index(one.kind))
    return Report(charges, len(calls), agreed, tuple(ranked))


def _by_key(expected: Iterable[Expected]) -> dict[str, Expected]:
    """The calls by downstream key. If several incarnations made the same call, one that was executed counts."""
    calls: dict[str, Expected] = {}
    for one in expected:
        there = calls.get(one.downstream_key)
        if there is None or there.belief is not Belief.MADE:
            calls[one.downstream_key] = one
    return calls


def _against(ours: Expected, theirs: list[LedgerEntry]) -> Iterable[Difference]:
    if not theirs:
        if ours.belief is Belief.MADE:
            yield Difference(DifferenceKind.MISSING, ours, None, charges=0)
        return
    first = theirs[0]
    ids = Counter(entry.provider_id for entry in theirs)
    if len(ids) > 1 or (None in ids and len(theirs) > 1):
        yield Difference(DifferenceKind.TWICE, ours, first, charges=len(theirs))
    if ours.belief is Belief.REFUSED:
        yield Difference(DifferenceKind.REFUSED, ours, first, charges=len(theirs))
    if ours.belief is Belief.OPEN:
        yield Difference(DifferenceKind.OPEN, ours, first, charges=len(theirs))
    if ours.amount is not None and first.amount is not None and ours.amount != first.amount:
        yield Difference(DifferenceKind.AMOUNT, ours, first)
    if ours.currency is not None and first.currency is not None and ours.currency.upper() != first.currency.upper():
        yield Difference(DifferenceKind.CURRENCY, ours, first)
