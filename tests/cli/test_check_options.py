"""`oncekey check`: options that choose, that come from a file, that reach further, and the baseline."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import fromstring

import pytest

from conformance.control import Control
from conformance.fronts import Front
from conformance.shop import Bug, Shop, Way
from harness.certificates import certificate
from harness.patience import PATIENCE, wait_until
from harness.served import Served
from oncekey import cli
from oncekey_check import CLAUSES
from oncekey_check.options import parser

BODY = '{"item": "teapot", "quantity": 2}'

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["oncekey", "check", *words])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        told = capsys.readouterr()
        return int(caught.value.code or 0), told.out, " ".join(told.err.replace("│", " ").split())

    return run


def _described(url: str, shop: Shop) -> list[str]:
    return [
        *(f"{url}/orders", "--body", BODY, "--header", "Authorization: Bearer alpha"),
        *("--count-url", f"{shop.url}/orders", "--count-pointer", "/total", "--patience", "0.5"),
    ]


def _results(out: str) -> dict[str, str]:
    return {clause["id"]: clause["result"] for clause in json.loads(out)["clauses"]}


def test_the_list_names_every_clause_and_sends_nothing(run: Run) -> None:
    code, out, _ = run("--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == [clause.id for clause in CLAUSES]
    assert "(needs --crash-command, --slow-header)" in out


def test_version_option_prints_the_oncekey_check_version(run: Run) -> None:
    assert run("--version") == (0, f"oncekey-check {version('oncekey-check')}\n", "")


def test_key_format_and_uuid_placeholder_fit_apis_with_own_rules(run: Run) -> None:
    with Shop(Way.SHORT_ONLY, Way.UNIQUE) as shop:
        words = _described(shop.url, shop)
        words[2] = '{"item": "teapot", "quantity": 2, "reference": "ref-{{uuid}}"}'
        code, out, _ = run(*words, "--key-format", "ord_{{hex:16}}", "--only", "keys", "--only", "replays", "--json")
    assert code == 0, out
    assert "--key-format 'ord_{{hex:16}}'" in json.loads(out)["command"]
    assert _results(out)["keys.whole"] == _results(out)["replays.one-effect"] == "passed"


@pytest.mark.parametrize("place", ["/orders?key={{key}}", "/orders/{{key}}"])
def test_key_placeholder_in_the_url_sends_the_key_there(run: Run, place: str) -> None:
    with Shop(Way.QUERY_KEY if "?" in place else Way.PATH_KEY) as shop:
        words = [f"{shop.url}{place}", *_described(shop.url, shop)[1:]]
        code, out, _ = run(*words, "--only", "replays", "--only", "keys", "--only", "mismatches", "--json")
    assert code == 0, out
    assert _results(out)["replays.one-effect"] == _results(out)["mismatches.nothing-happens"] == "passed"
    assert _results(out)["keys.quoted"] == "skipped"


def test_renewed_token_option_is_used_and_kept_out_of_reports(run: Run) -> None:
    with Shop(Bug.TOKEN_SCOPED) as shop:
        words = _described(shop.url, shop)
        token = ("--same-caller-header", "Authorization: Bearer renewed")
        code, out, _ = run(*words, *token, "--only", "tenants.same-caller", "--json")
    assert code == 1
    assert json.loads(out)["headlines"] == ["2 orders from one key: the retry was sent with a renewed token"]
    assert "RENEWED_AUTHORIZATION" in out
    assert "Bearer renewed" not in out


def test_a_server_that_dies_is_exit_code_2_with_every_report(run: Run, tmp_path: Path) -> None:
    files = {option: tmp_path / option for option in ("--junit", "--sarif", "--html")}
    with Shop() as shop:
        shop.dies_at = 30
        options = [word for option, path in files.items() for word in (option, str(path))]
        code, out, err = run(*_described(shop.url, shop), "--only", "keys", *options)
    assert code == 2
    assert "the run stopped early: the API stopped responding" in err
    assert "Stopped early: the API stopped responding" in out
    assert json.loads(files["--sarif"].read_text())["runs"][0]["invocations"][0]["executionSuccessful"] is False
    assert "not tried" in files["--junit"].read_text()
    assert "The run stopped early" in files["--html"].read_text()


def test_an_interrupted_run_is_exit_code_130_with_what_was_seen(tmp_path: Path) -> None:
    with Shop() as shop:
        words = [*_described(shop.url, shop), "--slow-header", "X-Slow: 30", "--html", str(tmp_path / "page.html")]
        process = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("oncekey")),
                "check",
                *words,
                "--only",
                "keys.missing",
                "--only",
                "races.2",
            ],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        wait_until(lambda: shop.slowed)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, err
    assert "1/2 keys.missing" in err  # progress, where there is no terminal
    assert "Stopped early: interrupted in races.2. 1 passed" in out
    assert "interrupted in races.2" in (tmp_path / "page.html").read_text()


def test_only_and_skip_options_select_clauses(run: Run) -> None:
    _, out, _ = run("--list", "--only", "races", "--only", "*.one-effect", "--skip", "races.50")
    ids = [line.split()[0] for line in out.splitlines()]
    assert "races.2" in ids
    assert "replays.one-effect" in ids
    assert "races.50" not in ids
    assert not any(name.startswith("keys") for name in ids)
    with Shop() as shop:
        code, out, _ = run(*_described(shop.url, shop), "--only", "replays.status", "--json")
    assert (code, _results(out)) == (0, {"replays.status": "passed"})


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        (("--only", "tenants, failures"), ("tenants.independent", "failures.corrected")),
        (("--only", "tenants,", "--only", "failures"), ("tenants.independent", "failures.corrected")),
        (("--only", "leases,crashes", "--skip", "*.answered,leases"), ("crashes.remembered",)),
    ],
)
def test_names_of_clauses_may_be_separated_by_commas(run: Run, words: tuple[str, ...], ids: tuple[str, ...]) -> None:
    _, out, _ = run("--list", *words)
    listed = [line.split()[0] for line in out.splitlines()]
    assert set(ids) <= set(listed)
    assert {name.partition(".")[0] for name in listed} == {name.partition(".")[0] for name in ids}
    assert "crashes.answered" not in listed


def test_empty_list_of_clauses_does_not_select_all_of_them(run: Run) -> None:
    code, _, err = run("--list", "--only", "")
    assert (code, "no clause matches ''" in err) == (2, True)


def test_skip_with_an_unknown_clause_exits_with_code_2(run: Run) -> None:
    code, _, err = run("http://shop.example/", "--skip", "replay")
    assert code == 2
    assert "no clause matches 'replay': --list shows all clauses" in err


@pytest.mark.parametrize(
    ("option", "front"),
    [
        (["--key-header", "X-Request-Id"], {"header": "X-Request-Id"}),
        (["--key-field", "client_token"], {"member": "client_token"}),
        (["--marker-header", "X-Cache: hit"], {"marker": "X-Cache"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_set_other_header_and_field_names(run: Run, option: list[str], front: dict[str, str]) -> None:
    only = ("--only", "replays.one-effect", "--only", "replays.marked", "--profile", "strict-money", "--json")
    with Shop() as shop, Front(shop.url, **front) as other:
        code, out, _ = run(*_described(other.url, shop), *option, *only)
        assert (code, set(_results(out).values())) == (0, {"passed"})
    with Shop(Bug.RUNS_AGAIN, Bug.NO_MARKER) as shop, Front(shop.url, **front) as other:
        code, out, _ = run(*_described(other.url, shop), *option, *only)
    assert (code, set(_results(out).values())) == (1, {"failed"})
    assert shlex.join(option).replace("'", "") in json.loads(out)["command"].replace("'", "")


def test_conflict_profile_accepts_409_for_a_different_body(run: Run) -> None:
    words = ("--only", "mismatches.status", "--profile", "conflict")
    with Shop(Bug.MISMATCH_409) as shop:
        assert run(*_described(shop.url, shop), *words)[0] == 0
    with Shop() as shop:
        assert run(*_described(shop.url, shop), *words)[0] == 1


def test_options_enable_instance_lease_and_large_response_clauses(run: Run) -> None:
    only = ("--only", "instances", "--only", "leases", "--only", "finals", "--json")
    with Shop(Bug.MISSING_RUNS) as shop, Shop() as second:
        second.orders = shop.orders
        large = {"padding": lambda headers: int(headers.get("X-Large", "0"))}
        with Front(shop.url, **large, unprotected=lambda headers: "X-Large" in headers) as front:
            words = _described(front.url, shop)
            help_ = ("--slow-header", "X-Slow: 0.2", "--lease", "0.2", "--large-header", "X-Large: 70000")
            declined = ("--declined-body", "{")
            code, out, _ = run(*words, *help_, *declined, "--also-url", f"{second.url}/orders", *only)
    assert code == 1
    results = _results(out)
    assert results.pop("finals.declined") in {"skipped", "undecided"}  # the shop's refusals all look the same
    assert results == {
        "finals.large": "failed",
        "instances.replayed": "failed",
        "instances.race": "failed",
        "leases.one-effect": "passed",
    }


def test_crash_and_store_commands_are_run_and_kept_out_of_reports(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    with Shop() as shop, Control(crash=shop.records.clear, down=lambda: None, up=shop.records.clear) as control:
        commands = {name: shlex.join(control.command(name)) for name in ("crash", "down", "up")}
        words = ("--crash-command", commands["crash"], "--store-down-command", commands["down"])
        only = ("--store-up-command", commands["up"], "--only", "crashes.remembered", "--only", "outages.remembered")
        code, out, _ = run(*_described(shop.url, shop), *words, *only, "--html", str(page), "--command-limit", "30")
    assert code == 1
    assert "2 orders from one key: the server lost the first request in the crash" in out
    assert 'bash -c "$CRASH_COMMAND"' in out
    assert '--store-up-command "${STORE_UP_COMMAND}"' in out
    assert "urlopen" not in out + page.read_text()
    assert control.asked == ["crash", "down", "up"]


def test_scripts_option_writes_a_reproduction_script_per_finding(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "repeat" / "here"
    with Shop(Bug.GLOBAL_SCOPE) as shop:
        other = ("--other-tenant-header", "Authorization: Bearer beta", "--only", "tenants.independent")
        code, _, _ = run(*_described(shop.url, shop), *other, "--scripts", str(folder))
        assert code == 1
        (file,) = folder.iterdir()
        done = subprocess.run(
            ["bash", str(file)],
            env={**os.environ, "AUTHORIZATION": "Bearer alpha", "OTHER_AUTHORIZATION": "Bearer beta"},
            capture_output=True,
            text=True,
            check=True,
        )
    assert file.name == "tenants.independent.sh"
    first, second = re.findall(r"Location: (\S+)", done.stdout)
    assert first == second  # tenant B got tenant A's order
    assert "Bearer" not in file.read_text()


def test_command_line_options_override_the_config_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_TOKEN", "alpha")
    file = tmp_path / "check.toml"
    with Shop(Bug.SHORT_KEYS) as shop:
        file.write_text(
            f"""url = "{shop.url}/orders"
