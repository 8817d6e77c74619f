"""`oncekey audit`: routes without protection, and calls that nothing announces, in any framework."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest
from fastapi import FastAPI

from oncekey import LOCAL, SINGLE_TENANT, Once, Operation, cli
from oncekey.outside_calls import outside_calls

MAIL = """
import smtplib
import httpx

client = httpx.AsyncClient()

async def elsewhere():
    await client.post("https://example.org")
"""
SHOP = """
from typing import Annotated
from fastapi import Depends, FastAPI

import httpx
import requests
from oncekey import INLINE, LOCAL, OUTBOX, PHASED, SINGLE_TENANT, Once, Operation, SyncOperation
import mailing

once = Once("sqlite:///shop.db")
app = FastAPI()
once.install(app, tenant=SINGLE_TENANT)
session = requests.Session()

async def charge(key):
    async with httpx.AsyncClient() as psp:
        found = await psp.get("/rates")
        return (await psp.post("/charges", headers={"Idempotency-Key": key})).json()

def remember(text):
    session.post("https://example.org/log", json={"text": text})

@app.post("/announced")
@once.protect(effects=PHASED)
async def announced(op: Operation):
    async def inner(key):
        return await charge(key)
    await op.call("one", lambda key: charge(key), repeatable=True)
    await op.call("two", inner)
    return await op.call(name="three", fn=charge)

@app.post("/beside")
@once.protect(effects=PHASED)
async def beside(op: Operation, psp: Annotated[httpx.AsyncClient, Depends(httpx.AsyncClient)]):
    await op.phase("one", lambda tx: charge("none"))
    await psp.request("PUT", "/things")
    await mailing.client.send("x")

@app.post("/local")
@once.protect(effects=LOCAL)
async def local(op: Operation):
    remember("local")
    await mailing.elsewhere()

@app.post("/inline")
@once.protect(effects=INLINE)
async def inline(op: Operation):
    return await charge(op.downstream_key("charge"))

@app.put("/published")
@once.protect(effects=LOCAL)
async def published(op: Operation):
    op.emit("published", {})

@app.post("/forgotten")
async def forgotten(): ...

@once.function(key="order", effects=LOCAL)
def ship(op: SyncOperation, order: str) -> None:
    requests.post("https://example.org/ship")

@once.inbox(effects=LOCAL, consumer="warehouse")
def stock(op: SyncOperation, item: str) -> None: ...
"""
FLASK = """
import flask
import httpx
from flask.views import MethodView
from oncekey import LOCAL, SINGLE_TENANT, INLINE, Once, SyncOperation

once = Once("sqlite:///shop.db")
app = flask.Flask(__name__)
things = flask.Blueprint("things", __name__, url_prefix="/things")

@app.post("/orders/<int:number>")
@once.protect(effects=LOCAL)
def order(op: SyncOperation, number: int):
    httpx.post("https://example.org")
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
    (tmp_path / "mailing.py").write_text(MAIL)
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
    for name in ("mailing", "audited_shop", "audited_flask", "audited_plain"):
        if name not in before:
            sys.modules.pop(name, None)


SHOULD = {
    "open POST /forgotten",
    "publishes PUT /published",
    "unannounced POST /beside psp.post",
    "unannounced POST /beside psp.request",
    "unannounced POST /beside mailing.client.send",
    "unannounced POST /local session.post",
    "unannounced CALL ship requests.post",
}


@pytest.mark.parametrize("name", ["app", "once"])
def test_what_is_to_be_done_is_found(audit, name):  # R16, R133, R190, R252
    code, out, _ = audit(f"audited_shop:{name}", "--json")
    said = json.loads(out)
    assert code == 1
    assert {one["id"] for one in said["findings"]} == SHOULD
    lines = {(one["method"], one["path"]): one for one in said["lines"]}
    assert lines["CALL", "warehouse"]["verdict"] == "protected"
    assert {call["announced"] for call in lines["POST", "/announced"]["calls"]} == {True}
    assert [call["what"] for call in lines["POST", "/inline"]["calls"]] == ["psp.post"]
    assert lines["POST", "/inline"]["effects"] == "inline"


def test_flask_is_listed_with_its_blueprints_and_classes(audit):
    code, out, _ = audit("audited_flask:app", "--json")
    said = json.loads(out)
    assert code == 1
    assert {one["id"] for one in said["findings"]} == {
        "open POST /things/open",
        "unannounced POST /orders/{number} httpx.post",
    }
    assert {(one["method"], one["path"]): one["verdict"] for one in said["lines"]} == {
        ("POST", "/orders/{number}"): "protected",
        ("POST", "/things/open"): "open",
        ("POST", "/things/parts"): "protected",
        ("DELETE", "/things/parts"): "idempotent",
    }


def test_what_is_enrolled_by_path_is_known_where_nothing_else_is_seen(audit):
    code, out, _ = audit("audited_plain:once", "--json")
    assert (code, [one["path"] for one in json.loads(out)["lines"]]) == (0, ["/legacy/{id}"])
    code, _, err = audit("audited_plain:outer")
    assert (code, "cannot be seen" in err) == (2, True)


def test_known_findings_do_not_fail_and_gone_ones_are_named(audit, tmp_path):
    file = tmp_path / "known.json"
    assert audit("audited_shop:app", "--baseline", str(file), "--write-baseline")[0] == 0
    code, out, _ = audit("audited_shop:app", "--baseline", str(file))
    assert (code, "FINDING" in out, "known: open POST /forgotten" in out) == (0, False, True)
    assert "is not seen" in out
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


async def test_one_line_at_start_up_says_how_much_is_protected(tmp_path, caplog):
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
        said = [one.message for one in caplog.records if "change something" in one.message]
        assert len(said) == lines
        assert all(
            one.endswith("2 routes and functions change something; 1 protected, 1 open: POST /open") for one in said
        )


def test_what_has_no_source_has_no_calls():
    assert outside_calls(len) == []
    assert outside_calls(lambda: subprocess.run(["true"], check=True)) == []
