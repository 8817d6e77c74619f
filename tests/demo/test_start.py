"""Starting the demo: what it says when all is well, and the one line when something is not."""

from __future__ import annotations

import os
import pty
import shlex
import signal
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

import pytest

from harness.demo import ALPHA, COMMAND, Demo
from harness.ports import free_port
from oncekey.cli.printing import address
from oncekey.core.errors import ConfigurationError
from oncekey_demo import command
from oncekey_demo.command import curl_lines, policy_for
from oncekey_demo.serving import ledger_next_to


def _run(folder: Path, *options: str) -> tuple[int, str, list[str]]:
    port = () if "--port" in options else ("--port", str(free_port()))
    command = [*COMMAND, *port, *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout, done.stderr.splitlines()


def _faultless(curl: list[str]) -> list[str]:
    place = curl.index("X-Demo-Fault: drop-after")
    return [*curl[: place - 1], *curl[place + 1 :]]


def test_demo_prints_curl_commands_that_work(tmp_path: Path) -> None:
    with Demo(tmp_path) as demo:
        assert demo.output.startswith(f"oncekey-demo: a small shop at {demo.url}, ")
        assert "sqlite:///oncekey-demo.db" in demo.output
        commands = demo.output.replace("\\\n", " ").splitlines()
        curls = [shlex.split(line) for line in commands if line.startswith("curl ")]
        assert len(curls) == 6
        answers = [
            subprocess.run([*curl, "--silent"], capture_output=True, text=True, check=True).stdout
            for curl in [curls[0], curls[0], curls[1], curls[5], curls[3], _faultless(curls[3]), curls[4]]
        ]
    assert answers[0].startswith("HTTP/1.1 201 ")
    assert "idempotent-replayed: true" in answers[1]
    assert answers[2].startswith("HTTP/1.1 422 ")
    assert answers[3].count('"id":') == 1
    assert answers[4].startswith("HTTP/1.1 500 ")
    assert answers[5].startswith("HTTP/1.1 201 ")
    assert answers[6].count('"id":"ch_') == 1
    assert (tmp_path / "oncekey-demo.db").exists()


def test_demo_does_not_wrap_commands_on_a_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "--port", "0"],
        cwd=tmp_path,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "40"},
    ) as process:
        os.close(theirs)
        said = b""
        while b"demo-beta" not in said or said.count(b"curl") < 6:
            said += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    os.close(ours)
    assert b"-H 'Authorization: Bearer demo-alpha' \\" in said
    assert b"Traceback" not in said


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--store", "oracle://localhost/shop"], "there is no store for oracle"),
        (["--store", "nonsense"], "is not a store"),
        (["--store", "sqlite:///no/such/folder/x.db"], "cannot be opened"),
        (["--store", "memory:"], "needs a store that shares the application's transactions"),
        (["--lease", "0"], "lease: 0.0 is not allowed"),
        (["--lease", "-1"], "lease: -1.0 is not allowed"),
        (["--lease", "nan"], "lease: nan is not allowed"),
        (["--lease", "1e300"], "lease: 1e+300 is not allowed"),
        (["--host", "no such host"], "is not an address to listen on"),
        (["--provider", "https://elsewhere"], "is not a URL like http"),
        (["--call-timeout", "0"], "call_timeout: 0.0 is not allowed"),
    ],
)
def test_demo_start_error_is_one_line(tmp_path: Path, options: list[str], sentence: str) -> None:
    code, said, (line,) = _run(tmp_path, *options)
    assert (code, said) == (1, "")
    assert line.startswith("oncekey-demo: ")
    assert sentence in line


def test_a_file_that_is_no_database_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "oncekey-demo.db").write_text("a shopping list, and no database at all " * 100)
    code, said, (line,) = _run(tmp_path)
    assert (code, said) == (1, "")
    assert "not a SQLite database" in line


