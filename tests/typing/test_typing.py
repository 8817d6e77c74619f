"""Wrong use is found by the type checker, and right use is not."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
from mypy import api

from harness.pages import Block, Page, pages

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


# The programs of the documentation.


CACHE = ROOT / ".mypy_cache" / "pages"
"""Their own: with the options of `pyproject.toml`, every module would be checked anew by each of the two."""

DJANGO = Page(ROOT / "docs/howto/django.md")
PROJECT = "shop/"
"""The folder of its project; programs of other pages in this folder belong to that project."""
SETTINGS = """\
DATABASES: dict[str, dict[str, object]] = {}
INSTALLED_APPS: list[str] = []
MIDDLEWARE: list[str] = []
"""
"""The settings of `startproject` that the guide changes."""

UNTYPED = re.compile(r"^(?:from|import) (?:celery|django|rest_framework)\b", re.MULTILINE)
"""A program that uses a package without types."""
LENIENT = """
# mypy: allow-subclassing-any, disable-error-code="import-untyped, untyped-decorator"
"""
"""What such a program cannot avoid; it is added at the end, so that the lines keep their numbers."""


def programs(page: Page) -> list[Block]:
    """The programs of a page that have a file name."""
    return [block for block in page.blocks("python") if block.file is not None]


PAGES = [page for page in pages("README.md", "docs/**/*.md") if programs(page)]


def in_project(block: Block) -> bool:
    """Whether a program is part of the Django project."""
    return block.file is not None and block.file.startswith(PROJECT)


def refused(blocks: Sequence[Block], folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What mypy prints about the programs of one folder, which may import the examples."""
    names = sorted({block.file for block in blocks if block.file is not None})
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    if f"{PROJECT}settings.py" in names:
        (folder / PROJECT / "settings.py").write_text(SETTINGS)
    for block in blocks:
        block.save(folder, block.text + LENIENT if UNTYPED.search(block.text) else None)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MYPYPATH", str(ROOT / "examples"))
    options = ["--strict", "--no-error-summary", "--explicit-package-bases", "--cache-dir", str(CACHE)]
    said, complaints, _ = api.run([*options, *names])
    return said + complaints


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_programs_of_the_documentation_pass_the_type_checker(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [block for block in programs(page) if not in_project(block)]
    project = [block for block in programs(page) if in_project(block)]
    if alone:
        assert refused(alone, tmp_path / "alone", monkeypatch) == ""
    if project:
        guide = [] if page == DJANGO else programs(DJANGO)
        assert refused([*guide, *project], tmp_path / "project", monkeypatch) == ""


def test_every_program_of_a_page_is_checked() -> None:
    checked = {page.name: {block.file for block in programs(page)} for page in PAGES}
    assert checked["README.md"] == {"shop.py"}
    assert checked["docs/howto/fastapi.md"] == {"shop.py", "payments.py", "blocking.py"}
