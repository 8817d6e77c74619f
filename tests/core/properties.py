"""How property tests run here: the same examples every time, and no clock that could fail them."""

from __future__ import annotations

from hypothesis import settings

stable = settings(derandomize=True, deadline=None, max_examples=200)
thorough = settings(derandomize=True, deadline=None, max_examples=300)
