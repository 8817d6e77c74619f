"""How tests wait: for an event, and for nothing else.

What a test waits for comes soon or not at all, so how long it would wait is no part of what it proves. `PATIENCE` is
far beyond what the slowest machine takes, and within the time that pytest gives a test. A test that needs another bound
is one about a time-out, and sets that time-out in what it tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 90.0
"""Seconds after which what has not happened is taken to happen never."""


def wait_until(
    condition: Callable[[], object],
    otherwise: Callable[[], object] | str = "it never happened",
    *,
    every: float = 0.005,
) -> None:
    """Wait for what nobody announces; `otherwise` is what a failure says. Under asyncio: `harness.asgi.until`."""
    ends = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > ends:
            raise TimeoutError(str(otherwise if isinstance(otherwise, str) else otherwise()))
        time.sleep(every)
