"""Sockets to serve from: bound before anything is started, and the reason in one sentence where that fails."""

from __future__ import annotations

import socket

from oncekey.core.errors import OncekeyError

BACKLOG = 2048


class CannotServeError(OncekeyError):
    """A server cannot start; the message says why."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, or the reason why there is none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotServeError(f"{host} is no address to listen on ({error.strerror})") from error
    try:
        # Connections of a server that just ended may linger; on Windows the option would mean something else.
        if hasattr(socket, "SO_REUSEPORT"):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        why = getattr(error, "strerror", None) or str(error)
        raise CannotServeError(f"cannot listen on {host}, port {port} ({why}): choose another one") from error
    return listener


def address_of(host: str, listener: socket.socket) -> str:
    """The URL that a listener is reached by."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"