body = '{BODY}'
header = "Authorization: Bearer ${{SHOP_TOKEN}}"
profile = "strict-money"
only = ["keys.too-short", "keys.missing"]
patience = 0.5
json = true
"""
        )
        code, out, _ = run("--config", str(file))
        assert (code, _results(out)) == (1, {"keys.missing": "passed", "keys.too-short": "failed"})
        code, out, _ = run("--config", str(file), "--profile", "ietf", "--only", "keys.missing")
    assert (code, _results(out)) == (0, {"keys.missing": "passed"})
    assert "alpha" not in out


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("count_url = 1", "no option 'count_url'; the options are also-url,"),
        ("body = [1]", "body takes one value"),
        ("header = ['A: ${NO_SUCH_VARIABLE}']", "the environment variable NO_SUCH_VARIABLE is not set"),
        ("body", "is not TOML"),
        ("patience = 'long'", "--patience"),
    ],
)
def test_invalid_config_file_exits_with_code_2(run: Run, tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "check.toml"
    file.write_text(text)
    code, _, err = run("http://shop.example/", "--config", str(file))
    assert code == 2
    assert sentence in err
    assert run("--config", str(tmp_path / "none.toml"))[0] == 2


def test_a_baseline_fails_on_new_findings_only(run: Run, tmp_path: Path) -> None:
    known, junit = tmp_path / "known.json", tmp_path / "junit.xml"
    only = ("--only", "keys.too-short", "--only", "replays.marked", "--profile", "strict-money")
    with Shop(Bug.SHORT_KEYS) as shop:
        assert run(*_described(shop.url, shop), *only, "--write-baseline", str(known))[0] == 1
        document = json.loads(known.read_text())
        assert document["known"] == {
            "keys.too-short": {
                "harm": "wrong",
                "headline": "A key of 4 characters was accepted: two clients may choose the same one",
            }
        }
        code, out, _ = run(*_described(shop.url, shop), *only, "--baseline", str(known), "--junit", str(junit))
        assert code == 0
        assert re.search(r"known +keys.too-short +A key that is easy to guess is refused", out)
        assert "1 passed, 0 failed, 0 advice, 1 known by the profile" in out
        root = fromstring(junit.read_text())
        assert root.find(".//failure") is None
        assert "in the baseline" in root.find(".//skipped").attrib["message"]
    with Shop(Bug.SHORT_KEYS, Bug.NO_MARKER) as shop:
        code, out, _ = run(*_described(shop.url, shop), *only, "--baseline", str(known), "--json")
    assert (code, _results(out)) == (1, {"keys.too-short": "known", "replays.marked": "failed"})
    with Shop() as shop:
        code, _, err = run(*_described(shop.url, shop), *only, "--baseline", str(known))
    assert code == 0
    assert "keys.too-short is in the baseline but passes now: update it with --write-baseline" in err


def test_baseline_finding_with_greater_harm_counts_as_new(run: Run, tmp_path: Path) -> None:
    known = tmp_path / "known.json"
    known.write_text('{"profile": "ietf", "known": {"replays.one-effect": {"harm": "wrong"}}}')
    with Shop(Bug.RUNS_AGAIN) as shop:
        words = (*_described(shop.url, shop), "--only", "replays.one-effect", "--baseline", str(known))
        assert run(*words)[0] == 1
        known.write_text(known.read_text().replace("wrong", "twice"))
        assert run(*words)[0] == 0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "it is not a baseline: create one with --write-baseline"),
        ('{"profile": "ietf", "known": {"a": {"harm": "bad"}}}', "it is not a baseline"),
        ('{"profile": "stripe", "known": {}}', "it is a baseline of the profile stripe, but this run uses ietf"),
    ],
)
def test_invalid_baseline_file_exits_with_code_2(run: Run, tmp_path: Path, text: str, sentence: str) -> None:
    known = tmp_path / "known.json"
    known.write_text(text)
    with Shop() as shop:
        code, _, err = run(*_described(shop.url, shop), "--only", "keys.missing", "--baseline", str(known))
    assert code == 2
    assert sentence in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "the operation's URL is missing"),
        (["http://shop.example", "--store-down-command", "true"], "pass both commands"),
        (["http://shop.example", "--crash-command", "'"], "it cannot be split into words"),
        (["http://shop.example", "--crash-command", " "], "it is empty"),
        (["http://shop.example", "--lease", "20"], "a --timeout of more than two leases"),
        (["http://shop.example", "--cacert", "no-such-file"], "no-such-file cannot be read"),
        (["http://shop.example", "--key-header", "a b"], "'a b' is not a header name"),
        (["http://shop.example", "--marker-header", ": x"], "write 'Name' or 'Name: value'"),
        (["http://shop.example", "--key-field", "t", "--key-header", "K"], "pass one of the two options"),
        (["http://shop.example", "--key-field", "t", "--body", "[]"], "it needs a --body that is a JSON object"),
        (["http://shop.example", "--key-header", "K", "--header", "k: 1"], "the check creates its own keys"),
        (["http://shop.example", "--key-format", "ord_{{hex:2}}"], "it needs at least 6 random characters"),
        (["http://shop.example", "--key-format", "{{hex}}"], "need a number of characters"),
        (["http://shop.example", "--key-format", "{{letters:9}}"], "no other placeholder"),
        (["http://shop.example/{{key}}", "--key-header", "K"], "the key is already in the URL ({{key}})"),
    ],
)
def test_check_option_error_exits_with_code_2_and_a_hint(run: Run, words: list[str], sentence: str) -> None:
    code, _, err = run(*words)
    assert code == 2
    assert sentence in err


# Each option does what it says


@pytest.mark.parametrize(
    ("way", "options", "clause", "results"),
    [
        (Bug.INVALID_STORED, ["--invalid-body", '{"item": "cup"}'], "failures.corrected", ["advice", "passed"]),
        (Bug.ENDPOINT_IGNORED, ["--other-url", "{url}/refunds"], "mismatches.endpoint", ["skipped", "failed"]),
        (Bug.UNDESCRIBED, ["--openapi", "{right}/openapi.json"], "others.described", ["advice", "passed"]),
        (Way.OPTIONAL, ["--key-optional"], "keys.missing", ["failed", "undecided"]),
        (Bug.PUT_NEEDS_KEY, ["--unsafe-methods"], "others.put-delete", ["skipped", "advice"]),
    ],
    ids=lambda value: value.name if isinstance(value, Bug | Way) else "",
)
def test_option_changes_the_verdict_of_its_clause(
    run: Run, way: Bug | Way, options: list[str], clause: str, results: list[str]
) -> None:
    with Shop(way) as shop, Shop() as right:
        words = [*_described(shop.url, shop), "--only", clause, "--json"]
        filled = [word.replace("{url}", shop.url).replace("{right}", right.url) for word in options]
        assert [_results(run(*words, *more)[1])[clause] for more in ([], filled)] == results


def test_method_option_changes_the_request_method(run: Run) -> None:
    words = ("--method", "patch", "-H", "Authorization: Bearer alpha", "--only", "replays.status", "--json")
    with Shop() as shop:
        code, out, _ = run(f"{shop.url}/orders", "--body", BODY, *words)
    assert (code, json.loads(out)["method"], _results(out)) == (0, "PATCH", {"replays.status": "passed"})


def test_no_clause_is_begun_after_the_time_limit(run: Run) -> None:
    only = ("--only", "races.2", "--only", "races.10", "--slow-header", "X-Slow: 1.2", "--json")
    with Shop() as shop:
        code, out, _ = run(*_described(shop.url, shop), "--time-limit", "1", *only)
    assert (code, _results(out)) == (0, {"races.2": "passed", "races.10": "skipped"})
    assert json.loads(out)["clauses"][1]["because"] == "the time limit was reached"


def test_check_gives_up_on_a_silent_server_after_the_timeout(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        code, _, err = run(f"http://127.0.0.1:{silent.getsockname()[1]}/", "--timeout", "0.2")
    assert code == 2
    assert "does not respond: timed out" in err


def test_cacert_option_trusts_a_private_certificate(run: Run, tmp_path: Path) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await receive()
            await send({"type": "http.response.start", "status": 201, "headers": []})
            await send({"type": "http.response.body", "body": uuid.uuid4().hex.encode()})
        while scope["type"] == "lifespan":
            kind = (await receive())["type"]
            await send({"type": f"{kind}.complete"})

    shown, key = certificate(tmp_path)
    with Served(app, ssl_certfile=str(shown), ssl_keyfile=str(key)) as served:
        words = (f"https://localhost:{served.port}/", "--only", "keys.missing", "--key-optional", "--timeout", "9")
        assert run(*words, "--cacert", str(shown))[0] == 0
        code, _, err = run(*words)
    assert code == 2
    assert "certificate verify failed" in err


@pytest.mark.parametrize("option", ["--junit", "--sarif", "--html", "--write-baseline", "--scripts"])
def test_a_report_that_cannot_be_written_is_exit_code_2(run: Run, tmp_path: Path, option: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with Shop() as shop:
        words = (*_described(shop.url, shop), "--only", "keys.missing", option, str(tmp_path / "file" / "report"))
        code, _, err = run(*words)
    assert code == 2
    assert re.search(r"cannot be (written|created)", err)


@pytest.mark.parametrize(
    ("program", "words"),
    [("oncekey-check", ["--list"]), ("oncekey", ["check", "--list"]), ("oncekey-client", ["--help"])],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_command_whose_reader_closes_the_pipe_exits_quietly(program: str, words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [str(Path(sys.executable).with_name(program)), *words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=PATIENCE)
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode in {0, 1}


def test_a_pipe_that_is_closed_does_not_change_the_verdict() -> None:
    with Shop(Bug.NO_ECHO, Bug.MISSING_RUNS) as shop:
        reader, writer = os.pipe()
        os.close(reader)
        command = [sys.executable, "-c", "from oncekey_check.command import main; main()", *_described(shop.url, shop)]
        done = subprocess.run(
            [*command, "--only", "keys.missing,replays.status"],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        os.close(writer)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_every_option_is_used_by_a_test() -> None:
    options = {name for action in parser("oncekey-check")._actions for name in action.option_strings} - {"-h", "--help"}
    trees = [ast.parse(path.read_text("utf-8")) for path in Path(__file__).parent.glob("test_check*.py")]
    used = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert len(options) > 40
    assert options - used == set()
