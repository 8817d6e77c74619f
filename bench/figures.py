"""Figures of a run: slices of load, and medians with their range over rounds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class BenchError(Exception):
    """A measurement failed, or its figures would be wrong."""


@dataclass(frozen=True, slots=True)
class Range:
    """A median with the range of the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Slice:
    """One variant under load for a short time. Processor times are None if the system does not report them."""

    seconds: float
    latencies: Sequence[float]
    server_seconds: float | None
    store_seconds: float | None
    foreign_cores: float | None
    """Cores that other programs used."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One variant in one round: the total of its slices."""

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
            raise BenchError("no response was received")
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
        """Processor time per request, in the server and in its store."""
        return None if self.server_us is None or self.store_us is None else self.server_us + self.store_us


def _each(seconds: Iterable[float | None], requests: int) -> float | None:
    known = list(seconds)
    return None if None in known else sum(one for one in known if one is not None) / requests * 1e6


def at(ordered: Sequence[float], share: float) -> float:
    """A quantile of sorted values."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def by_rate(ours: Sequence[Figures], base: Sequence[Figures]) -> list[float]:
    """Requests per second as a share of the base's, by round."""
    return [one.rate / other.rate for one, other in zip(ours, base, strict=True)]


def added_us(ours: Sequence[Figures], base: Sequence[Figures], name: str) -> list[float]:
    """By how many microseconds `p50_ms` or `p99_ms` exceeds the base's, by round."""
    return [(getattr(one, name) - getattr(other, name)) * 1000 for one, other in zip(ours, base, strict=True)]


def by_cpu(ours: Sequence[Figures], base: Sequence[Figures]) -> list[float] | None:
    """The base's processor time as a share of ours, by round: 0.5 means twice the cost."""
    shares = []
    for one, other in zip(ours, base, strict=True):
        if not one.cpu_us or not other.cpu_us:
            return None
        shares.append(other.cpu_us / one.cpu_us)
    return shares
