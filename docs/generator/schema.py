"""`schema.md`: the tables as the migrations make them, and why each column is there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from oncekey.stores.sql import known
from oncekey.stores.statements import load

from .markdown import page as put_together
from .markdown import table, title

POSTGRES: Final = "oncekey.databases.postgres"
SQLITE: Final = "oncekey.databases.sqlite"
_RECORD_TABLE: Final = re.compile(r"CREATE TABLE oncekey[._]record(?:_\d+)? \((?P<body>.*?)\n\)", re.DOTALL)
_ADDED: Final = re.compile(
    r"ALTER TABLE oncekey\.record ADD COLUMN (?P<name>[a-z_]+) (?P<kind>[a-z]+)(?P<null> NOT NULL)?(?: DEFAULT -?\d+)?;"
    r"(?: *-- (?P<why>.*))?"
)

_COLUMN: Final = re.compile(
    r"^    (?P<name>[a-z_]+) +(?P<kind>[A-Za-z]+) *(?P<null>NOT NULL)?(?: PRIMARY KEY| DEFAULT \d+)?,? *"
    r"(?:-- (?P<why>.*))?$",
    re.MULTILINE,
)
_CONSTRAINT: Final = re.compile(r"CONSTRAINT (?P<name>[a-z_]+) CHECK")
_DROPPED: Final = re.compile(r"DROP COLUMN (?P<name>[a-z_]+)")
_WORK_TABLE: Final = re.compile(r"CREATE TABLE oncekey\.work \((?P<body>.*?)\n\)", re.DOTALL)
_SHARED: Final = frozenset({"incarnation", "scope", "key", "memo_version"})
_RULE: Final = re.compile(r"^(?:    \(|SELECT )'(?P<name>[a-z_]+)',", re.MULTILINE)

WHY: Final[Mapping[str, str]] = {
    "recovery": "what a lease that ran out means, stored for the same reason",
    "method": "of the request; shown by the status resource",
    "path": "of the request; shown by the status resource",
    "state": "where the record stands; see [states](../explanation/states.md)",
    "outcome": "of a completed record: `success` for 2xx and 3xx, `failure` for a stored error",
    "entered": "whether the handler counts as called",
    "owner": "which request holds the lease; a claim whose reply was lost is recognised by it",
    "lease_until": "until when the owner is taken to be alive",
    "call_timeout": "how long an outside call may take; the next owner waits for it",
    "ttl": "how long an answer is kept; added again when it is stored",
    "attempts": "how often the handler was begun under this record",
    "recovery_point": "`started`, then the last finished step of a phased handler, then `finished`",
    "request": "kept until the settlement: of a PHASED operation the request, as a completer repeats it; of an "
    "accepted OUTBOX operation the response of its 202",
    "response_status": "of the stored answer",
    "response_headers": "of the stored answer: a JSON list of pairs, in order, repeated ones kept",
    "response_schema": "the version of this way of storing, so that old answers stay readable",
    "last_error": "a short code, never the text of an exception: those quote what clients sent",
    "memo_version": "the version at which memo or intent were last written, in both tables; 0: there are none",
    "reconcile_after": "when an unknown outcome may be looked into",
    "reconcile_tries": "how often it was looked into",
    "created_at": "when this life of the key began",
    "last_run_at": "when its handler was last begun",
    "finished_at": "when its answer was stored",
    "expires_at": "until when the answer is replayed; never before `finished_at` + `ttl`",
}
"""Why a column is there, where the migration's own comment does not say it, or not all of it. A test fails for one with
neither."""

FOREIGN_KEY: Final = """```sql
ALTER TABLE orders ADD FOREIGN KEY (key_scope, key_text) REFERENCES oncekey.record (scope, key)
    ON DELETE SET NULL DEFERRABLE INITIALLY DEFERRED;
```"""
"""A test runs it as it stands."""

CHECKS: Final[Mapping[str, str]] = {
    "effects_known": "no kind of effects that the code does not know",
    "recovery_known": "no recovery that the code does not know",
    "state_known": "no state that the code does not know",
    "counts_up": "no counter goes below where it starts; an attempt that a stop interrupted is given back",
    "completed_has_answer": "completed without an answer to replay cannot be written",
    "completed_has_no_intent": "completed with an outside call in the air cannot be written",
    "answer_only_when_done": "an answer belongs to what is done",
    "owned_in_progress": "what is in progress has an owner and a lease",
    "owned_only_in_progress": "and nothing else has: an old owner's name cannot come back",
    "unknown_has_ticket": "an unknown record has at least a reason",
    "outcome_known": "no outcome that the code does not know",
    "memo_has_version": "a memo or an intent without the version at which it was written",
    "tries_count_up": "no counter goes below where it starts",
    "work_fits": "a record and its other row that were not written together",
    "work_has_record": "what belongs to no record any more",
}
"""What each constraint keeps out."""


class Column(NamedTuple):
    """A column as its migration has it."""

    table: str
    name: str
    kind: str
    required: bool
    why: str | None


def page() -> str:
    """The page."""
    other = {column.name: column for column in columns(SQLITE)}
    rows = [
        (
            f"`{column.name}`",
            f"`{column.table}`",
            f"`{column.kind}`",
            f"`{other[column.name].kind}`" if column.name in other else "",
            "" if column.required else "yes",
            WHY.get(column.name) or column.why,
        )
        for column in columns(POSTGRES)
    ]
    return put_together(
        title("Tables"),
        "oncekey keeps one row per key, in the application's own database. On PostgreSQL the table is "
        "`oncekey.record`, in a schema of its own; on SQLite it is `oncekey_record`, and other names begin like "
        "that, too. Beside it are the [outbox](../howto/outbox.md) and its dead letters, the audit, what providers and "
        "resolvers said of calls, and one row per migration; the statements below say what each is for. "
        "`oncekey migrate up` makes them, `oncekey migrate sql` prints them ([command line](cli.md)).",
        "The primary key is `(scope, key)`: a key alone is never looked up, and every statement of the request path is "
        "served by this one index. Instants and durations are microseconds; instants are by the store's clock.",
        "## Columns of a record",
        "On PostgreSQL a record is two rows. `record` has what every key has. `work` has what only unfinished, failed "
        "or phased work has; its row is there when something is in it, and gone with the record. The view "
        "`oncekey.whole` is both. On SQLite there is one row ([ADR 0031](../adr/0031-the-record-is-two-rows.md)).",
        table(("Column", "Table", "PostgreSQL", "SQLite", "Null", "Why"), rows),
        "Your own tables may refer to a record by `(scope, key)`, which a handler has as `op.scope` and `op.key`. "
        "Records are removed when they have expired, and your rows must not go with them: do it without a foreign "
        "key, or on PostgreSQL with this one, whose two columns may be null. It is deferred, because a LOCAL request "
        "writes its record last, right before the commit.",
        FOREIGN_KEY,
        "On SQLite leave it out: oncekey does not switch the enforcement of foreign keys on.",
        "## Constraints",
        "SQLite's table refuses a row that breaks one. On PostgreSQL each costs time with every write, so "
        "`oncekey doctor` looks for such rows instead.",
        table(
            ("Constraint", "PostgreSQL", "SQLite", "What it keeps out or sees to"),
            [(f"`{name}`", *constraints()[name], CHECKS[name]) for name in constraints()],
        ),
        "## PostgreSQL",
        *_statements(POSTGRES),
        "## SQLite",
        *_statements(SQLITE),
    )


def columns(package: str) -> list[Column]:
    """The columns of a store's records, in order."""
    text = _migrations(package)
    found = [*_COLUMN.finditer(_records(package)), *_ADDED.finditer(text)]
    there = [Column("record", one["name"], one["kind"], one["null"] is not None, one["why"]) for one in found]
    gone = {one["name"] for one in _DROPPED.finditer(text)}
    beside = [
        Column("work", one["name"], one["kind"], one["null"] is not None, one["why"])
        for body in _WORK_TABLE.finditer(text)
        for one in _COLUMN.finditer(body["body"])
        if one["name"] not in _SHARED
    ]
    return [*(one for one in there if one.name not in gone), *beside]


