"""The guides to writing a store and a skin show what ships as an example; other tests run the examples."""

from __future__ import annotations

import pytest

from harness.pages import ROOT, Page

PAGES = {
    "write-a-store": ("sqlite_cells", 2, 150),
    "write-a-framework": ("small_framework", 4, 250),
}
"""A guide, its example, how many pieces of it the guide shows, and how long it may be."""


@pytest.mark.parametrize("name", PAGES)
def test_code_shown_on_the_page_is_in_the_example(name: str) -> None:
    example, pieces, _ = PAGES[name]
    shown = [_unindented(block.text) for block in Page(ROOT / f"docs/howto/{name}.md").blocks("text")]
    assert len(shown) == pieces
    for text in shown:
        assert text in _unindented((ROOT / f"examples/{example}.py").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PAGES)
def test_example_is_shorter_than_its_limit(name: str) -> None:
    example, _, longest = PAGES[name]
    assert len((ROOT / f"examples/{example}.py").read_text(encoding="utf-8").splitlines()) < longest


def _unindented(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())
