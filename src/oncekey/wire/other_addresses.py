"""The URLs of the stores besides PostgreSQL: which one is meant, where it is, and by which driver it is reached."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

from oncekey.core.errors import ConfigurationError
from oncekey.databases.mariadb import address as mariadb_address
from oncekey.databases.redis import address as redis_address
from oncekey.wire import POOL_SIZE, Address, Kind, pool_size

MANY_CONNECTIONS: Final = 50
"""Where a connection carries one request at a time and costs the server next to nothing."""
_REGION: Final = re.compile(r"[a-z0-9-]{0,30}")
_TABLE: Final = re.compile(r"[A-Za-z0-9_.-]{3,255}")


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


def redis(scheme: str, rest: str, _: str | None) -> Address:
    """`redis://host:6379/0`, and the forms for clusters and sentinels; the driver reads it once more."""
    url = f"{scheme}:{rest}"
    return Address(Kind.REDIS, url, pool_size=redis_address.parse(url).pool_size)


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
    mariadb_address.MariadbAddress.parse(url)
    return Address(Kind.MARIADB, url, package, pool_size(sizes[-1]) if sizes else POOL_SIZE)
