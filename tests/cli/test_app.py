"""The command itself: its version, its commands, and what it needs."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import subprocess
import sys
from importlib import import_module
from importlib.metadata import entry_points, version

import pytest
import typer
from typer.testing import CliRunner

import oncekey
from oncekey import cli
from oncekey.cli.app import COMMANDS, GROUP, make_app
from oncekey.core.errors import OncekeyError


def test_version_option_prints_the_oncekey_version():
    result = CliRunner().invoke(make_app(), ["--version"])

    assert (result.exit_code, result.stdout) == (0, f"oncekey {version('oncekey')}\n")


def test_cli_without_a_command_lists_all_commands():
    result = CliRunner().invoke(make_app(), [], env={"NO_COLOR": "1"})

    assert "migrate" in result.output


def elsewhere() -> list[str]:
    """The commands that other distributions have."""
    return [name for name, (place, _) in COMMANDS.items() if place.startswith("oncekey-")]


def test_the_list_of_commands_is_what_the_modules_register():
    # Each module registers its own commands; the table of all of them is read without importing one.
    registered = {}
    for found in pkgutil.iter_modules(cli.__path__):
        module = import_module(f"oncekey.cli.{found.name}")
        if hasattr(module, "register"):
            own = typer.Typer()
            own.callback()(lambda: None)
            module.register(own)
            registered |= dict.fromkeys(typer.main.get_command(own).commands, found.name)

    for name in elsewhere():
        (found,) = entry_points(group=GROUP, name=name)
        own = typer.Typer()
        own.callback()(lambda: None)
        found.load().register(own)
        assert name in typer.main.get_command(own).commands
        registered[name] = found.dist.name

    assert {name: place for name, (place, _) in COMMANDS.items()} == registered
    assert {found.name for found in entry_points(group=GROUP)} == set(elsewhere())
    assert all(summary.endswith(".") and len(summary) <= 66 for _, summary in COMMANDS.values())


def test_unknown_command_exits_with_code_2():
    result = CliRunner().invoke(make_app(), ["helo"], env={"NO_COLOR": "1"})

    assert result.exit_code == 2
    assert "No such command" in result.output


def test_help_names_the_packages_of_commands_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown() -> str:
        result = CliRunner().invoke(make_app(), ["--help"], env={"NO_COLOR": "1"})
        return " ".join(result.output.split()).replace("- ", "-")  # it wraps lines at hyphens

    assert "pip install" not in shown()
    monkeypatch.setattr(cli.app, "find_spec", lambda name: None)
    assert all(f"(pip install oncekey-{name})" in shown() for name in ("check", "client", "demo"))
    assert shown().count("pip install") == len(elsewhere())


def loaded(statement: str) -> set[str]:
    """The modules that a new interpreter has loaded after a statement."""
    script = f"import sys\ntry:\n    {statement}\nexcept SystemExit: pass\nsys.stderr.write(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return set(done.stderr.split())


def test_help_loads_no_command_and_no_engine():
    modules = loaded("sys.argv = ['oncekey', '--help']; from oncekey.cli import main; main()")

    assert "oncekey.cli.app" in modules
    assert {name for name in modules if name.startswith("oncekey")} == {
        "oncekey", "oncekey.cli", "oncekey.cli.app", "oncekey.core", "oncekey.core.errors",
    }  # fmt: skip
    assert not modules & {
        "rich.console",
        "rich.markdown",
        "asyncio",
        "sqlite3",
        "fastapi",
        "httpx",
        "importlib.metadata",
    }


def test_package_imports_only_the_modules_in_use():
    assert {name for name in loaded("import oncekey") if name.startswith("oncekey")} == {"oncekey"}
    errors = {name for name in loaded("from oncekey import NotExecutedError") if name.startswith("oncekey")}
    assert errors == {"oncekey", "oncekey.core", "oncekey.core.errors"}
    assert "fastapi" not in loaded("from oncekey import Once")


def test_type_checkers_and_programs_see_the_same_names():
    (block,) = (node for node in ast.parse(inspect.getsource(oncekey)).body if isinstance(node, ast.If))
    seen = {node.module: {alias.name for alias in node.names} for node in block.body}

    assert seen == {place: set(names) for place, names in oncekey._PLACES.items()}
    assert {name for names in seen.values() for name in names} | {"__version__"} == set(oncekey.__all__)
    assert set(oncekey.__all__) <= set(dir(oncekey))
    assert all(hasattr(oncekey, name) for name in oncekey.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Twice'"):
        oncekey.Twice  # noqa: B018  (looking is the point)


def test_cli_without_typer_prints_the_install_command(monkeypatch, capsys):
    monkeypatch.setattr(cli, "find_spec", lambda _: None)

    with pytest.raises(SystemExit) as caught:
        cli.main()

    assert caught.value.code == 2
    assert capsys.readouterr().err == "the oncekey command needs another package: pip install 'oncekey[cli]'\n"


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
