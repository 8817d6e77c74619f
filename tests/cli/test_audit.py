"""`oncekey audit`: routes without protection, and PUTs that publish or call out, in any framework."""

from __future__ import annotations

import json
import logging
import sys

import pytest
from fastapi import FastAPI

from oncekey import LOCAL, SINGLE_TENANT, Once, Operation, cli

SHOP = """
import smtplib
import httpx
from fastapi import FastAPI
from oncekey import INLINE, LOCAL, SINGLE_TENANT, Once, Operation, SyncOperation

once = Once("sqlite:///shop.db")
app = FastAPI()
once.install(app, tenant=SINGLE_TENANT)
broker = smtplib

@app.post("/local")
@once.protect(effects=LOCAL)
async def local(op: Operation):
    op.emit("done", {})

@app.put("/inline")
@once.protect(effects=INLINE)
async def inline(op: Operation):
    httpx.post("https://example.org", headers={"Idempotency-Key": op.downstream_key("charge")})

@app.put("/published")
@once.protect(effects=LOCAL)
async def published(op: Operation):
    op.emit("published", {})

@app.put("/bare/published")
async def bare_published():
    broker.publish("renamed")

@app.delete("/bare/called")
async def bare_called():
    async def inner():
        async with httpx.AsyncClient() as client:
            await client.post("https://example.org")
    await inner()

@app.put("/bare/renamed")
async def bare_renamed():
    return httpx.get("https://example.org").status_code

@app.post("/forgotten")
async def forgotten(): ...

@once.function(key="order", effects=LOCAL)
def ship(op: SyncOperation, order: str) -> None: ...

@once.inbox(effects=LOCAL, consumer="warehouse")
def stock(op: SyncOperation, item: str) -> None: ...
"""
FLASK = """
import flask
from flask.views import MethodView
from oncekey import LOCAL, SINGLE_TENANT, INLINE, Once, SyncOperation

once = Once("sqlite:///shop.db")
app = flask.Flask(__name__)
things = flask.Blueprint("things", __name__, url_prefix="/things")

@app.post("/orders/<int:number>")
@once.protect(effects=LOCAL)
def order(op: SyncOperation, number: int):
    return {}

@things.post("/open")
def open_one():
    return {}

class Parts(MethodView):
    def get(self): return {}
    def post(self): return {}
    def delete(self): return {}

things.add_url_rule("/parts", view_func=Parts.as_view("parts"))
app.register_blueprint(things)
once.wsgi(app, tenant=SINGLE_TENANT, enrol={"POST /things/parts": once.by_path(effects=INLINE, operation="parts")})
"""
PLAIN = """
from oncekey import INLINE, SINGLE_TENANT, Once

async def outer(scope, receive, send): ...

once = Once("sqlite:///shop.db")
legacy = once.by_path(effects=INLINE, operation="legacy")
app = once.asgi(outer, tenant=SINGLE_TENANT, enrol={"POST /legacy/{id}": legacy})
"""


