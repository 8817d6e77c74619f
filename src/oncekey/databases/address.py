"""The URLs of stores, understood: which store is meant, where it is, and by which driver it is reached.

Nothing is opened here, and nothing is imported that may be missing. `read` in the `address` module of each database
reads what follows a scheme; `oncekey.wire` has the table of schemes. An error about a URL never repeats a password.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from oncekey.core.errors import ConfigurationError

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


def pool_size(text: str) -> int:
    """How many connections `pool_size=` allows."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ConfigurationError(f"pool_size={text} is no number of connections: pool_size=10 is one")
    return int(text)