def constraints() -> dict[str, tuple[str, str]]:
    """The names of the constraints, and who keeps each: on PostgreSQL, and on SQLite."""
    sqlite = [one["name"] for one in _CONSTRAINT.finditer(_records(SQLITE))]
    work = [
        one["name"] for body in _WORK_TABLE.finditer(_migrations(POSTGRES)) for one in _CONSTRAINT.finditer(body[0])
    ]
    looked_for = [one["name"] for one in _RULE.finditer(load(POSTGRES, "queries.sql", "doctor.sql")["diagnostic_rows"])]
    kept: dict[str, tuple[str, str]] = {}
    for name in dict.fromkeys((*sqlite, *looked_for, *work)):
        postgres = "`work`" if name in work else "`doctor`" if name in looked_for else "`record`"
        kept[name] = (postgres, "the table" if name in sqlite else "")
    return kept


def _records(package: str) -> str:
    """The body of the table of records, as the last migration that made it has it."""
    return [found["body"] for found in _RECORD_TABLE.finditer(_migrations(package))][-1]


def _migrations(package: str) -> str:
    return "\n".join(migration.text for migration in known(package))


def _statements(package: str) -> list[str]:
    shown = [("The ledger of migrations", load(package, "ledger.sql")["table"] + ";")]
    shown += [(f"`{migration.label}`", migration.text) for migration in known(package)]
    return [f"{name}:\n\n```sql\n{text.strip()}\n```" for name, text in shown]
