"""What README has to name and to say; `tests/meta/test_distributions.py` runs its "Quick start" from the wheels."""

from __future__ import annotations

import shlex

from harness.pages import ROOT, Page

SECTION = "Quick start"
LINES = 150
README = Page(ROOT / "README.md")


def _installed() -> list[str]:
    """The words of README's own `pip install` line, behind `pip install`."""
    (line,) = (
        line for block in README.section(SECTION) for line in block.text.splitlines() if line.startswith("pip install")
    )
    return shlex.split(line)[2:]


def test_quick_start_shows_database_table_authentication_and_server() -> None:
    blocks = README.section(SECTION)
    assert any("\ncreatedb shop\n" in block.text for block in blocks if block.language == "sh")
    assert any("CREATE TABLE orders" in block.text for block in blocks if block.language == "sql")
    assert any("def authenticate" in block.text for block in blocks if block.language == "python")
    assert any(block.text.startswith("uvicorn shop:app") for block in blocks if block.language == "sh")
    assert "uvicorn" in _installed(), "the server is named where it is installed"


def test_readme_is_short_with_its_sections_in_order() -> None:
    lines = README.text.splitlines()
    assert len(lines) <= LINES
    assert [line.removeprefix("## ") for line in lines if line.startswith("## ")] == [
        "Quick start",
        "The four effects",
        "What it promises",
        "What it costs",
        "The demo",
        "Where to go next",
    ]
    assert "resumed_as" not in README.text, "a LOCAL route never needs it"
    assert "unless you set [`principal`]" in README.text.replace("\n", " ")
    assert 'Policy(bind_to="principal")' in README.text
