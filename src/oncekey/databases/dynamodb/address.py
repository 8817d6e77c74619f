"""The URLs of DynamoDB: a region and a table."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

from oncekey.core.errors import ConfigurationError
from oncekey.databases.address import Address, Kind, pool_size

MANY_CONNECTIONS: Final = 50
"""The default of `pool_size=`: each connection carries one request at a time and costs the server very little."""
_REGION: Final = re.compile(r"[a-z0-9-]{0,30}")
_TABLE: Final = re.compile(r"[A-Za-z0-9_.-]{3,255}")


def read(_: str, rest: str, __: str | None) -> Address:
    """`dynamodb://region/table`; without a region (`dynamodb:///table`), the SDK's own settings apply.

    `endpoint=` is for emulators and VPC endpoints. The URL has no credentials: the SDK finds them.
    """
    place, mark, query = rest.partition("?")
    region, slash, table = place.removeprefix("//").partition("/")
    if not place.startswith("//") or not slash or _TABLE.fullmatch(table) is None or _REGION.fullmatch(region) is None:
        raise ConfigurationError(
            "a DynamoDB URL has a region and a table, dynamodb://eu-central-1/oncekey; a table name has 3 to 255 "
            "letters, digits, dots, dashes and underscores; the SDK finds the credentials"
        )
    options = dict.fromkeys(("endpoint", "pool_size"), "")
    for option in query.split("&") if mark else ():
        name, _, value = option.partition("=")
        if name not in options or not value:
            raise ConfigurationError("a DynamoDB URL takes endpoint=http://... and pool_size=50, and no other options")
        options[name] = unquote(value)
    if options["endpoint"] and not options["endpoint"].startswith(("http://", "https://")):
        raise ConfigurationError("endpoint= is a URL such as http://127.0.0.1:8000")
    size = pool_size(options["pool_size"]) if options["pool_size"] else MANY_CONNECTIONS
    return Address(Kind.DYNAMODB, table, None, size, (("region", region), ("endpoint", options["endpoint"])))
