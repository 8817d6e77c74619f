"""Canonical forms: what makes two requests one, as bytes and hashes. Pure, like `core`."""
