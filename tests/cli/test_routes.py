"""`oncekey routes`: which state-changing routes a key protects, and what is to be done about the others."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SHOP = """
from fastapi import APIRouter, FastAPI, Request
from oncekey import INLINE, LOCAL, OUTBOX, PHASED, SINGLE_TENANT, Once, Operation, Sighting

once = Once("sqlite:///shop.db")
app = FastAPI()
once.install(app, tenant=SINGLE_TENANT, enrol={"POST /legacy/{name}": once.by_path(effects=INLINE, operation="legacy")})
once.webhook(app, "/hooks", secret="0123456789abcdef", parse=lambda event: None)
steps = APIRouter(prefix="/checkout")

@app.get("/orders")
async def orders(): ...

@app.post("/login")
async def login(): ...

@app.post("/legacy/{name}")
async def legacy(name: str): ...

@app.put("/profile")
async def profile(): ...

@app.put("/address")
@once.protect(effects=LOCAL)
async def address(op: Operation):
    async def later():
        op.emit("moved", {})
    await later()

@steps.post("/basket")
@once.protect(effects=LOCAL)
async def basket(op: Operation): ...

@steps.post("/payment")
@once.protect(effects=PHASED, replay_cache="memory")
async def payment(op: Operation): ...

@steps.post("/shipment")
async def shipment(): ...

app.include_router(steps)
"""


def run(*arguments, cwd):
    command = [sys.executable, "-c", "from oncekey.cli import main; main()", *arguments]
    return subprocess.run(command, cwd=cwd, check=False, capture_output=True, text=True)


@pytest.fixture
def shop(tmp_path):
    (tmp_path / "routed_shop.py").write_text(SHOP)
    return tmp_path


def survey(shop, *options):
    done = run("routes", "--app", "routed_shop:once", "--json", *options, cwd=shop)
    items = json.loads(done.stdout)["items"]
    return done.returncode, {(item["method"], item["path"]): item for item in items}


def test_every_step_of_a_flow_is_listed_with_its_protection(shop):  # R133
    code, found = survey(shop)
    assert code == 1
    assert {place: item["verdict"] for place, item in found.items()} == {
        ("POST", "/checkout/basket"): "protected",
        ("POST", "/checkout/payment"): "protected",
        ("POST", "/checkout/shipment"): "open",
        ("POST", "/legacy/{name}"): "protected",
        ("POST", "/login"): "open",
        ("PUT", "/address"): "publishes",
        ("PUT", "/profile"): "idempotent",
    }
    payment = found["POST", "/checkout/payment"]
    assert (payment["operation"], payment["effects"], payment["key"]) == ("payment", "phased", "required")
    assert payment["front"] == "replay_cache=memory (0:01:00)"
    assert found["POST", "/legacy/{name}"]["operation"] == "legacy"
    assert found["POST", "/legacy/{name}"]["front"] is None


def test_the_column_of_fronts_is_there_if_a_route_has_one(shop):
    plain = 'from oncekey import LOCAL, Once\nonce = Once("memory:")\n@once.function(key="order", effects=LOCAL)\n'
    (shop / "plain_shop.py").write_text(f"{plain}async def ship(order: str) -> None: ...\n")
    done = run("routes", "--app", "plain_shop:once", cwd=shop)
    assert done.stdout.splitlines()[0].split() == ["method", "path", "verdict", "operation", "effects", "key"]
    done = run("routes", "--app", "routed_shop:once", cwd=shop)
    assert done.stdout.splitlines()[0].split()[-1] == "front"


def test_a_put_that_publishes_is_not_idempotent(shop):  # R16, R267
    done = run("routes", "--app", "routed_shop:once", cwd=shop)
    assert done.returncode == 1
    assert "PUT /address: serve it by POST or PATCH with a key" in done.stdout
    assert "POST /checkout/shipment: protect it" in done.stdout


def test_routes_open_option_declares_an_unprotected_route(shop):
    code, found = survey(shop, "--open", "POST /login", "--open", "POST /checkout/shipment")
    assert (code, found["POST", "/login"]["verdict"]) == (1, "declared open")  # the PUT is left
    wrong = run("routes", "--app", "routed_shop:once", "--open", "POST /logn", cwd=shop)
    assert (wrong.returncode, wrong.stderr) == (2, "oncekey: --open 'POST /logn': no such route is served\n")
