"""Any OpenAPI document says what keys protect, and stays a valid one (R228, R229)."""

from __future__ import annotations

import copy
import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import flask
import pytest
import yaml
from fastapi import FastAPI
from openapi_spec_validator import validate

from oncekey import INLINE, LOCAL, OUTBOX, SINGLE_TENANT, Once, Operation, Policy, SyncOperation, cli
from oncekey.core.answers import refuse
from oncekey.core.errors import ConfigurationError
from oncekey.core.model import Code, Effects, Refuse
from oncekey.core.policy import ErrorFormat, Flavor
from oncekey.core.problems import PROBLEMS
from oncekey.engine.enrolment import Enrolment
from oncekey.frameworks.listing import listed
from oncekey.frameworks.openapi import describe_one, transformed

DOCUMENT: dict[str, Any] = {
    "openapi": "3.0.3",
    "info": {"title": "Things", "version": "1"},
    "servers": [{"url": "https://api.example.org/v1"}],
    "paths": {
        "/things/{thing}": {
            "parameters": [{"name": "thing", "in": "path", "required": True, "schema": {"type": "integer"}}],
            "get": {"responses": {"200": {"$ref": "#/components/responses/Done"}}},
            "post": {"responses": {"200": {"$ref": "#/components/responses/Done"}, "409": {"description": "Taken"}}},
        },
        "/keyed": {
            "post": {
                "parameters": [{"$ref": "#/components/parameters/Key"}],
                "responses": {"200": {"$ref": "#/components/responses/Done"}},
            }
        },
        "/open": {"post": {"responses": {"200": {"description": "Done"}}}},
    },
    "components": {
        "responses": {"Done": {"description": "Done", "content": {"application/json": {"schema": {"type": "object"}}}}},
        "parameters": {
            "Key": {"name": "idempotency-key", "in": "header", "required": True, "schema": {"type": "string"}}
        },
    },
}


def a_flask(once: Once) -> flask.Flask:
    app = flask.Flask("things")

    @app.post("/v1/things/<int:number>")
    @once.protect(effects=LOCAL, ttl=72 * 3600)
    def make(op: SyncOperation[Any], number: int) -> dict[str, int]:
        return {"number": number}

    @app.post("/v1/keyed")
    @once.protect(effects=LOCAL)
    def keyed(op: SyncOperation[Any]) -> dict[str, str]:
        return {}

    @app.post("/v1/open")
    def unprotected() -> dict[str, str]:
        return {}

    @app.post("/v1/hidden")
    @once.protect(effects=LOCAL)
    def hidden(op: SyncOperation[Any]) -> dict[str, str]:
        return {}

    once.wsgi(app, tenant=SINGLE_TENANT)
    return app


@pytest.mark.parametrize("version", ["3.0.3", "3.1.0"])
@pytest.mark.parametrize("flavor", list(Flavor))
def test_the_document_of_a_flask_app_is_extended(version: str, flavor: Flavor) -> None:
    app = a_flask(Once("sqlite:///unused.db", policy=Policy(flavor=flavor)))
    document = {**DOCUMENT, "openapi": version}
    before = copy.deepcopy(document)
    made, missing = transformed(document, listed(app) or ())
    validate(made)
    assert document == before
    assert missing == ["POST /v1/hidden"]
    about = made["paths"]["/things/{thing}"]["post"]
    (parameter,) = about["parameters"]
    assert (parameter["name"], parameter["required"]) == ("Idempotency-Key", True)
    assert "72 hours" in parameter["description"]
    misuse = "400" if flavor is Flavor.STRIPE else "422"
    assert {"200", "400", "409", "503", misuse} <= set(about["responses"])
    assert about["responses"]["409"]["description"] == "Taken"
    assert set(about["responses"]["200"]["headers"]) == {
        "Idempotency-Key",
        "Idempotency-Key-Expires",
        "Idempotent-Replayed",
    }
    # What other operations refer to, and what is not protected, is as it was.
    assert made["components"] == before["components"]
    assert made["paths"]["/things/{thing}"]["get"] == before["paths"]["/things/{thing}"]["get"]
    assert made["paths"]["/open"] == before["paths"]["/open"]
    assert made["paths"]["/keyed"]["post"]["parameters"] == [{"$ref": "#/components/parameters/Key"}]
    assert transformed(made, listed(app) or ())[0] == made


def test_the_fastapi_document_is_valid_and_complete() -> None:
    once = Once("sqlite:///unused.db")
    app = FastAPI()
    once.install(app, tenant=SINGLE_TENANT)

    @app.post("/inline", status_code=201)
    @once.protect(effects=INLINE, on_in_progress="accepted")
    async def inline(body: dict[str, Any]) -> dict[str, Any]:
        return body

    @app.post("/outbox", status_code=202)
    @once.protect(effects=OUTBOX)
    async def outbox(body: dict[str, Any], op: Operation) -> None:
        op.defer("x", body)

    @app.post("/silent", status_code=204)
    @once.protect(effects=OUTBOX)
    async def silent(body: dict[str, Any], op: Operation) -> None:
        op.defer("x", body)

    document = app.openapi()
    validate(document)
    for path in ("/inline", "/outbox", "/silent"):
        responses = document["paths"][path]["post"]["responses"]
        assert {"202", "400", "409", "413", "422", "503"} <= set(responses)
        assert {"Retry-After", "Location"} <= set(responses["202"]["headers"])
    accepted = document["paths"]["/silent"]["post"]["responses"]["202"]
    assert accepted["description"] == "Accepted: the request is committed, and a worker completes it."
    assert accepted["content"]["application/json"]["schema"]["required"] == ["state"]


