"""Reads `queries.sql`: titled blocks, one statement each."""

from __future__ import annotations

import re
from importlib.resources import files

_TITLE = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


def load(package: str) -> dict[str, str]:
    """The statements of a store's package, by their names."""
    text = files(package).joinpath("queries.sql").read_text("utf-8")
    _, *parts = _TITLE.split(text)
    return {name: body.strip().rstrip(";") for name, body in zip(parts[::2], parts[1::2], strict=True)}
