"""The URLs of stores, understood: which store is meant, where it is, and by which driver it is to be reached.

Nothing is opened here, and nothing is imported that may be missing. Each kind of store has one function that reads what
follows its scheme; `oncekey.wire` has the table that says which scheme is whose. A sentence about a mistake never
repeats what may be a password.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final
from urllib.parse import unquote

from oncekey.core.errors import ConfigurationError
from oncekey.drivers.mariadb.address import MariadbAddress
from oncekey.drivers.postgres.address import objection
from oncekey.drivers.redis_address import parse

POOL_SIZE: Final = 10
MANY_CONNECTIONS: Final = 50
"""Where a connection carries one request at a time and costs the server next to nothing."""
_REGION: Final = re.compile(r"[a-z0-9-]{0,30}")
_TABLE: Final = re.compile(r"[A-Za-z0-9_.-]{3,255}")


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


def memory(_: str, rest: str, __: str | None) -> Address:
    """`memory:`, and nothing after it."""
    if rest.strip("/"):
        raise ConfigurationError("memory: has no name and no file: say memory:, without anything after it")
    return Address(Kind.MEMORY)


def sqlite(_: str, rest: str, package: str | None) -> Address:
    """`sqlite:///relative.db` or `sqlite:////absolute.db`."""
    if "?" in rest:
        raise ConfigurationError("a SQLite store takes no options; a question mark in a file's name is %3F")
    path = unquote(rest.removeprefix("///"))
    if not rest.startswith("///") or path in {"", ":memory:"}:
        raise ConfigurationError(
            "a SQLite store is a file: sqlite:///relative.db (three slashes) or sqlite:////absolute.db (four)"
        )
    return Address(Kind.SQLITE, path, package)


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


def redis(scheme: str, rest: str, _: str | None) -> Address:
    """`redis://host:6379/0`, and the forms for clusters and sentinels; the driver reads it once more."""
    url = f"{scheme}:{rest}"
    return Address(Kind.REDIS, url, pool_size=parse(url).pool_size)


def dynamodb(_: str, rest: str, __: str | None) -> Address:
    """`dynamodb://region/table`; without a region, `dynamodb:///table`, the SDK's own settings name it.

    `endpoint=` is for emulators and VPC endpoints. There is no place for credentials: the SDK knows where it has them.
    """
    place, mark, query = rest.partition("?")
    region, slash, table = place.removeprefix("//").partition("/")
    if not place.startswith("//") or not slash or _TABLE.fullmatch(table) is None or _REGION.fullmatch(region) is None:
        raise ConfigurationError(
            "a DynamoDB store is a region and a table, dynamodb://eu-central-1/oncekey; a table's name has 3 to 255 "
            "letters, digits, dots, dashes and underscores, and credentials are the SDK's business"
        )
    options = dict.fromkeys(("endpoint", "pool_size"), "")
    for option in query.split("&") if mark else ():
        name, _, value = option.partition("=")
        if name not in options or not value:
            raise ConfigurationError(
                "a DynamoDB store takes endpoint=http://... and pool_size=50, and no other options"
            )
        options[name] = unquote(value)
    if options["endpoint"] and not options["endpoint"].startswith(("http://", "https://")):
        raise ConfigurationError("endpoint= is an address such as http://127.0.0.1:8000")
    size = pool_size(options["pool_size"]) if options["pool_size"] else MANY_CONNECTIONS
    return Address(Kind.DYNAMODB, table, None, size, (("region", region), ("endpoint", options["endpoint"])))


def mariadb(scheme: str, rest: str, package: str | None) -> Address:
    """`mariadb://user@host/database?pool_size=10`; `mysql://` is the same."""
    place, mark, query = rest.partition("?")
    options = query.split("&") if mark else []
    sizes = [option.partition("=")[2] for option in options if option.startswith("pool_size=")]
    kept = "&".join(option for option in options if not option.startswith("pool_size="))
    url = f"{scheme}:{place}?{kept}" if kept else f"{scheme}:{place}"
    MariadbAddress.parse(url)
    return Address(Kind.MARIADB, url, package, pool_size(sizes[-1]) if sizes else POOL_SIZE)


def pool_size(text: str) -> int:
    """How many connections `pool_size=` allows."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ConfigurationError(f"pool_size={text} is no number of connections: pool_size=10 is one")
    return int(text)
