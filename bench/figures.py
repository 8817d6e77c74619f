"""Figures of a run: per slice, per round as ratios, and as the table and the JSON that people read."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field

from bench.load import Volley

BASE = "unprotected"
KINDS = (BASE, "new key", "replay")


@dataclass(frozen=True, slots=True)
class Slice:
    """One kind of request, measured once."""

    rate: float
    p50_ms: float
    p99_ms: float
    requests: int
    cpu_us: float | None = None
    """What one request cost the server's own process; None where the system does not say."""

    @classmethod
    def of(cls, volley: Volley, cpu_seconds: float | None = None) -> Slice:
        ordered = sorted(volley.latencies)
        return cls(
            rate=volley.rate,
            p50_ms=_at(ordered, 0.50) * 1000,
            p99_ms=_at(ordered, 0.99) * 1000,
            requests=volley.count,
            cpu_us=None if cpu_seconds is None else cpu_seconds / volley.count * 1e6,
        )


@dataclass(frozen=True, slots=True)
class Range:
    """A median and how far the rounds lay apart."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Range:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(slots=True)
class Result:
    """All rounds on one store: kind of request -> one slice per round."""

    store: str
    rounds: dict[str, list[Slice]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    def rate(self, kind: str) -> Range:
        return Range.of([each.rate for each in self.rounds[kind]])

    def ratio(self, kind: str) -> Range:
        """As a share of the unprotected rate of the same round: what a noisy machine still lets one say."""
        pairs = zip(self.rounds[kind], self.rounds[BASE], strict=True)
        return Range.of([each.rate / base.rate for each, base in pairs])

    def cpu_us(self, kind: str) -> float | None:
        costs = [each.cpu_us for each in self.rounds[kind] if each.cpu_us is not None]
        return statistics.median(costs) if costs else None

    def latency(self, kind: str) -> tuple[float, float]:
        slices = self.rounds[kind]
        return statistics.median(s.p50_ms for s in slices), statistics.median(s.p99_ms for s in slices)


def table(results: list[Result]) -> str:
    """The results for people."""
    header = (
        f"{'store':<10} {'request':<12} {'requests/s':>20} {'ratio to unprotected':>22}"
        f" {'server us/request':>18} {'p50 ms':>8} {'p99 ms':>8}"
    )
    lines = [header]
    for result in results:
        lines.append("")
        for kind in KINDS:
            rate, ratio = result.rate(kind), result.ratio(kind)
            p50, p99 = result.latency(kind)
            shown_rate = f"{rate.median:.0f} ({rate.low:.0f}-{rate.high:.0f})"
            shown_ratio = "1.00" if kind == BASE else f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"
            cpu = result.cpu_us(kind)
            shown_cpu = "?" if cpu is None else f"{cpu:.0f}"
            lines.append(
                f"{result.store:<10} {kind:<12} {shown_rate:>20} {shown_ratio:>22}"
                f" {shown_cpu:>18} {p50:>8.1f} {p99:>8.1f}"
            )
    return "\n".join(lines)


def document(results: list[Result], settings: dict[str, object]) -> dict[str, object]:
    """The results for programs."""
    return {
        "settings": settings,
        "stores": {
            result.store: {
                kind: {
                    "requests_per_second": asdict(result.rate(kind)),
                    "ratio": asdict(result.ratio(kind)),
                    "rounds": [asdict(each) for each in result.rounds[kind]],
                }
                for kind in KINDS
            }
            for result in results
        },
    }


def _at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0
