"""The URLs of DynamoDB: a region and a table."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

from oncekey.core.errors import ConfigurationError
from oncekey.databases.address import Address, Kind, pool_size

MANY_CONNECTIONS: Final = 50
"""Where a connection carries one request at a time and costs the server next to nothing."""
_REGION: Final = re.compile(r"[a-z0-9-]{0,30}")
_TABLE: Final = re.compile(r"[A-Za-z0-9_.-]{3,255}")


def read(_: str, rest: str, __: str | None) -> Address:
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
