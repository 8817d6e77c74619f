"""The commands that a contributor and the CI type."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()


def _make(*words: str) -> subprocess.CompletedProcess[str]:
    # Free of what an outer make hands down: its variables and its job server.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *words], cwd=ROOT, capture_output=True, text=True, check=False, env=environment)


def _script(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return path


def test_help_lists_every_public_target() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):(?!=)", MAKEFILE, re.MULTILINE))
    listed = set(re.findall(r"^  make ([a-z-]+) +\S", _make("help").stdout, re.MULTILINE))
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert phony is not None
    assert listed == targets == set(phony[1].split())
    assert listed >= {"help", "install", "run", "test", "check", "bench", "pins", "clean"}


def test_make_without_a_target_prints_the_help() -> None:
    assert _make().stdout == _make("help").stdout


@pytest.mark.parametrize(
    ("pretence", "sentence"),
    [
        (
            "sys.version_info = (3, 9, 2); sys.version = '3.9.2 (main)'",
            "needs Python 3.11 or newer and .* is 3.9.2",
        ),
        ("import importlib.util as u; u.find_spec = lambda name: None", "has no venv module"),
        ("sys.exit(1)", "needs Python 3.11 or newer and .* does not run"),
    ],
)
def test_make_install_with_an_unsuitable_python_prints_one_line(tmp_path: Path, pretence: str, sentence: str) -> None:
    python = _script(
        tmp_path / "python",
        f'''exec "{sys.executable}" -c "import sys; {pretence}; exec(sys.argv[1])" "$2"''',
    )
    done = _make("-n", "install", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}")
    assert done.returncode != 0
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert re.search(sentence, line)


def test_a_fit_python_gets_an_environment_with_pinned_packages(tmp_path: Path) -> None:
    done = _make("-n", "install", f"PYTHON={sys.executable}", f"VENV={tmp_path / 'venv'}")
    assert done.returncode == 0
    assert f"{sys.executable} -m venv {tmp_path / 'venv'}" in done.stdout
    assert "--require-hashes -r requirements/run.txt" in done.stdout
    assert "--no-deps --no-build-isolation -e ." in done.stdout


def test_the_lowest_versions_have_an_environment_of_their_own(tmp_path: Path) -> None:
    venv, lowest = tmp_path / "venv", tmp_path / "venv-lowest"
    done = _make("-n", "lowest", f"PYTHON={sys.executable}", f"VENV={venv}")
    assert f"{sys.executable} -m venv --clear {lowest}\n" in done.stdout
    assert "--require-hashes -r requirements/lowest.txt" in done.stdout
    assert f"{lowest}/bin/python -m pytest" in done.stdout
    assert {"tests/frameworks", "tests/drivers"} <= set(done.stdout.split())
    assert f"{venv}/bin" not in done.stdout


def test_make_test_requires_only_the_environment(tmp_path: Path) -> None:
    done = _make("-n", "test", f"PYTHON={sys.executable}", f"VENV={tmp_path / 'venv'}")
    assert "-m pytest -n 4 --durations=10 --suite=fast tests" in done.stdout
    assert not re.search("apt-get|npm|chromium|pgbouncer|mariadb", done.stdout)


def test_all_tests_are_the_fast_ones_and_then_the_others(tmp_path: Path) -> None:
    done = _make("-n", "test-all", f"PYTHON={sys.executable}", f"VENV={tmp_path / 'venv'}")
    assert re.findall("--suite=([a-z]+) tests", done.stdout) == ["fast", "more"]
    assert done.stdout.index("--suite=fast") < done.stdout.index("apt-get") < done.stdout.index("--suite=more")


@pytest.mark.parametrize("target", ["test", "test-more", "test-all"])
def test_tests_variable_runs_the_named_tests_once(tmp_path: Path, target: str) -> None:
    done = _make("-n", target, "TESTS=tests/skins", f"PYTHON={sys.executable}", f"VENV={tmp_path / 'venv'}")
    assert done.stdout.count("-m pytest") == 1
    assert "--durations=10  tests/skins" in done.stdout
    assert "--suite" not in done.stdout


def _looked_for(target: str, tmp_path: Path, *programs: str, user: int, **variables: str) -> tuple[int, str, list[str]]:
    """`make browser` and its like on a machine with these programs: its code, what it says, what they are asked."""
    folder = tmp_path / "programs"
    folder.mkdir()
    asked = tmp_path / "asked"
    asked.touch()
    for name in ("make", "sh", "which", "grep", "awk"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    for name in programs:
        _script(folder / name, f'echo "$*" >> {asked}')
    _script(folder / "id", f"echo {user}")
    environment = {"PATH": str(folder), **variables}
    command = [str(folder / "make"), target, "SBIN=", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    return done.returncode, done.stdout + done.stderr, asked.read_text().splitlines()


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("browser", "chromium"),
        ("browser", "chromium-browser"),
        ("browser", "google-chrome"),
        ("pooler", "pgbouncer"),
        ("promtool", "promtool"),
        ("systemd", "systemd-analyze"),
    ],
)
def test_make_uses_an_installed_tool(tmp_path: Path, target: str, name: str) -> None:
    assert _looked_for(target, tmp_path, "apt-get", name, user=0) == (0, "", [])


@pytest.mark.parametrize(
    ("target", "variable"),
    [
        ("browser", "ONCEKEY_TEST_BROWSER"),
        ("pooler", "ONCEKEY_TEST_PGBOUNCER"),
        ("promtool", "ONCEKEY_TEST_PROMTOOL"),
        ("systemd", "ONCEKEY_TEST_SYSTEMD_ANALYZE"),
    ],
)
def test_make_uses_the_tool_named_by_its_variable(tmp_path: Path, target: str, variable: str) -> None:
    assert _looked_for(target, tmp_path, "apt-get", user=0, **{variable: "mine"}) == (0, "", [])


@pytest.mark.parametrize(
    ("target", "installs"),
    [
        ("browser", "chromium"),
        ("pooler", "--no-install-recommends pgbouncer"),
        ("systemd", "--no-install-recommends systemd"),
    ],
)
def test_root_installs_what_is_missing(tmp_path: Path, target: str, installs: str) -> None:
    code, said, asked = _looked_for(target, tmp_path, "apt-get", user=0)
    assert (code, asked) == (0, ["update -qq", f"install -y -qq {installs}"])
    assert "installing it by apt-get" in said


def test_make_extracts_promtool_without_installing_prometheus(tmp_path: Path) -> None:
    (tmp_path / "venv" / "prometheus").mkdir(parents=True)
    code, said, asked = _looked_for("promtool", tmp_path, "apt-get", "mkdir", "dpkg", "mv", "rm", user=0)
    assert (code, "taking it out of the package prometheus" in said) == (0, True)
    update, _, download, *unpack = asked
    assert (update, download.split()[0], download.split()[-1]) == ("update -qq", "download", "prometheus")
    assert unpack == ["-x prometheus_*.deb .", "usr/bin/promtool ../bin", "-rf ../prometheus"]


@pytest.mark.parametrize(("programs", "user"), [(["apt-get"], 1000), ([], 0)])
@pytest.mark.parametrize(
    ("target", "fails"),
    [
        ("browser", "tests/demo/test_browser.py"),
        ("pooler", "tests/drivers/postgres/test_pgbouncer.py"),
        ("promtool", "tests/kit/test_alerts.py"),
        ("systemd", "tests/kit/test_running.py"),
    ],
)
def test_make_prints_a_hint_if_a_tool_cannot_be_installed(
    tmp_path: Path, programs: list[str], user: int, target: str, fails: str
) -> None:
    code, said, asked = _looked_for(target, tmp_path, *programs, user=user)
    assert (code, asked) == (0, [])
    assert f"{fails} will fail: install it" in said


def test_make_run_passes_its_arguments_to_the_demo(tmp_path: Path) -> None:
    done = _make("-n", "run", "ARGS=--port 8123", f"PYTHON={sys.executable}", f"VENV={tmp_path / 'venv'}")
    assert f"{tmp_path / 'venv'}/bin/oncekey-demo --port 8123\n" in done.stdout


def _ci(tmp_path: Path, make: str) -> tuple[int, list[str]]:
    """Run a copy of .ci/run with a `make` that writes down what it is asked for."""
    (tmp_path / ".ci").mkdir()
    copy = tmp_path / ".ci" / "run"
    shutil.copy(ROOT / ".ci" / "run", copy)
    programs = tmp_path / "programs"
    programs.mkdir()
    asked = tmp_path / "asked"
    _script(programs / "make", f'echo "$PWD $*" >> {asked}', make)
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run([copy], cwd=elsewhere, env=environment, capture_output=True, check=False)
    return done.returncode, asked.read_text().splitlines()


def test_ci_checks_and_tests_from_the_repositorys_root(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    assert _ci(tmp_path, "exit 0") == (0, [f"{root} {step}" for step in ("check", "lowest", "test", "test-more")])


def test_ci_fails_when_a_step_fails(tmp_path: Path) -> None:
    assert _ci(tmp_path, "exit 3") == (3, [f"{tmp_path.resolve()} check"])