@pytest.fixture
def audit(tmp_path, monkeypatch, capsys):
    (tmp_path / "audited_shop.py").write_text(SHOP)
    (tmp_path / "audited_flask.py").write_text(FLASK)
    (tmp_path / "audited_plain.py").write_text(PLAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def run(app, *words, command="audit"):
        monkeypatch.setattr(sys, "argv", ["oncekey", command, "--app", app, *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return ended.value.code or 0, said.out, said.err

    yield run
    for name in ("audited_shop", "audited_flask", "audited_plain"):
        if name not in before:
            sys.modules.pop(name, None)


SHOULD = {
    "open POST /forgotten",
    "publishes PUT /published",
    "publishes PUT /bare/published",
    "publishes DELETE /bare/called",
}


@pytest.mark.parametrize("name", ["app", "once"])
def test_audit_reports_unprotected_and_publishing_routes(audit, name):  # R16, R133, R190, R252, R267
    code, out, _ = audit(f"audited_shop:{name}", "--json")
    said = json.loads(out)
    assert code == 1
    assert {one["id"] for one in said["findings"]} == SHOULD
    verdicts = {(one["method"], one["path"]): one["verdict"] for one in said["lines"]}
    assert verdicts["CALL", "warehouse"] == "protected"
    assert verdicts["PUT", "/inline"] == "protected"
    assert verdicts["PUT", "/bare/renamed"] == "idempotent"


def test_a_put_that_publishes_on_purpose_can_be_declared(audit):  # R267
    declared = [
        word
        for name in SHOULD
        if "published" not in name or "bare" in name
        for word in ("--open", name.split(" ", 1)[1])
    ]
    code, out, _ = audit("audited_shop:app", "--json", *declared)
    assert (code, [one["id"] for one in json.loads(out)["findings"]]) == (1, ["publishes PUT /published"])


def test_flask_is_listed_with_its_blueprints_and_classes(audit):
    code, out, _ = audit("audited_flask:app", "--json")
    said = json.loads(out)
    assert code == 1
    assert [one["id"] for one in said["findings"]] == ["open POST /things/open"]
    assert {(one["method"], one["path"]): one["verdict"] for one in said["lines"]} == {
        ("POST", "/orders/{number}"): "protected",
        ("POST", "/things/open"): "open",
        ("POST", "/things/parts"): "protected",
        ("DELETE", "/things/parts"): "idempotent",
    }


def test_audit_of_a_plain_asgi_app_lists_only_enrolled_paths(audit):
    code, out, _ = audit("audited_plain:once", "--json")
    assert (code, [one["path"] for one in json.loads(out)["lines"]]) == (0, ["/legacy/{id}"])
    code, _, err = audit("audited_plain:outer")
    assert (code, "cannot be listed" in err) == (2, True)


def test_audit_baseline_accepts_listed_findings_and_reports_fixed_ones(audit, tmp_path):
    file = tmp_path / "known.json"
    assert audit("audited_shop:app", "--baseline", str(file), "--write-baseline")[0] == 0
    code, out, _ = audit("audited_shop:app", "--baseline", str(file))
    assert (code, "FINDING" in out, "known: open POST /forgotten" in out) == (0, False, True)
    known = json.loads(file.read_text())
    known["findings"] = [*sorted(SHOULD - {"open POST /forgotten"}), "open POST /removed"]
    file.write_text(json.dumps(known))
    code, out, _ = audit("audited_shop:app", "--baseline", str(file))
    assert (code, "FINDING: open POST /forgotten" in out, "gone: open POST /removed" in out) == (1, True, True)
    assert audit("audited_shop:app", "--baseline", str(file), "--open", "POST /forgotten")[0] == 0
    for text in ("[]", '{"version": 2, "findings": []}', "no"):
        file.write_text(text)
        assert audit("audited_shop:app", "--baseline", str(file))[0] == 2
    assert audit("audited_shop:app", "--write-baseline")[0] == 2


def test_functions_and_consumers_are_listed_with_the_routes(audit):
    _, out, _ = audit("audited_shop:once", "--json", command="routes")
    found = {one["path"]: one for one in json.loads(out)["items"] if one["method"] == "CALL"}
    assert {name: one["effects"] for name, one in found.items()} == {"ship": "local", "warehouse": "local"}


async def test_startup_logs_one_line_with_the_number_of_protected_routes(tmp_path, caplog):
    for survey, lines in ((True, 1), (False, 0)):
        once = Once(f"sqlite:///{tmp_path}/shop.db", migrate=True, survey=survey)
        app = FastAPI(lifespan=once.lifespan)
        once.install(app, tenant=SINGLE_TENANT)

        @app.post("/kept")
        @once.protect(effects=LOCAL)
        async def kept(op: Operation) -> None: ...

        @app.post("/open")
        async def unprotected() -> None: ...

        caplog.clear()
        with caplog.at_level(logging.INFO, "oncekey"):
            for _ in range(2):
                async with app.router.lifespan_context(app):
                    pass
        said = [one.message for one in caplog.records if "state-changing routes" in one.message]
        assert len(said) == lines
        assert all(
            one.endswith("2 state-changing routes and functions: 1 protected, 1 open: POST /open") for one in said
        )
