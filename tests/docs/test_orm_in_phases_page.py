"""The program of the guide to the ORM in phases runs, and does what its page says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import httpx
from sqlalchemy import select

from harness.pages import ROOT, Page
from harness.provider import Provider
from harness.walkthrough import with_store

PAGE = Page(ROOT / "docs" / "howto" / "orm-in-phases.md")
KEY = {"Idempotency-Key": "4c1d9a3e-6d0b-4f53-8f0e-5f1f3f7f9999", "Authorization": "Bearer ann"}
PAYMENT = {"customer": "c-1", "amount": 1999}


def _program(dsn: str, folder: Path, provider: str) -> ModuleType:
    (block,) = [block for block in PAGE.blocks("python") if block.file == "ledger.py"]
    file = folder / "ledger.py"
    file.write_text(with_store(block.text, lambda: dsn).replace("http://127.0.0.1:2525", provider))
    spec = importlib.util.spec_from_file_location("documented_ledger", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a framework looks up the names of annotations
    spec.loader.exec_module(module)
    return module


async def test_a_payment_whose_reply_was_lost_is_one_row_and_one_charge(postgres_dsn: str, tmp_path: Path) -> None:
    # R115, R116
    with Provider(tmp_path) as provider:
        program = _program(postgres_dsn, tmp_path, provider.url)
        async with program.engine.begin() as connection:
            await connection.run_sync(program.Tables.metadata.create_all)
        async with program.lifespan(program.app):
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
            async with program.AsyncSession(program.engine) as session:
                rows = (await session.scalars(select(program.Payment))).all()
            assert program.engine.pool.checkedout() == 0
        (charge,) = provider.charges()
    assert [stranger.status_code, lost.status_code, paid.status_code] == [401, 500, 201]
    assert paid.json() == {"id": 1, "charge": charge["id"]}
    assert (again.content, again.headers["Idempotent-Replayed"]) == (paid.content, "true")
    assert [(row.tenant, row.amount, row.charge) for row in rows] == [("shop-1", 1999, charge["id"])]
