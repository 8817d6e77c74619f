"""Tries SQL statements with one guard dropped, each in turn, and reports those that no test notices.

`PYTHONPATH=tests python -m harness.mutating sqlite` (or `postgres`). One pass over the tests records which of them
execute which statement. Each mutant is tried with those alone, the cheapest first, up to the first that fails. All of
it is one process with one database server, and pytest repeats a test without collecting it again.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest
from _pytest.runner import runtestprotocol

from harness.guards import guards
from harness.unmutated import SHOWN, SHOWN_FILES, UNMUTATED, VERSIONED
from oncekey.stores import statements
from oncekey.stores.sql import FILES, ONE_ROW, SHARED, SqlSchema
from oncekey.stores.statements import load

_PACKAGES: Final = {"sqlite": "oncekey.databases.sqlite", "postgres": "oncekey.databases.postgres"}
_FUNCTION: Final = re.compile(r"CREATE FUNCTION oncekey\.(\w+)\(.*?\$\$.*?\$\$;", re.DOTALL)
_DROPPED: Final = re.compile(r"oncekey\.(\w+)\(")
_ORDER: Final = {
    "tests/contract/test_sql_guards.py": 1,
    "tests/contract/test_postgres_functions.py": 1,
    "tests/contract/test_postgres_guards.py": 2,
    "tests/contract/each_move.py": 3,
}
"""Tests about single statements are cheap, and so are tried first."""
_NO_SQL: Final = (
    "syntax error",
    "SyntaxError",
    'near "',
    "IndeterminateDatatype",
    "AmbiguousParameter",
    "no such column",
)
"""What a failure contains if the mutant is no SQL at all: then it says nothing about the guard."""
SETS: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "sqlite": (
        (
            "tests/contract/each_move.py",
            "tests/contract/test_sql_guards.py",
        ),
        "sqlite",
    ),
    "postgres": (
        (
            "tests/contract/each_move.py",
            "tests/contract/test_sql_guards.py",
            "tests/contract/test_postgres_functions.py",
            "tests/contract/test_postgres_guards.py",
        ),
        "psycopg",
    ),
}
"""The tests that mutants of a dialect are tried with, and which of their variants."""


@dataclass(slots=True)
class Mutant:
    """A statement, or a function of PostgreSQL, without one of its guards."""

    statement: str
    guard: str
    original: str
    text: str
    function: bool = False
    listed: bool = False
    killer: str | None = None
    invalid: str | None = None
    tried: int = 0

    @property
    def name(self) -> str:
        """As a report and the list of exceptions have it."""
        return f"{self.statement}: {self.guard}"

    @property
    def wrong(self) -> str | None:
        """What a report has to say of it."""
        if self.invalid:
            return "no SQL"
        if self.listed:
            return None if self.killer is None else f"noticed by {self.killer}, so UNMUTATED must not list it"
        return "lives" if self.killer is None else None


def mutants(dialect: str) -> Iterator[Mutant]:
    """All mutants of a dialect, in the order of its files; what only shows records to operators is left alone."""
    package = _PACKAGES[dialect]
    names, shared = (ONE_ROW, SHARED) if dialect == "sqlite" else (FILES, None)
    for name, text in load(package, *(one for one in names if one not in SHOWN_FILES), shared=shared).items():
        if name not in SHOWN:
            yield from (Mutant(name, one.text, text, one.dropped(text)) for one in guards(text))
    if dialect == "postgres":
        for name, text in functions(package).items():
            yield from (Mutant(f"{name}()", one.text, text, one.dropped(text), function=True) for one in guards(text))


def functions(package: str) -> dict[str, str]:
    """The functions that a migrated database has, as the migrations create them."""
    found: dict[str, str] = {}
    folder = files(package).joinpath("migrations")
    for file in sorted(folder.iterdir(), key=lambda one: one.name):
        text = file.read_text("utf-8")
        found.update({match[1]: match[0] for match in _FUNCTION.finditer(text)})
        for line in re.findall(r"^DROP FUNCTION .*;$", text, re.MULTILINE):
            for name in _DROPPED.findall(line):
                found.pop(name, None)
    return found


def _place(item: pytest.Item) -> int:
    """Where a test comes among those that execute a statement: the cheapest first."""
    return _ORDER.get(item.nodeid.partition("::")[0], 5) + ("::test_all_" in item.nodeid)


def _functions(item: pytest.Item) -> tuple[str, ...]:
    """The functions of PostgreSQL that a test is about, as its class names them."""
    return getattr(getattr(item, "cls", None), "functions", ())


def wanted(dialect: str) -> list[Mutant]:
    """The mutants that tests must notice, and for each entry of the list of exceptions one that they cannot."""
    chosen: list[Mutant] = []
    entries: set[str] = set()
    for mutant in mutants(dialect):
        if any(matches(pattern, mutant) for pattern in VERSIONED):
            continue
        entry = next((pattern for pattern in UNMUTATED if matches(pattern, mutant)), None)
        if entry not in entries:
            chosen.append(replace(mutant, listed=entry is not None))
            entries |= {entry} if entry else set()
    return chosen


def matches(pattern: str, mutant: Mutant) -> bool:
    """Whether an entry of the list is about the mutant; `*` stands for any statement, or for what ends a guard."""
    statement, _, guard = pattern.partition(": ")
    same = guard == mutant.guard or (guard.endswith("*") and mutant.guard.startswith(guard[:-1]))
    return same and statement in {"*", mutant.statement}


class _Switched(Mapping[str, Any]):
    """The commands of a store, of which one may be exchanged while stores exist; it notes which are used."""

    def __init__(self, commands: Mapping[str, Any], plugin: Mutating) -> None:
        self._commands, self._plugin = commands, plugin

    def __getitem__(self, name: str) -> Any:
        command = self._commands[name]
        if not isinstance(command, str):
            return command
        self._plugin.used.add(command)
        return self._plugin.swapped.get(command, command)

    def __iter__(self) -> Iterator[str]:
        return iter(self._commands)

    def __len__(self) -> int:
        return len(self._commands)


class _Sibling:
    """Stands for the next test of the same module: what its tests share is kept."""

    def __init__(self, item: pytest.Item) -> None:
        self._chain = [*item.listchain()[:-1], object()]

    def listchain(self) -> list[object]:
        return self._chain


@dataclass(eq=False)
class Mutating:
    """The plugin: it repeats the tests in place of running them once."""

    wanted: Sequence[Mutant]
    report: Path
    used: set[str] = field(default_factory=set)
    swapped: dict[str, str] = field(default_factory=dict)
    server: Any = None

    def pytest_configure(self) -> None:
        """Let the stores of this process look their commands up here, and new databases get a function's mutant."""
        begin, script = statements.Statements.__init__, SqlSchema.script

        def switched(self_: statements.Statements, commands: Mapping[str, Any], clock: Any = None) -> None:
            begin(self_, _Switched(commands, self), clock)

        def mutated(self_: SqlSchema) -> str:
            text = script(self_)
            for original, mutant in self.swapped.items():
                text = text.replace(original, mutant)
            return text

        patch = pytest.MonkeyPatch()
        patch.setattr(statements.Statements, "__init__", switched)
        patch.setattr(SqlSchema, "script", mutated)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        """Note the server of PostgreSQL, whose functions are to be exchanged."""
        made = yield
        if fixturedef.argname == "postgres_server":
            self.server = made
        return made

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run every test once, and then those that matter for each mutant."""
        tests: dict[str, list[tuple[int, pytest.Item]]] = defaultdict(list)
        executed: dict[str, set[str]] = {}
        for item in session.items:
            alike = item.nodeid.replace("::test_all_", "::test_")  # the same statements, on more records
            if alike not in executed:
                self.used = executed[alike] = set()
                failures = self._failures(item)
                assert not failures, f"without a mutant {item.nodeid} fails:\n{failures[0]}"
            for text in executed[alike]:
                tests[text].append((_place(item), item))
        with self.report.open("w") as out:
            for mutant in self.wanted:
                if mutant.function:
                    name = mutant.statement[:-2]
                    fitting = [(0, item) for item in session.items if name in _functions(item)]
                else:
                    fitting = tests[mutant.original]
                self._try(mutant, fitting)
                out.write(json.dumps({**asdict(mutant), "original": "", "text": ""}) + "\n")
                out.flush()
        session._setupstate.teardown_exact(None)
        return True

    def _try(self, mutant: Mutant, fitting: list[tuple[int, pytest.Item]]) -> None:
        """Run the tests up to the first that fails; it is the first one for the next mutant of the statement."""
        for place, item in sorted(fitting, key=lambda one: one[0]):
            mutant.tried += 1
            failure = self._killed_by(mutant, item)
            if failure is not None:
                mutant.killer = item.nodeid
                mutant.invalid = next((text for text in _NO_SQL if text in failure), None)
                fitting.remove((place, item))
                fitting.append((0, item))
                return

    def _killed_by(self, mutant: Mutant, item: pytest.Item) -> str | None:
        """How the test fails because of the mutant.

        A failed assertion is about what the statement did. After any other error the test must pass without the mutant,
        in what tests share: an error can leave a connection behind that fails the next test.
        """
        session: Any = item.session
        for _ in range(2):
            with self._exchanged(mutant):
                failures = self._failures(item)
            if not failures:
                return None
            if "AssertionError" in failures[0] or not self._failures(item):
                return failures[0]
            session._setupstate.teardown_exact(None)  # what the tests share is broken, by this mutant or the one before
        raise AssertionError(f"{item.nodeid} fails after {mutant.name}, without it and with everything made anew")

    @contextmanager
    def _exchanged(self, mutant: Mutant) -> Iterator[None]:
        self.swapped = {mutant.original: mutant.text}
        try:
            if mutant.function:
                self._replace(mutant.text)
            yield
        finally:
            self.swapped = {}
            if mutant.function:
                self._replace(mutant.original)

    def _replace(self, function: str) -> None:
        """Put a function into every database that has the tables."""
        text = function.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1)
        with psycopg.connect(self.server.dsn(), autocommit=True) as connection:
            names = [row[0] for row in connection.execute("SELECT datname FROM pg_database WHERE NOT datistemplate")]
        for name in names:
            with psycopg.connect(self.server.dsn(name), autocommit=True) as connection:
                if connection.execute("SELECT to_regnamespace('oncekey') IS NOT NULL").fetchone() == (True,):
                    connection.execute(text.encode())

    def _failures(self, item: pytest.Item) -> list[str]:
        session: Any = item.session
        session._setupstate.teardown_exact(item)
        reports = runtestprotocol(item, log=False, nextitem=_Sibling(item))  # type: ignore[arg-type]
        return [str(report.longrepr) for report in reports if report.failed]


def tried(report: Path) -> list[Mutant]:
    """What a run found, mutant by mutant."""
    return [Mutant(**json.loads(line)) for line in report.read_text().splitlines()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the mutants, and print those that live."""
    parser = argparse.ArgumentParser(prog="python -m harness.mutating", description=__doc__)
    parser.add_argument("dialect", choices=sorted(SETS))
    parser.add_argument("--only", help="statements, with commas between them")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="try one mutant of N")
    parser.add_argument("--tests", help="other tests than the usual ones")
    parser.add_argument("--report", type=Path, default=Path("mutants.jsonl"), help="where the results are written")
    asked = parser.parse_args(arguments)
    chosen = wanted(asked.dialect)[:: asked.every]
    if asked.only:
        chosen = [one for one in chosen if one.statement in asked.only.split(",")]
    paths, variants = SETS[asked.dialect]
    options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--timeout=60", "-k", variants]
    code = pytest.main(
        [*options, *(asked.tests.split(",") if asked.tests else paths)], plugins=[Mutating(chosen, asked.report)]
    )
    results = tried(asked.report)
    for one in results:
        if one.wrong:
            print(f"{one.name} ({one.tried} tests): {one.wrong}")
    wrong = sum(one.wrong is not None for one in results)
    statements_tried = len({one.statement for one in results})
    must = [one for one in results if not one.listed]
    living = sum(one.killer is None for one in must)
    print(f"{statements_tried} statements, {len(must)} mutants, {living} live, {time.process_time():.0f} s of CPU")
    return int(code) or int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
