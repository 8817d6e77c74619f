"""SQL stores: the parts that each is made of, and its migrations, which are numbered files in its package.

`ledger.sql` of a store's package has titled blocks: `table` creates that table, `applied` reads it, `record` adds a
line, and `lock` admits one migrator at a time where a transaction alone does not. `unlock` admits the next one where a
lock does not end with its transaction.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from oncekey.core.errors import SchemaError
from oncekey.core.migrations import Applied, Migration, MigrationPhase, changed, ordered
from oncekey.core.sqltext import sentences
from oncekey.flow import Mode, Statement, Transaction
from oncekey.stores.audit import AuditStore
from oncekey.stores.keystore import KeyStore
from oncekey.stores.operate import OperateStore
from oncekey.stores.outbox import OutboxStore
from oncekey.stores.reconcile import ReconcileStore
from oncekey.stores.statements import execute, execute_until_acknowledged, load
from oncekey.stores.survey import SurveyStore
from oncekey.stores.upkeep import ResealStore, UpkeepStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from oncekey.core.model import Instant
    from oncekey.core.sqltext import Dialect
    from oncekey.flow import Body, Command, Flow, Row, Value

_PLACEHOLDER: Final = re.compile(r"(?<!:):(\w+)")
_HARMLESS: Final = re.compile(r"[a-z0-9_]+")


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
"""The package with the statements of the stores that keep a record in one row."""
ONE_ROW: Final = ("spelling.sql", *FILES)
"""The files of such a store; in the first one it says what it spells in its own way."""


class SqlStore(KeyStore):
    """Records in a SQL database, with every part that its statements serve; a subclass adds its locks."""

    def __init__(
        self,
        commands: Mapping[str, Command],
        schema: SqlSchema,
        diagnostics: Mapping[str, tuple[str, ...]],
        *,
        upkeep: type[UpkeepStore] = UpkeepStore,
        clock: Callable[[], Instant] | None = None,
    ) -> None:
        super().__init__(commands, schema=schema, clock=clock)
        statements = self._statements
        self.audit = AuditStore(statements)
        self.outbox = OutboxStore(statements, self.audit)
        self.upkeep = upkeep(statements, self.audit)
        self.reconcile = ReconcileStore(statements, self.audit)
        self.operate = OperateStore(statements, self.audit, diagnostics=diagnostics)
        self.survey = SurveyStore(statements)
        self.reseal = ResealStore(statements)


class SqlSchema:
    """The tables of a SQL store."""

    def __init__(self, package: str, dialect: Dialect, *, migrations: tuple[Migration, ...] | None = None) -> None:
        self._ledger = load(package, "ledger.sql")
        self._dialect = dialect
        self.migrations = known(package) if migrations is None else migrations

    def applied(self) -> Flow[tuple[Applied, ...]]:
        """The migrations that the store has noted; none if it has no table for them yet."""
        try:
            return (yield from execute(Transaction("migrations", Mode.READ, self._applied)))
        except SchemaError:
            return ()

    def migrate(self, migration: Migration) -> Flow[bool]:
        return (
            yield from execute_until_acknowledged(Transaction("migrate", Mode.ATOMIC, lambda: self._migrate(migration)))
        )

    def script(self) -> str:
        """All migrations as text, for operators who run them by other means."""
        parts = [self._ledger["table"] + ";"]
        for one in self.migrations:
            record = _filled(self._ledger["record"], _line(one))
            parts.append(f"-- {one.label}\nBEGIN;\n\n{one.text.strip()}\n\n{record};\n\nCOMMIT;")
        return "\n\n".join(parts) + "\n"

    def statements(self, first: int, last: int) -> tuple[str, ...]:
        """The statements of some migrations, one by one, with the lines that note them."""
        texts = [self._ledger["table"]]
        for one in self.migrations[first - 1 : last]:
            texts += [one.text, _filled(self._ledger["record"], _line(one))]
        return tuple(sentence.text for text in texts for sentence in sentences(text, self._dialect))

    def _applied(self) -> Body[tuple[Applied, ...]]:
        rows = yield Statement("migrations", self._ledger["applied"])
        return tuple(_applied_of(row) for row in rows)

    def _migrate(self, migration: Migration) -> Body[bool]:
        if "lock" in self._ledger:
            yield Statement("migration_lock", self._ledger["lock"])
        ran = yield from self._alone(migration)
        if "unlock" in self._ledger:
            yield Statement("migration_unlock", self._ledger["unlock"])
        return ran

    def _alone(self, migration: Migration) -> Body[bool]:
        yield from self._execute("migration_table", self._ledger["table"])
        there = yield from self._applied()
        wrong = changed((migration,), there)
        if wrong is not None:
            raise SchemaError(wrong)
        if any(one.number == migration.number for one in there):
            return False
        yield from self._execute(migration.label, migration.text)
        yield Statement("migration_record", self._ledger["record"], _line(migration))
        return True

    def _execute(self, name: str, text: str) -> Body[None]:
        for sentence in sentences(text, self._dialect):
            yield Statement(name, sentence.text)


@cache
def known(package: str) -> tuple[Migration, ...]:
    """The migrations of a store's package, in order."""
    folder = files(package).joinpath("migrations")
    return ordered(
        Migration.read(file.name, file.read_text("utf-8")) for file in folder.iterdir() if file.name.endswith(".sql")
    )


def _line(migration: Migration) -> dict[str, Value]:
    return {
        "number": migration.number,
        "phase": migration.phase.value,
        "name": migration.name,
        "checksum": migration.checksum,
    }


def _applied_of(row: Row) -> Applied:
    at = int(row["applied_at"])
    return Applied(int(row["number"]), MigrationPhase(row["phase"]), row["name"], row["checksum"], applied_at=at)


def _filled(text: str, values: dict[str, Value]) -> str:
    """The statement as it is printed; only names and numbers of our own files come here."""

    def literal(match: re.Match[str]) -> str:
        value = values[match[1]]
        assert isinstance(value, int) or (isinstance(value, str) and _HARMLESS.fullmatch(value))
        return str(value) if isinstance(value, int) else f"'{value}'"

    return _PLACEHOLDER.sub(literal, text)
