"""The URLs of stores, understood: which store is meant, where it is, and by which driver it is to be reached.

Nothing is opened here, and nothing is imported that may be missing. Each kind of store has one function that reads what
follows its scheme; `oncekey.wire` has the table that says which scheme is whose. A sentence about a mistake never
repeats what may be a password.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from oncekey.core.errors import ConfigurationError
from oncekey.drivers.postgres.address import objection

POOL_SIZE: Final = 10


class Kind(StrEnum):
    """The stores there are."""

    MEMORY = "memory"
    SQLITE = "sqlite"
    POSTGRES = "postgres"
    MARIADB = "mariadb"
    REDIS = "redis"
    DYNAMODB = "dynamodb"


@dataclass(frozen=True, slots=True)
class Address:
    """A store's URL, understood. `place` is the file or the DSN; `package` the driver that was asked for."""

    kind: Kind
    place: str = ""
    package: str | None = None
    pool_size: int = POOL_SIZE
    options: tuple[tuple[str, str], ...] = ()
    """What else the URL says, for the store's driver."""


def postgres(_: str, rest: str, package: str | None) -> Address:
    """`postgresql://user@host/database?pool_size=10`, and libpq's own options."""
    # What is not ours is passed on letter by letter: no library for URLs reads them as PostgreSQL does.
    place, mark, query = rest.partition("?")
    options = query.split("&") if mark else []
    sizes = [option.partition("=")[2] for option in options if option.startswith("pool_size=")]
    kept = "&".join(option for option in options if not option.startswith("pool_size="))
    dsn = f"postgresql:{place}?{kept}" if kept else f"postgresql:{place}"
    wrong = objection(dsn)
    if wrong is not None:
        raise ConfigurationError(wrong)
    return Address(Kind.POSTGRES, dsn, package, pool_size(sizes[-1]) if sizes else POOL_SIZE)


def pool_size(text: str) -> int:
    """How many connections `pool_size=` allows."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ConfigurationError(f"pool_size={text} is no number of connections: pool_size=10 is one")
    return int(text)
