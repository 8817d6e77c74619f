"""A Valkey for the tests of what stands in front of the store, and an application before it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from harness.brokers import Valkey


@pytest.fixture(scope="package")
def _valkey() -> Iterator[Valkey]:
    with Valkey() as server:
        yield server


@pytest.fixture
def valkey(_valkey: Valkey) -> Valkey:
    """An empty one, which others use afterwards: who kills one starts its own."""
    with redis.Redis.from_url(_valkey.url) as client:
        client.flushall()
    return _valkey
