"""Events about what happened, and the observers that turn them into logs, metrics and traces.

`Prometheus` and `OpenTelemetry` need packages of their own (`oncekey[prometheus]`, `oncekey[opentelemetry]`), so they
are imported when they are first used.
"""

from typing import TYPE_CHECKING

from oncekey.observe.events import (
    About,
    Asked,
    Beat,
    Buried,
    Bypassed,
    Consulted,
    Contradicted,
    Count,
    Delivered,
    Doubted,
    Event,
    Found,
    GivenUp,
    How,
    Keyless,
    LookedUp,
    Messaged,
    Observer,
    Operated,
    Reaped,
    Refused,
    Replayed,
    Reserved,
    Resolved,
    Settled,
    ShortLease,
    Stepped,
    StoreFailed,
    Swept,
    TurnedAway,
    Unsettled,
    counted,
)
from oncekey.observe.logs import JsonLines, Logs

if TYPE_CHECKING:
    from oncekey.observe.opentelemetry import OpenTelemetry
    from oncekey.observe.prometheus import Prometheus

__all__ = [
    "About",
    "Asked",
    "Beat",
    "Buried",
    "Bypassed",
    "Consulted",
    "Contradicted",
    "Count",
    "Delivered",
    "Doubted",
    "Event",
    "Found",
    "GivenUp",
    "How",
    "JsonLines",
    "Keyless",
    "Logs",
    "LookedUp",
    "Messaged",
    "Observer",
    "OpenTelemetry",
    "Operated",
    "Prometheus",
    "Reaped",
    "Refused",
    "Replayed",
    "Reserved",
    "Resolved",
    "Settled",
    "ShortLease",
    "Stepped",
    "StoreFailed",
    "Swept",
    "TurnedAway",
    "Unsettled",
    "counted",
]

_LATER = {"OpenTelemetry": "oncekey.observe.opentelemetry", "Prometheus": "oncekey.observe.prometheus"}


def __getattr__(name: str) -> object:
    place = _LATER.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415  (an optional package)

    found: object = getattr(import_module(place), name)
    globals()[name] = found
    return found
