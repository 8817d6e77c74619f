"""The parsed URL of a store: the kind of store, its place, and the driver.

Nothing is opened here, and no optional package is imported. `read` in the `address` module of each database parses the
part after the scheme; `oncekey.wire` has the table of schemes. An error about a URL never repeats a password.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from oncekey.core.errors import ConfigurationError

POOL_SIZE: Final = 10


class Kind(StrEnum):
    """The kinds of stores."""

    MEMORY = "memory"
    SQLITE = "sqlite"
    POSTGRES = "postgres"
    MARIADB = "mariadb"
    REDIS = "redis"
    DYNAMODB = "dynamodb"


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL. `place` is the file or the DSN; `package` the driver that the URL selects."""

    kind: Kind
    place: str = ""
    package: str | None = None
    pool_size: int = POOL_SIZE
    options: tuple[tuple[str, str], ...] = ()
    """Other options in the URL, for the store's driver."""


def pool_size(text: str) -> int:
    """The number of connections in `pool_size=`."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ConfigurationError(f"pool_size={text} is not a number of connections: use pool_size=10, for example")
    return int(text)
