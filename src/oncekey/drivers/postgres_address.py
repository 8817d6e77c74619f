"""The address of a PostgreSQL server, with what oncekey reads from it and the libraries do not know.

`?pgbouncer=1` says that a pooler stands in between that lends a server connection per transaction: then nothing
is prepared, because the statement would be prepared on a connection that is somebody else's next time.
`?pgbouncer=0` promises that there is none: then every driver prepares its statements, which makes them cheaper.

What is wrong with an address is said in one sentence of our own. It never repeats any part of the address: where a
password holds a character that should have been escaped, any part of it may be a part of the password.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import unquote

from oncekey.core.errors import ConfigurationError

_POOLER: Final = "pgbouncer="
_YES: Final = frozenset({"1", "true", "yes", "on"})
_NO: Final = frozenset({"0", "false", "no", "off"})

_HINT: Final = (
    "write postgresql://user:password@host:5432/database, with %40 for @, %2F for / and %25 for % in a password"
)
_STRAY_PERCENT: Final = re.compile(r"%(?![0-9a-fA-F]{2})")
_PORTS: Final = range(1, 65536)


@dataclass(frozen=True, slots=True)
class PostgresAddress:
    """An address as a library takes it, and whether a pooler is behind it: `None` if it does not say."""

    dsn: str
    pooler: bool | None

    @classmethod
    def parse(cls, dsn: str) -> Self:
        """Take our own word out of an address and leave every other letter as it is."""
        if "://" not in dsn:
            return cls(dsn, pooler=None)
        wrong = objection(dsn)
        if wrong is not None:
            raise ConfigurationError(wrong)
        place, mark, query = dsn.partition("?")
        options = query.split("&") if mark else []
        ours = [option.removeprefix(_POOLER).lower() for option in options if option.startswith(_POOLER)]
        if not ours:
            return cls(dsn, pooler=None)
        if ours[-1] not in _YES | _NO:
            raise ConfigurationError(f"{_POOLER}{ours[-1]} in the address of PostgreSQL must be 1 or 0")
        kept = "&".join(option for option in options if not option.startswith(_POOLER))
        return cls(f"{place}?{kept}" if kept else place, pooler=ours[-1] in _YES)


def objection(url: str) -> str | None:
    """What is wrong with a URL of PostgreSQL, as far as that can be seen without asking a server. None: nothing."""
    if not url.partition(":")[2].startswith("//"):
        return f"the address of PostgreSQL lacks its two slashes: {_HINT}"
    if _STRAY_PERCENT.search(url):
        return f"the address of PostgreSQL has a % that begins no escape: {_HINT}"
    authority = re.split(r"[/?]", url.partition("//")[2], maxsplit=1)[0]
    for host in authority.rpartition("@")[2].split(","):
        wrong = _wrong_host(host)
        if wrong is not None:
            return f"{wrong} in the address of PostgreSQL: {_HINT}"
    return None


def _wrong_host(host: str) -> str | None:
    """Several hosts are divided by commas, and each may have a port of its own."""
    if host.startswith("["):
        _, bracket, rest = host.partition("]")
        if not bracket or rest[:1] not in ("", ":"):
            return "an IPv6 host without its closing bracket"
        port = rest[1:]
    else:
        _, _, port = host.partition(":")
    port = unquote(port)
    if port and not (port.isascii() and port.isdigit() and int(port) in _PORTS):
        return "a port that is no number from 1 to 65535"
    return None
