"""The address of a PostgreSQL server, with what oncekey reads from it and the libraries do not know.

`?pgbouncer=1` says that a pooler stands in between that lends a server connection per transaction: then nothing
is prepared, because the statement would be prepared on a connection that is somebody else's next time.
`?pgbouncer=prepared` says that it knows prepared statements and prepares them itself wherever one is executed, as
PgBouncer does since 1.21: then they are kept, and all else is as behind any pooler.
`?pgbouncer=0` promises that there is none: then every driver prepares its statements, which makes them cheaper.

Several hosts are divided by commas. Nothing can be claimed where nothing can be written, so of several hosts the one
that takes writes is meant (`target_session_attrs=read-write`), unless the address says something else.

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
_TARGET: Final = "target_session_attrs="
_WRITES: Final = f"{_TARGET}read-write"
_YES: Final = frozenset({"1", "true", "yes", "on"})
_PREPARED: Final = "prepared"
_NO: Final = frozenset({"0", "false", "no", "off"})

_HINT: Final = (
    "write postgresql://user:password@host:5432/database, with %40 for @, %2F for / and %25 for % in a password"
)
_STRAY_PERCENT: Final = re.compile(r"%(?![0-9a-fA-F]{2})")
_PORTS: Final = range(1, 65536)


BACKEND: Final = "SELECT pg_backend_pid()"


@dataclass(frozen=True, slots=True)
class Pooling:
    """What two connections tell of a pooler, and what the address says of it.

    A pooler greets a client with a process number of its own making; a mere relay passes the server's on. And where two
    clients, neither of them in a transaction, were answered by the same server process, it is lent by the transaction.
    That they were answered by two proves nothing.
    """

    stands: bool
    per_transaction: bool
    told: bool | None

    @classmethod
    def seen(cls, greeted: tuple[int, int], answered: tuple[int, int], *, told: bool | None) -> Self:
        """From the numbers that two connections were greeted with, and those that answered them."""
        return cls(greeted != answered, answered[0] == answered[1], told)


@dataclass(frozen=True, slots=True)
class PostgresAddress:
    """An address as a library takes it, and whether a pooler is behind it: `None` if it does not say."""

    dsn: str
    pooler: bool | None
    prepares: bool = False
    """Whether the pooler keeps prepared statements for its clients."""

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
        several = len(_hosts(place)) > 1 and not any(option.startswith(_TARGET) for option in options)
        if not ours and not several:
            return cls(dsn, pooler=None)
        said = ours[-1] if ours else ""
        if ours and said not in _YES | _NO | {_PREPARED}:
            raise ConfigurationError(f"{_POOLER}{said} in the address of PostgreSQL must be 1, 0 or prepared")
        others = [option for option in options if option and not option.startswith(_POOLER)]
        kept = "&".join([*others, _WRITES] if several else others)
        return cls(
            f"{place}?{kept}" if kept else place, pooler=said not in _NO if ours else None, prepares=said == _PREPARED
        )

    @property
    def each(self) -> tuple[str, ...]:
        """The same address by each of its hosts alone; as it is where it does not name several before the database."""
        place, mark, query = self.dsn.partition("?")
        scheme, _, rest = place.partition("//")
        authority, slash, path = rest.partition("/")
        account, at, _ = authority.rpartition("@")
        hosts = _hosts(place)
        if len(hosts) == 1:
            return (self.dsn,)
        return tuple(f"{scheme}//{account}{at}{host}{slash}{path}{mark}{query}" for host in hosts)


def objection(url: str) -> str | None:
    """What is wrong with a URL of PostgreSQL, as far as that can be seen without asking a server. None: nothing."""
    if not url.partition(":")[2].startswith("//"):
        return f"the address of PostgreSQL lacks its two slashes: {_HINT}"
    if _STRAY_PERCENT.search(url):
        return f"the address of PostgreSQL has a % that begins no escape: {_HINT}"
    for host in _hosts(url.partition("?")[0]):
        wrong = _wrong_host(host)
        if wrong is not None:
            return f"{wrong} in the address of PostgreSQL: {_HINT}"
    return None


def _hosts(place: str) -> list[str]:
    """The hosts of a URL, without its options."""
    return place.partition("//")[2].partition("/")[0].rpartition("@")[2].split(",")


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
