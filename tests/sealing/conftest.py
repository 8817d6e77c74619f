"""A real database of each kind, and the command."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from harness.valkeys import StoringValkey
from oncekey import cli
from sealing.looking import VARIABLE


@pytest.fixture(scope="module")
def valkey() -> Iterator[StoringValkey]:
    with StoringValkey() as server:
        yield server


@pytest.fixture(params=("sqlite", "asyncpg", "psycopg", "mariadb", "redis", "dynamodb", "memory"))
def any_url(request, tmp_path):
    """The URL of an empty store of every kind."""
    match request.param:
        case "sqlite":
            return f"sqlite:///{tmp_path}/keys.db"
        case "asyncpg" | "psycopg":
            dsn = request.getfixturevalue("postgres_dsn")
            return dsn.replace("postgresql://", f"postgresql+{request.param}://")
        case "redis":
            server = request.getfixturevalue("valkey")
            server.say("FLUSHALL")
            return server.url
        case "dynamodb":
            server = request.getfixturevalue("dynalite")
            return server.url(request.getfixturevalue("dynamo_table")(server))
        case "mariadb":
            return request.getfixturevalue("mariadb_url")
    return "memory:"


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
