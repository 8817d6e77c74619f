"""The options of `oncekey check` from a TOML file, so that a pipeline needs one short command."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_OWN: Final = frozenset({"config", "help"})


def configure(context: typer.Context, path: Path | None) -> Path | None:
    """Take the file's values as defaults: what stands on the command line is stronger."""
    # Help and completion ask for the value without running the command.
    if path is None or context.resilient_parsing:
        return path
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} is no TOML: {error}") from None
    context.default_map = {**(context.default_map or {}), **_values(context, given)}
    return path


def _values(context: typer.Context, given: Mapping[str, object]) -> dict[str, object]:
    """The values by the names of the command's parameters."""
    names: dict[str, tuple[str, bool]] = {}
    for parameter in context.command.params:
        if parameter.name not in _OWN:
            longest = max(parameter.opts, key=len).lstrip("-")
            names[longest] = parameter.name, bool(getattr(parameter, "multiple", False))
    values: dict[str, object] = {}
    for option, value in given.items():
        if option not in names:
            raise typer.BadParameter(f"there is no option {option!r}; its options are {', '.join(sorted(names))}")
        name, multiple = names[option]
        if isinstance(value, dict) or (isinstance(value, list) and not multiple):
            raise typer.BadParameter(f"{option} takes one value")
        values[name] = [_filled(one) for one in value] if isinstance(value, list) else _filled(value)
        if multiple and not isinstance(value, list):
            values[name] = [_filled(value)]
    return values


def _filled(value: object) -> object:
    """The value with `${NAME}` taken from the environment: credentials have no place in a file."""
    if not isinstance(value, str):
        return value

    def taken(met: re.Match[str]) -> str:
        if met[1] not in os.environ:
            raise typer.BadParameter(f"the environment has no {met[1]}")
        return os.environ[met[1]]

    return _VARIABLE.sub(taken, value)
