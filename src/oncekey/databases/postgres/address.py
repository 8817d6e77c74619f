"""The address of a PostgreSQL server, with oncekey's own options, which the client libraries do not have.

`?pgbouncer=1` declares a pooler that lends a server connection per transaction: nothing is prepared, because the next
transaction may get a connection on which the statement is not prepared.
`?pgbouncer=prepared` declares a pooler that supports prepared statements and prepares them wherever one is executed,
as PgBouncer does since 1.21: they are kept, and everything else is as with any pooler.
`?pgbouncer=0` promises that there is no pooler: every driver prepares its statements, which makes them cheaper.

Several hosts are separated by commas. A claim is a write, so of several hosts the one that accepts writes is used
(`target_session_attrs=read-write`), unless the address has another value.

An error about an address is one sentence of oncekey's own. It never repeats any part of the address: if a password
contains an unescaped character, any part of the address may be a part of the password.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import unquote

from oncekey.core.errors import ConfigurationError
from oncekey.databases.address import POOL_SIZE, Address, Kind, pool_size

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
GREETED: Final = "SELECT 1 WHERE pg_backend_pid() = {pid:d}"
"""Returns a row if the server process that greeted a client also executes its statements."""


@dataclass(frozen=True, slots=True)
class Pooling:
    """What two connections reveal about a pooler, and what the address declares.

    A pooler greets a client with its own process number; a mere proxy passes on the server's. If the statements of
    two clients, neither of them in a transaction, were executed by the same server process, the pooler lends
    connections per transaction. Two different processes prove nothing.
    """

    stands: bool
    per_transaction: bool
    declared: bool | None

    @classmethod
    def seen(cls, greeted: tuple[int, int], answered: tuple[int, int], *, declared: bool | None) -> Self:
        """Compare the process numbers that greeted two connections with those that executed their statements."""
        return cls(greeted != answered, answered[0] == answered[1], declared)


@dataclass(frozen=True, slots=True)
class PostgresAddress:
    """An address in the library's form, and whether it declares a pooler: `None` if it does not say."""

    dsn: str
    pooler: bool | None
    prepares: bool = False
    """Whether the pooler keeps prepared statements for its clients."""

    @classmethod
    def parse(cls, dsn: str) -> Self:
        """Remove oncekey's own option from an address and leave the rest as it is."""
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
        value = ours[-1] if ours else ""
        if ours and value not in _YES | _NO | {_PREPARED}:
            raise ConfigurationError(f"{_POOLER}{value} in the address of PostgreSQL must be 1, 0 or prepared")
        others = [option for option in options if option and not option.startswith(_POOLER)]
        kept = "&".join([*others, _WRITES] if several else others)
        return cls(
            f"{place}?{kept}" if kept else place, pooler=value not in _NO if ours else None, prepares=value == _PREPARED
        )

    @property
    def each(self) -> tuple[str, ...]:
        """The address once for each of its hosts; unchanged if it does not have several before the database."""
        place, mark, query = self.dsn.partition("?")
        scheme, _, rest = place.partition("//")
        authority, slash, path = rest.partition("/")
        account, at, _ = authority.rpartition("@")
        hosts = _hosts(place)
        if len(hosts) == 1:
            return (self.dsn,)
        return tuple(f"{scheme}//{account}{at}{host}{slash}{path}{mark}{query}" for host in hosts)


def objection(url: str) -> str | None:
    """What is wrong with a PostgreSQL URL, as far as that can be checked without a server. None: nothing."""
    if not url.partition(":")[2].startswith("//"):
        return f"the address of PostgreSQL lacks its two slashes: {_HINT}"
    if _STRAY_PERCENT.search(url):
        return f"the address of PostgreSQL has a % that does not begin an escape: {_HINT}"
    for host in _hosts(url.partition("?")[0]):
        wrong = _wrong_host(host)
        if wrong is not None:
            return f"{wrong} in the address of PostgreSQL: {_HINT}"
    return None


def _hosts(place: str) -> list[str]:
    """The hosts of a URL, without its options."""
    return place.partition("//")[2].partition("/")[0].rpartition("@")[2].split(",")


def _wrong_host(host: str) -> str | None:
    """What is wrong with a host, which may have its own port. None: nothing."""
    if host.startswith("["):
        _, bracket, rest = host.partition("]")
        if not bracket or rest[:1] not in ("", ":"):
            return "an IPv6 host without its closing bracket"
        port = rest[1:]
    else:
        _, _, port = host.partition(":")
    port = unquote(port)
    if port and not (port.isascii() and port.isdigit() and int(port) in _PORTS):
        return "a port that is not a number from 1 to 65535"
    return None


def read(_: str, rest: str, package: str | None) -> Address:
    """`postgresql://user@host/database?pool_size=10`, and libpq's own options."""
    # The rest is passed on unchanged: no URL library parses it as PostgreSQL does.
    place, mark, query = rest.partition("?")
    options = query.split("&") if mark else []
    sizes = [option.partition("=")[2] for option in options if option.startswith("pool_size=")]
    kept = "&".join(option for option in options if not option.startswith("pool_size="))
    dsn = f"postgresql:{place}?{kept}" if kept else f"postgresql:{place}"
    wrong = objection(dsn)
    if wrong is not None:
        raise ConfigurationError(wrong)
    return Address(Kind.POSTGRES, dsn, package, pool_size(sizes[-1]) if sizes else POOL_SIZE)
