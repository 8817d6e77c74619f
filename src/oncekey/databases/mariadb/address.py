"""The URL of a MariaDB or MySQL server, `mariadb://user:password@host:3306/database?ssl=true`, parsed offline."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from oncekey.core.errors import ConfigurationError
from oncekey.databases.address import POOL_SIZE, Address, Kind, pool_size

PORT: Final = 3306
FORM: Final = "mariadb://user:password@host:3306/database"
_OPTIONS: Final = frozenset({"unix_socket", "ssl", "ssl_ca", "ssl_cert", "ssl_key"})


@dataclass(frozen=True, slots=True)
class MariadbAddress:
    """The parts of a URL that a client library needs."""

    host: str
    port: int
    user: str
    password: str
    database: str
    unix_socket: str | None = None
    ssl: bool = False
    ssl_ca: str | None = None
    ssl_cert: str | None = None
    ssl_key: str | None = None

    @classmethod
    def parse(cls, url: str) -> MariadbAddress:
        """Parse a URL, or raise ConfigurationError, which does not quote the URL because it may contain a password."""
        try:
            parts = urlsplit(url)
            port = parts.port or PORT
            options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        except ValueError:
            raise ConfigurationError(f"not a MariaDB URL: use {FORM}") from None
        database = unquote(parts.path.removeprefix("/"))
        if not database or "/" in database:
            raise ConfigurationError(f"a MariaDB URL needs the name of a database: use {FORM}")
        strange = sorted(set(options) - _OPTIONS)
        if strange:
            raise ConfigurationError(
                f"a MariaDB store has no option {strange[0]}: it has {', '.join(sorted(_OPTIONS))}"
            )
        secure = options.get("ssl", "false").lower()
        if secure not in {"true", "false"}:
            raise ConfigurationError("ssl= is true or false; ssl_ca= is the file of the certificate authority")
        return cls(
            host=unquote(parts.hostname or "127.0.0.1"),
            port=port,
            user=unquote(parts.username or ""),
            password=unquote(parts.password or ""),
            database=database,
            unix_socket=options.get("unix_socket"),
            ssl=secure == "true" or any(name.startswith("ssl_") for name in options),
            ssl_ca=options.get("ssl_ca"),
            ssl_cert=options.get("ssl_cert"),
            ssl_key=options.get("ssl_key"),
        )

    def options(self) -> dict[str, Any]:
        """The options for PyMySQL and aiomysql; with TLS, the server's certificate is verified."""
        found: dict[str, Any] = {
            "host": self.host,
            "port": self.port,
            "user": self.user,
            "password": self.password,
            "charset": "utf8mb4",
            "unix_socket": self.unix_socket,
        }
        if self.ssl:
            context = ssl.create_default_context(cafile=self.ssl_ca)
            if self.ssl_cert is not None:
                context.load_cert_chain(self.ssl_cert, self.ssl_key)
            found["ssl"] = context
        return found


def read(scheme: str, rest: str, package: str | None) -> Address:
    """`mariadb://user@host/database?pool_size=10`; `mysql://` is the same."""
    place, mark, query = rest.partition("?")
    options = query.split("&") if mark else []
    sizes = [option.partition("=")[2] for option in options if option.startswith("pool_size=")]
    kept = "&".join(option for option in options if not option.startswith("pool_size="))
    url = f"{scheme}:{place}?{kept}" if kept else f"{scheme}:{place}"
    MariadbAddress.parse(url)
    return Address(Kind.MARIADB, url, package, pool_size(sizes[-1]) if sizes else POOL_SIZE)
