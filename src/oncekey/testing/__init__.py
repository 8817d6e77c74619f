"""Operations for unit tests of an application's handlers."""

from oncekey.testing.operations import operation, sync_operation

__all__ = ["operation", "sync_operation"]
