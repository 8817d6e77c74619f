"""The same database by another road: small changes to a `postgresql://` address."""

from __future__ import annotations

from urllib.parse import quote, urlsplit


def with_database(dsn: str, name: str) -> str:
    """Return the address of another database on the same server."""
    return urlsplit(dsn)._replace(path=f"/{quote(name, safe='')}").geturl()


def address(dsn: str) -> tuple[str, int]:
    """Return host and port."""
    parts = urlsplit(dsn)
    return parts.hostname or "127.0.0.1", parts.port or 5432


def through(dsn: str, port: int) -> str:
    """Return the same database as seen through something that listens on a port of loopback."""
    parts = urlsplit(dsn)
    credentials, at, _ = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{credentials}{at}127.0.0.1:{port}").geturl()
