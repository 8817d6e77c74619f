"""The scripts of a report repeat its findings: run by bash against the same shop, they get the same answers."""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

from conformance.aiming import shop_target
from conformance.fronts import Front
from conformance.shop import Bug, Shop
from oncekey_check import CLAUSES, Address, CheckProfile, Failed, Finding, Target, check
from oncekey_check.carrier import Carrier
from oncekey_check.clauses import Exchange, SendMode, Way
from oncekey_check.raw_http import Answer, RawRequest
from oncekey_check.reports import MARK, plain
from oncekey_check.scripts import FreshKeys, curl_line, octets, quoted, script, variable

WAIT = 409
CREDENTIALS = {"AUTHORIZATION": "Bearer alpha", "OTHER_AUTHORIZATION": "Bearer beta"}


def _bash(lines: list[str], folder: Path, **more: str) -> str:
    done = subprocess.run(
        ["bash", "-u", "-c", "\n".join(lines)],
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "TMPDIR": str(folder), **CREDENTIALS, **more},
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode("latin-1")


def _statuses(printed: str) -> list[int]:
    return [int(status) for status in re.findall(r"HTTP/1\.1 (\d{3})", printed)]


def _turns(statuses: list[int], finding: Finding) -> list[int]:
    """The statuses without repetitions: how often one asks while another request runs is a matter of moments.

    On a busy machine it may be over before the first retry, so that one is not told to wait at all.
    """
    turns = [status for status, _ in groupby(statuses)]
    waits = _waited(finding) and turns[-1] != WAIT
    return [status for status in turns if status != WAIT] if waits else turns


def _effects(printed: str) -> int:
    before, after = re.findall(r"effects (?:before|after): (\d+)", printed)
    return int(after) - int(before)


def _waited(finding: Finding) -> bool:
    assert isinstance(finding.verdict, Failed)
    return any(exchange.mode.seconds for exchange in finding.verdict.exchange if exchange.mode.way is Way.PLAIN)


def _seen(finding: Finding) -> list[int]:
    assert isinstance(finding.verdict, Failed)
    return [exchange.answer.status for exchange in finding.verdict.exchange if exchange.answer.status]


# One of each way in which requests are sent, and of each kind of caller and key.
@pytest.mark.parametrize(
    ("bug", "clause"),
    [
        (Bug.GLOBAL_SCOPE, "tenants.independent"),
        (Bug.REPLAY_BEFORE_LOGIN, "tenants.no-pass"),
        (Bug.RUNS_AGAIN, "replays.one-effect"),
        (Bug.NO_FINGERPRINT, "mismatches.nothing-happens"),
        (Bug.CHUNKED_UNCOMPARED, "replays.chunked-other"),
        (Bug.MALFORMED_IGNORED, "keys.malformed"),
        (Bug.MALFORMED_IGNORED, "keys.empty"),
        (Bug.MALFORMED_IGNORED, "keys.too-long"),
        (Bug.CASE_FOLDED, "keys.case"),
        (Bug.ODD_KEYS_CRASH, "keys.tricky"),
        (Bug.NAME_IN_ONE_CASE, "keys.field-name"),
        (Bug.ERROR_AFTER_EFFECT, "failures.one-effect"),
        (Bug.NO_409, "races.while-running"),
        (Bug.CONNECTION_TRUSTED, "races.pipelined"),
        (Bug.HANGUP_FORGETS, "hang-ups.sent"),
        (Bug.HALF_BODY_CLAIMS, "hang-ups.last-byte"),
        (Bug.PIECES_COMPARED, "hang-ups.slowly"),
        (Bug.GET_REPLAYS, "others.get"),
    ],
    ids=lambda value: value if "." in value else "",
)
def test_reproduction_script_shows_the_finding_again(bug: Bug, clause: str, tmp_path: Path) -> None:
    patience = {"patience": 0.5} if bug is Bug.HALF_BODY_CLAIMS else {}  # a retry there waits for what never comes
    with Shop(bug) as shop:
        report = check(
            shop_target(shop, **patience),
            profile=CheckProfile.STRICT_MONEY,
            clauses=[one for one in CLAUSES if one.id == clause],
        )
        (finding,) = report.failed
        assert isinstance(finding.verdict, Failed)
        lines = script(report.target, finding.verdict.exchange)
        for _ in range(2):  # it may be run again: its keys are fresh
            printed = _bash(lines, tmp_path)
            assert _turns(_statuses(printed), finding) == _turns(_seen(finding), finding), printed
            if finding.evidence.effects is not None:
                assert _effects(printed) >= finding.evidence.effects


