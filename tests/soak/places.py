"""A private server of every store, by name, for soaks that run for minutes on each."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from harness.dynamo import Dynalite, Moto
from harness.mariadb import MariadbInstallation, MariadbServer, MysqlInstallation
from harness.postgres import PostgresServer
from harness.postgres_binaries import Installation, installations
from harness.valkeys import Cluster, StoringValkey

Opened: TypeAlias = Callable[[Path], AbstractContextManager[tuple[Any, str]]]
"""Starts a server, in a folder where it has to be in one, and gives it with the URL of an empty store."""
NAME = "soak"
"""Of the database, or of the table."""


@contextmanager
def _sqlite(folder: Path) -> Iterator[tuple[None, str]]:
    yield None, f"sqlite:///{folder / NAME}.db"


def _postgres(installation: Installation) -> Opened:
    @contextmanager
    def opened(_: Path) -> Iterator[tuple[PostgresServer, str]]:
        with PostgresServer(installation) as server:
            yield server, server.create_database(NAME)

    return opened


def _mariadb(kind: type[MariadbInstallation]) -> Opened:
    @contextmanager
    def opened(_: Path) -> Iterator[tuple[MariadbServer, str]]:
        with MariadbServer(kind=kind) as server:
            yield server, server.create_database(NAME)

    return opened


def _redis(kind: type[StoringValkey | Cluster]) -> Opened:
    """Servers that nothing happens to: what a fail-over may lose is another matter, and has tests of its own."""

    @contextmanager
    def opened(_: Path) -> Iterator[tuple[StoringValkey | Cluster, str]]:
        with kind() as server:
            yield server, server.url

    return opened


def _dynamodb(kind: type[Moto | Dynalite]) -> Opened:
    @contextmanager
    def opened(_: Path) -> Iterator[tuple[Moto | Dynalite, str]]:
        with kind() as server:
            yield server, server.url(NAME)

    return opened


def places() -> Mapping[str, Opened]:
    """All of them but memory, which is one process; of PostgreSQL every version that is here."""
    return {
        "sqlite": _sqlite,
        **{f"postgresql-{one.major}": _postgres(one) for one in installations()},
        **{kind.name: _mariadb(kind) for kind in (MariadbInstallation, MysqlInstallation)},
        "redis": _redis(StoringValkey),
        "redis-cluster": _redis(Cluster),
        "dynamodb-moto": _dynamodb(Moto),
        "dynamodb-dynalite": _dynamodb(Dynalite),
    }


def choosing(parser: argparse.ArgumentParser) -> None:
    """Let the command name some of them."""
    parser.add_argument(
        "--store", action="append", choices=[*places()], help="may be repeated; without it, every store"
    )


def chosen(options: argparse.Namespace) -> Mapping[str, Opened]:
    """Those that the command names, or all."""
    return {name: opened for name, opened in places().items() if not options.store or name in options.store}
