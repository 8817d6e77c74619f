"""A store in memory says what it is: for tests, and for one process."""

from __future__ import annotations

import pytest

from oncekey import Once
from oncekey.once.startup import warn_of_memory
from oncekey.wire import aconnect

MEANT = "use it for tests only"
SEVERAL = "may be executed twice"


async def test_a_memory_store_warns_at_startup(caplog, monkeypatch):  # R60
    monkeypatch.delenv("WEB_CONCURRENCY", raising=False)
    async with Once("memory:").lifespan():
        pass
    assert [MEANT in line for line in caplog.messages] == [True]


@pytest.mark.parametrize(
    ("environ", "parent", "several"),
    [
        ({}, None, False),
        ({"WEB_CONCURRENCY": "1"}, None, False),
        ({"WEB_CONCURRENCY": "4"}, None, True),
        ({}, object(), True),
    ],
)
async def test_a_memory_store_with_several_processes_logs_an_error(caplog, environ, parent, several):  # R60
    warn_of_memory(aconnect("memory:"), environ, parent)
    assert [any(MEANT in line for line in caplog.messages), any(SEVERAL in line for line in caplog.messages)] == [
        True,
        several,
    ]


async def test_a_store_on_disk_logs_no_warning(caplog, tmp_path):
    async with Once(f"sqlite:///{tmp_path}/shop.db", migrate=True).lifespan():
        pass
    assert caplog.messages == []
