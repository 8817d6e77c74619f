"""Reads `queries.sql` and its like: titled blocks of SQL."""

from __future__ import annotations

import re
from importlib.resources import files

_TITLE = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


def load(package: str, file: str = "queries.sql") -> dict[str, str]:
    """The statements of a store's package, by their names."""
    text = files(package).joinpath(file).read_text("utf-8")
    _, *parts = _TITLE.split(text)
    return {name: body.strip().rstrip(";") for name, body in zip(parts[::2], parts[1::2], strict=True)}
