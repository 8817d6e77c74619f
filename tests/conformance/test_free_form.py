"""oncekey behind an API that takes any member: here its comparison itself is tried, and not what a model refuses."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request

from conformance.aiming import JSON
from harness.served import Served
from oncekey.core.model import INLINE
from oncekey.once import Once
from oncekey_check import CLAUSES, Address, CheckProfile, Passed, Target, check

COMPARED = {
    f"mismatches.{name}"
    for name in ("every-member", "large-integers", "types", "array-order", "duplicate-names", "surrogates", "depth")
}
ALSO = {"keys.whole", "leaks.mismatch", "leaks.first-body", "failures.corrected"}
CAPTURED = {"others.get", "others.get-current", "others.get-takes-no-key"}


def _api(database: Path) -> FastAPI:
    once = Once(f"sqlite:///{database}", migrate=True)
    app = FastAPI(lifespan=once.lifespan)
    once.install(app, tenant=lambda _: "acme")
    orders: list[str] = []

    @app.post("/orders", status_code=201)
    @once.protect(effects=INLINE)
    async def place(request: Request) -> dict[str, Any]:
        await request.json()
        orders.append(str(uuid.uuid4()))
        return {"id": orders[-1]}

    @app.get("/orders")
    async def placed() -> list[str]:
        return orders

    return app


def test_oncekey_distinguishes_bodies_and_keys_without_a_request_model(tmp_path: Path) -> None:
    # R3, R8, R14, R35, R37, R40
    with Served(_api(tmp_path / "keys.db")) as served:
        address = Address.parse(f"http://127.0.0.1:{served.port}/orders")
        target = Target(
            address=address, body=b'{"item": "teapot", "quantity": 2}', headers=(JSON,), count_address=address
        )
        tried = [clause for clause in CLAUSES if clause.id in COMPARED | ALSO | CAPTURED]
        report = check(target, profile=CheckProfile.STRICT_MONEY, clauses=tried)
    assert {finding.clause.id: finding.verdict for finding in report.findings} == dict.fromkeys(
        COMPARED | ALSO | CAPTURED, Passed()
    )
