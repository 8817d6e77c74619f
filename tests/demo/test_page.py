"""The pages come whole from the package, and ask only for what the demo serves."""

from __future__ import annotations

import re
import uuid
from html.parser import HTMLParser

import pytest

from harness.demo import ALPHA, Demo, get
from oncekey.core.problems import PROBLEMS
from oncekey_demo.provider_ledger import NAMES, Fault

PARTS = ("/demo.css", "/demo.js", "/verdict.js", "/icon.svg")


class _Elements(HTMLParser):
    """Every element, with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def values(self, attribute: str) -> list[str]:
        return [attributes[attribute] or "" for _, attributes in self.found if attribute in attributes]


def _text(demo: Demo, path: str) -> str:
    answer = get(demo.url + path)
    assert answer.status_code == 200
    return answer.text


@pytest.mark.parametrize("path", ["/", *PARTS])
def test_demo_pages_load_nothing_from_other_hosts(demo: Demo, path: str) -> None:
    text = _text(demo, path).replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "//" not in re.sub(r"^\s*// .*$", "", text, flags=re.MULTILINE)
    assert "@import" not in text
    assert "'self'" in get(demo.url + path).headers["content-security-policy"]


def test_everything_the_page_loads_or_links_to_is_there(demo: Demo) -> None:
    elements = _Elements(_text(demo, "/"))
    wanted = {address for address in [*elements.values("src"), *elements.values("href")] if address.startswith("/")}
    assert wanted >= {"/demo.css", "/icon.svg"}
    for address in wanted:
        assert get(demo.url + address, follow_redirects=True).status_code == 200


def test_demo_script_requests_only_served_paths(demo: Demo) -> None:
    script, elements = _text(demo, "/demo.js"), _Elements(_text(demo, "/"))
    paths = get(f"{demo.url}/openapi.json").json()["paths"]
    asked = set(re.findall(r"(?:fetch|read)\([\"`](/[a-z-]+(?:/[a-z]+)?)", script))
    assert asked == {"/demo/ledger", "/demo/charges", "/idempotency-keys"}
    assert {"/demo/ledger", "/demo/charges/{key}", "/idempotency-keys/{key}"} <= set(paths)
    loaded = set(re.findall(r'from "\.(/[a-z]+\.js)"', script))
    assert loaded
    assert loaded <= set(PARTS)
    routes = set(re.findall(r'^  "(/[a-z]+)": \{ name', script, flags=re.MULTILINE))
    offered = {attributes["value"] for tag, attributes in elements.found if tag == "option"} - {
        "demo-alpha",
        "demo-beta",
    }
    assert routes == offered == {"/orders", "/payments", "/transfers", "/notifications"}
    assert all("post" in paths[route] for route in routes)
    listed = set(re.findall(r'^  "(/[a-z]+)": \{ name: "', script, flags=re.MULTILINE))
    assert all("get" in paths[route] for route in listed)


def test_there_is_a_button_for_every_fault(demo: Demo) -> None:
    faults = [Fault.parse(name) for name in _Elements(_text(demo, "/")).values("data-fault")]
    assert [fault.kind.value for fault in faults] == [name.partition(":")[0] for name in NAMES]


def test_the_script_finds_its_elements(demo: Demo) -> None:
    script, elements = _text(demo, "/demo.js"), _Elements(_text(demo, "/"))
    ids = set(elements.values("id"))
    assert set(re.findall(r"\bat\(\"([a-z-]+)\"\)", script)) <= ids
    performed = set(re.findall(r"^  (\w+): (?:async )?\(request\)", script, flags=re.MULTILINE))
    assert set(elements.values("data-action")) == performed != set()


def test_every_field_has_a_label(demo: Demo) -> None:
    elements = _Elements(_text(demo, "/"))
    fields = {attributes["id"] for tag, attributes in elements.found if tag in {"input", "select", "textarea"}}
    labelled = {attributes["for"] for tag, attributes in elements.found if tag == "label"}
    assert fields == labelled != set()


def test_no_handler_is_written_into_the_page(demo: Demo) -> None:
    # The policy of the page forbids it, so it would silently do nothing.
    for tag, attributes in _Elements(_text(demo, "/")).found:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag


def test_problem_links_lead_to_sections_of_the_consumer_page(demo: Demo) -> None:
    # R11
    ids = _Elements(_text(demo, "/idempotency")).values("id")
    assert {problem.slug for problem in PROBLEMS.values()} <= set(ids)
    refused = demo.order(None, token=ALPHA)
    target = re.match(r'</idempotency#([a-z-]+)>; rel="describedby"', refused.headers["link"])
    assert target is not None
    assert target[1] in ids


def test_health_needs_no_token(demo: Demo) -> None:
    answer = get(f"{demo.url}/healthz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_key_header_on_a_page_request_is_ignored(demo: Demo) -> None:
    assert get(demo.url, headers={"Idempotency-Key": str(uuid.uuid4())}).status_code == 200