EVERYTHING = {"on_expired": "gone", "max_request_age": 3600, "max_live_keys": 1000, "problem_types": "https://e.org/"}
ELSEWHERE = {Code.KEY_NOT_FOUND: "of the status resource alone"}
"""The only problems that no route answers, with the reason."""


def documented(responses: dict[str, Any]) -> set[tuple[str, str]]:
    """The problems of an operation by name, each with its status."""
    return {
        (name, status)
        for status, response in responses.items()
        for media in response.get("content", {}).values()
        for name in media.get("examples", {})
        if name.startswith("idempotency_")
    }


@pytest.mark.parametrize("wsgi", [False, True])
@pytest.mark.parametrize("effects", list(Effects))
@pytest.mark.parametrize("error_format", list(ErrorFormat))
@pytest.mark.parametrize("flavor", list(Flavor))
def test_every_problem_is_listed_under_its_status(
    flavor: Flavor, error_format: ErrorFormat, effects: Effects, wsgi: bool
) -> None:
    # R229: compared with the table of problems and with what is really answered
    policy = Policy(flavor=flavor, error_format=error_format, **EVERYTHING)
    about: dict[str, Any] = {}
    describe_one(about, Enrolment("pay", effects, policy, None), wsgi=wsgi)
    validate({"openapi": "3.1.0", "info": DOCUMENT["info"], "paths": {"/pay": {"post": about}}})
    found = documented(about["responses"])
    absent = {*ELSEWHERE, Code.BODY_TOO_SLOW if wsgi else Code.BODY_LENGTH_MISSING}
    absent |= set() if effects is Effects.OUTBOX else {Code.TIMED_OUT}
    assert {name for name, _ in found} == {code.value for code in PROBLEMS if code not in absent}
    for code in PROBLEMS.keys() - absent:
        answer = refuse(Refuse(code), policy)
        status = policy.abandoned_status if code is Code.TIMED_OUT else answer.status
        assert (code.value, str(status)) in found
        response = about["responses"][str(status)]
        media = dict(answer.headers)[b"content-type"].decode()
        shown = response["content"][media]["examples"][code.value]["value"]
        assert shown.keys() >= json.loads(answer.body).keys()
        assert (b"retry-after" in dict(answer.headers)) <= ("Retry-After" in response.get("headers", {}))
    assert ("idempotency_key_reused_with_different_payload", "400" if flavor is Flavor.STRIPE else "422") in found
    assert {status for name, status in found if name == "idempotency_outcome_unknown"} == {"409", "503"}
    running = {status for name, status in found if name == "idempotency_key_in_progress"}
    assert running == {"409"}


@pytest.mark.parametrize(
    ("options", "gone", "there"),
    [
        ({}, {Code.KEY_EXPIRED, Code.RATE_LIMITED, Code.REQUEST_TOO_OLD}, set()),
        ({"require_key": False}, {Code.KEY_MISSING}, set()),
        ({"on_in_progress": "accepted"}, set(), {(Code.IN_PROGRESS, "202")}),
        ({"on_unknown": 202}, set(), {(Code.OUTCOME_UNKNOWN, "202"), (Code.OUTCOME_UNKNOWN, "503")}),
        ({"max_new_keys_per_second": 1}, set(), {(Code.RATE_LIMITED, "429")}),
    ],
)
def test_problems_disabled_by_settings_are_omitted(
    options: dict[str, Any], gone: set[Code], there: set[tuple[Code, str]]
) -> None:
    about: dict[str, Any] = {}
    describe_one(about, Enrolment("pay", INLINE, Policy(**options), None))
    found = documented(about["responses"])
    assert not {name for name, _ in found} & {code.value for code in gone}
    assert {(code.value, status) for code, status in there} <= found


def test_application_examples_are_kept() -> None:
    about: dict[str, Any] = {
        "responses": {
            "409": {"description": "Taken", "content": {"application/problem+json": {"example": {"code": "taken"}}}}
        }
    }
    describe_one(about, Enrolment("pay", INLINE, Policy(), None))
    taken = about["responses"]["409"]
    assert taken["description"] == "Taken"
    examples = taken["content"]["application/problem+json"]["examples"]
    assert examples["example"] == {"value": {"code": "taken"}}
    assert {"idempotency_key_in_progress", "idempotency_outcome_unknown"} <= examples.keys()


@pytest.mark.parametrize("version", ["2.0", "4.0.0", "?"])
def test_other_openapi_versions_are_rejected(version: str) -> None:
    with pytest.raises(ConfigurationError, match=r"3\.0 and 3\.1 are supported"):
        transformed({"openapi": version}, ())


def test_the_command_reads_json_and_yaml(tmp_path, monkeypatch, capsys) -> None:
    module = ModuleType("openapi_shop")
    module.__spec__ = ModuleSpec("openapi_shop", None)
    module.app = a_flask(Once("sqlite:///unused.db"))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "openapi_shop", module)

    def run(*words: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["oncekey", "openapi", "--app", "openapi_shop:app", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    (tmp_path / "api.json").write_text(json.dumps(DOCUMENT))
    (tmp_path / "api.yaml").write_text(yaml.safe_dump(DOCUMENT, sort_keys=False))
    told = [run(str(tmp_path / name)) for name in ("api.json", "api.yaml")]
    assert told[0] == told[1]
    code, out, err = told[0]
    assert out, err
    validate(json.loads(out))
    assert (code, err) == (1, "oncekey: POST /v1/hidden is protected, but not in the document\n")
    assert "pass the FILE" in run()[2]
    (tmp_path / "broken.yaml").write_text("a: [")
    for name in ("broken.yaml", "missing.json"):
        assert run(str(tmp_path / name))[0] == 2
