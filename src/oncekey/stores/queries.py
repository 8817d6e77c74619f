"""Reads `queries.sql` and its like: titled blocks of SQL."""

from __future__ import annotations

import re
from importlib.resources import files

_TITLE = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


def load(package: str, *names: str) -> dict[str, str]:
    """The statements of a store's package, by their names; `queries.sql` if no file is named."""
    statements: dict[str, str] = {}
    for name in names or ("queries.sql",):
        text = files(package).joinpath(name).read_text("utf-8")
        _, *parts = _TITLE.split(text)
        statements |= {title: body.strip().rstrip(";") for title, body in zip(parts[::2], parts[1::2], strict=True)}
    return statements
