"""The URLs of SQLite, which name a file."""

from __future__ import annotations

from urllib.parse import unquote

from oncekey.core.errors import ConfigurationError
from oncekey.databases.address import Address, Kind


def read(_: str, rest: str, package: str | None) -> Address:
    """`sqlite:///relative.db` or `sqlite:////absolute.db`."""
    if "?" in rest:
        raise ConfigurationError("a SQLite store takes no options; a question mark in a file's name is %3F")
    path = unquote(rest.removeprefix("///"))
    if not rest.startswith("///") or path in {"", ":memory:"}:
        raise ConfigurationError(
            "a SQLite store is a file: sqlite:///relative.db (three slashes) or sqlite:////absolute.db (four)"
        )
    return Address(Kind.SQLITE, path, package)
