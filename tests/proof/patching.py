"""Putting something in another's place, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Attributes replaced as long as the block lasts."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, instead in changes:
        setattr(owner, name, instead)
    try:
        yield
    finally:
        for owner, name, was in before:
            setattr(owner, name, was)
