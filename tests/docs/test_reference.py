"""The reference says what the code says: its pages are generated, and the generator leaves nothing out."""

from __future__ import annotations

import re
from dataclasses import fields
from uuid import UUID

import pytest

from harness.pages import ROOT, Page, generator, pages
from oncekey.canonical.fingerprint import Request
from oncekey.canonical.whole import fingerprint
from oncekey.core.answers import Answer, refuse, replay
from oncekey.core.first_sent import FIRST_SENT
from oncekey.core.model import (
    Code,
    Effects,
    Outcome,
    Record,
    RecordId,
    Recovery,
    Refuse,
    Replay,
    State,
    StoredResponse,
)
from oncekey.core.policy import Flavor, Policy
from oncekey.core.problems import PROBLEMS
from oncekey.stores.rows import COLUMNS, WORK
from oncekey.stores.sql import known

SOURCES = ROOT / "src" / "oncekey"


GENERATOR = generator()


def _page(name: str) -> Page:
    return Page(ROOT / "docs" / "reference" / name)


@pytest.mark.parametrize("name", GENERATOR.PAGES)
def test_generated_reference_page_is_up_to_date(name: str) -> None:
    stale = f"{name} is not what the code says: run `python -m docs.generator` and commit it"
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == GENERATOR.PAGES[name](), stale


def test_every_reference_page_is_generated_or_the_index() -> None:
    generated = {name.removeprefix("reference/") for name in GENERATOR.PAGES if name.startswith("reference/")}
    assert {page.path.name for page in pages("docs/reference/*.md")} == {"README.md", *generated}


# Settings (R230, R263)


def _described() -> dict[str, str]:
    return {name: group for group, sentences in GENERATOR.settings.groups().items() for name in sentences}


def test_every_setting_is_described_exactly_once() -> None:
    assert sorted(_described()) == sorted(setting.name for setting in fields(Policy))
    assert sum(len(sentences) for sentences in GENERATOR.settings.groups().values()) == len(fields(Policy))


@pytest.mark.parametrize("setting", _described())
def test_every_setting_is_read_by_something(setting: str) -> None:
    # What nothing reads is a promise that nobody keeps.
    own = SOURCES / "core" / "policy.py"
    modules = [path for path in SOURCES.rglob("*.py") if not path.is_relative_to(SOURCES / "testing") and path != own]
    read = (re.search(rf"policy\.{setting}\b", path.read_text()) for path in modules)
    assert any(read) or re.search(rf"(self|policy)\.{setting}\b", own.read_text())


# Problems (R229, R233)


def test_every_problem_code_has_advice_for_clients() -> None:
    assert set(GENERATOR.problems.ADVICE) == set(Code) == set(PROBLEMS)


def test_problems_page_lists_the_statuses_of_both_flavors() -> None:
    text = _page("problems.md").text
    for code, problem in PROBLEMS.items():
        ietf, stripe = problem.status_in(Flavor.IETF), problem.status_in(Flavor.STRIPE)
        assert f"| [`{code.value}`](#{code.value}) | {ietf} | {stripe} |" in text


@pytest.mark.parametrize("page", pages("README.md", "CHANGELOG.md", "docs/**/*.md"), ids=lambda page: page.name)
def test_every_code_that_a_page_names_exists(page: Page) -> None:
    known = {code.value for code in Code} | {problem.fault_code for problem in PROBLEMS.values()}
    named = set(re.findall(r"\b(?:idempotency|IDEMPOTENCY)_[a-zA-Z_]+", page.text))
    # The type of the stripe flavor and the endpoint's name in an example begin alike.
    assert named - known - {problem.stripe_type for problem in PROBLEMS.values()} == set()


# Headers (R229)


