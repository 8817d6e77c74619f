"""The named statements of a store: read from titled blocks of SQL, and executed until acknowledged."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeVar

from oncekey.core.errors import CommitAmbiguousError, StoreError, StoreUnavailableError
from oncekey.core.flow import Body, Command, Flow, Mode, Row, Rows, Statement, Transaction, Value
from oncekey.stores.rows import TABLE, Column

if TYPE_CHECKING:
    from oncekey.core.model import Instant
    from oncekey.stores.sealed_content import SealedContent


class Statements:
    """Named commands. `clock` returns every instant in tests that control time; else the store's clock is used."""

    def __init__(self, commands: Mapping[str, Command], clock: Callable[[], Instant] | None = None) -> None:
        self._commands = commands
        self._clock = clock
        self.content: SealedContent | None = None
        """Seals and opens the content of rows; None: content is stored as it is."""

    def require(self, names: tuple[str, ...]) -> None:
        """Raise if the store has no command for one of these names."""
        missing = set(names) - set(self._commands)
        if missing:
            raise ValueError(f"a store needs a statement for {', '.join(sorted(missing))}")

    def has(self, name: str) -> bool:
        """Whether the store has a command that is optional."""
        return name in self._commands

    def statement(
        self,
        name: str,
        params: dict[str, Value],
        *,
        form: str | None = None,
        reads: bool = False,
        at_once: bool = False,
    ) -> Statement:
        """One statement with its parameters and its instant.

        `form` names another command for the same statement, which a store may have for a case in which it is cheaper.
        """
        if self.content is not None:
            self.content.check(name, params)
        now = self.instant
        command = self._commands[name] if form is None else self._commands.get(form, self._commands[name])
        return Statement(name, command, {**params, "now": now}, reads=reads, at_once=at_once)

    def fold(self, name: str, params: dict[str, Value], *, text_command: str, proof: str | None = None) -> Statement:
        """A statement that may be sent in the message of a BEGIN or a COMMIT; `text_command` names its form as text."""
        if self.content is not None:
            self.content.check(name, params)
        text = self._commands[text_command]
        assert isinstance(text, str)
        if "now" not in params:
            params["now"] = None if self._clock is None else self._clock()
        proven = None if proof is None else self._commands[proof]
        return Statement(name, self._commands[name], params, True, text, proven)  # noqa: FBT003  (it folds; faster by position)

    def alone(self, name: str, params: dict[str, Value], mode: Mode = Mode.SINGLE) -> Transaction[Rows]:
        """A transaction of one statement."""

        def body() -> Body[Rows]:
            return (yield self.statement(name, params))

        return Transaction(name, mode, body)

    def read(self, name: str, params: dict[str, Value]) -> Flow[Rows]:
        """Run a statement that only reads, and return its rows."""
        return (yield from execute(self.alone(name, params, Mode.READ)))

    def write(self, name: str, params: dict[str, Value]) -> Flow[Rows]:
        """Run a statement that may be executed twice, until its reply arrives, and return its rows."""
        return (yield from execute_until_acknowledged(self.alone(name, params)))

    @property
    def instant(self) -> Instant | None:
        """The instant of all statements, in tests that control time. None: the store's own clock is used."""
        return None if self._clock is None else self._clock()


PART_STATEMENTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        part: tuple(names.split())
        for part, names in {
            "audit": "note history deletions forget_notes",
            "phases": "checkpoint announce result withdraw resumable",
            "outbox": "put_parcels due held_by find_parcel sent remaining hand_back again bury drop_parcel "
            "find_dead_letter dead_letters",
            "deferred": "hold_record hold_parcel extend_parcel take_up deferred_result pend park_record retake_parcel "
            "bring_back drop_dead_letter",
            "upkeep": "stale runs sweep_retryable mark_unknown expire_begun expiring kept_expired purge_expired "
            "purge_kept mark_expired drop_unclaimed abandon live_keys beat leave workers forget_workers",
            "reconcile": "unknown_due still_unknown add_evidence find_evidence evidence_about open_evidence "
            "judge_evidence find_calls keys_named add_call name_call list_calls forget_calls forget_evidence",
            "operate": "list_records find_key find_open_keys find_done_keys last_results parcels_of hold_record "
            "hold_parcels_of letters_of sweep_retryable mark_unknown operator_answer operator_result operator_replace "
            "operator_unexecuted operator_pend operator_bust operator_extend drop_deferred bring_back drop_dead_letter "
            "stats standing unresolved outbox_census letter_census",
            "survey": "walk_unknown walk_unknown_oldest walk_failed_retryable walk_in_progress walk_pending "
            "walk_completed walk_expired walk_letters find_key find_open_keys tally ended calls_of_record "
            "evidence_of_key evidence_of_provider parcels_in_full latest_notes notes_edge",
            "reseal": "content_records reseal_record content_parcels reseal_parcel reseal_letter content_evidence "
            "reseal_evidence seals",
        }.items()
    }
)
"""The statements that each part of a store needs. A SQL store imports a part at its first use, and cannot be created
if a statement is missing."""

T = TypeVar("T")

