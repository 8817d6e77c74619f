"""README's "Quick start" as a stranger does it: the built wheel, the packages that README names and no others."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from harness.pages import ROOT, Page
from harness.walkthrough import Walkthrough

SECTION = "Quick start"
LINES = 150
README = Page(ROOT / "README.md")
_PIN = re.compile(r"^([\w-]+)(?:\[[\w,-]+\])?(==\S+)( ; [^\\\n]+)? \\$", re.MULTILINE)


def _installed() -> list[str]:
    """The words of README's own `pip install` line, behind `pip install`."""
    (line,) = (
        line for block in README.section(SECTION) for line in block.text.splitlines() if line.startswith("pip install")
    )
    return shlex.split(line)[2:]


def _constraints(folder: Path) -> Path:
    """Our pins without their hashes, so that the same README gives the same environment today and tomorrow."""
    text = (ROOT / "requirements" / "dev.txt").read_text()
    file = folder / "constraints.txt"
    file.write_text("".join(f"{''.join(pin)}\n" for pin in _PIN.findall(text)))
    return file


def _run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def stranger(tmp_path: Path) -> str:
    """The interpreter of an environment with what README's `pip install` line names, from the wheel."""
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path))
    (wheel,) = tmp_path.glob("*.whl")
    wanted = [f"{word} @ {wheel.as_uri()}" if word.startswith("oncekey[") else word for word in _installed()]
    python = str(tmp_path / "venv" / "bin" / "python")
    constraints = ("-c", str(_constraints(tmp_path)))
    uv = shutil.which("uv")
    if uv is not None:
        _run(uv, "venv", "--quiet", "--python", sys.executable, str(tmp_path / "venv"))
        _run(uv, "pip", "install", "--quiet", "--python", python, *constraints, *wanted)
    else:
        _run(sys.executable, "-m", "venv", str(tmp_path / "venv"))
        _run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *constraints, *wanted)
    return python


def test_quick_start_runs_with_only_the_packages_it_names(stranger: str, tmp_path: Path, postgres_dsn: str) -> None:
    assert "site-packages" in _run(stranger, "-I", "-c", "import oncekey; print(oncekey.__file__)")
    folder = tmp_path / "shop"
    folder.mkdir()
    with Walkthrough(README, folder, lambda: postgres_dsn, stranger) as reader:
        reader.walk(SECTION)  # the order is sent twice over a socket, and its second answer is a replay
    with psycopg.connect(postgres_dsn) as connection:
        assert connection.execute("SELECT tenant, product FROM orders").fetchall() == [("acme", "tea")]


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
