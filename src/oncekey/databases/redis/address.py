"""The URLs of Redis and Valkey, parsed without a client.

`redis://user:password@host:6379/0` is one server, `redis+cluster://a:7000,b:7000` a cluster with some of its nodes, and
`redis+sentinel://a:26379,b:26379/name/0` the primary of that name, which the sentinels look up. `rediss` is the same
with TLS.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final
from urllib.parse import parse_qsl, unquote

from oncekey.core.errors import ConfigurationError
from oncekey.databases.address import POOL_SIZE, Address, Kind

PORT: Final = 6379
SENTINEL_PORT: Final = 26379
LAST_PORT: Final = 65535
WAIT_MS: Final = 1000
FORM: Final = (
    "a Redis URL is redis://user:password@host:6379/0, redis+cluster://host:7000,host:7001 or "
    "redis+sentinel://host:26379,host:26379/name/0, with rediss for TLS"
)
_NUMBERS: Final = ("wait", "wait_ms", "pool_size")
_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


class Mode(StrEnum):
    """How the server of a key is found."""

    SINGLE = "single"
    CLUSTER = "cluster"
    SENTINEL = "sentinel"


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Where Redis is, and how to connect to it."""

    mode: Mode
    hosts: tuple[tuple[str, int], ...]
    tls: bool = False
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    database: int = 0
    service: str = ""
    """The sentinels' name for the primary."""
    wait: int = 0
    """How many replicas must acknowledge a write."""
    wait_ms: int = WAIT_MS
    """How many milliseconds the replicas may take."""
    pool_size: int = POOL_SIZE
    files: tuple[tuple[str, str], ...] = ()
    """Certificates and keys, by the names of the client library's settings."""


def parse(url: str) -> RedisAddress:
    """Parse a URL, or raise ConfigurationError, which repeats no password."""
    scheme, _, rest = url.partition(":")
    base, _, mode = scheme.partition("+")
    if not rest.startswith("//"):
        raise ConfigurationError(FORM)
    where, _, query = rest[2:].partition("?")
    netloc, _, path = where.partition("/")
    account, at, listed = netloc.rpartition("@")
    username, colon, password = account.partition(":")
    options = _options(query)
    kind = Mode(mode or "single")
    service, database = _place(kind, path)
    numbers = {name: _number(name, options.pop(name)) for name in _NUMBERS if name in options}
    made = RedisAddress(
        mode=kind,
        hosts=tuple(_host(one, SENTINEL_PORT if mode == "sentinel" else PORT) for one in listed.split(",")),
        tls=base == "rediss",
        username=unquote(username) or None if at else None,
        password=unquote(password) if colon else None,
        database=database,
        service=service,
        wait=numbers.get("wait", 0),
        wait_ms=numbers.get("wait_ms", WAIT_MS),
        pool_size=numbers.get("pool_size", POOL_SIZE),
        files=tuple((name, options.pop(name)) for name in _FILES if name in options),
    )
    if options:
        known = ", ".join((*_NUMBERS, *_FILES))
        raise ConfigurationError(f"a Redis store has no option {min(options)[:30]}: there are {known}")
    if made.mode is Mode.SINGLE and len(made.hosts) > 1:
        raise ConfigurationError("redis:// takes one server: use redis+cluster:// or redis+sentinel:// for several")
    if made.files and not made.tls:
        raise ConfigurationError(f"{made.files[0][0]} is for TLS: use rediss://, with two s")
    return made


def _place(mode: Mode, path: str) -> tuple[str, int]:
    """The name of the service and the number of the database."""
    if mode is Mode.CLUSTER:
        if path.strip("/") not in {"", "0"}:
            raise ConfigurationError("a Redis cluster has no numbered databases: remove the path after the hosts")
        return "", 0
    if mode is Mode.SENTINEL:
        service, _, database = path.partition("/")
        if not service:
            raise ConfigurationError("sentinels need the primary's name: redis+sentinel://host:26379/name/0")
        return unquote(service), _number("the database", database or "0")
    return "", _number("the database", path.strip("/") or "0")


def _host(text: str, default: int) -> tuple[str, int]:
    if text.startswith("["):
        host, bracket, port = text[1:].partition("]")
        if not bracket or (port and not port.startswith(":")):
            raise ConfigurationError(f"a host of the Redis URL has no closing bracket: {FORM}")
        port = port[1:]
    else:
        host, _, port = text.partition(":")
    if not host:
        raise ConfigurationError(FORM)
    if not port:
        return host, default
    if not port.isascii() or not port.isdigit() or not 0 < int(port) <= LAST_PORT:
        raise ConfigurationError(f"the Redis URL has a port that is not a number: {FORM}")
    return host, int(port)


def _options(query: str) -> dict[str, str]:
    return dict(parse_qsl(query, keep_blank_values=True))


def _number(name: str, text: str) -> int:
    least = 0 if name in {"wait", "the database"} else 1
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise ConfigurationError(f"{name} of a Redis store is a number of at least {least}")
    return int(text)


def read(scheme: str, rest: str, _: str | None) -> Address:
    """`redis://host:6379/0`, and the forms for clusters and sentinels; the driver parses it again."""
    url = f"{scheme}:{rest}"
    return Address(Kind.REDIS, url, pool_size=parse(url).pool_size)
