"""The hunt: each mutant through the proof until a point gives it away."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from oncekey.testing.crash.proof import faults, prove

if TYPE_CHECKING:
    from collections.abc import Iterator

    from oncekey.testing.crash.mutants import Mutant
    from oncekey.testing.crash.places import Place
    from oncekey.testing.crasher import Fault
    from oncekey.wire import Kind


@dataclass(frozen=True, slots=True)
class Catch:
    """Where a mutant was caught, and by which sentence."""

    mutant: Mutant
    store: Kind
    fault: Fault
    sentence: str


async def hunt(place: Place, mutant: Mutant, keys: Iterator[str]) -> Catch | None:
    """The first point at which the mutant is caught; None means that the proof is blind to it."""
    seen = await prove(place, mutant.case, next(keys), None)
    for fault in faults(seen):
        if fault.manner is not mutant.fault.manner:
            continue
        verdict = await prove(place, mutant.case, next(keys), fault, mutant.variant)
        caught = [sentence for sentence in verdict.broken if sentence.startswith(mutant.breaks)]
        if caught:
            return Catch(mutant, place.kind, fault, caught[0])
    return None
