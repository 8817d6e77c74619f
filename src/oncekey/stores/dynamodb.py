"""Records in DynamoDB: a store of cells in a table of its own, which takes the place of migrations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from oncekey.cells import Diagnostics, Make
from oncekey.core.errors import SchemaError
from oncekey.core.migrations import Applied, Migration
from oncekey.core.model import SECOND
from oncekey.flow import Mode, Statement, Transaction
from oncekey.stores.cells import CellStore
from oncekey.stores.statements import execute, execute_until_acknowledged

if TYPE_CHECKING:
    from oncekey.cells import Asking
    from oncekey.core.model import Instant
    from oncekey.flow import Command, Flow, Rows, Steps

TABLE: Final = Migration.read(
    "0001_pre_table.sql",
    "one table: key pk (B); index pages (page_shard S, page_place B), keys only; items expire at forget_at\n",
)
NOT_OURS: Final = "the table {table} was not made by oncekey: its key is not pk, or it has no index pages"


class DynamoStore(CellStore):
    """Claims, settlements, heartbeats, steps and upkeep; LOCAL with the items that a handler stages."""

    resolution = SECOND

    def __init__(self, *, clock: Callable[[], Instant] | None = None) -> None:
        super().__init__(clock=clock)
        self.schema = DynamoSchema()


class DynamoSchema:
    """The one table: in place of migrations, whether it exists and has the right shape."""

    migrations: tuple[Migration, ...] = (TABLE,)

    def applied(self) -> Flow[tuple[Applied, ...]]:
        """The table, if it exists. One of another shape is not used."""
        rows = yield from execute(Transaction("migrations", Mode.READ, _described))
        if not rows:
            return ()
        if not rows[0]["key"] or rows[0]["index"] is None:
            raise SchemaError(NOT_OURS.format(table=rows[0]["table"]))
        return (Applied(TABLE.number, TABLE.phase, TABLE.name, TABLE.checksum),)

    def migrate(self, migration: Migration) -> Flow[bool]:
        """Create the table and let its items expire; False if it was there already."""

        def body() -> Steps[bool]:
            rows = yield Statement("migrate", _MAKE)
            return bool(rows[0]["made"])

        assert migration == TABLE
        return (yield from execute_until_acknowledged(Transaction("migrate", Mode.SINGLE, body)))


def _described() -> Steps[Rows]:
    return (yield Statement("migrations", _DESCRIBE))


def _describe() -> Asking[tuple[Mapping[str, Any], ...]]:
    rows: tuple[Mapping[str, Any], ...] = yield Diagnostics()
    return rows


def _make() -> Asking[tuple[Mapping[str, Any], ...]]:
    made: bool = yield Make()
    return ({"made": made},)


# A driver of cells does not take rows from a statement's function, but runs the verbs that it yields.
_DESCRIBE: Final = cast("Command", _describe)
_MAKE: Final = cast("Command", _make)
