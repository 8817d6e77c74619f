"""Which tests are in the fast suite (`make test`) and which in the rest (`make test-more`): one table.

The fast suite proves every promise once, on SQLite and PostgreSQL, with nothing that pip does not install. Each test
is in exactly one of the two suites. A file without a row is in the rest, so a new file does not slow the fast suite
until it is named here. `pytest tests/…` without `--suite` runs both.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

import pytest


class Suite(StrEnum):
    """What `--suite` takes."""

    FAST = "fast"
    MORE = "more"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Part:
    """Of a file, the fast tests: those whose name `only` finds, `but` does not, and that need no other server.

    A name is what follows the file in the id of a test: `TestSqlite::test_a_claim[x]`.
    """

    only: str = ""
    but: str = r"(?!)"  # finds nothing


WHOLE: Final = None
"""Every test of the file is fast, so the rest does not import it."""
NOTHING: Final = Part(only=r"(?!)")
"""No test of the file is fast, so the fast suite does not import it."""
OURS: Final = Part()
"""Those on memory, SQLite and PostgreSQL."""
SQLITE: Final = Part(but=r"\[.*(?:postgres|psycopg|asyncpg)")
"""Those on memory and SQLite."""

ASYNCPG: Final = Part(but=r"\[.*psycopg")
"""Those on memory, SQLite, and PostgreSQL by asyncpg."""

OTHERS: Final = re.compile(r"\[.*(?:mariadb|mysql|redis|dynamo|moto|dynalite|sqlalchemy|aiosqlite)", re.IGNORECASE)
"""Parameters that name another database, or a session of another package's."""
SERVERS: Final = frozenset(
    {"mariadb_server", "mysql_server", "either", "moto", "dynalite", "pooler", "valkey", "browser", "other_major"}
)
"""Fixtures that start what is not in the fast suite; there, each of them fails."""
PROGRAMS: Final = ("BROWSER", "DYNALITE", "MARIADB", "MYSQL", "PGBOUNCER", "PROMTOOL", "REDIS", "SYSTEMD_ANALYZE")
"""Programs that the fast suite does not find, also where they are installed: `ONCEKEY_TEST_…` names another place."""

_SEEDS: Final = r"test_no_seed_(?:breaks_a_promise\[(?![0-3]\])|of_a_narrower_world_breaks_one\[(?!\w+-0\]|mixed-3\]))"
"""All but a fifth of the simulator's seeds: four of twenty hundreds, and of each narrower world those that catch its
mutants."""
_REPEATED: Final = r"\[postgres-(?!local)"
"""The crash proof covers every effect on SQLite, and LOCAL on PostgreSQL too."""

TABLE: Final[tuple[tuple[str, Part | None], ...]] = (
    # Rules: pure, or in memory.
    ("core/test_jcs.py", Part(but=r"published_file_of_doubles\[100000")),
    ("core/*", WHOLE),
    ("engine/*", WHOLE),
    ("runtimes/*", WHOLE),
    ("testing/*", WHOLE),
    ("test_harness*.py", NOTHING),
    ("test_*.py", WHOLE),
    # Stores.
    ("contract/test_contract.py", Part(only=r"Test(?:Async)?(?:Memory|Sqlite)::")),
    ("contract/test_postgres_contract.py", Part(only=r"Test(?:Psycopg|AsyncPsycopg|Asyncpg)::")),
    ("contract/test_walk.py", Part(but=r"TestPostgres::")),
    ("stores/test_migrations.py", OURS),
    ("stores/test_postgres.py", OURS),
    ("stores/test_sqlite_schema.py", OURS),
    ("drivers/postgres/test_drivers.py", OURS),
    ("drivers/postgres/test_transactions.py", OURS),
    ("drivers/sqlite/test_processes.py", NOTHING),
    ("drivers/sqlite/*", OURS),
    # Proofs. That they catch their mutants is shown in the rest, where each test names the fast one that caught it.
    ("proof/test_model.py", Part(but=r"test_model_without_one_rule_is_refuted|test_every_row_of_the_table")),
    ("proof/test_sim_database.py", WHOLE),
    ("proof/test_simulator.py", Part(but=_SEEDS)),
    ("proof/test_crash_points.py", WHOLE),
    ("proof/test_crash_proof.py", Part(but=_REPEATED)),
    ("proof/test_every_action.py", Part(but=_REPEATED)),
    ("proof/test_lost_commits.py", WHOLE),
    ("proof/test_unforeseen.py", SQLITE),
    # Effects, over HTTP.
    ("local/test_http.py", Part(but=r"\[psycopg")),
    ("local/test_lock_store.py", OURS),
    ("local/test_sqlite_locks.py", OURS),
    ("phased/test_interrupted_steps.py", Part(but=r"\[.*(?:psycopg|def-)")),
    ("phased/*", ASYNCPG),
    ("outbox/test_accepted.py", Part(only=r"\[(?:sqlite|asyncpg)-")),
    ("outbox/test_crashes.py", OURS),
    ("outbox/test_deferred.py", OURS),
    ("outbox/test_parcels.py", OURS),
    ("frameworks/test_sqlalchemy*.py", NOTHING),
    ("frameworks/test_request_path.py", Part(but=r"imports_a_module\[(?!fastapi_phased)")),
    ("frameworks/test_rolled_back.py", Part(but=r"\[sqlite.*cancelled")),
    ("frameworks/*", OURS),
    ("skins/test_skins.py", Part(only=r"\[(?:fastapi-postgresql|flask-gthread-sqlite)\]")),
    # What workers and operators do to records.
    ("upkeep/test_bound.py", NOTHING),
    ("upkeep/test_plans.py", NOTHING),
    ("upkeep/*", OURS),
    ("operate/test_walk.py", Part(but=r"\[psycopg")),
    ("operate/*", OURS),
    ("reconcile/test_plans.py", NOTHING),
    ("reconcile/test_races.py", NOTHING),
    ("reconcile/*", OURS),
    ("workers/*", OURS),
    # What users run.
    ("client/test_killed.py", NOTHING),
    ("client/*", WHOLE),
    ("cli/test_migrate.py", Part(only=r"from_nothing|pre_phase_before|changed_checksum|status_json")),
    ("cli/test_check*.py", NOTHING),
    ("cli/test_client.py", NOTHING),
    ("cli/test_options.py", Part(but=r"test_no_colour|\[.*(?:postgres|psycopg|asyncpg)")),
    ("cli/test_routes.py", NOTHING),
    ("cli/test_worker.py", Part(but=r"usage_error_is_one_line|\[.*postgres")),
    ("cli/*", SQLITE),
    ("conformance/test_catalogue.py", WHOLE),
    ("conformance/test_free_form.py", WHOLE),
    ("conformance/test_raw_http.py", WHOLE),
    ("console/test_access.py", SQLITE),
    ("console/test_moves.py", SQLITE),
    ("console/test_pages.py", SQLITE),
    ("docs/test_links.py", WHOLE),
    ("docs/test_reference.py", WHOLE),
    ("docs/test_walks.py", Part(only=r"\[(README|docs/howto/fastapi)\.md\]")),
    ("meta/test_wheel.py", NOTHING),
    ("meta/test_distributions.py", NOTHING),
    ("meta/*", WHOLE),
)
"""Files below `tests`, with the tests of them that are fast; the first row that fits decides."""

