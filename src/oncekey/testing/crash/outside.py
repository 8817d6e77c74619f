"""The world outside: a provider with a ledger of its own and the receiver of messages. No crash of ours touches it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Provider(Protocol):
    """Somebody who charges cards."""

    async def charge(self, downstream_key: str, *, reference: str, amount: int) -> str:
        """Charge, and return the charge's id; the same key again is the same charge, if the provider cares."""


@dataclass(frozen=True, slots=True)
class Charge:
    """A line of the provider's ledger."""

    id: str
    downstream_key: str
    reference: str
    amount: int
    at: int


class Ledger:
    """A provider in memory. `deduplicates` is whether it recognises a key that it has seen."""

    def __init__(self, ticks: Callable[[], int], *, deduplicates: bool) -> None:
        self.charges: list[Charge] = []
        self.calls: Counter[str] = Counter()
        self._ticks = ticks
        self._deduplicates = deduplicates

    async def charge(self, downstream_key: str, *, reference: str, amount: int) -> str:
        """Charge."""
        self.calls[reference] += 1
        for known in self.charges:
            if self._deduplicates and known.downstream_key == downstream_key:
                return known.id
        made = Charge(f"ch_{len(self.charges) + 1}", downstream_key, reference, amount, self._ticks())
        self.charges.append(made)
        return made.id


class Inbox:
    """Who is told of things. Messages may come twice; their downstream key tells."""

    def __init__(self) -> None:
        self.received: list[str] = []

    def receive(self, downstream_key: str) -> None:
        """One message."""
        self.received.append(downstream_key)


@dataclass(slots=True)
class World:
    """All that there is outside of a process; a process that lives on may see another one."""

    provider: Provider
    inbox: Inbox
