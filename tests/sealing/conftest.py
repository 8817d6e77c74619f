"""A real database of each kind, and the command."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from oncekey import cli
from sealing.looking import VARIABLE


@pytest.fixture(params=("sqlite", "postgres", "mariadb"))
def url(request, tmp_path):
    """The URL of an empty one. Content is sealed before a store sees it, and MySQL gets the statements of MariaDB."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/shop.db"
    return request.getfixturevalue("postgres_dsn" if request.param == "postgres" else f"{request.param}_url")


@pytest.fixture
def oncekey(monkeypatch, capsys):
    """The command, with these keys: its exit code, what it said, and what it complained of."""

    def run(*words: str, keys: tuple[str, ...] = ()) -> tuple[Any, str, str]:
        monkeypatch.setenv("ONCEKEY_SEAL_KEYS", ",".join(VARIABLE[name] for name in keys))
        monkeypatch.setattr(sys, "argv", ["oncekey", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return run
