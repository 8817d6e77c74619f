"""The reason of an outage in the log: the class of its cause, and never its text."""

from __future__ import annotations

import pytest

from oncekey.core.errors import StoreUnavailableError
from oncekey.core.model import RecordId
from oncekey.wire import aconnect

NOBODY = "127.0.0.1:1"  # no server listens there
URLS = (
    f"postgresql+asyncpg://{NOBODY}/shop",
    f"postgresql+psycopg://{NOBODY}/shop",
    f"mariadb+aiomysql://{NOBODY}/shop",
    f"redis://{NOBODY}/0",
    f"dynamodb://eu-central-1/shop?endpoint=http://{NOBODY}",
    "sqlite:////nowhere/at/all/shop.db",
)


@pytest.mark.parametrize("url", URLS, ids=lambda url: url.partition(":")[0])
async def test_an_outage_names_the_class_of_its_cause(url: str, dynamo_credentials: None) -> None:
    engine = aconnect(url)
    try:
        with pytest.raises(StoreUnavailableError) as raised:
            await engine.find(RecordId("-", "a-key-that-nobody-finds"))
    finally:
        await engine.close()
    name, _, cause = raised.value.reason.partition(" from ")
    assert name.startswith("Store")
    assert cause.endswith(("Error", "Exception"))
    assert "127.0.0.1" not in raised.value.reason
