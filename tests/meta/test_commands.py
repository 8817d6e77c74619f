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


def test_help_is_what_make_alone_says() -> None:
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
def test_an_unfit_python_gets_one_clear_line(tmp_path: Path, pretence: str, sentence: str) -> None:
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


def test_run_hands_its_arguments_to_the_demo(tmp_path: Path) -> None:
    done = _make("-n", "run", "ARGS=--port 8123", f"PYTHON={sys.executable}", f"VENV={tmp_path / 'venv'}")
    assert f"{tmp_path / 'venv'}/bin/oncekey demo --port 8123\n" in done.stdout


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
    assert _ci(tmp_path, "exit 0") == (0, [f"{root} check", f"{root} test"])


def test_ci_fails_when_a_step_fails(tmp_path: Path) -> None:
    assert _ci(tmp_path, "exit 3") == (3, [f"{tmp_path.resolve()} check"])
