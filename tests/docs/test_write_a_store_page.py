"""The guide to writing a store shows the store that ships as an example; the walk of the page runs its test."""

from __future__ import annotations

from harness.pages import ROOT, Page

PAGE = Page(ROOT / "docs/howto/write-a-store.md")
EXAMPLE = ROOT / "examples/sqlite_cells.py"


def test_what_the_page_shows_is_in_the_example() -> None:
    shown = [_unindented(block.text) for block in PAGE.blocks("text")]
    assert len(shown) == 2
    for text in shown:
        assert text in _unindented(EXAMPLE.read_text(encoding="utf-8"))


def _unindented(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def test_the_example_is_small() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 150