REPEATS = 3
"""How often a statement whose reply was lost is executed again before the outage is reported."""


def locked_row(rows: Rows) -> Row:
    """The row that a write returns if its proof fits the locked rows; otherwise raise, which rolls back."""
    if not rows:
        raise StoreUnavailableError("a locked row has changed: the transaction is rolled back")
    return rows[0]


def execute(transaction: Transaction[T]) -> Flow[T]:
    """Run one transaction."""
    result: T = yield transaction
    return result


def execute_until_acknowledged(transaction: Transaction[T]) -> Flow[T]:
    """Run a transaction again if its reply was lost; it must be safe to execute twice (P7)."""
    lost: CommitAmbiguousError | None = None
    for _ in range(1 + REPEATS):
        try:
            return (yield from execute(transaction))
        except CommitAmbiguousError as error:
            lost = error
        except StoreError as error:
            if lost is None:
                raise
            raise lost from error  # this attempt was not executed, but the one before may have been
    assert lost is not None
    raise lost


_TITLE = re.compile(r"^-- (name|part): (\w+)(?:\((\w+(?:; \w+)*)\))?\n((?:--.*\n)*)", re.MULTILINE)
_PLACE = re.compile(r"\{(\w+)(?:\(([^{}]*)\))?\}")


@dataclass(frozen=True, slots=True)
class _Part:
    """A fragment of SQL for statements; its parameters, in parentheses, are replaced by the words of a use."""

    text: str
    names: tuple[str, ...]

    def filled(self, given: str | None) -> str:
        words = () if given is None else tuple(word.strip() for word in given.split(";"))
        text = self.text
        for name, word in zip(self.names, words, strict=True):
            text = text.replace(f"{{{name}}}", word)
        return text


def load(package: str, *names: str, shared: str | None = None) -> dict[str, str]:
    """The statements of a store's package, by their names; `queries.sql` if no file is named.

    SQL that several stores share is in the files of the same names in the package `shared`.

    The comment between a title and its SQL is for readers and is not sent to the server. Its first line is the purpose
    of the statement.

    A block titled `part` is not a statement: its text replaces its name in braces, in all of these files. One titled
    `part: walk(at; fits)` is used as `{walk(created_at; state = 'unknown')}`: each word replaces the parameter in its
    position. Some parts are generated from the table of columns (`_column_parts`).
    """
    return dict(_loaded(package, names or ("queries.sql",), shared))


@cache
def _loaded(package: str, names: tuple[str, ...], shared: str | None) -> dict[str, str]:
    statements: dict[str, str] = {}
    parts = _column_parts(postgres=shared is None)
    for name in names:
        _, *found = _TITLE.split("\n".join(_texts(name, shared, package)))
        for kind, title, asks, body in zip(found[::5], found[1::5], found[2::5], found[4::5], strict=True):
            whole = body.strip().rstrip(";")
            if kind == "part":
                parts[title] = _Part(whole, tuple(asks.split("; ")) if asks else ())
            else:
                statements[title] = whole
    return {name: _whole(text, parts) for name, text in statements.items()}


def _column_parts(*, postgres: bool) -> dict[str, _Part]:
    """The parts of SQL with the columns of a record, so that a new column needs no change of a statement."""
    given = [one for one in TABLE if "given" in one.words]
    hot = [one for one in TABLE if not (postgres and "work" in one.words)]

    def value(one: Column) -> str:
        return f":{one.name}::{one.type}" if postgres and one.type != "text" else f":{one.name}"

    def read(columns: Iterable[Column]) -> str:
        return ", ".join(f"record.{one.name}" if postgres or one.name != "key" else "record.`key`" for one in columns)

    texts = {
        "hot": read(hot),
        "all_but_content": read(one for one in TABLE if "content" not in one.words),
        "given_names": ", ".join(one.name for one in given),
        "given_values": ", ".join(map(value, given)),
        "given_set": ", ".join(f"{one.name} = {value(one)}" for one in given),
        "anew": ", ".join(f"{one.name} = {one.anew}" for one in hot if one.anew is not None),
    }
    parts = {name: _Part(text, ()) for name, text in texts.items()}
    renews = "{name} = CASE WHEN {{unbegun}} THEN {value} ELSE {{was}}{name} END"
    renewed = [renews.format(name=one.name, value=value(one)) for one in TABLE if "renewed" in one.words]
    parts["renewed"] = _Part(",\n    ".join(renewed), ("unbegun", "was"))
    return parts


def _texts(name: str, shared: str | None, package: str) -> Iterator[str]:
    """The text of the file of this name, or of both files if the shared package has one too."""
    places = [files(one).joinpath(name) for one in (shared, package) if one is not None]
    there = [place for place in places if place.is_file()]
    if not there:
        raise FileNotFoundError(f"{package} has no {name}")
    yield from (place.read_text("utf-8") for place in there)


def _whole(text: str, parts: dict[str, _Part]) -> str:
    """The statement with its parts filled in; a part may contain parts."""
    while _PLACE.search(text):
        text = _PLACE.sub(lambda match: parts[match[1]].filled(match[2]), text)
    return text
