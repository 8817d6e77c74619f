"""The command itself: its version, its commands, and what it needs."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest
import typer
from typer.testing import CliRunner

from oncekey import cli
from oncekey.cli.app import make_app
from oncekey.core.errors import OncekeyError


def test_it_says_its_version():
    result = CliRunner().invoke(make_app(), ["--version"])

    assert (result.exit_code, result.stdout) == (0, f"oncekey {version('oncekey')}\n")


def test_without_a_command_it_lists_them():
    result = CliRunner().invoke(make_app(), [], env={"NO_COLOR": "1"})

    assert "migrate" in result.output


def test_a_module_with_register_is_a_command(monkeypatch):
    def register(app: typer.Typer) -> None:
        app.command("hello")(lambda: typer.echo("hello"))

    monkeypatch.setattr("oncekey.cli.migrate.register", register)
    result = CliRunner().invoke(make_app(), ["hello"])

    assert (result.exit_code, result.stdout) == (0, "hello\n")


def test_without_typer_it_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(cli, "find_spec", lambda _: None)

    with pytest.raises(SystemExit) as caught:
        cli.main()

    assert caught.value.code == 2
    assert capsys.readouterr().err == "the command oncekey needs one more package: pip install 'oncekey[cli]'\n"


def test_our_own_errors_are_one_line(monkeypatch, capsys):
    def make() -> typer.Typer:
        app = typer.Typer(pretty_exceptions_enable=False)

        @app.command()
        def fail() -> None:
            raise OncekeyError("it is like this")

        return app

    monkeypatch.setattr("oncekey.cli.app.make_app", make)
    monkeypatch.setattr(sys, "argv", ["oncekey"])

    with pytest.raises(SystemExit) as caught:
        cli.main()

    assert caught.value.code == 2
    assert capsys.readouterr().err == "oncekey: it is like this\n"


def test_importing_the_package_of_commands_needs_no_typer():
    script = "import sys, oncekey.cli; sys.exit('typer' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