def test_a_schema_from_the_future_is_one_line(tmp_path: Path) -> None:
    with Demo(tmp_path):
        pass
    with closing(sqlite3.connect(tmp_path / "oncekey-demo.db")) as connection, connection:
        connection.execute("INSERT INTO oncekey_migration VALUES (999, 'post', 'later', 'unknown', 0)")
    code, said, (line,) = _run(tmp_path)
    assert (code, said) == (1, "")
    assert line.startswith("oncekey-demo: ")
    assert "0999_post_later" in line


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said, (line,) = _run(tmp_path, "--port", str(port))
    assert (code, said) == (1, "")
    assert f"port {port} " in line
    assert not (tmp_path / "oncekey-demo.db").exists()


def test_an_impossible_port_is_a_mistake_in_the_command(tmp_path: Path) -> None:
    code, _, lines = _run(tmp_path, "--port", "65536")
    assert code == 2
    assert any("--port" in line for line in lines)


def test_help_names_every_option(tmp_path: Path) -> None:
    code, said, _ = _run(tmp_path, "--help")
    assert code == 0
    assert all(option in said for option in ("--store", "--host", "--port", "--lease", "--call-timeout", "--provider"))


def test_ctrl_c_is_a_clean_end(tmp_path: Path) -> None:
    with Demo(tmp_path) as demo:
        demo.order("f7d7ac0e-3c5e-4fb2-9f5e-5d3dbe11c2d4")
        assert demo.stop(signal.SIGINT) == 0
        assert "Traceback" not in demo.output


def test_two_processes_may_share_a_file(tmp_path: Path) -> None:
    key = "f7d7ac0e-3c5e-4fb2-9f5e-5d3dbe11c2d4"
    with Demo(tmp_path) as one, Demo(tmp_path) as other:
        assert one.order(key).content == other.order(key).content
        assert one.orders(ALPHA) == other.orders(ALPHA)


def test_a_lease_may_be_short_or_longer_than_the_deadline() -> None:
    assert policy_for(1).lease == timedelta(seconds=1)
    assert policy_for(1).deadline == timedelta(hours=1)
    assert policy_for(7200).deadline == timedelta(hours=2)
    assert policy_for(1).outbox_lease == policy_for(1).send_window == timedelta(seconds=1)
    assert policy_for(7200).outbox_lease == timedelta(minutes=1)
    with pytest.raises(ConfigurationError, match="lease"):
        policy_for(-1)


def test_no_password_is_shown() -> None:
    assert address("postgresql://me:s3cret@db.example:5432/shop?password=s3cret") == "postgresql://db.example:5432/shop"
    assert address("sqlite:////var/shop.db") == "sqlite:////var/shop.db"


def test_each_line_has_its_own_key_where_it_needs_one() -> None:
    lines = dict(curl_lines("http://localhost:1", "k" * 36))
    assert sum("k" * 36 in command for command in lines.values()) == 2
    assert sum("X-Demo-Delay" in command for command in lines.values()) == 1


def test_ledger_file_is_next_to_the_store_file() -> None:
    assert ledger_next_to("sqlite:///oncekey-demo.db") == Path("oncekey-demo-provider.db")
    assert ledger_next_to("sqlite:////var/shop/demo.db?busy=1") == Path("/var/shop/oncekey-demo-provider.db")
    assert ledger_next_to("postgresql://localhost/shop") == Path("oncekey-demo-provider.db")


def test_unusable_ledger_prints_one_line_per_process(tmp_path: Path) -> None:
    code, said, lines = _run(tmp_path, "--provider-ledger", "no/such/folder/ledger.db")
    assert (code, said) == (1, "")
    assert [line.partition(": ")[0] for line in lines] == ["oncekey provider", "oncekey-demo"]
    assert "cannot be used" in lines[0]


def test_provider_ledger_option_sets_the_ledger_path(tmp_path: Path) -> None:
    (tmp_path / "books").mkdir()
    with Demo(tmp_path, "--provider-ledger", "books/ledger.db") as demo:
        assert demo.ledger() == []
    assert (tmp_path / "books" / "ledger.db").exists()
    assert not (tmp_path / "oncekey-demo-provider.db").exists()


def test_version_option_prints_the_oncekey_demo_version(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["oncekey-demo", "--version"])
    with pytest.raises(SystemExit) as caught:
        command.main()
    assert (caught.value.code, capsys.readouterr().out) == (0, f"oncekey-demo {version('oncekey-demo')}\n")
