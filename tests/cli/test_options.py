"""Operators' commands as they are typed: on a terminal, in a pipe, and their exit codes."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from datetime import datetime
from pathlib import Path

import pytest

from cli.operating import KEY, SCOPE, oncekey
from harness import flows
from oncekey.cli import options, printing
from oncekey.core.errors import CommitAmbiguousError, ConfigurationError
from oncekey.core.model import HOUR, MINUTE, SECOND, RecordId
from oncekey.core.policy import Policy
from oncekey.core.scope import scope_of
from oncekey.testing.claims import a_claim, answered

ONCEKEY = Path(sys.executable).with_name("oncekey")
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'shop.db'}"


def typed(*arguments: str, **options) -> subprocess.CompletedProcess:
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "xterm"}
    environment.pop("COLUMNS", None)
    return subprocess.run([ONCEKEY, *arguments], check=False, env=environment, **options)


def on_a_terminal(*arguments: str, **environment: str) -> str:
    """What a command writes to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    plain = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "COLUMNS"}}
    subprocess.run([ONCEKEY, *arguments], check=False, env={**plain, "TERM": "xterm", **environment}, stdout=theirs)
    os.close(theirs)
    seen = b""
    try:
        while piece := os.read(ours, 65536):
            seen += piece
    except OSError:  # the end of a terminal
        pass
    os.close(ours)
    return seen.decode()


@pytest.fixture
def busy(shop):
    """Keys as they come: long ones, of tenants with long names, in every state."""
    keys = [
        "4c1d9a3e-6d0b-4f53-8f0e-5f1f3f7f0601",
        "order-2026-11-16-of-a-customer-with-a-long-name-000000000000000001",
    ]
    for key in keys:
        claim = a_claim(
            id=RecordId(scope_of("-", "a tenant with a long name"), key), operation="create_an_order_for_a_customer"
        )
        flows.settle(shop, flows.begin(shop, claim, Policy()).lease, answered())
    return keys


def test_table_prints_all_columns_to_a_pipe_and_fits_a_terminal(busy, url):
    piped = typed("keys", "list", "--store", url, capture_output=True, text=True)
    assert piped.stdout.splitlines()[0].split()[:3] == ["key", "caller", "state"]
    assert (piped.stderr, "\x1b" in piped.stdout) == ("", False)
    seen = on_a_terminal("keys", "list", "--store", url)
    lines = seen.replace("\r", "").splitlines()
    assert all(len(ANSI.sub("", line)) <= 80 for line in lines)
    assert {line.split()[0] for line in lines[1:]} == set(busy)  # whole, and each on one line
    assert ANSI.sub("", lines[0]).split() == ["key", "state"]


def test_no_colour_where_none_is_wanted(busy, url):
    for command in (("keys", "list"), ("doctor", "--workers", "0"), ("keys", "show", busy[0]), ("stats",)):
        assert "\x1b" not in on_a_terminal(*command, "--store", url, NO_COLOR="1")
    assert "\x1b[" in on_a_terminal("keys", "list", "--store", url)
    assert "\x1b[" in on_a_terminal("doctor", "--workers", "0", "--store", url)


def test_table_keeps_the_first_column_on_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "12")
    printing.table(("a", "key", "b"), [("x", "k" * 40, "y")], empty="", first=("key",))
    told = capsys.readouterr()
    assert [line.rstrip() for line in told.out.splitlines()] == ["key", "k" * 40]
    assert told.err.startswith("(a, b did not fit")
    printing.table(("a", "b", "c"), [("1", "2" * 20, "3")], empty="", first=("a",))
    assert capsys.readouterr().out.splitlines() == ["a  c", "1  3"]
    printing.table(("a",), [], empty="nothing")
    assert capsys.readouterr().out == "nothing\n"


def test_long_command_is_wrapped_and_stays_copyable(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    whole = "oncekey keys resolve KEY --tenant 'a b' --executed --result '{\"id\": 1}' --reason '...'"
    lines = printing.broken(whole, indent=4)
    assert all(len(line) <= 36 for line in lines)
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == shlex.split(whole)
    odd = "oncekey keys show 'it'\"'\"'s quoted' --tenant acme --reason '...'"
    assert shlex.split("\n".join(printing.broken(odd, indent=4)).replace("\\\n", "")) == shlex.split(odd)


# One envelope for every list there is.
@pytest.mark.parametrize(
    "command", [("keys", "list"), ("keys", "history", KEY, "--tenant", "acme"), ("unknown", "list"), ("dlq", "list"),
                ("stats",), ("doctor", "--workers", "0"), ("migrate", "status")], ids=" ".join,
)  # fmt: skip
def test_every_list_command_prints_the_same_json_structure(shop, url, command):
    said = json.loads(oncekey(*command, "--store", url, "--json").stdout)
    assert list(said)[:3] == ["now", "items", "next"]
    assert datetime.fromisoformat(said["now"]).tzinfo is not None
    assert isinstance(said["items"], list)
    assert said["next"] is None


@pytest.mark.parametrize(
    ("reason", "code", "said"),
    [
        ("", 2, "--reason is empty"),
        ("impatient", 1, "not done: only a stored response can be busted; this one is in progress"),
    ],
)
def test_cli_exit_code_matches_the_kind_of_error(shop, url, reason, code, said):
    flows.begin(shop, a_claim(id=RecordId(SCOPE, KEY)), Policy())
    arguments = ("keys", "bust", KEY, "--tenant", "acme", "--store", url, "--reason", reason)
    result = typed(*arguments, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (code, "")
    assert said in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("text", "span"),
    [("90", 90 * SECOND), ("90s", 90 * SECOND), ("15m", 15 * MINUTE), ("2h", 2 * HOUR), ("1d", 24 * HOUR)],
)
def test_span_option_parses_durations(text, span):
    assert options.span(text) == span


@pytest.mark.parametrize("text", ["", "soon", "-1h", "inf", "nan", "1w"])
def test_span_option_rejects_invalid_durations(text):
    # A negative one would let "not executed" be believed too early.
    with pytest.raises(ConfigurationError):
        options.span(text)


@pytest.mark.parametrize("text", ["2026-11-16T01:50:00", "yesterday"])
def test_instant_option_requires_a_utc_offset(text):
    with pytest.raises(ConfigurationError):
        options.instant(text)
    assert options.instant("1970-01-01T01:00:01+01:00") == SECOND


def test_ambiguous_commit_error_refers_to_keys_history(shop, url):
    # P7: nobody knows, so nothing is repeated
    async def losing(engine):
        raise CommitAmbiguousError("gone")

    with pytest.raises(CommitAmbiguousError, match="keys history"):
        options.work(url, losing)
