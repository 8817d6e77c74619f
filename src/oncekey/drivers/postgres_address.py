"""The address of a PostgreSQL server, with what oncekey reads from it and the libraries do not know.

`?pgbouncer=1` says that a pooler stands in between that lends a server connection per transaction: then nothing
is prepared, because the statement would be prepared on a connection that is somebody else's next time.
`?pgbouncer=0` promises that there is none: then every driver prepares its statements, which makes them cheaper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import urlsplit

from oncekey.core.errors import ConfigurationError

_POOLER: Final = "pgbouncer="
_YES: Final = frozenset({"1", "true", "yes", "on"})
_NO: Final = frozenset({"0", "false", "no", "off"})


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
        parts = urlsplit(dsn)
        options = parts.query.split("&")
        ours = [option.removeprefix(_POOLER).lower() for option in options if option.startswith(_POOLER)]
        if not ours:
            return cls(dsn, pooler=None)
        if ours[-1] not in _YES | _NO:
            raise ConfigurationError(f"{_POOLER}{ours[-1]} in the address of PostgreSQL must be 1 or 0")
        kept = "&".join(option for option in options if not option.startswith(_POOLER))
        return cls(parts._replace(query=kept).geturl(), pooler=ours[-1] in _YES)