def test_a_race_is_repeated_as_a_race(tmp_path: Path) -> None:
    with Shop(Bug.CHECK_THEN_INSERT) as shop:
        report = check(shop_target(shop), clauses=[clause for clause in CLAUSES if clause.id == "races.10"])
        (finding,) = report.failed
        assert isinstance(finding.verdict, Failed)
        printed = _bash(script(report.target, finding.verdict.exchange), tmp_path)
    assert _effects(printed) > 1
    assert len(_statuses(printed)) >= 11


def test_script_copied_from_the_text_report_runs_unchanged(tmp_path: Path) -> None:
    with Shop(Bug.CONNECTION_TRUSTED) as shop:
        report = check(shop_target(shop), clauses=[clause for clause in CLAUSES if clause.id == "races.pipelined"])
        _, copied, _ = plain(report).split(f"{MARK}\n")
        printed = _bash(copied.splitlines(), tmp_path)
    assert _effects(printed) == 2


def test_a_key_in_the_body_is_fresh_as_well(tmp_path: Path) -> None:
    carrier = Carrier(member="client_token")
    with Shop(Bug.RUNS_AGAIN) as shop, Front(shop.url, member="client_token") as front:
        target = shop_target(shop, address=Address.parse(f"{front.url}/orders"), carrier=carrier)
        report = check(target, clauses=[one for one in CLAUSES if one.id == "replays.one-effect"])
        (finding,) = report.failed
        assert isinstance(finding.verdict, Failed)
        lines = script(report.target, finding.verdict.exchange)
        assert [_effects(_bash(lines, tmp_path)) for _ in range(2)] == [3, 3]


def test_reproduction_script_names_a_missing_credential_variable(tmp_path: Path) -> None:
    target = Target(address=Address.parse("http://127.0.0.1:1/"), body=b"", other_tenant=(("Authorization", "b"),))
    request = RawRequest("POST", target.address, (("Authorization", "b"), ("X-Api-Key", "a")))
    lines = script(target, [Exchange(request, Answer(200, "OK"))])
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "OTHER_AUTHORIZATION: set it to the value of the header Authorization, as the other tenant" in done.stderr


