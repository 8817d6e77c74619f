"""The program of the guide to SQLAlchemy runs, and does what its page says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from harness.pages import ROOT, Page, load
from harness.walkthrough import with_store

PAGE = Page(ROOT / "docs" / "howto" / "sqlalchemy.md")
KEYS = [{"Idempotency-Key": f"{number}" * 16, "Authorization": "Bearer ann"} for number in range(3)]


@pytest.fixture
def program(postgres_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The page's program, imported, on the test's database."""
    return load(with_store(PAGE.program("sessions.py"), lambda: postgres_dsn), "sessions.py", tmp_path, monkeypatch)


async def test_sqlalchemy_guide_program_works_as_described(program: Any) -> None:
    async with program.engine.begin() as connection:
        await connection.run_sync(program.Base.metadata.create_all)
    async with program.app.router.lifespan_context(program.app):
        async with program.AsyncSession(program.engine) as session:
            session.add_all([program.User(token=name, tenant=name) for name in ("ann", "bob")])
            await session.commit()
        transport = httpx.ASGITransport(program.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop.example") as client:

            async def book(seat: str, headers: dict[str, str]) -> httpx.Response:
                return await client.post("/bookings", json={"seat": seat}, headers=headers)

            assert (await book("1A", {**KEYS[0], "Authorization": "Bearer eve"})).status_code == 401
            first = await book("1A", KEYS[0])
            assert (first.status_code, first.json()) == (201, {"id": 1})
            again = await book("1A", KEYS[0])
            assert (again.content, again.headers["Idempotent-Replayed"]) == (first.content, "true")
            place = f"/idempotency-keys/{KEYS[0]['Idempotency-Key']}"
            for token, status in (("ann", 200), ("bob", 404), ("eve", 401)):
                shown = await client.get(place, headers={"Authorization": f"Bearer {token}"})
                assert shown.status_code == status

            for _ in range(2):
                taken = await book("1A", KEYS[1])
                assert (taken.status_code, taken.json()) == (409, {"detail": "this seat is taken"})
            assert taken.headers["Idempotent-Replayed"] == "true"

            assert (await book("2B", {**KEYS[2], "Authorization": "Bearer bob"})).status_code == 201
            assert (await client.get("/bookings", headers=KEYS[0])).json() == ["1A"]
        assert program.engine.pool.checkedout() == 0


async def test_get_or_create_keeps_the_rows_before_it(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = PAGE.section("Get or create")
    create = load(block.text, "get_or_create.py", tmp_path, monkeypatch).create
    async with program.engine.begin() as connection:
        await connection.run_sync(program.Base.metadata.create_all)
    async with program.AsyncSession(program.engine) as session, session.begin():
        created = [await create(session, program.Booking(tenant="ann", seat=seat)) for seat in ("1A", "1B", "1A")]
    async with program.AsyncSession(program.engine) as session:
        assert (created, sorted(await session.scalars(select(program.Booking.seat)))) == (
            [True, True, False],
            ["1A", "1B"],
        )
    await program.engine.dispose()
