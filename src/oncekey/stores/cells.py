"""A store for requests on any cells that can be read and swapped.

Every statement is the same loop: read the cell, compute the move, swap. If another writer was faster, the statement
reads again, and the move is computed from the new cell. The move compares the owner's proof with the cell whose
version the swap compares, so no write can come between. The clock is that of the read: a lease that is written by it
ends no later than it should, and `keep_until` has a grace that is longer than any pause.

DynamoDB is such a store, with one table and no migrations.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from oncekey.cells import Asking, Diagnostics, Look, Make, Seen, Swap
from oncekey.core.errors import SchemaError, StoreUnavailableError
from oncekey.core.flow import Body, Command, Flow, Mode, Rows, Statement, Transaction
from oncekey.core.migrations import Applied, Migration
from oncekey.core.model import SECOND, Instant
from oncekey.stores.cells_operate import DIAGNOSTICS, OPERATOR_STATEMENTS, LoggedMoves
from oncekey.stores.cells_reseal import RESEAL, CellReseal
from oncekey.stores.cells_upkeep import LOST, ROUNDS, UPKEEP, keep_until, resumable
from oncekey.stores.cells_workers import WORKERS
from oncekey.stores.keystore import KeyStore
from oncekey.stores.moves import MOVES, claimed, found, recalled
from oncekey.stores.operate import OperateStore
from oncekey.stores.statements import execute, execute_until_acknowledged
from oncekey.stores.upkeep import UpkeepStore

if TYPE_CHECKING:
    from oncekey.stores.moves import CellMove


class CellStore(KeyStore):
    """Records in cells, for requests, phased steps, sweeper, reaper, completer and operators; there is no outbox."""

    of_cells = True

    def __init__(self, *, clock: Callable[[], Instant] | None = None) -> None:
        super().__init__(_COMMANDS, clock=clock)
        self.upkeep = UpkeepStore(self._statements, None)
        self.operate = OperateStore(self._statements, LoggedMoves(), diagnostics=DIAGNOSTICS)
        self.reseal = CellReseal(self._statements)


def _find(*, now: Instant | None, scope: str, key: str) -> Asking[Rows]:
    cell, clock = yield Look(scope, key)
    return [found(cell, clock if now is None else now)]


def _recall(*, now: Instant | None, scope: str, key: str) -> Asking[Rows]:
    cell, clock = yield Look(scope, key)
    return recalled(cell, clock if now is None else now)


def _recall_all(*, now: Instant | None, asked: str) -> Asking[Rows]:
    rows: list[Mapping[str, Any]] = []
    for one in json.loads(asked):
        rows += yield from _recall(now=now, **one)
    return rows


def _claim(*, now: Instant | None, **given: Any) -> Asking[Rows]:  # noqa: ANN401  (columns of any kind)
    scope, key = given["scope"], given["key"]
    for _ in range(ROUNDS):
        cell, clock = yield Look(scope, key)
        at = clock if now is None else now
        ours = claimed(cell, at, given)
        if cell is not None or (yield Swap(scope, key, None, ours, None)):
            return [{**ours, "now": at}]
    raise StoreUnavailableError(LOST)


def _moving(move: CellMove) -> Callable[..., Asking[Rows]]:
    def ask(*, now: Instant | None, **given: Any) -> Asking[Rows]:  # noqa: ANN401  (columns of any kind)
        scope, key = given["scope"], given["key"]
        for _ in range(ROUNDS):
            cell, clock = yield Look(scope, key)
            at = clock if now is None else now
            moved = move.apply(cell, at, given)
            if cell is None or moved is None:
                return []
            # An instant of a test's clock is not comparable with the store's.
            until = keep_until(moved.cell) if now is None else None
            seen = Seen(cell["incarnation"], cell["version"])
            if (yield Swap(scope, key, seen, moved.cell, until)):
                return [{**(cell if moved.cell is None else moved.cell), "now": at}]
        raise StoreUnavailableError(LOST)

    return ask


# A driver of cells does not take rows from a statement's function, but runs the verbs that it yields.
_COMMANDS: Final = cast(
    "Mapping[str, Command]",
    {
        "find": _find,
        "recall": _recall,
        "recall_all": _recall_all,
        "claim": _claim,
        **{name: _moving(move) for name, move in MOVES.items()},
        "resumable": resumable,
        **UPKEEP,
        **WORKERS,
        **OPERATOR_STATEMENTS,
        **RESEAL,
    },
)


TABLE: Final = Migration.read(
    "0001_pre_table.sql",
    "one table: key pk (B); index pages (page_shard S, page_place B), keys only; items expire at forget_at\n",
)
NOT_OURS: Final = "the table {table} was not created by oncekey: its key is not pk, or it has no index pages"


class DynamoStore(CellStore):
    """Records in a DynamoDB table; LOCAL commits the items that a handler stages."""

    resolution = SECOND

    def __init__(self, *, clock: Callable[[], Instant] | None = None) -> None:
        super().__init__(clock=clock)
        self.schema = DynamoSchema()


class DynamoSchema:
    """The one table. In place of migrations, it is checked to exist and to have the right shape."""

    migrations: tuple[Migration, ...] = (TABLE,)

    def applied(self) -> Flow[tuple[Applied, ...]]:
        """The table, if it exists. A table of another shape is not used."""
        rows = yield from execute(Transaction("migrations", Mode.READ, _described))
        if not rows:
            return ()
        if not rows[0]["key"] or rows[0]["index"] is None:
            raise SchemaError(NOT_OURS.format(table=rows[0]["table"]))
        return (Applied(TABLE.number, TABLE.phase, TABLE.name, TABLE.checksum),)

    def migrate(self, *migrations: Migration) -> Flow[tuple[Migration, ...]]:
        """Create the table and let its items expire; the result is empty if it already existed."""

        def body() -> Body[tuple[Migration, ...]]:
            rows = yield Statement("migrate", _MAKE)
            return migrations if rows[0]["made"] else ()

        assert migrations == (TABLE,)
        return (yield from execute_until_acknowledged(Transaction("migrate", Mode.SINGLE, body)))


def _described() -> Body[Rows]:
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
