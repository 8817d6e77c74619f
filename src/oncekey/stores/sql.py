"""SQL stores: their parts, and their migrations, which are numbered files in the package of a store.

The ledger of migrations has titled blocks in `ledger.sql`: `table` creates its table, `applied` reads it, `record`
adds a line, and `lock` admits one migrator at a time where a transaction alone does not. `unlock` releases a lock that
does not end with its transaction.
"""

from __future__ import annotations

from functools import cache, cached_property
from importlib.resources import files
from itertools import chain
from typing import TYPE_CHECKING, Final

from oncekey.core.errors import SchemaError
from oncekey.core.flow import Body, Command, Flow, Mode, Row, Statement, Transaction, Value
from oncekey.core.lazy import Lazy
from oncekey.core.migrations import Applied, Migration, MigrationPhase, changed, ordered
from oncekey.core.sqltext import Dialect, split
from oncekey.stores.keystore import KeyStore, NoteWriter, ParcelStore
from oncekey.stores.statements import PART_STATEMENTS, execute, execute_until_acknowledged, load

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from oncekey.core.model import Instant
    from oncekey.stores import audit as auditing
    from oncekey.stores import operate as operating
    from oncekey.stores import outbox as parcels
    from oncekey.stores import reconcile as reconciling
    from oncekey.stores import reseal as resealing
    from oncekey.stores import scripts
    from oncekey.stores import survey as surveying
    from oncekey.stores import upkeep as upkeeping
else:
    auditing = Lazy("oncekey.stores.audit")
    operating = Lazy("oncekey.stores.operate")
    parcels = Lazy("oncekey.stores.outbox")
    reconciling = Lazy("oncekey.stores.reconcile")
    scripts = Lazy("oncekey.stores.scripts")
    resealing = Lazy("oncekey.stores.reseal")
    surveying = Lazy("oncekey.stores.survey")
    upkeeping = Lazy("oncekey.stores.upkeep")

FILES: Final = (
    "queries.sql",
    "locks.sql",
    "phases.sql",
    "outbox.sql",
    "upkeep.sql",
    "operate.sql",
    "console.sql",
    "reconcile.sql",
    "doctor.sql",
    "reseal.sql",
)
"""The files with the statements of a store."""
SHARED: Final = "oncekey.stores.onerow"
"""The package with the statements of the stores whose record is one row."""
ONE_ROW: Final = ("spelling.sql", *FILES)
"""The files of such a store; the first has its own syntax."""


class SqlStore(KeyStore):
    """Records in a SQL database, with every part for which it has statements; a subclass adds its locks."""

    audit = cached_property(lambda self: auditing.AuditStore(self._statements))
    outbox = cached_property(lambda self: parcels.OutboxStore(self._statements, self.audit))
    upkeep = cached_property(lambda self: upkeeping.UpkeepStore(self._statements, self.audit))
    reconcile = cached_property(lambda self: reconciling.ReconcileStore(self._statements, self.audit))
    operate = cached_property(
        lambda self: operating.OperateStore(self._statements, self.audit, diagnostics=self.diagnostics)
    )
    survey = cached_property(lambda self: surveying.SurveyStore(self._statements))
    reseal = cached_property(lambda self: resealing.ResealStore(self._statements))

    def __init__(
        self,
        commands: Mapping[str, Command],
        schema: SqlSchema,
        diagnostics: Mapping[str, tuple[str, ...]],
        *,
        clock: Callable[[], Instant] | None = None,
    ) -> None:
        super().__init__(commands, schema=schema, clock=clock)
        statements = self._statements
        statements.require((*chain.from_iterable(PART_STATEMENTS.values()), *diagnostics))
        self.diagnostics = diagnostics
        self.notes = NoteWriter(statements)
        self.parcels = ParcelStore(statements)


class SqlSchema:
    """The tables of a SQL store."""

    def __init__(self, package: str, dialect: Dialect, *, migrations: tuple[Migration, ...] | None = None) -> None:
        self._ledger = load(package, "ledger.sql")
        self._dialect = dialect
        self.migrations = known(package) if migrations is None else migrations

    def applied(self) -> Flow[tuple[Applied, ...]]:
        """The migrations in the store's ledger; none if it has no ledger yet."""
        try:
            return (yield from execute(Transaction("migrations", Mode.READ, self._applied)))
        except SchemaError:
            return ()

    def migrate(self, *migrations: Migration) -> Flow[tuple[Migration, ...]]:
        transaction = Transaction("migrate", Mode.ATOMIC, lambda: self._migrate(migrations))
        return (yield from execute_until_acknowledged(transaction))

    def script(self) -> str:
        """All migrations as text, for operators who run them with other tools."""
        return scripts.script(self.migrations, self._ledger)

    def statements(self, first: int, last: int) -> tuple[str, ...]:
        """The statements of some migrations, one by one, with the ledger's lines about them."""
        return scripts.statements(self.migrations[first - 1 : last], self._ledger, self._dialect)

    def _applied(self) -> Body[tuple[Applied, ...]]:
        rows = yield Statement("migrations", self._ledger["applied"])
        return tuple(_applied_of(row) for row in rows)

    def _migrate(self, migrations: tuple[Migration, ...]) -> Body[tuple[Migration, ...]]:
        if "lock" in self._ledger:
            yield Statement("migration_lock", self._ledger["lock"])
        ran = yield from self._alone(migrations)
        if "unlock" in self._ledger:
            yield Statement("migration_unlock", self._ledger["unlock"])
        return ran

    def _alone(self, migrations: tuple[Migration, ...]) -> Body[tuple[Migration, ...]]:
        yield from self._execute("migration_table", self._ledger["table"])
        there = yield from self._applied()
        wrong = changed(migrations, there)
        if wrong is not None:
            raise SchemaError(wrong)
        applied = {one.number for one in there}
        missing = tuple(one for one in migrations if one.number not in applied)
        for migration in missing:
            yield from self._execute(migration.label, migration.text)
            yield Statement("migration_record", self._ledger["record"], line_of(migration))
        return missing

    def _execute(self, name: str, text: str) -> Body[None]:
        for statement in split(text, self._dialect):
            yield Statement(name, statement)


@cache
def known(package: str) -> tuple[Migration, ...]:
    """The migrations of a store's package, in order."""
    folder = files(package).joinpath("migrations")
    lines = (line.split() for line in folder.joinpath("former.txt").read_text("utf-8").splitlines())
    former = {name: checksum for checksum, name in lines}
    return ordered(
        Migration.read(file.name, file.read_text("utf-8"), former.get(file.name))
        for file in folder.iterdir()
        if file.name.endswith(".sql")
    )


def line_of(migration: Migration) -> dict[str, Value]:
    """The ledger's line about a migration."""
    return {
        "number": migration.number,
        "phase": migration.phase.value,
        "name": migration.name,
        "checksum": migration.checksum,
    }


def _applied_of(row: Row) -> Applied:
    at = int(row["applied_at"])
    return Applied(int(row["number"]), MigrationPhase(row["phase"]), row["name"], row["checksum"], applied_at=at)