def _record(body: bytes | None) -> Record:
    stored = StoredResponse(201, ((b"location", b"/orders/1"),), body)
    return Record(
        id=RecordId("acme", "k" * 16),
        incarnation=UUID(int=1),
        operation="create",
        effects=Effects.LOCAL,
        recovery=Recovery.RETRY,
        method="POST",
        path="/orders",
        fingerprint="jcs1:sha256:00",
        seed=b"",
        state=State.COMPLETED,
        outcome=Outcome.SUCCESS,
        entered=True,
        fence=1,
        version=2,
        owner=None,
        lease_until=None,
        deadline=0,
        call_timeout=0,
        ttl=0,
        attempts=1,
        recovery_point="started",
        memo=(),
        intent=None,
        response=stored,
        last_error=None,
        reconcile_after=None,
        reconcile_tries=0,
        created_at=0,
        last_run_at=0,
        finished_at=0,
        expires_at=0,
    )


def _answers() -> list[Answer]:
    policy, told = Policy(), {"echo": b'"k"', "status_url": "/idempotency-keys/k"}
    refusals = [refuse(Refuse(code), policy, **told) for code in Code]
    return [*refusals, *(replay(Replay(_record(body), 0), policy, **told) for body in (b"{}", None))]


def test_headers_page_lists_exactly_the_response_headers() -> None:
    sent = {name.decode().lower() for answer in _answers() for name, _ in answer.headers}
    assert sent == {name.lower() for name in GENERATOR.headers.RESPONSE}


@pytest.mark.parametrize("page", pages("README.md", "docs/**/*.md"), ids=lambda page: page.name)
def test_every_idempotency_header_that_a_page_names_exists(page: Page) -> None:
    policy = Policy()
    # The title of a problem speaks of several keys.
    known = {policy.key_header, f"{policy.key_header}s", policy.replayed_header, policy.expires_header, FIRST_SENT}
    assert set(re.findall(r"\bIdempoten[a-z]+-[A-Z][A-Za-z]*(?:-[A-Z][A-Za-z]*)*", page.text)) <= known


# Tables (R237)


@pytest.mark.parametrize("package", [GENERATOR.schema.POSTGRES, GENERATOR.schema.SQLITE])
def test_every_table_column_has_a_documented_reason(package: str) -> None:
    columns = GENERATOR.schema.columns(package)
    own = {"memo_version"} if package == GENERATOR.schema.POSTGRES else set()
    assert {column.name for column in columns} == {*COLUMNS, *own}
    assert {column.name for column in columns if column.table == "work"} == (WORK if own else set())
    assert [column.name for column in columns if not (column.why or GENERATOR.schema.WHY.get(column.name))] == []


def test_documented_reasons_match_columns_and_constraints() -> None:
    assert set(GENERATOR.schema.WHY) <= {*COLUMNS, "memo_version"}
    assert set(GENERATOR.schema.constraints()) == set(GENERATOR.schema.CHECKS)


@pytest.mark.parametrize("package", [GENERATOR.schema.POSTGRES, GENERATOR.schema.SQLITE])
def test_the_outbox_begins_with_the_columns_that_its_guide_names(package: str) -> None:
    # They are the defaults of Debezium's outbox event router, which reads a table by them.
    text = "\n".join(migration.text for migration in known(package))
    body = re.findall(r"CREATE TABLE oncekey[._]outbox \((.*?)\n\)", text, re.DOTALL)[-1]
    columns = re.findall(r"^    ([a-z_]+) +[a-zA-Z]+", body, re.MULTILINE)[:5]
    guide = Page(ROOT / "docs" / "howto" / "outbox.md").text.partition("## Debezium")[2]
    assert re.findall(r"^\| `([a-z]+)` \|", guide, re.MULTILINE) == columns
    assert columns == ["id", "aggregatetype", "aggregateid", "type", "payload"]


# The command line


def test_every_command_is_on_the_page() -> None:
    assert [line for line in _page("cli.md").text.splitlines() if line.startswith("## ")] == [
        f"## {command}" for command in GENERATOR.cli.commands()
    ]


# The fingerprint (R33)


def test_the_published_fingerprint_is_the_one_that_is_computed() -> None:
    page = Page(ROOT / "docs" / "explanation" / "fingerprint.md")
    (body,) = page.blocks("json")
    published = [block.text.strip() for block in page.blocks("text") if block.text.startswith("jcs1:")]
    request = Request("POST", "/payments", b"draft=false", b"application/json", body.text.strip().encode())
    assert published == [fingerprint(request)]
