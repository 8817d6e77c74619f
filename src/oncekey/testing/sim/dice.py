"""Chance, from one seed: the same seed throws the same dice, on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar
from uuid import UUID

T = TypeVar("T")


class Dice:
    """All that a run leaves to chance is thrown here."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)  # noqa: S311  (a schedule to be replayed, not a secret)

    def chance(self, likelihood: float) -> bool:
        """True as often as said."""
        return likelihood > 0 and self._random.random() < likelihood

    def between(self, low: int, high: int) -> int:
        """A whole number, both ends included."""
        return low + int(self._random.random() * (high - low + 1))

    def pick(self, of: Sequence[T]) -> T:
        """One of them."""
        return of[int(self._random.random() * len(of))]

    def uuid(self) -> UUID:
        """A random UUID that is the same in every replay."""
        return UUID(int=self._random.getrandbits(128), version=4)