MUTANTS_OF_THE_REST: Final[frozenset[str]] = frozenset()
"""Mutants of the contract, the simulator and the model that no fast test would notice: the rest has to catch them."""


def row_of(path: str) -> tuple[str, Part | None]:
    """The row that decides for a file below `tests`."""
    return next((row for row in TABLE if fnmatch(path, row[0])), (path, NOTHING))


def fast_tests(path: str) -> Part | None:
    """The tests of a file that are fast: `NOTHING` if it has no row."""
    return row_of(path)[1]


def is_fast(path: str, name: str, fixtures: frozenset[str] = frozenset()) -> bool:
    """Whether a test is in the fast suite, by its file, its name there and the fixtures that it asks for."""
    row = fast_tests(path)
    if row is WHOLE:
        return True
    if re.search(row.only, name) is None or re.search(row.but, name) is not None:
        return False
    return OTHERS.search(name) is None and SERVERS.isdisjoint(fixtures)


def is_needless(path: str, suite: Suite) -> bool:
    """Whether a suite has no test of this file, so that it need not be imported."""
    row = fast_tests(path)
    return (suite is Suite.FAST and row is NOTHING) or (suite is Suite.MORE and row is WHOLE)


def chosen(config: pytest.Config) -> Suite:
    """The suite that was asked for."""
    return Suite(config.getoption("suite"))


def assert_caught(mutant: str, path: str, names: Iterable[str]) -> None:
    """Fail unless one of the tests that notice a mutant is fast, or the mutant is named as one of the rest."""
    fast = [name for name in names if is_fast(path, name)]
    if mutant in MUTANTS_OF_THE_REST:
        assert not fast, f"{mutant} is caught by {fast[0]}: take it off MUTANTS_OF_THE_REST"
    else:
        assert fast, f"no fast test of {path} catches {mutant}: put one back, or name it in MUTANTS_OF_THE_REST"


class Selection:
    """The plugin: it leaves out files before they are imported, and tests after they are collected."""

    def pytest_configure(self, config: pytest.Config) -> None:
        """Hide the programs that are not in the fast suite: it has to pass where they are not installed."""
        if chosen(config) is Suite.FAST:
            os.environ.update({f"ONCEKEY_TEST_{name}": "/not/in/the/fast/suite" for name in PROGRAMS})

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        """Import no file of which the suite has no test: importing takes a third of the time before the first test."""
        tests = config.rootpath / "tests"
        if not collection_path.match("test_*.py") or not collection_path.is_relative_to(tests):
            return None
        return is_needless(collection_path.relative_to(tests).as_posix(), chosen(config)) or None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep the tests of the suite."""
        suite = chosen(config)
        if suite is Suite.ALL:
            return
        kept: list[pytest.Item] = []
        left_out: list[pytest.Item] = []
        for item in items:
            path, _, name = item.nodeid.removeprefix("tests/").partition("::")
            fast = is_fast(path, name, frozenset(getattr(item, "fixturenames", ())))
            (kept if fast is (suite is Suite.FAST) else left_out).append(item)
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept

    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
        """Start no other server in the fast suite, also where there is one: it has to pass where there is none."""
        if fixturedef.argname in SERVERS and chosen(request.config) is Suite.FAST:
            pytest.fail(f"{fixturedef.argname} is not in the fast suite: name the test in tests/harness/selection.py")