def test_reproduction_script_takes_the_crash_command_from_a_variable(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with Shop() as shop:
        target = shop_target(shop)
        request = RawRequest(
            "POST", target.address, (*target.headers, ("Idempotency-Key", "a-key-of-a-report")), target.body
        )
        mode = SendMode(Way.PLAIN, after=("--crash-command",))
        lines = script(target, [Exchange(request, Answer(201, "Created"), mode=mode)])
        printed = _bash(lines, tmp_path, CRASH_COMMAND=f"touch {mark}")
    assert _statuses(printed) == [201]
    assert mark.exists()


TARGET = Target(address=Address.parse("http://shop.example/orders?a='b'"), body=b"")


def test_curl_line_matches_the_sent_request() -> None:
    headers = (("A", "it's"), ("Content-Type", "a/b"), ("Idempotency-Key", ""), ("X-Api-Key", "s3cret"))
    words = shlex.split(curl_line(RawRequest("POST", TARGET.address, headers, b'{"a": "$b"}'), TARGET))
    assert words == [
        *("curl", "-si", "-X", "POST", str(TARGET.address), "-H", "A: it's", "-H", "Content-Type: a/b"),
        *("-H", "Idempotency-Key;", "-H", "X-Api-Key: ${X_API_KEY}", "--data-raw", '{"a": "$b"}'),
    ]


@pytest.mark.parametrize("body", [b"x" * 5000, b"\xff\x00\r\n", b"@file", b"line\nline", "\u2028ü".encode()])
def test_any_body_reaches_the_server_as_it_was(body: bytes, tmp_path: Path) -> None:
    request = RawRequest("POST", TARGET.address, (), body)
    line = re.sub(r"curl .* (--data-\S+)", r"sent \1", curl_line(request, TARGET), flags=re.DOTALL)
    printed = _bash(
        ['sent() { if [ "$1" = --data-raw ]; then printf %s "$2"; else cat; fi; }', line.replace("@-", "")], tmp_path
    )
    assert printed.encode("latin-1") == body


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "it's",
        'a "b" $c \\d',
        f"a{variable('X')}b",
        f"!`{variable('X')}",
        f'"{variable("X")}1"',
        "\xfc$",
        "é\xff",
    ],
)
def test_quoted_shell_word_is_not_expanded(text: str, tmp_path: Path) -> None:
    printed = _bash([f"X=hex; printf %s {quoted(octets(text))}"], tmp_path)
    assert printed == text.replace(variable("X"), "hex")


def test_only_the_random_part_of_a_key_is_fresh(tmp_path: Path) -> None:
    key = "5f0c9a7e-1b2c-4d3e-8f90-abcdef012345"
    fresh = FreshKeys.of([f'"{key}"', key.upper(), "ab12cd34" * 8, "short"])
    assert len(fresh.parts) == 2
    lines = [*fresh.lines(), f"printf '%s\\n' {quoted(fresh.put_in(key))} {quoted(fresh.put_in(key.upper()))}"]
    small, capital = _bash(lines, tmp_path).split()
    assert small != key
    assert small.upper() == capital
    assert small.startswith("5f0c9a7e-1b2c-4d3e-8f90-")


def test_carrier_translates_header_names_in_both_directions() -> None:
    carrier = Carrier("X-Request-Id", marker="X-Cache", marked_by="hit")
    lines = (("Idempotency-Key", "k"), ("IDEMPOTENCY-KEY", "k"))
    headers, body, _ = replace(RawRequest("POST", TARGET.address, lines, b"{}"), carrier=carrier).as_sent()
    assert (headers, body) == ((("X-Request-Id", "k"), ("X-REQUEST-ID", "k")), b"{}")
    read = carrier.read((("x-cache", "HIT"), ("X-Request-Id", "k")))
    assert read == (("Idempotent-Replayed", "true"), ("Idempotency-Key", "k"))
    assert carrier.as_received(read) == (("X-Cache", "hit"), ("X-Request-Id", "k"))
    assert carrier.in_api_words("Idempotent-Replayed: true, Idempotency-Key") == "X-Cache: hit, X-Request-Id"


@pytest.mark.parametrize(
    ("value", "body", "sent"),
    [
        ('"k"', b'{"a": 1}', b'{"t": "k", "a": 1}'),
        ("k", b" {} ", b' {"t": "k"} '),
        ('"k\\"l"', b'{ "a": [1', b'{"t": "k\\"l",  "a": [1'),
        ("k", b"[1]", b"[1]"),
        ("k", b"", b""),
    ],
)
def test_a_key_becomes_the_first_member_of_the_body(value: str, body: bytes, sent: bytes) -> None:
    carrier = Carrier(member="t")
    lines = (("Idempotency-Key", value), ("A", "b"))
    request = RawRequest("POST", TARGET.address, lines, body, carrier=carrier)
    assert request.as_sent() == ((("A", "b"),), sent, TARGET.address)
    assert replace(RawRequest("POST", TARGET.address, (), body), carrier=carrier).content == body
