"""Tools for tests of stores, drivers and applications; shipped, and without dependencies of their own."""

from oncekey.testing.operations import operation, sync_operation

__all__ = ["operation", "sync_operation"]
