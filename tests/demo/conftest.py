"""A demo that the tests of one module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.demo import Demo


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """`oncekey demo` as somebody starts it who reads no further than its name."""
    with Demo(tmp_path_factory.mktemp("demo")) as running:
        yield running
