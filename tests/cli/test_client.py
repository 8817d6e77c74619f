"""`oncekey client`, as it is typed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from client.scripted import ScriptedServer, answer
from oncekey_client.exchange import Call, Reply
from oncekey_client.journal import Journal, Progress

ONCEKEY = Path(sys.executable).with_name("oncekey")
KEY = "key-of-the-first-order"


def oncekey(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [ONCEKEY, "client", *arguments], capture_output=True, text=True, check=False, cwd=cwd, env=dict(os.environ)
    )


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "journal.db")


def begin(journal, url, key=KEY, name=None, profile="ietf"):
    call = Call("POST", url, (("Content-Type", "application/json"),), b'{"secret": "body"}')
    journal.begin(call, key, name=name, profile=profile)


def test_client_resume_sends_open_requests_that_list_shows(journal, tmp_path):
    # R225
    with ScriptedServer(answer(201, {"id": 1})) as server:
        begin(journal, f"{server.url}/orders?token=t", name="invoice-7")
        before = oncekey("list", "--journal", "journal.db", cwd=tmp_path)
        done = oncekey("resume", "--journal", "journal.db", "--header", "Authorization: Bearer t", cwd=tmp_path)
    after = oncekey("list", "--journal", "journal.db", cwd=tmp_path)
    again = oncekey("resume", "--journal", "journal.db", "--json", cwd=tmp_path)
    assert (before.returncode, before.stdout.splitlines()[1].split()[:2]) == (1, ["open", "invoice-7"])
    assert (done.returncode, done.stdout.splitlines()[1].split()[:3]) == (0, ["answered", "201", "invoice-7"])
    assert (after.returncode, after.stdout) == (0, done.stdout)
    assert (again.returncode, json.loads(again.stdout)["items"]) == (0, [])
    (seen,) = server.seen
    assert (seen.key, seen.body) == (f'"{KEY}"', b'{"secret": "body"}')
    assert (seen.target, seen.headers["authorization"]) == ("/orders?token=t", "Bearer t")
    assert [result.stderr for result in (before, done, after, again)] == [""] * 4
    assert "token" not in before.stdout
    assert "secret" not in before.stdout


def test_client_resume_exits_with_code_1_while_a_request_stays_open(journal, tmp_path):
    with ScriptedServer(answer(401)) as server:
        begin(journal, server.url)
        done = oncekey("resume", "--journal", "journal.db", "--json", cwd=tmp_path)
    assert done.returncode == 1
    (line,) = json.loads(done.stdout)["items"]
    assert (line["key"], line["state"], line["status"]) == (KEY, "open", None)


def test_a_key_that_is_too_old_is_not_sent(journal, tmp_path):
    with ScriptedServer() as server:
        begin(journal, server.url)
        done = oncekey("resume", "--journal", "journal.db", "--max-age", "0", "--json", cwd=tmp_path)
    assert (done.returncode, json.loads(done.stdout)["items"][0]["state"], server.seen) == (1, "unknown", [])


def test_credentials_go_to_one_origin_only(journal, tmp_path):
    with ScriptedServer(answer(201)) as server, ScriptedServer() as other:
        begin(journal, server.url)
        begin(journal, other.url, key="key-of-another-order")
        header = ("--header", "Authorization: Bearer t")
        refused = oncekey("resume", "--journal", "journal.db", *header, cwd=tmp_path)
        done = oncekey("resume", "--journal", "journal.db", *header, "--origin", server.url, cwd=tmp_path)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "2 origins" in refused.stderr
    assert done.returncode == 0
    assert (len(server.seen), len(other.seen)) == (1, 0)
    assert [entry.progress for entry in journal.unfinished()] == [Progress.OPEN]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("list", "--journal", "none.db"), "the journal none.db does not exist"),
        (("resume", "--journal", "journal.db", "--header", "nonsense"), "'Name: value'"),
    ],
)
def test_client_usage_error_is_one_line(journal, tmp_path, arguments, says):
    begin(journal, "http://shop.example/")
    journal.answer(KEY, Reply(201))
    result = oncekey(*arguments, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
