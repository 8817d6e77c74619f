"""Operators' commands as they are typed: on a terminal, in a pipe, and their exit codes."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from cli.operating import KEY, SCOPE
from oncekey.cli import desk
from oncekey.core.errors import CommitAmbiguousError, ConfigurationError
from oncekey.core.model import HOUR, MINUTE, SECOND, RecordId
from oncekey.core.policy import Policy
from oncekey.testing.claims import a_claim, answered

ONCEKEY = Path(sys.executable).with_name("oncekey")


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'shop.db'}"


def typed(*arguments: str, **options) -> subprocess.CompletedProcess:
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "160", "TERM": "xterm"}
    return subprocess.run([ONCEKEY, *arguments], check=False, env=environment, **options)


def test_a_terminal_gets_a_frame_and_a_pipe_gets_columns(shop, url):
    shop.settle(shop.begin(a_claim(id=RecordId(SCOPE, KEY)), Policy()).lease, answered())
    piped = typed("keys", "list", "--store", url, capture_output=True, text=True)
    assert piped.stdout.splitlines()[0].split()[:3] == ["key", "scope", "state"]
    ours, theirs = pty.openpty()
    typed("keys", "list", "--store", url, stdout=theirs)
    os.close(theirs)
    seen = b""
    try:
        while piece := os.read(ours, 65536):
            seen += piece
    except OSError:  # the end of a terminal
        pass
    os.close(ours)
    assert "┏" in seen.decode()
    assert KEY in seen.decode()


@pytest.mark.parametrize(
    ("reason", "code", "said"), [("", 2, "--reason is empty"), ("impatient", 1, "not done: bust is not possible")]
)
def test_exit_codes(shop, url, reason, code, said):
    shop.begin(a_claim(id=RecordId(SCOPE, KEY)), Policy())
    arguments = ("keys", "bust", KEY, "--tenant", "acme", "--store", url, "--reason", reason)
    result = typed(*arguments, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (code, "")
    assert said in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("text", "span"),
    [("90", 90 * SECOND), ("90s", 90 * SECOND), ("15m", 15 * MINUTE), ("2h", 2 * HOUR), ("1d", 24 * HOUR)],
)
def test_spans(text, span):
    assert desk.span(text) == span


@pytest.mark.parametrize("text", ["", "soon", "-1h", "inf", "nan", "1w"])
def test_no_spans(text):
    # A negative one would let "not executed" be believed too early.
    with pytest.raises(ConfigurationError):
        desk.span(text)


@pytest.mark.parametrize("text", ["2026-11-16T01:50:00", "yesterday"])
def test_instants_have_an_offset(text):
    with pytest.raises(ConfigurationError):
        desk.instant(text)
    assert desk.instant("1970-01-01T01:00:01+01:00") == SECOND


def test_a_lost_reply_says_where_to_look(shop, url):
    # P7: nobody knows, so nothing is repeated
    async def losing(engine):
        raise CommitAmbiguousError("gone")

    with pytest.raises(CommitAmbiguousError, match="keys history"):
        desk.work(url, losing)
