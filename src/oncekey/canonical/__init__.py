"""Canonical forms of requests as bytes and hashes, to compare requests. Pure, like `core`."""
