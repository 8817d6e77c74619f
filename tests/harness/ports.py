"""Free ports on loopback."""

from __future__ import annotations

import os
import random
import socket

# Below the ranges from which Linux, macOS and Windows take ports for outgoing connections, so that a server
# which was killed finds its port still free when it comes back.
_LOWEST, _HIGHEST = 15_000, 32_000
_ATTEMPTS = 200
_given: set[int] = set()


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on now.

    It is taken some time later, so it must not be promised to anybody else meanwhile: each of pytest-xdist's workers
    has ports of its own, and none of them is given away twice.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    first = _LOWEST + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % workers
    for port in random.sample(range(first, _HIGHEST, workers), _ATTEMPTS):
        if port not in _given and _is_free(port):
            _given.add(port)
            return port
    raise RuntimeError(f"no free port among {_ATTEMPTS} tries between {_LOWEST} and {_HIGHEST}")


def listens(port: int) -> bool:
    """Whether a server listens on a port of 127.0.0.1; a poll by HTTP costs a hundred times more."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # What servers do themselves: connections of an earlier server that still linger do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError:
            return False
        return True
