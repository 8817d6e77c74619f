"""Wrong use is found by the type checker, and right use is not."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest
from mypy import api

from harness.pages import Page

ROOT = Path(__file__).resolve().parents[2]
CODE = Path(__file__).with_name("api.py")


def expected() -> dict[int, str]:
    """The lines that have to be refused, with their codes."""
    marked = re.compile(r"  # error: ([a-z-]+)$")
    lines = enumerate(CODE.read_text().splitlines(), start=1)
    return {number: found[1] for number, line in lines if (found := marked.search(line))}


def found() -> dict[int, set[str]]:
    """The lines that mypy refuses, with all its codes."""
    options = ["--strict", "--no-error-summary", "--no-pretty", "--show-error-codes"]
    places = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    said, complaints, _ = api.run([*options, *places, str(CODE)])
    assert complaints == ""
    errors: defaultdict[int, set[str]] = defaultdict(set)
    for line in said.splitlines():
        if error := re.search(r"api\.py:(\d+): error: .*\[([a-z-]+)\]$", line):
            errors[int(error[1])].add(error[2])
        else:
            assert ": note: " in line, line
    return errors


def test_the_type_checker_refuses_wrong_use_and_nothing_else() -> None:
    # apishape 5: wrong options, a bare @once.protect and a wrong connection are errors before anything runs
    wanted, errors = expected(), found()
    assert set(errors) == set(wanted)
    assert {line: code for line, code in wanted.items() if code not in errors[line]} == {}
    assert len(wanted) > 10


@pytest.mark.parametrize(
    ("page", "files"),
    [("README.md", {"shop.py"}), ("docs/howto/fastapi.md", {"shop.py", "payments.py", "blocking.py"})],
)
def test_the_first_programs_pass_the_type_checker(
    page: str, files: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = {one.file: one.text for one in Page(ROOT / page).blocks("python") if one.file is not None}
    assert set(programs) == files
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    options = ["--strict", "--no-error-summary", "--cache-dir", str(ROOT / ".mypy_cache")]
    said, complaints, code = api.run([*options, *programs])
    assert (said, complaints, code) == ("", "", 0)
