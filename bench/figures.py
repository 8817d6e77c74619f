"""Figures of a run: what a slice of load came to, and medians with their range over rounds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class BenchError(Exception):
    """The figures would be wrong, or there would be none."""


@dataclass(frozen=True, slots=True)
class Range:
    """A median and how far the rounds lay apart."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Slice:
    """One variant under load for a moment. Processors' seconds are None where the system does not say them."""

    seconds: float
    latencies: Sequence[float]
    server_seconds: float | None
    store_seconds: float | None
    foreign_cores: float | None
    """Cores that were busy with what is no part of this bench."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One variant in one round: all of its slices together."""

    requests: int
    rate: float
    p50_ms: float
    p99_ms: float
    server_us: float | None
    store_us: float | None
    foreign_cores: float | None

    @classmethod
    def of(cls, slices: Sequence[Slice]) -> Figures:
        ordered = sorted(latency for each in slices for latency in each.latencies)
        if not ordered:
            raise BenchError("no answer came")
        requests = len(ordered)
        foreign = [each.foreign_cores for each in slices if each.foreign_cores is not None]
        return cls(
            requests=requests,
            rate=requests / sum(each.seconds for each in slices),
            p50_ms=at(ordered, 0.50) * 1000,
            p99_ms=at(ordered, 0.99) * 1000,
            server_us=_each((one.server_seconds for one in slices), requests),
            store_us=_each((one.store_seconds for one in slices), requests),
            foreign_cores=statistics.fmean(foreign) if foreign else None,
        )

    @property
    def cpu_us(self) -> float | None:
        """Processors' time of one request, in the server and in its store."""
        return None if self.server_us is None or self.store_us is None else self.server_us + self.store_us


def _each(seconds: Iterable[float | None], requests: int) -> float | None:
    known = list(seconds)
    return None if None in known else sum(one for one in known if one is not None) / requests * 1e6


def at(ordered: Sequence[float], share: float) -> float:
    """What a share of sorted values does not exceed."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def by_rate(ours: Sequence[Figures], base: Sequence[Figures]) -> list[float]:
    """Requests per second as a share of the base's, of the same round each."""
    return [one.rate / other.rate for one, other in zip(ours, base, strict=True)]


def added_us(ours: Sequence[Figures], base: Sequence[Figures], name: str) -> list[float]:
    """By how many microseconds a wait (`p50_ms`, `p99_ms`) is longer than the base's, of the same round each."""
    return [(getattr(one, name) - getattr(other, name)) * 1000 for one, other in zip(ours, base, strict=True)]


def by_cpu(ours: Sequence[Figures], base: Sequence[Figures]) -> list[float] | None:
    """The base's processors' time as a share of ours, of the same round each: 0.5 is twice the cost."""
    shares = []
    for one, other in zip(ours, base, strict=True):
        if not one.cpu_us or not other.cpu_us:
            return None
        shares.append(other.cpu_us / one.cpu_us)
    return shares
