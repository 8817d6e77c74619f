"""The program of the guide to the ORM in phases runs, and does what its page says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from harness.pages import ROOT, Page, load
from harness.provider import Provider
from harness.walkthrough import with_store

PAGE = Page(ROOT / "docs" / "howto" / "sqlalchemy.md")
KEY = {"Idempotency-Key": "4c1d9a3e-6d0b-4f53-8f0e-5f1f3f7f9999", "Authorization": "Bearer ann"}
PAYMENT = {"customer": "c-1", "amount": 1999}


async def test_orm_payment_with_a_lost_reply_is_stored_and_charged_once(
    postgres_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # R115, R116
    with Provider(tmp_path) as provider:
        text = with_store(PAGE.program("ledger.py"), lambda: postgres_dsn).replace(
            "http://127.0.0.1:2525", provider.url
        )
        program: Any = load(text, "ledger.py", tmp_path, monkeypatch)
        async with program.engine.begin() as connection:
            await connection.run_sync(program.Base.metadata.create_all)
        async with program.app.router.lifespan_context(program.app):
            async with program.AsyncSession(program.engine) as session:
                session.add(program.User(token="ann", tenant="shop-1"))
                await session.commit()
            transport = httpx.ASGITransport(program.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop.example") as client:
                stranger = await client.post("/payments", json=PAYMENT, headers={**KEY, "Authorization": "Bearer eve"})
                provider.fault("drop-after", 1)
                lost = await client.post("/payments", json=PAYMENT, headers=KEY)
                paid = await client.post("/payments", json=PAYMENT, headers=KEY)
                again = await client.post("/payments", json=PAYMENT, headers=KEY)
                place = f"/idempotency-keys/{KEY['Idempotency-Key']}"
                shown = [
                    await client.get(place, headers={"Authorization": f"Bearer {token}"}) for token in ("ann", "eve")
                ]
            async with program.AsyncSession(program.engine) as session:
                rows = (await session.scalars(select(program.Payment))).all()
            assert program.engine.pool.checkedout() == 0
        (charge,) = provider.charges()
    assert [stranger.status_code, lost.status_code, paid.status_code] == [401, 500, 201]
    assert [one.status_code for one in shown] == [200, 401]
    assert paid.json() == {"id": 1, "charge": charge["id"]}
    assert (again.content, again.headers["Idempotent-Replayed"]) == (paid.content, "true")
    assert [(row.tenant, row.amount, row.charge) for row in rows] == [("shop-1", 1999, charge["id"])]
