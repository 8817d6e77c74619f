"""Faults by name: what a provider may do to its clients, before or after the charge is in the ledger."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

LONGEST_DELAY: Final = 600.0


class Kind(StrEnum):
    """`-after` means that the charge is in the ledger, although the client never hears of it."""

    DELAY = "delay"
    HANG_AFTER = "hang-after"
    ERROR_BEFORE = "error-before"
    ERROR_AFTER = "error-after"
    DROP_BEFORE = "drop-before"
    DROP_AFTER = "drop-after"
    DECLINE = "decline"


NAMES: Final = tuple("delay:SECONDS" if kind is Kind.DELAY else kind.value for kind in Kind)
BEFORE: Final = frozenset({Kind.ERROR_BEFORE, Kind.DROP_BEFORE, Kind.DECLINE})
"""The faults that leave the ledger as it was."""


class UnknownFaultError(ValueError):
    """There is no such fault; the message lists those that there are."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, as a header or `POST /faults` names it."""

    kind: Kind
    seconds: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `drop-after` or `delay:2.5`."""
        name, _, rest = text.strip().partition(":")
        try:
            kind = Kind(name)
            seconds = float(rest) if kind is Kind.DELAY else 0.0
        except ValueError:
            kind, seconds = Kind.DELAY, math.nan
        if not 0 <= seconds <= LONGEST_DELAY or (rest and kind is not Kind.DELAY):
            shown = ", ".join(NAMES)
            raise UnknownFaultError(f"A fault is one of {shown} (0 to {LONGEST_DELAY:g} seconds).")
        return cls(kind, seconds)

    def __str__(self) -> str:
        return f"{self.kind.value}:{self.seconds:g}" if self.kind is Kind.DELAY else self.kind.value


class StandingFault:
    """The fault that all requests meet which bring none of their own, so many times or until it is taken away."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.times: int | None = None

    def set(self, fault: Fault | None, times: int | None = None) -> None:
        """Put another one in its place."""
        self.fault, self.times = fault, times

    def strike(self) -> Fault | None:
        """The fault for one request."""
        struck = self.fault
        if struck is not None and self.times is not None:
            self.times -= 1
            if self.times == 0:
                self.set(None)
        return struck

    def shown(self) -> dict[str, object]:
        """The standing fault as JSON has it, with the names of all."""
        return {"fault": None if self.fault is None else str(self.fault), "times": self.times, "faults": list(NAMES)}
