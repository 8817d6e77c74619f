"""`oncekey check`: what it is told, what it says, and its exit code."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from xml.etree.ElementTree import fromstring

import pytest

from conformance.shop import Bug, Shop
from harness.ports import free_port
from oncekey import cli
from oncekey_check import chosen, command

BODY = '{"item": "teapot", "quantity": 2}'
# What the command says is tested here, and the clauses elsewhere.
FEW = ("--only", "keys", "--only", "tenants", "--only", "failures")
FAST = chosen(FEW[1::2])


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["oncekey", "check", *words])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        told = capsys.readouterr()
        return int(caught.value.code or 0), told.out, " ".join(told.err.replace("│", " ").split())

    return run


def _described(shop: Shop) -> list[str]:
    return [
        *(f"{shop.url}/orders", "--body", BODY, "--header", "Authorization: Bearer alpha"),
        *("--count-url", f"{shop.url}/orders", "--count-pointer", "/total", "--fail-header", "X-Fail: 1"),
        *("--other-tenant-header", "Authorization: Bearer beta", "--patience", "0.5", *FEW),
    ]


def test_an_api_that_keeps_its_promises_is_exit_code_0(run) -> None:
    with Shop() as shop:
        code, out, err = run(*_described(shop))
    assert code == 0, out
    assert "passed    tenants.independent        The same key of two tenants is two operations" in out
    # The clauses that tell the profiles apart were not tried, so the report does not name the matching ones.
    assert re.fullmatch(r"[0-9]+ passed, 0 failed, .* by the profile ietf", out.splitlines()[-1])
    assert re.search(rf"{len(FAST)} clauses, about [0-9]+ requests to {shop.url}/orders", err)
    assert f"1/{len(FAST)} keys.missing" in err  # a pipeline's log shows how far it is


def test_a_broken_promise_is_exit_code_1_and_comes_first(run) -> None:
    with Shop(Bug.GLOBAL_SCOPE) as shop:
        code, out, _ = run(*_described(shop))
    assert code == 1
    assert out.splitlines()[2] == "Tenant B received tenant A's order, and its own never happened"
    assert '-H "Authorization: ${OTHER_AUTHORIZATION}"' in out


def test_reports_are_written(run, tmp_path: Path) -> None:
    body = tmp_path / "order.json"
    body.write_text(BODY)
    with Shop(Bug.SHORT_KEYS) as shop:
        words = [f"@{body}" if word == BODY else word for word in _described(shop)]
        files = ("--junit", str(tmp_path / "junit.xml"), "--html", str(tmp_path / "report.html"))
        code, out, _ = run(*words, "--json", "--profile", "strict-money", *files)
    assert code == 1
    assert json.loads(out)["most_dangerous"] == ["keys.too-short"]
    assert fromstring((tmp_path / "junit.xml").read_text()).find(".//failure") is not None
    assert "keys.too-short" in (tmp_path / "report.html").read_text()


def test_a_terminal_gets_a_table_and_progress(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with Shop(Bug.SHORT_KEYS) as shop:
        monkeypatch.setattr(command, "_is_terminal", lambda _: True)
        code, out, err = run(*_described(shop), "--profile", "strict-money")
    assert code == 1
    assert "A key of 4 characters was accepted: two clients may choose the same one" in out
    assert "tenants" in out
    assert f"1/{len(FAST)} keys.missing" in err


def test_check_of_an_unreachable_server_prints_one_error_line(run) -> None:
    url = f"http://127.0.0.1:{free_port()}/orders"
    code, _, err = run(url, "--body", BODY)
    assert code == 2
    assert f"oncekey: {url} does not respond: " in err


def test_check_reports_the_response_of_a_failed_first_request(run) -> None:
    with Shop() as shop:
        code, _, err = run(f"{shop.url}/orders", "--body", BODY)
    assert code == 2
    assert "with a fresh key must succeed before anything can be checked, but received 401 Unauthorized" in err
    assert '{"code": "unauthorized"}' in err


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--count-pointer", "/nothing"], "there is no 'nothing' on the way to '/nothing'"),
        (["--count-pointer", "total"], "must begin with a slash"),
        (["--count-pointer", ""], "neither a whole number nor a list"),
        (["--count-url", "{url}/openapi.json", "--count-pointer", "/paths/~1orders/post/parameters"], "by 0, not by 1"),
        (["--other-body", "{"], "--other-body was not accepted under a fresh key: 400"),
    ],
)
def test_check_rejects_options_that_allow_no_count_or_comparison(run, more: list[str], sentence: str) -> None:
    with Shop() as shop:
        code, _, err = run(*_described(shop), *(word.replace("{url}", shop.url) for word in more))
    assert code == 2
    assert sentence in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["shop.example"], "'shop.example' is not a supported URL"),
        (["http://shop.example", "--body", "{"], "the body is not JSON"),
        (["http://shop.example", "--body", "@no-such-file"], "no-such-file cannot be read"),
        (["http://shop.example", "--header", "Authorization"], "is not a header: write 'Name: value'"),
        (["http://shop.example", "--header", "A: b\r\nC: d"], "is not a header: write 'Name: value'"),
        (["http://shop.example", "--slow-header", "nothing"], "is not a header: write 'Name: value'"),
        (["http://shop.example", "--header", "Idempotency-Key: k"], "the check creates its own keys"),
        (["http://shop.example", "--profile", "paypal"], "'paypal' is not one of"),
    ],
)
def test_check_usage_error_exits_with_code_2_and_a_hint(run, words: list[str], sentence: str) -> None:
    code, _, err = run(*words)
    assert code == 2
    assert sentence in err


def test_check_does_not_parse_a_text_body_as_json(run) -> None:
    with Shop() as shop:
        code, out, _ = run(*_described(shop), "--body", "null", "--header", "Content-Type: text/plain")
    assert code == 0, out
    assert "A tenant cannot find out which keys another one uses (it needs --other-body)" in out
    assert "does not use up its key (no body is known that this API refuses)" in out
