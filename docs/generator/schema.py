"""`schema.md`: the tables that the migrations create, and the purpose of each column."""

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
    "scope": "the caller: namespace and tenant, encoded with their lengths so that no two callers share a scope",
    "key": "the client's key, byte for byte",
    "incarnation": "identifies this life of the key; other tables refer to a record by it",
    "operation": "the name of the protected handler",
    "effects": "stored with the claim, so that a deployment cannot change what a crash means",
    "fingerprint": "of the request, with the version of the algorithm; compared before anything else",
    "seed": "the downstream keys are derived from it; it does not change between attempts and owners",
    "fence": "raised by each new owner; an owner proves incarnation and fence",
    "version": "raised by each write; other writers prove incarnation and version",
    "deadline": "when the heartbeat stops",
    "memo": "the results of the finished steps, in order",
    "intent": "the recorded external call that has no result yet",
    "recovery": "the meaning of an expired lease, stored for the same reason",
    "method": "of the request; shown by the status resource",
    "path": "of the request; shown by the status resource",
    "state": "the state of the record; see [states](../explanation/states.md)",
    "outcome": "of a completed record: `success` for 2xx and 3xx, `failure` for a stored error",
    "entered": "whether the handler counts as called",
    "owner": "the request that holds the lease; identifies a claim whose reply was lost",
    "lease_until": "the time until which the owner counts as alive",
    "call_timeout": "how long a call to a provider may take; the next owner waits that long",
    "ttl": "how long the response is kept, counted from when it is stored",
    "attempts": "how often the handler was started for this record",
    "recovery_point": "`started`, then the last finished step of a phased handler, then `finished`",
    "request": "stored until the settlement: the request of a PHASED operation, for the completer; the 202 response of "
    "an accepted OUTBOX operation",
    "response_status": "of the stored response",
    "response_headers": "of the stored response: a JSON list of pairs, in order, including repeated fields",
    "response_schema": "the version of the storage format, so that old responses stay readable",
    "last_error": "a short code, never the text of an exception, which may quote client data",
    "memo_version": "the version at which memo or intent were last written, in both tables; 0 if there are none",
    "reconcile_after": "when a resolver may check an unknown outcome",
    "reconcile_tries": "how often resolvers checked it",
    "created_at": "when this life of the key began; for a `LOCAL` record, when it was committed",
    "last_run_at": "when its handler was last started; for a `LOCAL` record, when it was committed",
    "finished_at": "when its response was stored",
    "expires_at": "the time until which the response is replayed; never before `finished_at` + `ttl`",
}
"""The purpose of a column, if the comment in its migration is incomplete. A test requires one of the two."""

FOREIGN_KEY: Final = """```sql
ALTER TABLE orders ADD FOREIGN KEY (key_scope, key_text) REFERENCES oncekey.record (scope, key)
    ON DELETE SET NULL DEFERRABLE INITIALLY DEFERRED;
```"""
"""A test runs it unchanged."""

CHECKS: Final[Mapping[str, str]] = {
    "effects_known": "unrecognised effects",
    "recovery_known": "unrecognised recovery",
    "state_known": "unrecognised state",
    "counts_up": "a counter below its start; an attempt that a shutdown interrupted is not counted",
    "completed_has_answer": "completed without a response",
    "completed_has_no_intent": "completed with an open call",
    "answer_only_when_done": "a response without completion",
    "owned_in_progress": "in progress without an owner and a lease",
    "owned_only_in_progress": "an owner in another state",
    "unknown_has_ticket": "unknown without a reason",
    "outcome_known": "unrecognised outcome",
    "memo_has_version": "a memo or an intent without the version at which it was written",
    "tries_count_up": "a counter below its start",
    "work_fits": "a record and a `work` row that were not written together",
    "work_has_record": "a `work` row without a record",
}
"""What each constraint prevents."""


class Column(NamedTuple):
    """A column, as declared by its migration."""

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
        "oncekey stores one row per key, in the application's own database. On PostgreSQL the table is "
        "`oncekey.record`, in a separate schema; on SQLite it is `oncekey_record`, and the other names have the same "
        "prefix. Other tables contain the [outbox](../howto/outbox.md) and its dead letters, the audit, evidence about "
        "calls, and one row per migration; the statements below describe each. `oncekey migrate up` creates the "
        "tables, `oncekey migrate sql` prints the statements ([command line](cli.md)).",
        "The primary key is `(scope, key)`: oncekey never looks up a key without its scope, and every statement of a "
        "request uses this one index. Instants and durations are in microseconds; instants are by the store's clock.",
        "## Columns of a record",
        "On PostgreSQL a record is two rows. `record` has the columns that every key needs. `work` has those of "
        "unfinished, failed or PHASED requests; its row exists only if it has content, and is deleted with the record. "
        "The view `oncekey.whole` joins both. On SQLite there is one row ([ADR "
        "0031](../adr/0031-the-record-is-two-rows.md)).",
        table(("Column", "Table", "PostgreSQL", "SQLite", "Null", "Meaning"), rows),
        "Your own tables can refer to a record by `(scope, key)`, which a handler has as `op.scope` and `op.key`. "
        "Expired records are deleted, and your rows must survive that: use no foreign key, or on PostgreSQL this one, "
        "with two nullable columns. It is deferred, because a LOCAL request writes its record last, right before the "
        "commit.",
        FOREIGN_KEY,
        "On SQLite omit it: oncekey does not enable the enforcement of foreign keys.",
        "## Constraints",
        "SQLite's table refuses a row that violates one. On PostgreSQL each would cost time with every write, so "
        "`oncekey doctor` searches for such rows instead.",
        table(
            ("Constraint", "PostgreSQL", "SQLite", "What it prevents"),
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
    """The names of the constraints, and where PostgreSQL and SQLite enforce each."""
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
    """The body of the table of records in the last migration that creates it."""
    return [found["body"] for found in _RECORD_TABLE.finditer(_migrations(package))][-1]


def _migrations(package: str) -> str:
    return "\n".join(migration.text for migration in known(package))


def _statements(package: str) -> list[str]:
    shown = [("The table of migrations", load(package, "ledger.sql")["table"] + ";")]
    shown += [(f"`{migration.label}`", migration.text) for migration in known(package)]
    return [f"{name}:\n\n```sql\n{text.strip()}\n```" for name, text in shown]
