"""Pages of the documentation as a test reads them: fenced blocks, links, and the anchors of headings."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w-]*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#{1,6} (?P<text>.+)$", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\((?P<target>[^)\s]+)\)")
_CODE = re.compile(r"`[^`\n]*`")
_FILE = re.compile(r"# (?P<name>[\w/]+\.py)\n")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line on which the text begins."""

    language: str
    text: str
    line: int

    @property
    def file(self) -> str | None:
        """The name that a program gives itself in its first line."""
        found = _FILE.match(self.text)
        return found["name"] if found else None

    def save(self, folder: Path, text: str | None = None) -> None:
        """Write the program to its file, or add it to that file if its second line is `# at the end`."""
        assert self.file is not None
        path = folder / self.file
        before = path.read_text() + "\n" if self.text.splitlines()[1:2] == ["# at the end"] else ""
        path.write_text(before + (self.text if text is None else text))


@dataclass(frozen=True)
class Page:
    """A Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        """Its path in the repository."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def text(self) -> str:
        """All of it."""
        return self.path.read_text(encoding="utf-8")

    def blocks(self, *languages: str) -> list[Block]:
        """The fenced blocks, of some languages only if they are named."""
        return [block for block in self._blocks() if not languages or block.language in languages]

    def program(self, file: str) -> str:
        """The text of the one program that names itself `file`."""
        (text,) = (block.text for block in self.blocks("python") if block.file == file)
        return text

    def section(self, heading: str) -> list[Block]:
        """The fenced blocks between a second-level heading and the next one."""
        lines = [number for number, line in enumerate(self.text.splitlines(), 1) if line.startswith("## ")]
        start = next(number for number in lines if self.text.splitlines()[number - 1] == f"## {heading}")
        end = next((number for number in lines if number > start), float("inf"))
        return [block for block in self._blocks() if start < block.line < end]

    def links(self) -> list[str]:
        """Where it links to, other sites included."""
        return [found["target"] for found in _LINK.finditer(_CODE.sub("`", self._prose()))]

    def anchors(self) -> set[str]:
        """The fragments by which its headings can be linked to, as GitHub makes them."""
        return {_anchor(found["text"]) for found in _HEADING.finditer(self._prose())}

    def _blocks(self) -> Iterator[Block]:
        text = self.text
        for found in _FENCE.finditer(text):
            indent = len(found["indent"])
            lines = [line[indent:] for line in found["text"].splitlines(keepends=True)]
            yield Block(found["language"], "".join(lines), text.count("\n", 0, found.start()) + 2)

    def _prose(self) -> str:
        return _FENCE.sub("", self.text)


def generator() -> ModuleType:
    """Import docs/generator, which is no part of any installed package."""
    name, folder = "docs_generator", ROOT / "docs" / "generator"
    if name not in sys.modules:
        places = [str(folder)]
        spec = importlib.util.spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=places)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def load(text: str, file: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a program of a page from a file in a folder.

    It stays in `sys.modules` until the test ends: a framework looks up the names of its annotations there.
    """
    path = folder / file
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"documented_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def pages(*patterns: str) -> list[Page]:
    """The pages that match a pattern, in order; a pattern that matches nothing is a mistake of the test."""
    found = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    assert found, f"no page matches {patterns}"
    return [Page(path) for path in found]


def _anchor(heading: str) -> str:
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
