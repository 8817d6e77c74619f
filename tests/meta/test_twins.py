"""Generated drivers are what their generator writes, and the generator does what it says."""

from __future__ import annotations

import pytest
from tools.twins import DRIVERS, TWINS, Twin, generated, main, twin_of

SOURCE = '''"""Waits for asyncio."""

import asyncio

from oncekey.databases.slots import AsyncSlots


class AsyncThing:
    """One of asyncio's."""

    @property
    def full(self):  # asyncio only
        return True

    async def take(self, slots: AsyncSlots) -> None:
        async with asyncio.Lock():  # `await` in a comment, and "await" in a text, stay
            await slots.acquire("await", [await self.take(one) async for one in aiter(slots)])
'''

BLOCKING = '''# Generated from thing.py by `python -m tools.twins`: edit that one.
"""Waits for threads."""

import threading

from oncekey.databases.slots import Slots


class Thing:
    """One of asyncio's."""


    def take(self, slots: Slots) -> None:
        with threading.Lock():  # `await` in a comment, and "await" in a text, stay
            slots.acquire("await", [self.take(one) for one in iter(slots)])
'''


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.target)
def test_every_generated_driver_is_up_to_date(twin: Twin) -> None:
    assert (DRIVERS / twin.target).read_text("utf-8") == twin_of(twin), "run `python -m tools.twins`"


def test_a_twin_is_the_same_code_without_await() -> None:
    twin = Twin("x/thing.py", "x/other.py", phrases={"Waits for asyncio": "Waits for threads"})
    assert generated(twin, SOURCE) == BLOCKING


def test_generator_rejects_a_phrase_missing_in_the_source() -> None:
    with pytest.raises(ValueError, match="no passage 'nowhere'"):
        generated(Twin("x/thing.py", "x/other.py", phrases={"nowhere": "there"}), SOURCE)


def test_generator_check_names_an_outdated_driver(tmp_path, monkeypatch, capsys) -> None:
    import tools.twins as module

    (tmp_path / "thing.py").write_text(SOURCE)
    (tmp_path / "other.py").write_text("old")
    monkeypatch.setattr(module, "DRIVERS", tmp_path)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "TWINS", (Twin("thing.py", "other.py"),))
    assert main(["--check"]) == 1
    assert "other.py is out of date" in capsys.readouterr().out
    assert (tmp_path / "other.py").read_text() == "old"
    assert main([]) == 0
    assert main(["--check"]) == 0
    assert "class Thing:" in (tmp_path / "other.py").read_text()
