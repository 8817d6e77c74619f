"""How property tests run here: the same examples every time, and no clock that could fail them."""

from __future__ import annotations

from hypothesis import settings

stable = settings(derandomize=True, deadline=None, max_examples=100)
thorough = settings(derandomize=True, deadline=None, max_examples=200)
