"""A failed test is run once more, alone: what passes then is reported, and what fails again still fails the run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness import flaky

_CONFTEST = """
import sys
sys.path.insert(0, {tests!r})
from harness import flaky

def pytest_configure(config):
    config.pluginmanager.register(flaky.Flaky())
"""
_SECOND_TIME = """
from pathlib import Path

def test_{name}():
    trace = Path(__file__).with_suffix(".ran")
    ran = trace.exists()
    trace.touch()
    assert ran, "too early"
"""


def _run(folder: Path, *modules: str, workers: int = 0) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(_CONFTEST.format(tests=str(Path(__file__).parent)))
    (folder / "pytest.ini").write_text("[pytest]\n")
    for module in modules:
        path = folder / module
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_SECOND_TIME.format(name=path.stem) if "second" in module else "def test_it():\n    assert 0\n")
    command = [sys.executable, "-m", "pytest", "-n", str(workers), "--import-mode=importlib", "."]
    return subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_test_that_passes_when_repeated_is_reported_as_flaky(tmp_path: Path, workers: int) -> None:
    done = _run(tmp_path, "tests/cli/test_second.py", workers=workers)
    assert done.returncode == 0, done.stdout
    assert "1 flaky tests: they passed when run again, alone" in done.stdout
    assert "too early" in done.stdout
    assert "failed" not in done.stdout.splitlines()[-1]


def test_a_test_that_fails_again_fails_the_run(tmp_path: Path) -> None:
    done = _run(tmp_path, "tests/cli/test_broken.py", "tests/cli/test_second.py")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "1 failed, 1 flaky" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("folder", flaky.NEVER)
def test_tests_in_excluded_folders_are_not_repeated(tmp_path: Path, folder: str) -> None:
    done = _run(tmp_path, f"{folder}test_second.py")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "flaky" not in done.stdout


def test_more_than_three_flaky_tests_fail_the_run(tmp_path: Path) -> None:
    done = _run(tmp_path, *(f"tests/cli/test_second_{number}.py" for number in range(flaky.MOST + 1)))
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "4 flaky tests: more than 3 fail the run" in done.stdout
