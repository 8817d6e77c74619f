"""Each test is in exactly one of the two suites, and a file that its suite does not need is not imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.each import each
from harness.selection import (
    NOTHING,
    PROGRAMS,
    SERVERS,
    TABLE,
    WHOLE,
    Part,
    Suite,
    fast_tests,
    is_fast,
    is_needless,
    row_of,
)

TESTS = Path(__file__).parent
FILES = sorted(path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py"))

_CONFTEST = """
import sys
sys.path.insert(0, {tests!r})
from harness import selection

def pytest_addoption(parser):
    parser.addoption("--suite", default="all")

def pytest_configure(config):
    config.pluginmanager.register(selection.Selection())
"""
_SPLIT = """
import pytest

@pytest.fixture(params=["sqlite", "mariadb"])
def store(request):
    return request.param

@pytest.fixture
def valkey():
    return "running"

def test_on(store): pass
def test_cached(valkey): pass
"""
_DEFECT = """
import pytest

@pytest.fixture
def valkey():
    return "running"

def test_hidden(request):
    request.getfixturevalue("valkey")
"""


def _run(
    folder: Path, suite: str, environment: dict[str, str] | None = None, **files: str
) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(_CONFTEST.format(tests=str(TESTS)))
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, text in files.items():
        path = folder / "tests" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-v", "--import-mode=importlib", f"--suite={suite}"]
    return subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True, env=environment)


def _passed(done: subprocess.CompletedProcess[str]) -> list[str]:
    return re.findall(r"^tests/(\S+) PASSED", done.stdout, re.MULTILINE)


BROKEN = "raise RuntimeError('imported')\n"


def test_each_test_is_in_exactly_one_suite(tmp_path: Path) -> None:
    files = {
        "core__test_a": "def test_rule(): pass\n",
        "phased__test_b": _SPLIT,
        "new__test_c": "def test_new(): pass\n",
    }
    suites = {suite: _passed(_run(tmp_path, suite, **files)) for suite in Suite}

    assert suites[Suite.FAST] == ["core/test_a.py::test_rule", "phased/test_b.py::test_on[sqlite]"]
    assert suites[Suite.MORE] == [
        "new/test_c.py::test_new",
        "phased/test_b.py::test_on[mariadb]",
        "phased/test_b.py::test_cached",
    ]
    assert sorted(suites[Suite.ALL]) == sorted(suites[Suite.FAST] + suites[Suite.MORE])


@pytest.mark.parametrize(("suite", "left_out"), [("fast", "ended__test_a"), ("more", "core__test_a")])
def test_a_file_of_the_other_suite_is_not_imported(tmp_path: Path, suite: str, left_out: str) -> None:
    done = _run(tmp_path, suite, phased__test_b=_SPLIT, **{left_out: BROKEN})

    assert done.returncode == 0, done.stdout


def test_an_undeclared_server_fails_the_fast_suite(tmp_path: Path) -> None:
    done = _run(tmp_path, "fast", phased__test_b=_DEFECT)

    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "valkey is not in the fast suite: name the test in tests/harness/selection.py" in done.stdout


@pytest.mark.parametrize(("suite", "hidden"), [("fast", True), ("more", False), ("all", False)])
def test_the_fast_suite_hides_external_programs(tmp_path: Path, suite: str, hidden: bool) -> None:
    names = [f"ONCEKEY_TEST_{name}" for name in PROGRAMS]
    found = f"[one for one in {names} if 'fast' in os.environ.get(one, '')]"
    looks = f"import os\n\ndef test_it():\n    assert {found} == {names if hidden else []}\n"
    folder = "new" if suite == "more" else "core"
    environment = {name: value for name, value in os.environ.items() if name not in names}

    done = _run(tmp_path, suite, environment, **{f"{folder}__test_a": looks})

    assert _passed(done) == [f"{folder}/test_a.py::test_it"], done.stdout


@each("row", TABLE)
def test_every_selection_row_matches_a_file(row: tuple[str, Part | None]) -> None:
    assert row in {row_of(path) for path in FILES}, "it names no file, or the row of its files is before it"


@each("path", FILES)
def test_a_file_is_needed_by_a_suite(path: str) -> None:
    assert not (is_needless(path, Suite.FAST) and is_needless(path, Suite.MORE))
    assert not is_needless(path, Suite.ALL)


def test_a_file_without_a_row_is_in_the_second_suite() -> None:
    assert fast_tests("nobody/test_wrote_it_yet.py") is NOTHING
    assert not is_fast("nobody/test_wrote_it_yet.py", "test_it")


@each("server", sorted(SERVERS))
def test_a_test_with_a_server_leaves_the_fast_suite(server: str) -> None:
    assert is_fast("phased/test_course.py", "test_it[asyncpg]")
    assert not is_fast("phased/test_course.py", "test_it[asyncpg]", frozenset({server}))
    assert fast_tests("core/test_keys.py") is WHOLE
