"""The explorations: one per kind of effects and kind of provider, each small enough to be complete.

Crashes and lost replies are not counted: anybody may die at any step, as often as it likes. What is bounded is
how many are in the middle of something at the same time, how often a handler is begun before it is parked, and
how often the key is used anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from oncekey.core.model import Effects, Recovery
from oncekey.testing.model.world import Scenario

_LOCAL, _PHASED, _OUTBOX, _INLINE = Effects.LOCAL, Effects.PHASED, Effects.OUTBOX, Effects.INLINE
_RETRY, _RESUME, _UNKNOWN = Recovery.RETRY, Recovery.RESUME, Recovery.UNKNOWN

_ALL = (
    Scenario(
        "local",
        _LOCAL,
        _RETRY,
        procs=3,
        incarnations=3,
        losses=True,
        one_commit=True,
        busts=True,
        hangs=True,
        soft=True,
    ),
    Scenario("local, in doubt by policy", _LOCAL, _UNKNOWN, procs=3, incarnations=2, losses=True),
    Scenario("inline", _INLINE, _UNKNOWN, procs=3, incarnations=3, losses=True, busts=True),
    Scenario("inline, closing", _INLINE, _UNKNOWN, procs=3, losses=True, closes=True),
    Scenario("inline, beyond the waiting rule", _INLINE, _UNKNOWN, procs=3, losses=True, residual=True, forgives=True),
    Scenario("inline, after a deploy", _INLINE, _UNKNOWN, procs=3, routes=(_INLINE, _LOCAL)),
    Scenario("phased", _PHASED, _RESUME, procs=4, max_attempts=3, losses=True),
    Scenario("phased, used anew", _PHASED, _RESUME, procs=3, incarnations=2, losses=True),
    Scenario("phased, closing", _PHASED, _RESUME, procs=3, closes=True),
    Scenario("phased, beyond the waiting rule", _PHASED, _RESUME, procs=3, residual=True, forgives=True),
    Scenario("phased, by hand", _PHASED, _RESUME, procs=3, by_hand=True),
    Scenario("phased, in doubt by policy", _PHASED, _UNKNOWN, procs=3, losses=True),
    Scenario("phased, repeatable", _PHASED, _RESUME, dedup=True, procs=3, max_attempts=3, losses=True),
    Scenario("phased, repeatable, used anew", _PHASED, _RESUME, dedup=True, incarnations=2),
    Scenario("outbox", _OUTBOX, _RETRY, procs=4, losses=True),
    Scenario("outbox, used anew", _OUTBOX, _RETRY, procs=3, incarnations=3, losses=True, soft=True),
    Scenario("outbox, beyond the waiting rule", _OUTBOX, _RETRY, procs=3, losses=True, residual=True, forgives=True),
    Scenario("outbox, in doubt by policy", _OUTBOX, _UNKNOWN, procs=4, losses=True),
    Scenario("outbox, repeatable", _OUTBOX, _RETRY, dedup=True, procs=3, losses=True),
    Scenario("outbox, repeatable, used anew", _OUTBOX, _RETRY, dedup=True, incarnations=2),
)

SCENARIOS: Mapping[str, Scenario] = MappingProxyType({scenario.name: scenario for scenario in _ALL})
"""All explorations by their names."""
