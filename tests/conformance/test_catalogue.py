"""The table of clauses, and the small parts that clauses are made of."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from uuid import UUID, uuid4

import pytest

from conformance.shop import Shop
from harness.pages import ROOT
from oncekey_check import CLAUSES, Address, Need, Target, bodies, chosen
from oncekey_check.bodies import amount_at, is_same, volatile
from oncekey_check.carrier import KeyFormat, filled
from oncekey_check.catalogue import REFERENCES, NoSuchClauseError
from oncekey_check.clauses import Failed, Harm, InconclusiveError
from oncekey_check.headlines import HEADLINES, Evidence, headline_of
from oncekey_check.probe import Probe
from oncekey_check.raw_http import Answer, RawRequest
from oncekey_check.target import is_secret, replaced

WRONG = Failed("this", "that")
ORDER = b'{"customer": "c\\u00fc", "items": [{"sku": "t", "n": 2}, true], "note": null}'


def test_every_clause_is_unique_and_fully_described() -> None:
    assert len({clause.id for clause in CLAUSES}) == len(CLAUSES)
    for clause in CLAUSES:
        assert re.fullmatch(r"[a-z-]+\.[a-z0-9-]+", clause.id)
        assert clause.why.endswith(".")
        assert clause.fix.endswith(".")
        assert not clause.title.endswith(".")
        assert clause.must | clause.should
        assert not clause.must & clause.should
        assert clause.requests > 0


def test_every_clause_has_a_headline_and_public_texts() -> None:
    names = {clause.id for clause in CLAUSES}
    assert names <= set(REFERENCES)
    assert names <= set(HEADLINES)
    for texts in REFERENCES.values():
        assert texts
        assert all(text.url.startswith("https://") and text.name for text in texts)
    for clause in CLAUSES:
        for evidence in (Evidence(), Evidence(3), Evidence(None, 2)):
            _, headline = headline_of(clause, WRONG, evidence, "payment")
            assert "{" not in headline
            assert not headline.endswith(".")


def test_conformance_page_links_public_texts_without_internal_numbers() -> None:
    page = (ROOT / "docs/reference/conformance.md").read_text()
    assert not re.search(r"\bR[0-9]{1,3}\b", page)
    for clause in CLAUSES:
        row = next(line for line in page.splitlines() if line.startswith(f"| `{clause.id}` |"))
        assert all(text.url in row for text in REFERENCES[clause.id])


def test_clause_without_a_headline_uses_its_title() -> None:
    clause = replace(CLAUSES[0], id="keys.new")
    assert headline_of(clause, WRONG, Evidence(), "order") == (Harm.WRONG, f"This guarantee is broken: {clause.title}")


def test_headline_claims_no_second_effect_if_one_was_counted() -> None:
    for clause in CLAUSES:
        harm, headline = headline_of(clause, WRONG, Evidence(1, 2), "order")
        assert harm is not Harm.TWICE, clause.id
        assert "from one key" not in headline


def test_verdict_headline_overrides_the_clause_headline() -> None:
    verdict = replace(WRONG, headline=(Harm.LOST, "The second {noun} never happened"))
    assert headline_of(CLAUSES[0], verdict, Evidence(3), "order") == (Harm.LOST, "The second order never happened")


@pytest.mark.parametrize(
    ("path", "noun"),
    [("/v1/orders", "order"), ("/entries", "entry"), ("/press", "press"), ("/", "operation"), ("/a/1234", "operation")],
)
def test_target_derives_the_effect_noun_from_its_url(path: str, noun: str) -> None:
    assert Target(address=Address.parse(f"http://shop.example{path}"), body=b"").noun == noun


def test_clauses_are_chosen_by_id_area_and_pattern() -> None:
    assert [clause.id for clause in chosen(["races.2"])] == ["races.2"]
    assert {clause.id.partition(".")[0] for clause in chosen(["races", "tenants"])} == {"races", "tenants"}
    assert all(clause.id.endswith(".one-effect") for clause in chosen(["*.one-effect"]))
    assert len(chosen(skip=["keys"])) == len(CLAUSES) - len(chosen(["keys"]))
    with pytest.raises(NoSuchClauseError, match="no clause matches 'race'"):
        chosen(["race"])


def test_every_need_is_used_by_a_clause() -> None:
    assert {need for clause in CLAUSES for need in clause.needs} == set(Need)


def test_target_lacks_only_the_needs_without_an_option() -> None:
    address = Address.parse("http://shop.example/")
    nothing = Target(address=address, body=b"x", is_json=False)
    line = ("Authorization", "x")
    everything = Target(
        address=address,
        body=b"{}",
        headers=(line,),
        other_body=b"[]",
        other_tenant=(line,),
        same_caller=(line,),
        slow=line,
        fail=line,
        count_address=address,
        other_address=address,
        also_address=address,
        declined_body=b"1",
        large=line,
        lease=1.0,
        crash_command=("true",),
        store_down_command=("true",),
        unothers=True,
    )
    assert [need for need in Need if everything.lacks(need)] == []
    assert [need for need in Need if not nothing.lacks(need)] == []


def test_generated_other_bodies_change_one_value() -> None:
    other, *more = (json.loads(body) for body in bodies.others(ORDER))
    assert other == {"customer": "cü", "items": [{"sku": "t", "n": 3}, True], "note": None}
    assert [body["items"][1] for body in more] == [True, True, False]


@pytest.mark.parametrize(
    ("body", "other"),
    [(b'{"a": "b"}', {"a": "bx"}), (b"[true, 1.5]", [True, 2.5]), (b'"a"', "ax"), (b"{}", None), (b"[null]", None)],
)
def test_other_body_is_generated_from_the_existing_members(body: bytes, other: object) -> None:
    made = next(bodies.others(body), None)
    assert (None if made is None else json.loads(made)) == other


def test_placeholder_values_depend_on_the_key() -> None:
    body = b'{"id": "{{uuid}}", "of": "{{key}}", "n": "{{n}}", "text": "no. {{n}}"}'
    key = str(uuid4())
    one, same = filled(body, key), filled(body, key)
    document = json.loads(one)
    assert one == same != filled(body, str(uuid4()))
    assert document["of"] == key
    assert document["text"] == f"no. {document['n']}"
    assert UUID(document["id"]).version == 4
    assert document["id"].endswith(key[-12:])  # so that a script that replaces the key replaces it, too
    assert json.loads(filled(body, key, "other tenant "))["id"] != document["id"]
    assert filled(b'{"a": 1}', key) == b'{"a": 1}'


@pytest.mark.parametrize("value", ['"abc"', "abc", '"abc";v=1'])
def test_every_spelling_of_a_key_fills_a_body_in_the_same_way(value: str) -> None:
    request = RawRequest("POST", Address.parse("http://shop.example/"), (("Idempotency-Key", value),), b'"{{key}}"')
    assert request.content == b'"abc"'


def test_a_body_without_a_key_is_filled_once_for_each_request() -> None:
    requests = [RawRequest("POST", Address.parse("http://shop.example/"), body=b'"{{uuid}}"') for _ in range(2)]
    assert requests[0].content == requests[0].content != requests[1].content


@pytest.mark.parametrize(
    ("text", "form"),
    [("{{uuid}}", r"[0-9a-f-]{36}"), ("ord_{{hex:16}}", r"ord_[0-9a-f]{16}"), ("{{digits:8}}-x", r"[0-9]{8}-x")],
)
def test_keys_have_the_form_that_the_api_accepts(text: str, form: str) -> None:
    keys = KeyFormat.parse(text)
    one = keys.fresh()
    assert re.fullmatch(form, one)
    assert one != keys.fresh()
    for near in keys.near(one):
        assert re.fullmatch(form, near)
        assert sum(a != b for a, b in zip(one, near, strict=True)) == 1


@pytest.mark.parametrize("spell", [bodies.spaced, bodies.escaped])
def test_another_spelling_is_the_same_document(spell) -> None:
    # R34
    for body in (ORDER, b'{"\\"": "\\ud83d\\ude00", "b": [[], {}, -1.5e3]}'):
        assert json.loads(spell(body)) == json.loads(body)
        assert spell(body) != body


def test_a_body_lacks_each_of_its_members_in_turn() -> None:
    assert [json.loads(body) for body in bodies.lacking(b'{"a": 1, "b": {"c": 2}}')] == [{"b": {"c": 2}}, {"a": 1}]
    assert list(bodies.lacking(b"[1]")) == []


def test_every_place_of_a_body_is_found_and_can_be_filled() -> None:
    document = {"a": [1, {"b": None}], "c": "d"}
    assert dict(bodies.leaves(document)) == {("a", 0): 1, ("a", 1, "b"): None, ("c",): "d"}
    assert [path for path, _ in bodies.containers(document)] == [(), ("a",), ("a", 1)]
    assert bodies.put(document, ("a", 1, "b"), 3) == {"a": [1, {"b": 3}], "c": "d"}
    assert bodies.put(document, ("e",), 3) == {**document, "e": 3}
    assert document == {"a": [1, {"b": None}], "c": "d"}


def test_body_writer_inserts_raw_json_literals() -> None:
    assert bodies.spelt({"a": 1}, ("a",), '"\\ud800"') == b'{"a": "\\ud800"}'


def _answer(**content: object) -> Answer:
    return Answer(201, "Created", (), json.dumps(content).encode())


def test_comparison_ignores_fields_that_change_in_every_response() -> None:
    fresh, first, again = (_answer(id=order, request=number) for number, order in enumerate((1, 2, 2)))
    new = volatile(fresh, first, again)
    assert new == {("request",)}
    assert is_same(first, again, new)
    assert not is_same(fresh, first, new)


def test_second_execution_is_not_mistaken_for_a_replay() -> None:
    fresh, first, again = (_answer(id=number, status="placed") for number in range(3))
    assert volatile(fresh, first, again) == frozenset()
    assert not is_same(first, again)


def test_location_header_distinguishes_responses_with_equal_bodies() -> None:
    one, two, lost = (Answer(201, "", ((("Location", place),) if place else ()), b"{}") for place in ("/1", "/2", ""))
    assert not is_same(one, two)
    assert is_same(one, lost)


def test_a_broken_body_is_no_json() -> None:
    with pytest.raises(ValueError):
        bodies.parsed(bodies.broken(ORDER + b"\n"))


@pytest.mark.parametrize(
    ("document", "pointer", "amount"),
    [
        ([1, 2, 3], "", 3),
        ({"total": 7}, "/total", 7),
        ({"a/b": {"~": [0, 5.0]}}, "/a~1b/~0/1", 5),
        ({"": 4}, "/", 4),
    ],
)
def test_a_pointer_leads_to_a_number_or_a_list(document: object, pointer: str, amount: int) -> None:
    assert amount_at(document, pointer) == amount


@pytest.mark.parametrize(
    ("document", "pointer"),
    [
        ({}, ""),
        ({"a": True}, "/a"),
        ({"a": 1.5}, "/a"),
        ({"a": "1"}, "/a"),
        ([1], "/1"),
        ([1], "/-"),
        (1, "a"),
        (1, "/a"),
    ],
)
def test_count_pointer_to_another_type_raises(document: object, pointer: str) -> None:
    with pytest.raises(ValueError):
        amount_at(document, pointer)


def test_headers_are_replaced_by_name_in_any_case() -> None:
    assert replaced((("A", "1"), ("B", "2")), (("a", "3"),)) == (("B", "2"), ("a", "3"))


@pytest.mark.parametrize("name", ["Authorization", "cookie", "Set-Cookie", "X-Api-Key", "X-Auth-Token"])
def test_credential_headers_are_recognised_by_name(name: str) -> None:
    assert is_secret(name)
    assert not is_secret("Content-Type")
    assert not is_secret("Idempotency-Key")


def test_a_run_ends_when_its_requests_are_used_up() -> None:
    with Shop() as shop:
        target = Target(address=Address.parse(f"{shop.url}/orders"), body=b"{}", timeout=5)
        probe = Probe(target, quoted=True, usual=201, latency=0.0, most=2)
        probe.send(probe.fresh())
        probe.send(probe.fresh())
        with pytest.raises(InconclusiveError, match="2 requests are used up"):
            probe.send(probe.fresh())
