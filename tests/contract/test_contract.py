"""The shipped contract, on every store behind every driver."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("oncekey.testing.contract")

from oncekey.drivers.memory import AsyncMemoryDriver, MemoryDriver  # noqa: E402  (asserts are rewritten first)
from oncekey.stores.memory import MemoryStore  # noqa: E402
from oncekey.testing.contract import StoreContract, blocking, under_asyncio  # noqa: E402


class TestMemory(StoreContract):
    @pytest.fixture
    def world(self):
        with blocking(MemoryStore, MemoryDriver()) as world:
            yield world


class TestAsyncMemory(StoreContract):
    @pytest.fixture
    def world(self):
        with under_asyncio(MemoryStore, AsyncMemoryDriver()) as world:
            yield world
