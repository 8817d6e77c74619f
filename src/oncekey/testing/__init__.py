"""What tests of stores, drivers and applications stand on; shipped, and with no dependency of its own."""

from oncekey.testing.operations import operation, sync_operation

__all__ = ["operation", "sync_operation"]
