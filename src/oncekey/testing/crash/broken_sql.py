"""Stores that say something else: statements of a real store with one piece taken out or replaced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from oncekey.stores.queries import load
from oncekey.stores.sqlite import SqliteStore
from oncekey.wire import Kind

if TYPE_CHECKING:
    from oncekey.engine.shell import AsyncEngine


@dataclass(frozen=True, slots=True)
class Breaking:
    """In the named statements (all, if none is named) `piece` is replaced by `instead`, a text or a block's name.

    Without a piece the block of the statement's own name stands for the whole of it.
    """

    statements: tuple[str, ...]
    piece: Mapping[Kind, str]
    instead: str = ""


def amended(engine: AsyncEngine, *breakings: Breaking) -> None:
    """Break the store of an engine that nobody else uses."""
    kind = Kind.SQLITE if isinstance(engine.store, SqliteStore) else Kind.POSTGRES
    statements = cast("Any", engine.store)._statements  # noqa: SLF001  (that is what a mutant is)
    commands: dict[str, str] = dict(statements._commands)  # noqa: SLF001
    for breaking in breakings:
        names = [name for name in breaking.statements or tuple(commands) if name in commands]
        changed = {name: _broken(commands[name], name, breaking, kind) for name in names}
        if changed == {name: commands[name] for name in names}:
            raise AssertionError(f"nothing was broken in {', '.join(names)}: the mutant is out of date")
        commands |= changed
    statements._commands = commands  # noqa: SLF001


def _broken(command: str, name: str, breaking: Breaking, kind: Kind) -> str:
    blocks = _blocks()
    if not breaking.piece:
        return blocks[name]
    instead = blocks.get(breaking.instead) or blocks.get(f"{breaking.instead}_{kind}") or breaking.instead
    return command.replace(breaking.piece[kind], instead)


@cache
def _blocks() -> dict[str, str]:
    return load("oncekey.testing.crash", "broken.sql")
