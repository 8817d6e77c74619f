"""The size of a worker's next batch.

Batches grow while they finish in time, and shrink as soon as one does not. The relay and the reaper measure the time
and use the same rule.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Worked:
    """The measurements of one batch."""

    asked: int
    got: int
    took: float
    """From its claim until its last item was done, in the unit of `Bounds.target`."""
    weight: int = 0
    """How many bytes it loaded into memory."""

    @property
    def full(self) -> bool:
        """Whether the batch was as large as the worker asked for, so that a larger one would have returned more."""
        return self.got >= self.asked


@dataclass(frozen=True, slots=True)
class Bounds:
    """The smallest and largest size of a batch, and the time in which a batch should end."""

    least: int
    most: int
    target: float
    heaviest: int | None = None
    """How many bytes a batch may load into memory; a batch of the least size may exceed that."""

    def after(self, size: int, worked: Worked) -> int:
        """The size of the next batch.

        At the speed of the last batch it would end just in time; it is at most twice and at least half of the last
        size. A batch that ended in time never makes it smaller, and one that was not full never makes it larger,
        because it does not show how long a larger one takes.
        """
        fits = 2 * size if worked.took <= 0 else int(min(2 * size, worked.got * self.target / worked.took))
        if worked.took > self.target:
            wanted = max(size // 2, min(size, fits))
        elif worked.full:
            wanted = max(size, fits)
        else:
            wanted = size
        return self._within(size, wanted, worked)

    def _within(self, size: int, wanted: int, worked: Worked) -> int:
        most = self.most
        if self.heaviest is not None and worked.weight:
            most = min(most, self.heaviest * worked.got // worked.weight)
        # A size that fell below the least because batches failed also grows back step by step.
        return max(min(self.least, 2 * size), min(most, wanted))
