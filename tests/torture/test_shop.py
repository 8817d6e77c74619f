"""What is tortured is what ships: the shop's commits go the way that an application's do."""

from __future__ import annotations

import json

import pytest

from frameworks.shop import new_key
from harness.asgi import Caller
from harness.cutting import CuttingProxy
from harness.dsn import through
from oncekey_demo.torture.plan import Settings
from oncekey_demo.torture.shop import Shop, Wanted

BODY = json.dumps(Wanted("c", 7).data()).encode()


@pytest.mark.parametrize(("path", "folded"), [("/orders", False), ("/bookings", True)])
async def test_torture_shop_commits_once_with_or_without_a_folded_seal(
    path: str, folded: bool, tables_dsn: str
) -> None:
    with CuttingProxy.before(tables_dsn) as proxy:
        shop = Shop(Settings(through(tables_dsn, proxy.port), "http://127.0.0.1:1", "torture"))
        async with shop.once.lifespan(shop.app):
            await shop.books.open()
            proxy.count()
            headers = {"Idempotency-Key": new_key(), "Content-Type": "application/json"}
            reply = await Caller(shop.app, "POST", path, headers=headers, body=BODY).run(raising=True)
            assert reply.status == 201, reply
            commits = [said for said, _ in proxy.messages if b"COMMIT\0" in said or b"COMMIT;" in said]
            assert len(commits) == 1
            assert (b"oncekey.seal" in commits[0]) == folded
