"""The guide to writing a store shows the store that ships as an example, and its test runs and passes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from harness.pages import ROOT, Page

PAGE = Page(ROOT / "docs/howto/write-a-store.md")
EXAMPLE = ROOT / "examples/sqlite_cells.py"


def test_what_the_page_shows_is_in_the_example() -> None:
    shown = [_unindented(block.text) for block in PAGE.blocks("sql")]
    assert len(shown) == 2
    for text in shown:
        assert text in _unindented(EXAMPLE.read_text(encoding="utf-8"))


def _unindented(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def test_the_example_is_small() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 150


def test_the_contract_of_the_page_passes(tmp_path: Path) -> None:
    """As a reader runs it: the two files in a folder, and pytest."""
    (block,) = [block for block in PAGE.blocks("python") if block.file == "test_cells.py"]
    (tmp_path / "test_cells.py").write_text(block.text, encoding="utf-8")
    shutil.copy(EXAMPLE, tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    assert " passed" in ran.stdout
